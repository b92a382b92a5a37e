"""A directory of files on any file system that PyArrow reaches, and the few ways in which the store touches it.

Rules
- A file is seen whole or not at all. On a local or mounted file system it is written under a temporary name, synced,
  renamed, and its folder is synced; so is the folder of one that is deleted. HDFS has the same without the syncs; an
  object store makes an object visible when its last part has arrived.
- What is written is never changed: a new state of a thing is a new file, or replaces the whole file at once. Logs are
  the exception (`append`): they grow, are not synced, and whoever reads them knows a torn end.
- Whatever goes wrong leaves here as `StorageError` and names the file; a file that a failed write left is removed.
- Where that fails, or after a crash, it is swept by its suffix. While others write, the kernel says which are nobody's:
  who writes a file has it locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyarrow import fs as pyarrow_fs  # pyright: ignore[reportMissingTypeStubs]

from ..errors import StorageError

log = logging.getLogger(__name__)

pa: Any = pyarrow  # it has no types
fs: Any = pyarrow_fs
TEMPORARY = ".tmp"
"""Suffix of files that are being written."""
_ADVISED = 2 << 20
"""Bytes that the kernel is asked to read at once; of more it would read a part only."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Fill = Callable[[Any], None]
"""Writes a file's content to the binary sink that it is given."""


class Directory(ABC):
    """A directory, opened by `open_directory`. File names are relative, with `/` between folders."""

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
    def read(self, name: str) -> Any:
        """Read a whole small file.

        Raises:
            StorageError: there is none, or it cannot be read.
        """

    @abstractmethod
    def open(self, name: str) -> OpenFile:
        """Open a file to read parts of it; errors as in `read`."""

    @abstractmethod
    def list(self, folder: str) -> dict[str, int]:
        """Return the files of a folder and of those below it, with their lengths; empty where there is no folder."""

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


class OpenFile(ABC):
    """A file that is open for reading."""

    nbytes: int

    @abstractmethod
    def part(self, offset: int, nbytes: int) -> Bytes:
        """Return a part of the file, read-only; a memory-mapped one reads its pages when they are looked at.

        Raises:
            StorageError: it cannot be read.
        """

    @abstractmethod
    def arrow(self) -> Any:
        """Return what PyArrow reads it through."""

    @abstractmethod
    def close(self) -> None:
        """Let the file go; mapped parts stay readable for as long as they are used."""


def open_directory(uri: str, create: bool = True) -> Directory:
    """Open a directory.

    Args:
        uri: a path, absolute, or a URI of `pyarrow.fs`: `file:`, `s3:`, `gs:`, `hdfs:`.
        create: make it where there is none.

    Raises:
        StorageError: it cannot be made or reached, or it is no directory.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     directory = open_directory(folder)
    ...     length = directory.write("a/b", lambda sink: sink.write(b"abc"))
    ...     length, directory.list("a"), directory.read("a/b").to_pybytes()
    (3, {'a/b': 3}, b'abc')
    """
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, pa.ArrowException) as exc:
        shown = without_credentials(uri)
        reason = str(exc).replace(uri, shown)
        raise StorageError(f"{shown}: expected an absolute path or a URI of a file system; {reason}") from None
    if isinstance(system, fs.LocalFileSystem):
        return LocalDirectory(Path(path), create)
    return RemoteDirectory(system, path, uri, create)


def without_credentials(uri: str) -> str:
    """Return a URI as messages may show it: without user, password and options.

    >>> without_credentials("s3://key:secret@bucket/prefix?region=us-east-1")
    's3://bucket/prefix'
    """
    return re.sub(r"(?<=://)[^/]*@", "", uri.partition("?")[0])


