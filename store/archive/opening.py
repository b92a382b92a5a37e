"""What a path or a URI names: a directory, or a file of other tools.

Rules
- What `pyarrow.fs` knows can be opened, and through it what fsspec knows (`fsspec+sftp://...`). The local files of
  fsspec are this machine's.
- A file system in the memory of one process is refused for a directory: shards and clients are processes of their own,
  and each would have another one.
- A file of other tools is read whole and replaced whole: on this machine it is written under another name beside it,
  synced and renamed; elsewhere as `remote.write_whole` does. It is for others: who may read it says the process's
  umask, as of any file. A folder of this machine is not made for it.
- Nothing is asked of a file system before a file is read or written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import unquote

from ..errors import StorageError
from ..uris import check_credentials, is_uri, place_in, without_credentials
from .directory import Directory, Fill, fs, naming
from .local import LocalDirectory
from .remote import RemoteDirectory, is_foreign, write_whole

_KNOWN = "file:, s3:, gs:, abfs:, hdfs:, or fsspec+SCHEME: with a file system of fsspec"
_LOCAL = ("file", "local")
_MEMORY = "memory"
_WRAPPERS = 8
"""Most file systems of fsspec around one another."""


def open_directory(uri: str, create: bool = True) -> Directory:
    """Open a directory.

    Args:
        uri: a path, absolute, or a URI of `pyarrow.fs`: `file:`, `s3:`, `gs:`, `abfs:`, `hdfs:`, `fsspec+sftp:`.
        create: make it where there is none.

    Raises:
        StorageError: it cannot be made or reached, it is no directory, its URI has a secret that is not
            percent-encoded, or it is in the memory of one process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     directory = open_directory(folder)
    ...     length = directory.write("a/b", lambda sink: sink.write(b"abc"))
    ...     length, directory.list("a"), directory.read("a/b").to_pybytes()
    (3, {'a/b': 3}, b'abc')
    """
    if uri.startswith(f"{_MEMORY}:"):
        raise _in_memory(uri)
    system, path = found_system(uri)
    if isinstance(system, fs.LocalFileSystem):
        return LocalDirectory(Path(path), create)
    if _MEMORY in protocols_of(system):
        raise _in_memory(uri)
    return RemoteDirectory(system, path, uri, create)


class Place:
    """Where a file of other tools is, or shall be.

    Args:
        path: a path of this machine, or a URI of `pyarrow.fs`.

    Raises:
        StorageError: it is neither.

    >>> str(Place("s3://key:secret@bucket/m.arrow?region=us-east-1")), Place("file:///a/m%20n.arrow").name
    ('s3://bucket/m.arrow', 'm n.arrow')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            text = os.fspath(path)
        except TypeError:
            text = None
        if not isinstance(text, str) or "\0" in text:
            raise StorageError(f"expected the path or URI of a file; found {path!r:.200}")
        self._text = text
        self._uri = is_uri(text)

    def __str__(self) -> str:
        return without_credentials(self._text) if self._uri else self._text

    @property
    def name(self) -> str:
        """The file's, without its folder."""
        return unquote(place_in(self._text)).rpartition("/")[2] if self._uri else os.path.basename(self._text)

    def read(self) -> bytes:
        """Return what the file holds.

        Raises:
            StorageError: there is no such file, or it cannot be read.
        """
        if isinstance(self._file, Path):
            with naming(self, "read"):
                return self._file.read_bytes()
        system, path = self._file
        with naming(self, "read", is_foreign(system)), system.open_input_file(path) as file:
            return file.read()

    @contextmanager
    def opened(self) -> Generator[IO[bytes]]:
        """Have the file open, as one of this machine; errors as of `read`."""
        if isinstance(self._file, Path):
            with naming(self, "read"):
                file = self._file.open("rb")
            with file:
                yield file
            return
        content = self.read()
        with tempfile.NamedTemporaryFile() as copy:  # with a name, which HDF5 asks for
            with naming(self, "copy"):
                copy.write(content)
                copy.seek(0)
            yield cast("IO[bytes]", copy)

    def replace(self, fill: Fill) -> None:
        """Write the file, or in its place.

        Raises:
            StorageError: it cannot be written; what was there is there still, but where `remote` writes in its place.
        """
        if not isinstance(self._file, Path):
            write_whole(*self._file, str(self), fill)
            return
        parent = self._file.parent
        if not os.path.isdir(parent):
            raise StorageError(f"{self}: expected an existing folder; found none at {parent}")
        LocalDirectory(parent, create=False, private=False).write(self._file.name, fill)

    @cached_property
    def _file(self) -> Path | tuple[Any, str]:
        """The file of this machine, or a file system and the path in it."""
        if not self._uri:
            return Path(self._text)
        system, path = found_system(self._text)
        if not self.name or "/" not in path.strip("/"):
            raise StorageError(f"{self}: expected a folder or bucket, and the name of a file in it")
        return Path(path) if isinstance(system, fs.LocalFileSystem) else (system, path)


def found_system(uri: str) -> tuple[Any, str]:
    """Return the file system of PyArrow that a URI, or an absolute path, names, and the path in it.

    Raises:
        StorageError: there is none, it cannot be reached, or what is written to it would be nowhere.
    """
    check_credentials(uri)
    shown = without_credentials(uri)
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except Exception as exc:  # noqa: BLE001  what fsspec finds may raise anything
        telling = shown == uri or not (
            uri.startswith("fsspec+") or shown.endswith("...")
        )  # else its text may have a secret
        reason = str(exc).replace(uri, shown) if telling and str(exc) else type(exc).__name__
        expected = f"expected an absolute path or a URI of a file system ({_KNOWN})"
        raise StorageError(f"{shown}: {expected}; {reason}") from None
    if "\0" in path:
        raise StorageError(f"{shown!r}: expected an absolute path or a URI of a file system; found a null character")
    if system.type_name == "mock":
        raise StorageError(f"{shown}: expected a file system ({_KNOWN}); found a mock, which stores nothing")
    if not isinstance(system, fs.PyFileSystem):
        return system, path
    protocols = protocols_of(system)
    return (fs.LocalFileSystem(), path) if len(protocols) == 1 and protocols & set(_LOCAL) else (system, path)


def _in_memory(uri: str) -> StorageError:
    expected = f"expected files that all processes of a repository can access ({_KNOWN})"
    return StorageError(f"{without_credentials(uri)}: {expected}; found the memory of one process")


def protocols_of(system: Any) -> set[str]:
    """Return what fsspec calls a file system, and those that it wraps; none for PyArrow's own."""
    found: set[str] = set()
    inner = getattr(getattr(system, "handler", None), "fs", None)
    for _ in range(_WRAPPERS):
        if inner is None:
            break
        protocol: object = inner.protocol
        names = [protocol] if isinstance(protocol, str) else list(cast("tuple[str, ...]", protocol))
        found.update(names[:1])
        inner = getattr(inner, "fs", None)
    return found
