"""What TensorVine's memory asks of Linux: memfds, mappings, open-file-description locks, pidfds.

Rules
- Descriptors are numbers that are never used twice in a world; a process that ends closes its own. So a finalizer
  finds its descriptor whichever process's turn it is when the collector comes to it.
- Locks are of the open file description, as `F_OFD_SETLK`'s: two readers share, a writer excludes, closing the last
  descriptor lets go. A lock is a list of ranges with what each owner has on it.
- The bytes of a memfd are one NumPy array that all who mapped it see. Its size can be sealed.
"""

from __future__ import annotations

import errno
import fcntl as real_fcntl
import mmap as real_mmap
import os as real_os
import select as real_select
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np

from .scheduler import Process
from .threads import world

ADD_SEALS, SEAL_SHRINK, SEAL_GROW = 1033, 2, 4
GETLK, SETLK, SETLKW = 36, 37, 38
"""The OFD commands of `fcntl`."""
_FLOCK = "hhqqi4x"
CHUNK_BYTES = 256
"""In place of the 2 MiB that pages are made by."""


class Memory:
    """The file behind a memfd."""

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        self.number = world().number()
        self.seals = 0
        self.pages: set[int] = set()
        """Chunks of `CHUNK_BYTES` after the version page that were made and have not gone since."""
        self.locks: list[tuple[int, int, int, Opened]] = []
        """(kind, start, end, who)."""


class Opened:
    """An open file description, or a pidfd."""

    def __init__(self, memory: Memory | None = None, process: Process | None = None) -> None:
        self.memory = memory
        self.process = process

    def fallocate64(self, start: int, length: int) -> None:
        """Punch a hole: what is read there is zeros."""
        if self.memory is not None:
            self.memory.bytes[start : start + length] = 0
            self.memory.pages -= set(_chunks(start, start + length))

    def close(self) -> None:
        """Drop what it has locked."""
        if self.memory is not None:
            self.memory.locks = [lock for lock in self.memory.locks if lock[3] is not self]


