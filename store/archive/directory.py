"""A directory of files on any file system that PyArrow reaches, and the few ways in which the store touches it.

Rules
- A file is seen whole or not at all. On a local or mounted file system it is written under a temporary name, synced,
  renamed, and its folder is synced; so is the folder of one that is deleted. HDFS has the same without the syncs; an
  object store makes an object visible when its last part has arrived. Of what fsspec knows, some can neither: see
  `remote`.
- What is written is never changed: a new state of a thing is a new file, or replaces the whole file at once. Logs are
  the exception (`append`): they grow, are not synced, and whoever reads them knows a torn end.
- Whatever goes wrong leaves here as `StorageError` and names the file, or as `CorruptDataError` where the file is none
  or was cut; a file that a failed write left is removed.
- Errors and logs show the names of files with characters that are not printable escaped: others may choose them.
- Where that fails, or after a crash, it is swept by its suffix. While others write, the kernel says which are nobody's:
  who writes a file has it locked.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray
from pyarrow import fs as pyarrow_fs  # pyright: ignore[reportMissingTypeStubs]

from ..errors import CorruptDataError, StorageError, shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

pa: Any = pyarrow  # it has no types
fs: Any = pyarrow_fs
TEMPORARY = ".tmp"
"""Suffix of files that are being written."""
FOLDER = "a folder"
"""What `Directory.odd` calls one."""
SMALL_BYTES = 1 << 30
"""Longest file that is read whole."""
Bytes = NDArray[np.uint8]
FILE_ERRORS: tuple[type[Exception], ...] = (OSError, pa.ArrowException)
"""What PyArrow's own file systems raise."""


class Sink(Protocol):
    """A binary file that is written."""

    def write(self, data: Buffer, /) -> object:
        """Write bytes, all of them."""
        ...


class Content(Protocol):
    """What a file holds: a buffer of PyArrow's."""

    @property
    def size(self) -> int:
        """Its length in bytes."""
        ...

    def to_pybytes(self) -> bytes:
        """Copy it."""
        ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


Fill = Callable[[Sink], object]
"""Writes a file's content to the sink that it is given."""


class Directory(ABC):
    """A directory, opened by `opening.open_directory`. File names are relative, with `/` between folders."""

    uri: str
    """How messages name it."""

    @abstractmethod
    def write(self, name: str, fill: Fill) -> int:
        """Write a file, whole or not at all, and give its length in bytes. It is on the disk when this returns.

        Raises:
            StorageError: the disk is full, read-only, forbidden, gone; nothing is left of the file.
        """

    def append(self, name: str, data: bytes) -> bool:
        """Add to the end of a file, which is made where there is none; False where the file system cannot.

        It is not synced: it is there when this process dies, but perhaps not when the machine loses its power.

        Raises:
            StorageError: it is not there, or in part.
        """
        return False

    @abstractmethod
    def read(self, name: str) -> Content:
        """Read a whole small file.

        Raises:
            StorageError: there is none, or it cannot be read.
            CorruptDataError: what stands there is no file, or is larger than any such file.
        """

    @abstractmethod
    def open(self, name: str) -> OpenFile:
        """Open a file to read parts of it; errors as in `read`."""

    @abstractmethod
    def list(self, folder: str) -> dict[str, int]:
        """Return the files of a folder and of those below it, with their lengths; empty where there is no folder."""

    def odd(self, folder: str) -> dict[str, str]:
        """Return all else that is there, and what it is: folders, and what the store never makes, such as links."""
        return {}

    @abstractmethod
    def delete(self, *names: str) -> None:
        """Remove files; a missing one is no error. They stay removed, whatever happens, when this returns.

        Raises:
            StorageError: one cannot be removed, or may come back when the power fails.
        """

    def claim(self, name: str) -> int | None:
        """Lock a file for as long as this process lives; None where the file system has no locks.

        Raises:
            StorageError: another process has it.
        """
        return None

    def abandoned(self) -> list[str]:
        """Name the half-written files that nobody writes; none where the file system has no locks to tell.

        One that was begun this very moment may be among them.

        Raises:
            StorageError: the directory cannot be listed.
        """
        return []

    def sweep(self, folder: str) -> list[str]:
        """Remove what writers that died left half-written, and name it. Nobody else may be writing there."""
        left = self._half_written(folder)
        self.delete(*left)
        return left

    def _half_written(self, folder: str) -> list[str]:
        return [name for name in self.list(folder) if name.endswith(TEMPORARY)]


