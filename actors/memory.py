"""A shard's memory, shared with the clients of its node: what is written there is never copied again.

Rules
- The memory is a memfd: it has no name in any file system, so nothing is left behind however its processes end.
  Clients open it through the shard's `/proc/PID/fd`; where they cannot, blocks are carried (`ways`).
- Its first page is the board, which the shard alone writes: `epoch` counts whatever changes an answer, `freed`
  whatever takes a segment from its place. A client that finds there what its last answer said knows, without a
  message, that the answer still holds.
- Parts are granted by the shard (`store.arena`), and each is written by the one client that it was granted to,
  before anybody else may see it. A part returns when its segment is gone and nobody reads it, or when the client
  that was filling it has ended; never by time alone: a paused client could write into what has become another's.
- Readers hold a kernel lock (`F_OFD_SETLK`) on the part for as long as any array on it lives; the kernel lets it go
  when they die. The shard counts a freeing on the board first and tries the lock second; a reader locks first and
  reads the board second. So either the reader sees that its answer is stale, or the shard sees the reader.
- Readers map the memory without write permission: a write through a view is an error of the writer, not of all.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import struct
import threading
import weakref
from collections.abc import Callable

import numpy as np

from ..store.arena import Part
from ..store.errors import StoreFullError

BOARD_BYTES = mmap.PAGESIZE
CHUNK_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23
_SETLK = 37  # F_OFD_SETLK; builds of Python against old headers lack the name


class SharedMemory:
    """The shard's side: makes the memory and owns it.

    Args:
        capacity: bytes for segments. Pages are made when they are first used.
        touch: bytes at the low end whose pages are made now.
    """

    def __init__(self, capacity: int, touch: int = 0) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("tensorvine")
        os.ftruncate(self.fd, BOARD_BYTES + capacity)
        self._map = mmap.mmap(self.fd, BOARD_BYTES + capacity)
        whole = np.frombuffer(self._map, np.uint8)
        self._board = whole[:16].view(np.uint64)
        self._pages = _Pages(whole[BOARD_BYTES:])
        self._pages.part(Part(0, min(touch, capacity)))
        self._readers = ReadLocks(os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY))

    def publish(self, epoch: int, freed: int) -> None:
        """Show the shard's counters to the clients of this node."""
        self._board[:] = (epoch, freed)

    def part(self, part: Part) -> np.ndarray:
        """Give a part's bytes."""
        return self._pages.part(part)

    def read(self, part: Part) -> np.ndarray:
        """Give a part's bytes, kept in place for as long as the array or a view on it lives."""
        view = self.part(part)[:]
        return self._readers.guard(np.frombuffer(view.data, np.uint8), part)

    def is_read(self, part: Part) -> bool:
        """Tell whether any process has an array on this part. Call it after `publish` of the freeing."""
        try:
            _lock(self.fd, fcntl.F_WRLCK, part)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return True
            raise
        _lock(self.fd, fcntl.F_UNLCK, part)
        return False


class MemoryView:
    """A client's side: maps another process's memory.

    Args:
        pid: the shard's process.
        fd: its descriptor of the memory.
        capacity: its capacity in bytes.

    Raises:
        OSError: it cannot be opened: another node, container or user.
    """

    def __init__(self, pid: int, fd: int, capacity: int) -> None:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        self._readers = ReadLocks(own)
        length = BOARD_BYTES + capacity
        self._readable = memoryview(mmap.mmap(own, length, prot=mmap.PROT_READ))
        writable = np.frombuffer(mmap.mmap(own, length), np.uint8)
        self._pages = _Pages(writable[BOARD_BYTES:])
        self._board = np.frombuffer(self._readable[:16], np.uint64)
        self._pidfd = os.pidfd_open(pid)
        self._alive = process_watch(self._pidfd)

    def counters(self) -> tuple[int, int] | None:
        """Give the shard's epoch and count of freeings; None when its process has ended."""
        return (int(self._board[0]), int(self._board[1])) if self._alive() else None

    def part(self, part: Part) -> np.ndarray:
        """Give a granted part, to write to."""
        return self._pages.part(part)

    def read(self, part: Part) -> np.ndarray:
        """Give a part's bytes, read-only, locked in place for as long as the array or a view on it lives."""
        start = BOARD_BYTES + part.offset
        return self._readers.guard(np.frombuffer(self._readable[start : start + part.length], np.uint8), part)

    def close(self) -> None:
        """Let the shard's process go. The memory is unmapped when the last array on it goes."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._alive = _never


class ReadLocks:
    """Kernel locks on the parts that this process reads. Owns the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._counts: dict[Part, int] = {}
        self._mutex = threading.RLock()  # a finalizer may run in the middle of guard
        weakref.finalize(self, os.close, fd)

    def guard(self, block: np.ndarray, part: Part) -> np.ndarray:
        """Lock `part` until `block`, whose base is no array, and all views on it are gone."""
        with self._mutex:
            if part not in self._counts:
                _lock(self._fd, fcntl.F_RDLCK, part)
            self._counts[part] = self._counts.get(part, 0) + 1
        weakref.finalize(block, self._release, part).atexit = False
        return block

    def _release(self, part: Part) -> None:
        with self._mutex:
            self._counts[part] -= 1
            if not self._counts[part]:
                del self._counts[part]
                _lock(self._fd, fcntl.F_UNLCK, part)


class _Pages:
    """A writable mapping whose pages are made, many at once, where they are needed for the first time."""

    def __init__(self, block: np.ndarray) -> None:
        self._block = block
        self._made = np.zeros(-(-block.nbytes // CHUNK_BYTES), np.bool_)

    def part(self, part: Part) -> np.ndarray:
        first, last = part.offset // CHUNK_BYTES, -(-(part.offset + part.length) // CHUNK_BYTES)
        if not self._made[first:last].all():
            _populate(self._block[first * CHUNK_BYTES : last * CHUNK_BYTES])
            self._made[first:last] = True
        return self._block[part.offset : part.offset + part.length]


def process_watch(pidfd: int) -> Callable[[], bool]:
    """Make a function that tells, in a microsecond, whether the process behind `pidfd` still runs."""

    def alive() -> bool:
        poll = select.poll()  # one object would refuse two threads at once
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)

    return alive


def _populate(block: np.ndarray) -> None:
    """Make a mapping's pages now; one by one where the kernel cannot do it (before Linux 5.14)."""
    start = block.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = block.ctypes.data + block.nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise StoreFullError(f"shared memory: expected {length} more bytes; the system has none: {os.strerror(code)}")
    block[:: mmap.PAGESIZE] = 0


def _lock(fd: int, kind: int, part: Part) -> None:
    fcntl.fcntl(fd, _SETLK, struct.pack("hhqqi4x", kind, 0, BOARD_BYTES + part.offset, part.length, 0))


def _never() -> bool:
    return False
