"""A shard's memory, shared with the clients of its node: what is written there is never copied again.

Rules
- M1. The memory is a memfd: it has no name in any file system, so nothing is left behind however its processes end.
  Clients open it through the shard's `/proc/PID/fd`; where they cannot, blocks are carried (`ways`).
- M2. Its first page is the board, which the shard alone writes: `epoch` counts whatever changes an answer. A client
  that finds there what its last answer said knows, without a message, that the answer still holds.
- M3. Parts are granted by the shard (`store.segments.arena`), and each is written by the one client that it was granted
  to, before anybody else may see it. A part returns when its segment is gone and nobody reads it, or when the client
  that was filling it has ended; never by time alone: a paused client could write into what has become another's.
- M4. In front of every block stands its header (`store.segments.blockheader`). Readers lock a block first and compare
  its header second; the shard clears the header first and looks for locks second. So either the reader sees that the
  block is not what it was told of, or the shard sees the reader and leaves the block as it is. No answer about a place
  is believed: a wrong one is noticed here.
- M5. A reader's lock (`F_OFD_SETLK`) is on the block's first byte, for as long as any array on it lives; the kernel
  lets it go when the process dies. One byte: blocks of different times may overlap, and to unlock one must not unlock
  another.
- M6. Locks are a process's own. A process that forks gives its child locks of its own on all that it reads, before
  there is a child: what either lets go then, the other keeps.
- M7. Readers map the memory without write permission: a write through a view is an error of the writer, not of all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import select
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator

import numpy as np

from ...store.errors import ShardUnavailableError, StoreFullError
from ...store.segments.arena import Part
from ...store.segments.blockheader import CLEARED, HEADER_BYTES

log = logging.getLogger(__name__)

BOARD_BYTES = mmap.PAGESIZE
CHUNK_BYTES = 2 << 20
SMALLEST_BYTES = 64 << 10
"""Blocks of fewer bytes stay out of this memory, so that headers take less than a thousandth of it."""
_MADV_POPULATE_WRITE = 23
_GETLK, _SETLK = 36, 37  # F_OFD_GETLK and F_OFD_SETLK; builds of Python against old headers lack the names
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def size_for(capacity: int) -> int:
    """Return the bytes of memory that hold blocks of `capacity` bytes together, each with its header."""
    return capacity + (capacity // SMALLEST_BYTES + 1) * HEADER_BYTES


class SharedMemory:
    """The shard's side: makes the memory and owns it.

    Args:
        capacity: bytes for segments. Pages are made when they are first used.
        touch: bytes at the low end whose pages are made now.

    Raises:
        ShardUnavailableError: this kernel has no locks that tell the shard who reads (Linux before 3.15, gVisor).
    """

    def __init__(self, capacity: int, touch: int = 0) -> None:
        self.capacity = capacity
        self.size = size_for(capacity)
        self.fd = os.memfd_create("tensorvine")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, BOARD_BYTES + self.size)
        try:
            _is_locked(self.fd, 0)
        except OSError as exc:
            raise ShardUnavailableError(
                f"shared memory: expected a kernel with open file description locks (Linux 3.15 or later): {exc}"
            ) from exc
        self._map = mmap.mmap(self.fd, BOARD_BYTES + self.size)
        whole = np.frombuffer(self._map, np.uint8)
        self._board = whole[:8].view(np.uint64)
        self._blocks = whole[BOARD_BYTES:]
        self._pages = _Pages(self.fd, self._blocks)
        self._pages.part(Part(0, min(touch, capacity)))
        self._readers = ReadLocks(self.fd)

    def publish(self, epoch: int) -> None:
        """Show the shard's counter to the clients of this node."""
        self._board[0] = epoch

    def part(self, part: Part) -> np.ndarray:
        """Return a part's bytes."""
        return self._pages.part(part)

    def label(self, part: Part, header: bytes) -> None:
        """Write the header of the block that lies in a part from now on."""
        self._header(part)[:] = np.frombuffer(header, np.uint8)

    def clear(self, part: Part) -> None:
        """Have nobody take what lies in a part for a block any more. To be done before `is_read` is asked."""
        self._header(part)[:] = np.frombuffer(CLEARED, np.uint8)

    def read(self, part: Part) -> np.ndarray:
        """Return a part's bytes, kept in place for as long as the array or a view on it lives."""
        view = self.part(part)[:]
        return self._readers.guard(np.frombuffer(view.data, np.uint8), part)

    def held(self, part: Part) -> contextlib.AbstractContextManager[None]:
        """Keep a part in place while it is being filled, whatever becomes of those who had it granted."""
        return self._readers.held(part)

    def is_read(self, part: Part) -> bool:
        """Tell whether any process has an array on this part. Call it after `clear`."""
        return _is_locked(self.fd, part.offset)

    def _header(self, part: Part) -> np.ndarray:
        return self._blocks[part.offset - HEADER_BYTES : part.offset]


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
        weakref.finalize(self, os.close, own)
        _is_locked(own, 0)  # else it would be found out in the middle of a read
        length = BOARD_BYTES + size_for(capacity)
        readable = mmap.mmap(own, length, prot=mmap.PROT_READ)
        self._readers = ReadLocks(own, readable)
        self._readable = memoryview(readable)
        writable = np.frombuffer(mmap.mmap(own, length), np.uint8)
        self._pages = _Pages(own, writable[BOARD_BYTES:])
        self._board = np.frombuffer(self._readable[:8], np.uint64)
        self._pidfd = os.pidfd_open(pid)
        self._alive = process_watch(self._pidfd)

    def epoch(self) -> int | None:
        """Return the shard's epoch; None when its process has ended."""
        return int(self._board[0]) if self._alive() else None

    def part(self, part: Part) -> np.ndarray:
        """Return a granted part, to write to."""
        return self._pages.part(part)

    def read(self, part: Part, header: bytes) -> np.ndarray | None:
        """Return a block's bytes, read-only, locked in place for as long as the array or a view on it lives.

        None: what lies in the part is not, or is no longer, the block with this header.
        """
        start = BOARD_BYTES + part.offset
        block = np.frombuffer(self._readable[start : start + part.length], np.uint8)
        block = self._readers.guard(block, part)
        return block if bytes(self._readable[start - HEADER_BYTES : start]) == header else None

    def close(self) -> None:
        """Let the shard's process go. The memory is unmapped when the last array on it goes."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._alive = _never


class ReadLocks:
    """Kernel locks on the parts that this process reads.

    Args:
        fd: of the memory. Locks belong to an open file description: it is opened once more for them alone.
        readable: where this process reads it, made unreadable in a forked child that could get no locks.
    """

    def __init__(self, fd: int, readable: mmap.mmap | None = None) -> None:
        self._fds = [_opened_again(fd)]
        """The descriptor that has the locks; one more while this process forks."""
        self._readable = readable
        self._counts: dict[int, int] = {}
        """Offset of a part -> arrays on it."""
        self._mutex = threading.Lock()
        self._released: deque[int] = deque()
        """Left by finalizers, which may run in the middle of anything, and counted off by whoever has the mutex."""
        weakref.finalize(self, _close_all, self._fds)
        _forking.watch(self)

    def guard(self, block: np.ndarray, part: Part) -> np.ndarray:
        """Lock `part` until `block`, whose base is no array, and all views on it are gone."""
        self._take(part.offset)
        weakref.finalize(block, self._release, part.offset).atexit = False
        return block

    @contextlib.contextmanager
    def held(self, part: Part) -> Generator[None]:
        """Lock `part` meanwhile."""
        self._take(part.offset)
        try:
            yield
        finally:
            self._release(part.offset)

    def _take(self, offset: int) -> None:
        with self._mutex:
            count = self._counts.get(offset, 0)
            if not count:
                _lock(self._fds[0], fcntl.F_RDLCK, offset)
            self._counts[offset] = count + 1
        self._settle()

    def _release(self, offset: int) -> None:
        self._released.append(offset)
        self._settle()

    def _settle(self) -> None:
        """Count off what was released; where somebody has the mutex, he does when he lets it go."""
        while self._released and self._mutex.acquire(blocking=False):
            try:
                while self._released:
                    offset = self._released.popleft()
                    self._counts[offset] -= 1
                    if not self._counts[offset]:
                        del self._counts[offset]
                        _lock(self._fds[0], fcntl.F_UNLCK, offset)
            finally:
                self._mutex.release()

    # ---- forks ------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Make the locks that the child is to have, and keep all as it is until it has them."""
        self._mutex.acquire()
        try:
            self._fds.append(_opened_again(self._fds[0]))
            for offset in self._counts:
                _lock(self._fds[1], fcntl.F_RDLCK, offset)
        except OSError as exc:
            log.error("fork: the child gets no locks on %d blocks, and cannot read them: %s", len(self._counts), exc)
            _close_all(self._fds[1:])
            del self._fds[1:]

    def after_fork(self, child: bool) -> None:
        """Go on: by the new locks in the child, by the old ones in the parent."""
        if child and len(self._fds) == 1 and self._readable is not None:
            _forbid(self._readable)
        elif len(self._fds) == 2:
            os.close(self._fds.pop(0 if child else 1))
        self._mutex.release()
        self._settle()