class GuardedDirectory(Directory):
    """Another directory, of which files change only while they may.

    Args:
        directory: it.
        check: called before each change; what it raises is raised, and nothing has changed.
    """

    def __init__(self, directory: Directory, check: Callable[[], None]) -> None:
        self.uri = directory.uri
        self._directory = directory
        self._check = check

    def write(self, name: str, fill: Fill) -> int:
        """Write a file, if that may be."""
        self._check()
        return self._directory.write(name, fill)

    def append(self, name: str, data: bytes) -> bool:
        """Add to a file, if that may be."""
        self._check()
        return self._directory.append(name, data)

    def delete(self, *names: str) -> None:
        """Remove files, if that may be."""
        self._check()
        self._directory.delete(*names)

    def read(self, name: str) -> Content:
        """Read a file."""
        return self._directory.read(name)

    def open(self, name: str) -> OpenFile:
        """Open a file."""
        return self._directory.open(name)

    def list(self, folder: str) -> dict[str, int]:
        """List files."""
        return self._directory.list(folder)

    def odd(self, folder: str) -> dict[str, str]:
        """List all else."""
        return self._directory.odd(folder)

    def claim(self, name: str) -> int | None:
        """Lock a file."""
        return self._directory.claim(name)

    def abandoned(self) -> list[str]:
        """Name half-written files."""
        return self._directory.abandoned()


class OpenFile(ABC):
    """A file that is open for reading."""

    nbytes: int

    @abstractmethod
    def part(self, offset: int, nbytes: int, into: Bytes | None = None) -> Bytes:
        """Read a part of the file, into memory of its own or into some that is given.

        Args:
            offset: where it begins.
            nbytes: its length.
            into: as many bytes, which may hold anything after an error; None: new memory.

        Returns:
            The part, read-only.

        Raises:
            StorageError: it cannot be read.
            CorruptDataError: the file was cut since it was opened.
        """

    @abstractmethod
    def arrow(self) -> object:
        """Return what PyArrow reads it through."""

    @abstractmethod
    def close(self) -> None:
        """Let the file go; parts that were read stay."""


@contextlib.contextmanager
def naming(where: object, action: str, foreign: bool = False) -> Generator[None]:
    """Turn what a file system raises into an error that names the file.

    Args:
        where: names it.
        action: what was done to it.
        foreign: whether the file system may raise anything, with a secret in its text: then no text of it is shown.
    """
    errors = (Exception,) if foreign else FILE_ERRORS
    try:
        yield
    except (StorageError, CorruptDataError):
        raise
    except errors as exc:
        cause = _told(exc) if foreign else exc
        reason = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(exc)
        if not reason or (foreign and cause is None):
            reason = type(exc).__name__
        raise StorageError(shown(f"{where}: expected to {action} it; {reason}")) from cause


def _told(exc: Exception) -> OSError | None:
    """Return what an error says by its number or its type alone; None: nothing."""
    if isinstance(exc, FileNotFoundError):  # readers ask for it; those of fsspec have no number
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    number: object = exc.errno if isinstance(exc, OSError) else None
    return OSError(number, os.strerror(number)) if isinstance(number, int) and number in errno.errorcode else None


def check_part(where: object, offset: int, nbytes: int, length: int) -> None:
    """Refuse a part that a file of this length does not have."""
    if not 0 <= offset <= offset + nbytes <= length:
        raise StorageError(f"{where}: expected {nbytes} bytes at {offset}; the file has {length}")
