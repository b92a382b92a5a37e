"""A directory of a file system that only PyArrow reaches: an object store, HDFS, or one of fsspec.

Rules
- An object store makes an object visible when its last part has arrived; elsewhere a file is renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any, cast

import numpy as np

from ..errors import CorruptDataError
from ..uris import without_credentials
from .directory import (
    FILE_ERRORS,
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
        self._errors = errors_of(system)
        with naming(self.uri, "find a directory at", self._errors):
            info = system.get_file_info(self._path)
            if info.type is fs.FileType.File:
                raise NotADirectoryError(f"expected a directory; {self._path} is a file")
            if info.type is fs.FileType.NotFound:
                if not create:
                    raise FileNotFoundError("expected a directory; found nothing")
                system.create_dir(self._path, recursive=True)

    def write(self, name: str, fill: Fill) -> int:
        """Write an object; see `write_whole`."""
        return write_whole(self._system, self._full(name), f"{self.uri}/{name}", fill)

    def read(self, name: str) -> Content:
        """Read an object."""
        where = f"{self.uri}/{name}"
        with naming(where, "read", self._errors), self._system.open_input_file(self._full(name)) as file:
            if file.size() > SMALL_BYTES:
                raise CorruptDataError(f"{where}: expected at most {SMALL_BYTES} bytes; found {file.size()}")
            return file.read_buffer()

    def open(self, name: str) -> OpenFile:
        """Open an object for ranged reads."""
        with naming(f"{self.uri}/{name}", "open", self._errors):
            return _Remote(self._system.open_input_file(self._full(name)), f"{self.uri}/{name}", self._errors)

    def list(self, folder: str) -> dict[str, int]:
        """List a prefix."""
        selector = fs.FileSelector(self._full(folder), allow_not_found=True, recursive=True)
        with naming(f"{self.uri}/{folder}", "list", self._errors):
            found = cast("list[Any]", self._system.get_file_info(selector))
        skip = len(self._path) + 1
        return {info.path[skip:]: info.size for info in found if info.type is fs.FileType.File}

    def delete(self, *names: str) -> None:
        """Delete objects."""
        for name in names:
            where = f"{self.uri}/{name}"
            with naming(where, "delete", self._errors), contextlib.suppress(FileNotFoundError):
                self._system.delete_file(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}"


def write_whole(system: Any, path: str, where: str, fill: Fill) -> int:
    """Write a file, whole or not at all, and give its length in bytes.

    The content is made before the file is opened: closing a stream half-way would complete an object.

    Args:
        system: a file system of PyArrow's.
        path: in it.
        where: names the file in errors.
        fill: writes the content.

    Raises:
        StorageError: the file cannot be written.
    """
    renames = system.type_name == "hdfs" or isinstance(system, fs.PyFileSystem)
    target = f"{path}.{uuid.uuid4().hex}{TEMPORARY}" if renames else path
    content = pa.BufferOutputStream()
    fill(content)
    buffer = content.getvalue()
    with naming(where, "write", errors_of(system)):
        if renames:
            system.create_dir(path.rpartition("/")[0], recursive=True)
        with system.open_output_stream(target) as sink:
            sink.write(buffer)
        if renames:
            system.move(target, path)
    return buffer.size


def errors_of(system: Any) -> tuple[type[Exception], ...]:
    """Return what a file system raises: one of fsspec may raise anything."""
    return (Exception,) if isinstance(system, fs.PyFileSystem) else FILE_ERRORS


class _Remote(OpenFile):
    def __init__(self, file: Any, uri: str, errors: tuple[type[Exception], ...]) -> None:
        self._file, self._uri, self._errors = file, uri, errors
        self.nbytes = file.size()

    def part(self, offset: int, nbytes: int, into: Bytes | None = None) -> Bytes:
        check_part(self._uri, offset, nbytes, self.nbytes)
        with naming(self._uri, f"read {nbytes} bytes at {offset} of", self._errors):
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