class _Forking:
    """Tells all locks of this process that it forks."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[ReadLocks] = weakref.WeakSet()
        self._under_way: list[ReadLocks] = []
        self._registered = False
        self._turn = threading.Lock()
        """Held by the thread that forks, in the child as well: two may want to at one time."""

    def watch(self, locks: ReadLocks) -> None:
        self._all.add(locks)
        if not self._registered:
            self._registered = True
            child, parent = (lambda: self._after(True)), (lambda: self._after(False))
            os.register_at_fork(before=self._before, after_in_child=child, after_in_parent=parent)

    def _before(self) -> None:
        self._turn.acquire()
        self._under_way = list(self._all)
        for locks in self._under_way:
            locks.before_fork()

    def _after(self, child: bool) -> None:
        under_way, self._under_way = self._under_way, []
        for locks in under_way:
            locks.after_fork(child)
        self._turn.release()


_forking = _Forking()


class _Pages:
    """A writable mapping whose pages are made, many at once, where they are needed for the first time."""

    def __init__(self, fd: int, block: np.ndarray) -> None:
        self._fd = fd
        self._block = block
        self._made = np.zeros(-(-block.nbytes // CHUNK_BYTES), np.bool_)

    def part(self, part: Part) -> np.ndarray:
        first = max(part.offset - HEADER_BYTES, 0) // CHUNK_BYTES
        last = -(-(part.offset + part.length) // CHUNK_BYTES)
        if not self._made[first:last].all():
            _populate(self._fd, first * CHUNK_BYTES, self._block[first * CHUNK_BYTES : last * CHUNK_BYTES])
            self._made[first:last] = True
        return self._block[part.offset : part.offset + part.length]


def process_watch(pidfd: int) -> Callable[[], bool]:
    """Make a function that tells, in a microsecond, whether the process behind `pidfd` still runs."""

    def alive() -> bool:
        poll = select.poll()  # one object would refuse two threads at once
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)

    return alive


def _populate(fd: int, offset: int, block: np.ndarray) -> None:
    """Make a mapping's pages now, without changing what is in those that there are.

    Args:
        fd: of the memory.
        offset: of the block, after the board.
        block: where it is mapped.
    """
    start = block.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = block.ctypes.data + block.nbytes - start
    code = _advise(start, length)
    if code in _NO_SUCH_CALL:
        _log_old_kernel()
        code = _allocate(fd, BOARD_BYTES + offset, block.nbytes)
    if code:
        raise StoreFullError(f"shared memory: expected {length} more bytes; the system has none: {os.strerror(code)}")


def _advise(start: int, length: int) -> int:
    """Have the kernel make the pages and map them; gives its error, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    return 0 if done == 0 else ctypes.get_errno()


def _allocate(fd: int, start: int, length: int) -> int:
    """Have the kernel make the pages; gives its error, or 0. They are mapped one by one when they are used."""
    try:
        os.posix_fallocate(fd, start, length)
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


@functools.cache
def _log_old_kernel() -> None:
    log.info("shared memory: no MADV_POPULATE_WRITE (Linux before 5.14): pages are mapped one by one, which is slower")


def _forbid(mapping: mmap.mmap) -> None:
    """Make a mapping unreadable: who reads it ends by a signal, and not with bytes that have become another's."""
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), 0)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _opened_again(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


def _lock(fd: int, kind: int, offset: int) -> None:
    fcntl.fcntl(fd, _SETLK, _flock(kind, offset))


def _is_locked(fd: int, offset: int) -> bool:
    """Tell whether a part is locked through another description; nobody is disturbed by the question."""
    (found,) = struct.unpack_from("h", fcntl.fcntl(fd, _GETLK, _flock(fcntl.F_WRLCK, offset)))
    return found != fcntl.F_UNLCK


def _flock(kind: int, offset: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, BOARD_BYTES + offset, 1, 0)


def _never() -> bool:
    return False
