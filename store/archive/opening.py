"""Opening a directory: a path or a URI says which kind it is."""

from __future__ import annotations

from pathlib import Path

from ..errors import StorageError
from ..uris import check_credentials, without_credentials
from .directory import Directory, fs, pa
from .local import LocalDirectory
from .remote import RemoteDirectory


def open_directory(uri: str, create: bool = True) -> Directory:
    """Open a directory.

    Args:
        uri: a path, absolute, or a URI of `pyarrow.fs`: `file:`, `s3:`, `gs:`, `hdfs:`.
        create: make it where there is none.

    Raises:
        StorageError: it cannot be made or reached, it is no directory, or its URI has a secret that is not
            percent-encoded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     directory = open_directory(folder)
    ...     length = directory.write("a/b", lambda sink: sink.write(b"abc"))
    ...     length, directory.list("a"), directory.read("a/b").to_pybytes()
    (3, {'a/b': 3}, b'abc')
    """
    check_credentials(uri)
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, pa.ArrowException) as exc:
        shown = without_credentials(uri)
        reason = str(exc).replace(uri, shown)
        raise StorageError(f"{shown}: expected an absolute path or a URI of a file system; {reason}") from None
    if isinstance(system, fs.LocalFileSystem):
        return LocalDirectory(Path(path), create)
    return RemoteDirectory(system, path, uri, create)
