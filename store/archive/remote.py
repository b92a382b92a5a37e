"""A directory of a file system that only PyArrow reaches: an object store or HDFS.

Rules
- An object store makes an object visible when its last part has arrived; on HDFS a file is renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any, cast

import numpy as np

from ..errors import CorruptDataError
from ..uris import without_credentials
from .directory import (
    SMALL_BYTES,
    TEMPORARY,
    Bytes,
    Content,
    Directory,
    Fill,
    OpenFile,
    check_part,
    fs,
    naming,
    pa,
)


class RemoteDirectory(Directory):
    """A directory of a file system that only PyArrow reaches: an object store or HDFS."""

    def __init__(self, system: Any, path: str, uri: str, create: bool = True) -> None:
        self.uri = without_credentials(uri)
        self._system = system
        self._path = path.rstrip("/")
        self._renames = system.type_name == "hdfs"
        with naming(self.uri, "find a directory at"):
            info = system.get_file_info(self._path)
            if info.type is fs.FileType.File:
                raise NotADirectoryError(f"expected a directory; {self._path} is a file")
            if info.type is fs.FileType.NotFound:
                if not create:
                    raise FileNotFoundError("expected a directory; found nothing")
                system.create_dir(self._path, recursive=True)

    def write(self, name: str, fill: Fill) -> int:
        """Write an object; on HDFS under a temporary name, then renamed.

        The content is made before the object is opened: closing a stream half-way would complete the object.
        """
        path = self._full(name)
        target = f"{path}.{uuid.uuid4().hex}{TEMPORARY}" if self._renames else path
        content = pa.BufferOutputStream()
        fill(content)
        buffer = content.getvalue()
        with naming(f"{self.uri}/{name}", "write"):
            if self._renames:
                self._system.create_dir(path.rpartition("/")[0], recursive=True)
            with self._system.open_output_stream(target) as sink:
                sink.write(buffer)
            if self._renames:
                self._system.move(target, path)
        return buffer.size

    def read(self, name: str) -> Content:
        """Read an object."""
        with naming(f"{self.uri}/{name}", "read"), self._system.open_input_file(self._full(name)) as file:
            if file.size() > SMALL_BYTES:
                raise CorruptDataError(f"{self.uri}/{name}: expected at most {SMALL_BYTES} bytes; found {file.size()}")
            return file.read_buffer()

    def open(self, name: str) -> OpenFile:
        """Open an object for ranged reads."""
        with naming(f"{self.uri}/{name}", "open"):
            return _Remote(self._system.open_input_file(self._full(name)), f"{self.uri}/{name}")

    def list(self, folder: str) -> dict[str, int]:
        """List a prefix."""
        selector = fs.FileSelector(self._full(folder), allow_not_found=True, recursive=True)
        with naming(f"{self.uri}/{folder}", "list"):
            found = cast("list[Any]", self._system.get_file_info(selector))
        skip = len(self._path) + 1
        return {info.path[skip:]: info.size for info in found if info.type is fs.FileType.File}

    def delete(self, *names: str) -> None:
        """Delete objects."""
        for name in names:
            with naming(f"{self.uri}/{name}", "delete"), contextlib.suppress(FileNotFoundError):
                self._system.delete_file(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}"


class _Remote(OpenFile):
    def __init__(self, file: Any, uri: str) -> None:
        self._file, self._uri = file, uri
        self.nbytes = file.size()

    def part(self, offset: int, nbytes: int, into: Bytes | None = None) -> Bytes:
        check_part(self._uri, offset, nbytes, self.nbytes)
        with naming(self._uri, f"read {nbytes} bytes at {offset} of"):
            found = np.frombuffer(self._file.read_at(nbytes, offset), np.uint8)
        if found.nbytes != nbytes:
            raise CorruptDataError(f"{self._uri}: expected {nbytes} bytes at {offset}; found {found.nbytes}")
        if into is not None:
            into[:] = found
        return found

    def arrow(self) -> object:
        return self._file

    def close(self) -> None:
        self._file.close()
