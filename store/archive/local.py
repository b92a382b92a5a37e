"""A directory of this machine's file systems, parallel ones that are mounted included.

Rules
- A file is written under a temporary name, synced, renamed, and its folder is synced; so is the folder of one that is
  deleted.
- Who writes a file has it locked: the kernel says which half-written ones are nobody's.
- Reads are mapped. A file that was cut since is noticed before its pages are looked at.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import StorageError
from .directory import TEMPORARY, Bytes, Content, Directory, Fill, OpenFile, check_part, naming, pa
from .sharing import make_folder, open_file

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

_ADVISED = 2 << 20
"""Bytes that the kernel is asked to read at once; of more it would read a part only."""


class LocalDirectory(Directory):
    """A directory of this machine's file systems, parallel ones that are mounted included.

    Args:
        path: where it is.
        create: make it where there is none.
        private: files that are written have the rights that `sharing` says; False: those of the process's umask.
    """

    def __init__(self, path: Path, create: bool = True, private: bool = True) -> None:
        self.uri = str(path)
        self._path = path
        self._opener = open_file if private else None
        with naming(path, "find a directory at"):
            if create:
                self._make_folder(path)
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))

    def write(self, name: str, fill: Fill) -> int:
        """Write to a temporary name, sync, rename, sync the folder."""
        path = self._path / name
        temporary = path.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
        with naming(path, "write"):
            self._make_folder(path.parent, self._path)
            try:
                with open(temporary, "xb", buffering=0, opener=self._opener) as file:
                    with contextlib.suppress(OSError):  # a file system without locks
                        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
                    fill(_Whole(file))
                    os.fsync(file.fileno())
                    nbytes = file.tell()
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            _sync_folder(path.parent)
        return nbytes

    def append(self, name: str, data: bytes) -> bool:
        """Open, write, close: nothing is kept open that could be a deleted file's."""
        path = self._path / name
        with naming(path, "append to"):
            self._make_folder(path.parent, self._path)
            descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
            if written < len(data):
                raise OSError(errno.ENOSPC, f"expected to write {len(data)} bytes; {written} were taken")
        return True

    def read(self, name: str) -> Content:
        """Read a file."""
        with naming(self._path / name, "read"):
            return pa.py_buffer((self._path / name).read_bytes())

    def open(self, name: str) -> OpenFile:
        """Map a file."""
        with naming(self._path / name, "map"):
            return _Mapped(self._path / name)

    def list(self, folder: str) -> dict[str, int]:
        """Walk a folder."""
        top = self._path / folder
        with naming(top, "list"):
            return dict(self._walk(str(top))) if top.exists() else {}

    def delete(self, *names: str) -> None:
        """Unlink files, then sync each folder once: also for one that is missing, the sync may be what failed."""
        for name in names:
            with naming(self._path / name, "delete"), contextlib.suppress(FileNotFoundError):
                os.unlink(self._path / name)
        for folder in dict.fromkeys((self._path / name).parent for name in names):
            with naming(folder, "sync"), contextlib.suppress(FileNotFoundError):
                _sync_folder(folder)

    def claim(self, name: str) -> int | None:
        """Lock a file; the kernel lets go of it when this process ends, however that is."""
        path = self._path / name
        with naming(path, "lock"):
            descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                os.close(descriptor)
                raise StorageError(f"{self.uri}: expected a path of its own; another repository runs on it") from exc
            except OSError as exc:
                os.close(descriptor)
                if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                log.warning("%s: the file system has no locks: nothing keeps a second repository off it", path)
                return None
        return descriptor

    def abandoned(self) -> list[str]:
        """Try their locks, which the kernel lets go of when a writer ends, however that is."""
        return [name for name in self._half_written("") if self._is_abandoned(name)]

    def _is_abandoned(self, name: str) -> bool:
        try:
            descriptor = os.open(self._path / name, os.O_RDWR)
        except OSError:
            return False  # it is written by now; or it cannot be told
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # it is being written, or the file system has no locks
        finally:
            os.close(descriptor)
        return True

    def _walk(self, top: str) -> Iterator[tuple[str, int]]:
        skip = len(str(self._path)) + 1
        with os.scandir(top) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(entry.path)
                else:
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        yield entry.path[skip:], entry.stat().st_size

    def _make_folder(self, folder: Path, below: Path | None = None) -> None:
        """Make a folder and sync the ones that got a new entry: else a crash could take the folder away.

        Args:
            folder: which.
            below: what must be there: a directory that went away is not made anew, for the files would be elsewhere.
        """
        parts = (folder, *folder.parents)
        missing = [part for part in parts[: parts.index(below) if below else None] if not part.exists()]
        for part in reversed(missing):
            make_folder(part)
            _sync_folder(part.parent)


class _Whole:
    """A sink whose `write` writes all it is given: a raw file may take less, and at most 2 GiB at once."""

    closed = False

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.tell = file.tell

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        done = 0
        while done < len(view):
            done += self._file.write(view[done : done + (64 << 20)])
        return done

    def flush(self) -> None:
        """Nothing is buffered."""


class _Mapped(OpenFile):
    """A mapped file. The kernel would read up to megabytes around each page; so it is told what is wanted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "rb") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), self.nbytes, prot=mmap.PROT_READ) if self.nbytes else None
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)
        self._whole: Bytes | None = np.frombuffer(self._map or b"", np.uint8)

    def part(self, offset: int, nbytes: int) -> Bytes:
        whole = self._opened()
        # A file that was cut would kill the process that looks at the pages that it lost.
        check_part(self._path, offset, nbytes, self._map.size() if self._map is not None else 0)
        if self._map is not None:
            for start in range(offset - offset % mmap.PAGESIZE, offset + nbytes, _ADVISED):
                self._map.madvise(mmap.MADV_WILLNEED, start, min(_ADVISED, offset + nbytes - start))
        return whole[offset : offset + nbytes]

    def arrow(self) -> object:
        return pa.BufferReader(pa.py_buffer(self._opened()))

    def close(self) -> None:
        self._map = self._whole = None

    def _opened(self) -> Bytes:
        if self._whole is None:
            raise StorageError(f"{self._path}: expected an open file; it was closed")
        return self._whole


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
