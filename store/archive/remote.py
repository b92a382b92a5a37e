"""A directory of a file system that only PyArrow reaches: an object store, HDFS, or one of fsspec.

Rules
- An object store makes an object visible when its last part has arrived. On HDFS, and where one of fsspec is known to
  replace a file at once by renaming and takes names as they are (`sftp`, local files behind a wrapper), a file is
  renamed when it is whole. Elsewhere it is written in its place: readers may see a part of it, and after a failure too.
- What one of fsspec raises may have a secret in its text, such as a whole URL: no message says it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import uuid
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ..errors import CorruptDataError, StorageError
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

_IMPLEMENTATIONS = "fsspec.implementations."
_REPLACING = (f"{_IMPLEMENTATIONS}local", f"{_IMPLEMENTATIONS}sftp")
"""Modules whose `mv` renames, replaces what was there at once, and takes no pattern."""


class RemoteDirectory(Directory):
    """A directory of a file system that only PyArrow reaches: an object store, HDFS, or one of fsspec."""

    def __init__(self, system: Any, path: str, uri: str, create: bool = True) -> None:
        self.uri = without_credentials(uri)
        self._system = system
        self._path = path.rstrip("/")
        self._foreign = is_foreign(system)
        with naming(self.uri, "find a directory at", self._foreign):
            info = system.get_file_info(self._path)
            if info.type is fs.FileType.File:
                raise StorageError(f"{self.uri}: expected a directory; found a file")
            if info.type is fs.FileType.NotFound:
                if not create:
                    raise StorageError(f"{self.uri}: expected a directory; found nothing")
                system.create_dir(self._path, recursive=True)

    def write(self, name: str, fill: Fill) -> int:
        """Write an object; see `write_whole`."""
        return write_whole(self._system, self._full(name), f"{self.uri}/{name}", fill)

    def read(self, name: str) -> Content:
        """Read an object."""
        where = f"{self.uri}/{name}"
        with naming(where, "read", self._foreign), self._system.open_input_file(self._full(name)) as file:
            if file.size() > SMALL_BYTES:
                raise CorruptDataError(f"{where}: expected at most {SMALL_BYTES} bytes; found {file.size()}")
            return file.read_buffer()

    def open(self, name: str) -> OpenFile:
        """Open an object for ranged reads."""
        with naming(f"{self.uri}/{name}", "open", self._foreign):
            return _Remote(self._system.open_input_file(self._full(name)), f"{self.uri}/{name}", self._foreign)

    def list(self, folder: str) -> dict[str, int]:
        """List a prefix."""
        selector = fs.FileSelector(self._full(folder), allow_not_found=True, recursive=True)
        with naming(f"{self.uri}/{folder}", "list", self._foreign):
            found = cast("list[Any]", self._system.get_file_info(selector))
        skip = len(self._path) + 1
        return {info.path[skip:]: info.size for info in found if info.type is fs.FileType.File}

    def delete(self, *names: str) -> None:
        """Delete objects."""
        for name in names:
            where = f"{self.uri}/{name}"
            with naming(where, "delete", self._foreign), contextlib.suppress(FileNotFoundError):
                self._system.delete_file(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}"


def write_whole(system: Any, path: str, where: str, fill: Fill) -> int:
    """Write a file, whole or not at all where the file system can do that, and give its length in bytes.

    The content is made before the file is opened: closing a stream half-way would complete an object.

    Args:
        system: a file system of PyArrow's.
        path: in it.
        where: names the file in errors.
        fill: writes the content.

    Raises:
        StorageError: the file cannot be written.
    """
    content = pa.BufferOutputStream()
    fill(content)
    buffer = content.getvalue()
    with naming(where, "write", is_foreign(system)):
        _make_folder(system, path.rpartition("/")[0])
        rename = _rename_of(system)
        if rename is None:
            _write(system, path, buffer)
        else:
            _write_and_rename(system, path, buffer, rename)
    return buffer.size


def _make_folder(system: Any, folder: str) -> None:
    """Make a folder, where files do not make their own; some file systems refuse to make one again."""
    if is_foreign(system):
        if system.get_file_info(folder).type is fs.FileType.NotFound:
            system.create_dir(folder, recursive=True)
    elif system.type_name == "hdfs":
        system.create_dir(folder, recursive=True)


def _rename_of(system: Any) -> Callable[[str, str], object] | None:
    """Return what replaces a file by another at once; None where that is not known.

    fsspec's own `mv` is none: it copies, takes its source for a pattern, and may ignore what a server answers.
    """
    if not is_foreign(system):
        return system.move if system.type_name == "hdfs" else None
    outer: Any = getattr(system.handler, "fs", None)
    inner, module = outer, _module_of_mv(outer)
    while module == f"{_IMPLEMENTATIONS}dirfs":
        inner = inner.fs
        module = _module_of_mv(inner)
    return outer.mv if module in _REPLACING else None


def _module_of_mv(system: object) -> str:
    """Return the module that a file system of fsspec has its `mv` of."""
    return getattr(getattr(type(system), "mv", None), "__module__", "")


def _write_and_rename(system: Any, path: str, buffer: Any, rename: Callable[[str, str], object]) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}{TEMPORARY}"
    try:
        _write(system, temporary, buffer)
        if system.get_file_info(path).type is fs.FileType.Directory:  # some would move it into that
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        rename(temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            system.delete_file(temporary)
        raise


def _write(system: Any, path: str, buffer: Any) -> None:
    with system.open_output_stream(path) as sink:
        sink.write(buffer)


def is_foreign(system: Any) -> bool:
    """Tell whether a file system is one of fsspec, which may raise anything."""
    return isinstance(system, fs.PyFileSystem)


class _Remote(OpenFile):
    def __init__(self, file: Any, uri: str, foreign: bool) -> None:
        self._file, self._uri, self._foreign = file, uri, foreign
        self.nbytes = file.size()

    def part(self, offset: int, nbytes: int, into: Bytes | None = None) -> Bytes:
        check_part(self._uri, offset, nbytes, self.nbytes)
        with naming(self._uri, f"read {nbytes} bytes at {offset} of", self._foreign):
            found = np.frombuffer(self._file.read_at(nbytes, offset), np.uint8)
        if found.nbytes != nbytes:
            raise CorruptDataError(f"{self._uri}: expected {nbytes} bytes at {offset}; found {found.nbytes}")
        if into is not None:
            into[:] = found
        return found

    def arrow(self) -> object:
        return pa.PythonFile(_Parts(self), mode="r") if self._foreign else self._file

    def close(self) -> None:
        self._file.close()


class _Parts(io.RawIOBase):
    """What is read through `_Remote.part`, so that its errors are ours."""

    def __init__(self, file: _Remote) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.nbytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._file.nbytes - self._at, 0)
        nbytes = left if size is None or size < 0 else min(size, left)
        found = self._file.part(self._at, nbytes).tobytes() if nbytes else b""
        self._at += nbytes
        return found