class LocalDirectory(Directory):
    """A directory of this machine's file systems, parallel ones that are mounted included."""

    def __init__(self, path: Path, create: bool = True) -> None:
        self.uri = str(path)
        self._path = path
        with _naming(path, "find a directory at"):
            if create:
                self._make_folder(path)
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))

    def write(self, name: str, fill: Fill) -> int:
        """Write to a temporary name, sync, rename, sync the folder."""
        path = self._path / name
        temporary = path.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
        with _naming(path, "write"):
            self._make_folder(path.parent, self._path)
            try:
                with open(temporary, "xb", buffering=0) as file:
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
        with _naming(path, "append to"):
            self._make_folder(path.parent, self._path)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
            if written < len(data):
                raise OSError(errno.ENOSPC, f"expected to write {len(data)} bytes; {written} were taken")
        return True

    def read(self, name: str) -> Any:
        """Read a file."""
        with _naming(self._path / name, "read"):
            return pa.py_buffer((self._path / name).read_bytes())

    def open(self, name: str) -> OpenFile:
        """Map a file."""
        with _naming(self._path / name, "map"):
            return _Mapped(self._path / name)

    def list(self, folder: str) -> dict[str, int]:
        """Walk a folder."""
        top = self._path / folder
        with _naming(top, "list"):
            return dict(self._walk(str(top))) if top.exists() else {}

    def delete(self, *names: str) -> None:
        """Unlink files, then sync each folder once: also for one that is missing, the sync may be what failed."""
        for name in names:
            with _naming(self._path / name, "delete"), contextlib.suppress(FileNotFoundError):
                os.unlink(self._path / name)
        for folder in dict.fromkeys((self._path / name).parent for name in names):
            with _naming(folder, "sync"), contextlib.suppress(FileNotFoundError):
                _sync_folder(folder)

    def claim(self, name: str) -> int | None:
        """Lock a file; the kernel lets go of it when this process ends, however that is."""
        path = self._path / name
        with _naming(path, "lock"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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
            part.mkdir(exist_ok=True)
            _sync_folder(part.parent)


class RemoteDirectory(Directory):
    """A directory of a file system that only PyArrow reaches: an object store or HDFS."""

    def __init__(self, system: Any, path: str, uri: str, create: bool = True) -> None:
        self.uri = without_credentials(uri)
        self._system = system
        self._path = path.rstrip("/")
        self._renames = system.type_name == "hdfs"
        with _naming(self.uri, "find a directory at"):
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
        with _naming(f"{self.uri}/{name}", "write"):
            if self._renames:
                self._system.create_dir(path.rpartition("/")[0], recursive=True)
            with self._system.open_output_stream(target) as sink:
                sink.write(buffer)
            if self._renames:
                self._system.move(target, path)
        return buffer.size

    def read(self, name: str) -> Any:
        """Read an object."""
        with _naming(f"{self.uri}/{name}", "read"), self._system.open_input_file(self._full(name)) as file:
            return file.read_buffer()

    def open(self, name: str) -> OpenFile:
        """Open an object for ranged reads."""
        with _naming(f"{self.uri}/{name}", "open"):
            return _Remote(self._system.open_input_file(self._full(name)), f"{self.uri}/{name}")

    def list(self, folder: str) -> dict[str, int]:
        """List a prefix."""
        selector = fs.FileSelector(self._full(folder), allow_not_found=True, recursive=True)
        with _naming(f"{self.uri}/{folder}", "list"):
            found = cast("list[Any]", self._system.get_file_info(selector))
        skip = len(self._path) + 1
        return {info.path[skip:]: info.size for info in found if info.type is fs.FileType.File}

    def delete(self, *names: str) -> None:
        """Delete objects."""
        for name in names:
            with _naming(f"{self.uri}/{name}", "delete"), contextlib.suppress(FileNotFoundError):
                self._system.delete_file(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}"


class _Whole:
    """A sink whose `write` writes all it is given: a raw file may take less, and at most 2 GiB at once."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file = file
        self.tell = file.tell

    def write(self, data: Any) -> int:
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
        _check_part(self._path, offset, nbytes, self._map.size() if self._map is not None else 0)
        if self._map is not None:
            for start in range(offset - offset % mmap.PAGESIZE, offset + nbytes, _ADVISED):
                self._map.madvise(mmap.MADV_WILLNEED, start, min(_ADVISED, offset + nbytes - start))
        return whole[offset : offset + nbytes]

    def arrow(self) -> Any:
        return pa.BufferReader(pa.py_buffer(self._opened()))

    def close(self) -> None:
        self._map = self._whole = None

    def _opened(self) -> Bytes:
        if self._whole is None:
            raise StorageError(f"{self._path}: expected an open file; it was closed")
        return self._whole


class _Remote(OpenFile):
    def __init__(self, file: Any, uri: str) -> None:
        self._file, self._uri = file, uri
        self.nbytes = file.size()

    def part(self, offset: int, nbytes: int) -> Bytes:
        _check_part(self._uri, offset, nbytes, self.nbytes)
        with _naming(self._uri, f"read {nbytes} bytes at {offset} of"):
            found = np.frombuffer(self._file.read_at(nbytes, offset), np.uint8)
        if found.nbytes != nbytes:
            raise StorageError(f"{self._uri}: expected {nbytes} bytes at {offset}; found {found.nbytes}")
        return found

    def arrow(self) -> Any:
        return self._file

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _naming(where: object, action: str) -> Generator[None]:
    """Turn what a file system raises into an error that names the file."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, pa.ArrowException) as exc:
        reason = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else str(exc)
        raise StorageError(f"{where}: expected to {action} it; {reason}") from exc


def _check_part(where: object, offset: int, nbytes: int, length: int) -> None:
    if not 0 <= offset <= offset + nbytes <= length:
        raise StorageError(f"{where}: expected {nbytes} bytes at {offset}; the file has {length}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
