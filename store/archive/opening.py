"""Opening a directory: a path or a URI says which kind it is.

Rules
- What `pyarrow.fs` knows can be opened, and through it what fsspec knows (`fsspec+sftp://...`). The local files of
  fsspec are this machine's.
- A file system in the memory of one process is refused for a directory: shards and clients are processes of their own,
  and each would have another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ..errors import StorageError
from ..uris import check_credentials, without_credentials
from .directory import Directory, fs
from .local import LocalDirectory
from .remote import RemoteDirectory

_KNOWN = "file:, s3:, gs:, abfs: or hdfs:, or fsspec+SCHEME: for another one that fsspec knows"
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
        telling = shown == uri or not uri.startswith("fsspec+")  # else its text may have a secret
        reason = str(exc).replace(uri, shown) if telling and str(exc) else type(exc).__name__
        expected = f"expected an absolute path or a URI of a file system ({_KNOWN})"
        raise StorageError(f"{shown}: {expected}; {reason}") from None
    if "\0" in path:
        raise StorageError(f"{shown!r}: expected an absolute path or a URI of a file system; found a null character")
    if system.type_name == "mock":
        raise StorageError(f"{shown}: expected a file system ({_KNOWN}); found one that holds nothing")
    if not isinstance(system, fs.PyFileSystem):
        return system, path
    protocols = protocols_of(system)
    return (fs.LocalFileSystem(), path) if len(protocols) == 1 and protocols & set(_LOCAL) else (system, path)


def _in_memory(uri: str) -> StorageError:
    expected = f"expected files that all processes of a repository see ({_KNOWN})"
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
