"""A file of other tools at a path or a URI: read whole, and replaced whole.

Rules
- A file of this machine is written under another name beside it, synced and renamed; elsewhere as `remote.write_whole`
  does. It is for others: who may read it says the process's umask, as of any file.
- A folder of this machine is not made. Where folders are no more than a part of a name, there is none to make.
- Nothing is asked of a file system before the file is read or written.
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
from ..uris import is_uri, place_in, without_credentials
from .directory import Fill, fs, naming
from .local import LocalDirectory
from .opening import found_system
from .remote import errors_of, write_whole


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
            raise StorageError(f"expected the path or the URI of a file; found {path!r:.200}")
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
        with naming(self, "read", errors_of(system)), system.open_input_file(path) as file:
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
            StorageError: it cannot be written; what was there is there still.
        """
        if not isinstance(self._file, Path):
            write_whole(*self._file, str(self), fill)
            return
        parent = self._file.parent
        if not os.path.isdir(parent):
            raise StorageError(f"{self}: expected a folder to write it to; found none at {parent}")
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
