"""A directory of this machine's file systems, parallel ones that are mounted included.

Rules
- A file is written under a temporary name, synced, renamed, and its folder is synced; so is the folder of one that is
  deleted.
- Who writes a file has it locked: the kernel says which half-written ones are nobody's.
- What is read is a regular file (`open_regular`): no link, which may lead anywhere, nothing that blocks or has no end.
- Each folder below the directory is opened without following links, and files are opened, renamed and deleted within
  the open folder. The directory itself may be a link.
- Reads copy (`preadv`): who reads a file that is cut meanwhile gets an error, where a mapping would end the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import uuid
import weakref
from collections.abc import Generator, Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CorruptDataError, StorageError, shown
from ..sharing import make_folder, open_file
from .directory import FOLDER, SMALL_BYTES, TEMPORARY, Bytes, Content, Directory, Fill, OpenFile, check_part, naming, pa

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

_ADVISED = 2 << 20
"""Bytes that the kernel is asked to read at once; of more it would read a part only."""
_SHORT = 128 << 10
"""Bytes that it reads at once unasked."""
_AT_ONCE = 1 << 30
"""Bytes of one read; the kernel gives less than 2 GiB at a time."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LONGEST_NAME = 1024
"""Characters of a folder's name, from the directory on; the store's own are shorter."""
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: FOLDER,
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
        self._private = private
        with naming(path, "find a directory at"):
            if create:
                _make_path(path)
            os.close(os.open(path, _FOLDER_FLAGS))

    def write(self, name: str, fill: Fill) -> int:
        """Write to a temporary name, sync, rename, sync the folder."""
        path = self._path / name
        temporary = f".{uuid.uuid4().hex}{TEMPORARY}"
        with naming(path, "write"), self._folder_of(name, make=True) as folder:

            def opener(_: str, flags: int) -> int:
                if self._private:
                    return open_file(temporary, flags, folder)
                return os.open(temporary, flags, 0o666, dir_fd=folder)

            try:
                with open(path.with_name(temporary), "xb", buffering=0, opener=opener) as file:
                    with contextlib.suppress(OSError):  # a file system without locks
                        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
                    fill(_Whole(file))
                    os.fsync(file.fileno())
                    nbytes = file.tell()
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            os.fsync(folder)
        return nbytes

    def append(self, name: str, data: bytes) -> bool:
        """Open, write, close: nothing is kept open that could be a deleted file's."""
        with naming(self._path / name, "append to"):
            descriptor = self._open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
            if written < len(data):
                raise OSError(errno.ENOSPC, f"expected to write {len(data)} bytes; wrote {written}")
        return True

    def read(self, name: str) -> Content:
        """Read a file."""
        path = self._path / name
        with naming(path, "read"):
            descriptor = self._open(name)
            try:
                return pa.py_buffer(_whole(path, descriptor))
            finally:
                os.close(descriptor)

    def open(self, name: str) -> OpenFile:
        """Open a file."""
        with naming(self._path / name, "open"):
            return _Opened(self._path / name, self._open(name))

    def list(self, folder: str) -> dict[str, int]:
        """Walk a folder."""
        found: dict[str, int] = {}
        with naming(self._path / folder, "list"):
            for name, entry in self._walk(folder):
                if entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        found[name] = entry.stat(follow_symlinks=False).st_size
        return found

    def odd(self, folder: str) -> dict[str, str]:
        """Walk a folder."""
        found: dict[str, str] = {}
        with naming(self._path / folder, "list"):
            for name, entry in self._walk(folder):
                if not entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        found[name] = _kind(entry.stat(follow_symlinks=False).st_mode)
        return found

    def delete(self, *names: str) -> None:
        """Unlink files, then sync each folder once: also for one that is missing, the sync may be what failed."""
        for name in names:
            with (
                naming(self._path / name, "delete"),
                contextlib.suppress(FileNotFoundError),
                self._folder_of(name) as folder,
            ):
                os.unlink(name.rpartition("/")[2], dir_fd=folder)
        for name in {name.rpartition("/")[0]: name for name in names}.values():
            with (
                naming((self._path / name).parent, "sync"),
                contextlib.suppress(FileNotFoundError),
                self._folder_of(name) as folder,
            ):
                os.fsync(folder)

    def claim(self, name: str) -> int | None:
        """Lock a file; the kernel lets go of it when this process ends, however that is."""
        path = self._path / name
        with naming(path, "lock"):
            descriptor = self._open(name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                os.close(descriptor)
                raise StorageError(f"{self.uri}: expected a path of its own; another repository runs on it") from exc
            except OSError as exc:
                os.close(descriptor)
                if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                log.warning("%s: the file system has no locks: a second repository on this path is not detected", path)
                return None
        return descriptor

    def abandoned(self) -> list[str]:
        """Try their locks, which the kernel lets go of when a writer ends, however that is."""
        return [name for name in self._half_written("") if self._is_abandoned(name)]

    def _is_abandoned(self, name: str) -> bool:
        try:
            descriptor = self._open(name, os.O_RDWR)
        except OSError:
            return False  # it is written by now, or no file of ours; or it cannot be told
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # it is being written, or the file system has no locks
        finally:
            os.close(descriptor)
        return True

    def _walk(self, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """List what is in a folder and in those below it. Links are listed, not followed."""
        waiting = [folder]
        while waiting:
            top = waiting.pop()
            try:
                with self._folder_of(f"{top}/" if top else "") as opened:
                    descriptor = os.dup(opened)
            except (FileNotFoundError, NotADirectoryError) as exc:
                if top == folder and not isinstance(exc, FileNotFoundError):
                    raise
                continue  # there is none; or it went, or became something else, since it was listed
            try:
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        name = f"{top}/{entry.name}" if top else entry.name
                        yield name, entry
                        if entry.is_dir(follow_symlinks=False) and len(name) <= _LONGEST_NAME:
                            waiting.append(name)
            finally:
                os.close(descriptor)

    def _open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file; its folder is made if the file may be."""
        with self._folder_of(name, make=bool(flags & os.O_CREAT)) as folder:
            return open_regular(self._path / name, flags, folder)

    @contextlib.contextmanager
    def _folder_of(self, name: str, make: bool = False) -> Generator[int]:
        """Open the folder of a file, and yield its descriptor.

        Args:
            name: the file's, from the directory on.
            make: make missing folders, and sync those that get one: else a crash could take it away. The directory
                itself is not made: the file would be elsewhere than the others.

        Raises:
            NotADirectoryError: a link or something else stands in a folder's place; says what.
            OSError: a folder cannot be opened or made.
        """
        descriptor = os.open(self._path, _FOLDER_FLAGS)
        try:
            for number, part in enumerate(parts := name.split("/")[:-1]):
                try:
                    inner = self._inner(descriptor, part, make)
                except OSError as exc:
                    if exc.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    path = self._path.joinpath(*parts[: number + 1])
                    found = _kind(os.lstat(part, dir_fd=descriptor).st_mode)
                    raise NotADirectoryError(f"Not a directory: {path} is {found}") from exc
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _inner(self, folder: int, part: str, make: bool) -> int:
        try:
            return os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        make_folder(part, folder)
        os.fsync(folder)
        return os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)


def _make_path(path: Path) -> None:
    """Make the directory and those above it, and sync the ones that got a new entry."""
    for part in reversed([part for part in (path, *path.parents) if not part.exists()]):
        make_folder(part)
        descriptor = os.open(part.parent, _FOLDER_FLAGS)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


class _Opened(OpenFile):
    """An open file. The kernel would read up to megabytes around each part; so it is told what is wanted.

    It is closed with the last reference to it, at the latest.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._closes = weakref.finalize(self, os.close, self._descriptor)
        self._closes.atexit = False
        self.nbytes = os.fstat(self._descriptor).st_size
        self._advise(0, 0, os.POSIX_FADV_RANDOM)

    def part(self, offset: int, nbytes: int, into: Bytes | None = None) -> Bytes:
        self._check_open()
        check_part(self._path, offset, nbytes, self.nbytes)
        target = into if into is not None else np.empty(nbytes, np.uint8)
        for start in range(offset, offset + nbytes, _ADVISED) if nbytes > _SHORT else ():
            self._advise(start, min(_ADVISED, offset + nbytes - start), os.POSIX_FADV_WILLNEED)
        with naming(self._path, f"read {nbytes} bytes at {offset} of"):
            _fill(self._path, self._descriptor, target, offset)
        found = target[:]
        found.flags.writeable = False
        return found

    def arrow(self) -> object:
        self._check_open()
        if self.nbytes <= _SHORT:  # one call of the system in place of a dozen
            return pa.BufferReader(self.part(0, self.nbytes))
        return pa.PythonFile(FileIO(self._descriptor, closefd=False), mode="r")

    def close(self) -> None:
        self._closes()

    def _check_open(self) -> None:
        if not self._closes.alive:
            raise StorageError(f"{self._path}: expected an open file; it was closed")

    def _advise(self, offset: int, nbytes: int, advice: int) -> None:
        with contextlib.suppress(OSError):  # a file system that takes no advice
            os.posix_fadvise(self._descriptor, offset, nbytes, advice)


def open_regular(path: Path, flags: int, folder: int) -> int:
    """Open a regular file, and nothing else; one that is made has the rights that `sharing` says.

    Opening anything else could block, or lead to a file of elsewhere; reading it may have no end.

    Args:
        path: names it in errors.
        flags: as of `os.open`.
        folder: descriptor of its folder.

    Raises:
        CorruptDataError: something else stands there; says what.
        OSError: it cannot be opened.
    """
    try:
        descriptor = open_file(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, folder)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            with contextlib.suppress(FileNotFoundError):
                _check_regular(path, os.lstat(path.name, dir_fd=folder).st_mode)
        raise
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CorruptDataError(shown(f"{path}: expected a regular file; found {_kind(mode)}"))


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _whole(path: Path, descriptor: int) -> bytes:
    """Read a file from its beginning to its end."""
    nbytes = os.fstat(descriptor).st_size
    if nbytes > SMALL_BYTES:
        raise CorruptDataError(shown(f"{path}: expected at most {SMALL_BYTES} bytes; found {nbytes}"))
    found = os.pread(descriptor, nbytes, 0)
    while len(found) < nbytes:
        more = os.pread(descriptor, nbytes - len(found), len(found))
        if not more:
            raise CorruptDataError(shown(f"{path}: expected {nbytes} bytes; found {len(found)}: it was truncated"))
        found += more
    return found


def _fill(path: Path, descriptor: int, target: Bytes, offset: int) -> None:
    """Read as many bytes as `target` has."""
    done = 0
    while done < target.nbytes:
        count = os.preadv(descriptor, [target.data[done : done + _AT_ONCE]], offset + done)
        if not count:
            raise CorruptDataError(
                f"{path}: expected {target.nbytes} bytes at {offset}; found {done}: the file was truncated"
            )
        done += count