def _chunks(start: int, end: int) -> range:
    """Return the chunks that two offsets of a file span."""
    return range((start - real_mmap.PAGESIZE) // CHUNK_BYTES, -(-(end - real_mmap.PAGESIZE) // CHUNK_BYTES))


def _descriptor(number: int) -> Opened:
    owner = _owner(number)
    if owner is None:
        raise OSError(errno.EBADF, f"no descriptor {number}")
    return owner.descriptors[number]


def _owner(number: int) -> Process | None:
    w = world()
    process = w.process
    if process is not None and number in process.descriptors:
        return process
    return next((other for other in w.processes.values() if number in other.descriptors), None)


def _enter(opened: Opened) -> int:
    process = world().process
    if process is None:
        raise OSError(errno.ESRCH, "no process")
    number = world().number()
    process.descriptors[number] = opened
    return number


class Os:
    """`os`, as the actors see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(real_os, name)

    @staticmethod
    def getpid() -> int:
        process = world().process
        return process.pid if process is not None else 0

    @staticmethod
    def setpriority(*_: Any) -> None:
        """Nothing: the scheduler knows no priorities."""

    @staticmethod
    def register_at_fork(**_: Any) -> None:
        """Nothing: simulated processes do not fork."""

    @staticmethod
    def memfd_create(name: str, flags: int = 0) -> int:
        return _enter(Opened(Memory()))

    @staticmethod
    def fchmod(number: int, mode: int) -> None:
        """Nothing: all processes are of one user."""

    @staticmethod
    def ftruncate(number: int, length: int) -> None:
        memory = _descriptor(number).memory
        if memory is not None:
            more = length > memory.bytes.nbytes
            if memory.seals & (SEAL_GROW if more else SEAL_SHRINK):
                raise PermissionError(errno.EPERM, "Operation not permitted")
            memory.bytes = _aligned(length)

    @staticmethod
    def fstat(number: int) -> Any:
        memory = _descriptor(number).memory
        if memory is None:
            return SimpleNamespace(st_dev=1, st_ino=0, st_blocks=0)
        return SimpleNamespace(st_dev=1, st_ino=memory.number, st_blocks=len(memory.pages) * CHUNK_BYTES // 512)

    @staticmethod
    def lseek(number: int, offset: int, whence: int) -> int:
        memory = _descriptor(number).memory
        if memory is None:
            raise OSError(errno.ESPIPE, "Illegal seek")
        chunk, last = _chunks(offset, offset + 1)[0], -(-(memory.bytes.nbytes - real_mmap.PAGESIZE) // CHUNK_BYTES)
        while chunk < last and (chunk in memory.pages) != (whence == real_os.SEEK_DATA):
            chunk += 1
        if chunk == last and whence == real_os.SEEK_DATA:
            raise OSError(errno.ENXIO, "No such device or address")
        return max(offset, min(real_mmap.PAGESIZE + chunk * CHUNK_BYTES, memory.bytes.nbytes))

    @staticmethod
    def open(path: Any, flags: int, mode: int = 0o777) -> int:
        text = str(path)
        if not text.startswith("/proc/"):
            return real_os.open(path, flags, mode)
        _, _, pid, _, number = text.split("/")
        w = world()
        owner = w.process if pid == "self" else w.processes.get(int(pid))
        opened = owner.descriptors.get(int(number)) if owner is not None and not owner.dead else None
        if opened is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", text)
        return _enter(Opened(opened.memory))

    @staticmethod
    def dup(number: int) -> int:
        return _enter(_descriptor(number))

    @staticmethod
    def close(number: int) -> None:
        if world().over:
            return
        opened, owner = _descriptor(number), _owner(number)
        if owner is not None:
            del owner.descriptors[number]
            if opened not in owner.descriptors.values():
                opened.close()

    @staticmethod
    def pidfd_open(pid: int, flags: int = 0) -> int:
        process = world().processes.get(pid)
        if process is None or process.dead:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        return _enter(Opened(process=process))


class Fcntl:
    """`fcntl`, as the shared memory sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(real_fcntl, name)

    @staticmethod
    def fcntl(number: int, command: int, argument: Any = 0) -> Any:
        w = world()
        if w.over:
            return argument
        if command == ADD_SEALS and (sealed := _descriptor(number).memory) is not None:
            sealed.seals |= argument
            return 0
        if command not in (GETLK, SETLK, SETLKW):
            return real_fcntl.fcntl(number, command, argument)
        w.point()
        opened = _descriptor(number)
        memory = opened.memory
        if memory is None:
            raise OSError(errno.EBADF, "not a memfd")
        kind, whence, start, length, pid = struct.unpack(_FLOCK, argument)
        end = start + length if length else 1 << 62
        if kind != real_fcntl.F_UNLCK:
            for other, first, last, owner in memory.locks:
                if owner is opened or last <= start or first >= end:
                    continue
                if kind == real_fcntl.F_RDLCK and other == real_fcntl.F_RDLCK:
                    continue
                if command == GETLK:
                    return struct.pack(_FLOCK, other, 0, first, last - first, -1)
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            if command == GETLK:
                return struct.pack(_FLOCK, real_fcntl.F_UNLCK, whence, start, length, pid)
        memory.locks = _replaced(memory.locks, opened, kind, start, end)
        return argument


def _replaced(
    locks: list[tuple[int, int, int, Opened]], who: Opened, kind: int, start: int, end: int
) -> list[tuple[int, int, int, Opened]]:
    """Return the locks after `who` has set a range to `kind`."""
    kept: list[tuple[int, int, int, Opened]] = []
    for lock in locks:
        other, first, last, owner = lock
        if owner is not who or last <= start or first >= end:
            kept.append(lock)
            continue
        if first < start:
            kept.append((other, first, start, owner))
        if last > end:
            kept.append((other, end, last, owner))
    if kind != real_fcntl.F_UNLCK:
        kept.append((kind, start, end, who))
    return kept


class _Map(np.ndarray):
    """A mapping: bytes that offer what `mmap.mmap` does."""

    def madvise(self, *_: Any) -> None:
        """Nothing: all pages are there."""

    def close(self) -> None:
        """Nothing: it goes with its last user."""


class Mmap:
    """`mmap`, as the shared memory sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(real_mmap, name)

    @staticmethod
    def mmap(
        number: int, length: int, *_: Any, prot: int = real_mmap.PROT_READ | real_mmap.PROT_WRITE, **__: Any
    ) -> Any:
        memory = _descriptor(number).memory
        if memory is None or memory.bytes.nbytes < length:
            raise OSError(errno.EINVAL, "no such mapping")
        mapped = memory.bytes.view(_Map)
        if not prot & real_mmap.PROT_WRITE:
            mapped.flags.writeable = False
        return mapped


class _Poll:
    def __init__(self) -> None:
        self._watched: list[int] = []

    def register(self, number: int, *_: Any) -> None:
        self._watched.append(number)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        ended: list[tuple[int, int]] = []
        for number in self._watched:
            process = _descriptor(number).process
            if process is not None and process.dead:
                ended.append((number, real_select.POLLIN))
        return ended


class Select:
    """`select`, as the shared memory sees it."""

    poll = _Poll
    POLLIN = real_select.POLLIN

    def __getattr__(self, name: str) -> Any:
        return getattr(real_select, name)


class Ctypes:
    """`ctypes`, for `madvise`, which makes pages or, in a world of old kernels, cannot, and for `fallocate`."""

    def __getattr__(self, name: str) -> Any:
        import ctypes

        return getattr(ctypes, name)

    @staticmethod
    def CDLL(*_: Any, **__: Any) -> Any:  # noqa: N802  as in ctypes
        return Ctypes()

    @staticmethod
    def madvise(address: Any, length: Any, _: int) -> int:
        if getattr(world(), "old_kernel", False):
            return -1
        memory, start = _mapped(address.value)
        memory.pages.update(_chunks(max(start, real_mmap.PAGESIZE), start + length.value))
        return 0

    @staticmethod
    def fallocate64(number: Any, mode: Any, offset: Any, length: Any) -> int:
        w = world()
        w.point()
        _descriptor(number.value).fallocate64(offset.value, length.value)
        w.point()
        return 0

    @staticmethod
    def get_errno() -> int:
        return errno.EINVAL


def _aligned(length: int) -> np.ndarray:
    """Return zeros that start where a page does, as maps do: what is rounded to pages must not differ from run to run,
    nor lie in another memory."""
    memory = np.zeros(length + real_mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % real_mmap.PAGESIZE
    return memory[start : start + length]


def _mapped(address: int) -> tuple[Memory, int]:
    """Return whose bytes lie at an address, and where there."""
    for process in world().processes.values():
        for opened in process.descriptors.values():
            if opened.memory is not None:
                start = address - opened.memory.bytes.ctypes.data
                if 0 <= start < opened.memory.bytes.nbytes:
                    return opened.memory, start
    raise OSError(errno.EFAULT, "Bad address")


def check_made(number: int, start: int, end: int) -> None:
    """Check that there are the pages between two offsets of a memory, after its version page.

    Raises:
        OSError: one is missing: to write there could end the process by a signal.
    """
    memory = _descriptor(number).memory
    page = real_mmap.PAGESIZE
    if memory is not None and not memory.pages.issuperset(_chunks(page + start, page + end)):
        raise OSError(errno.EFAULT, f"expected pages from {start} to {end}")
