"""Preallocated shared memory between a shard and the clients of its node (DStore, section 3).

Rules
- The buffer is a memfd: no name in any file system, so nothing is left behind however its processes end. Clients
  open it through the shard's `/proc/PID/fd`; where they cannot, they use the object store instead (`upload`).
- Its first page is the board: the shard's epoch, which the shard alone writes. A client that finds the epoch of its
  last answer there knows that the answer still holds, without a message.
- Parts are granted by the shard (`store.staging`) and written by the one client that they were granted to. A part
  returns when the shard has adopted it or when the client's process has ended, never by time alone: a paused client
  could write into a part that has become another's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
from collections.abc import Callable

import numpy as np

BOARD_BYTES = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23


class StagingBuffer:
    """The shard's side: makes the buffer and owns it.

    Args:
        capacity: bytes that clients can be granted.
        touch: bytes at the low end whose pages are made now: a fresh page costs ten times its copy.
    """

    def __init__(self, capacity: int, touch: int = 0) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("tensorvine-staging")
        os.ftruncate(self.fd, BOARD_BYTES + capacity)
        self._map = mmap.mmap(self.fd, BOARD_BYTES + capacity)
        whole = np.frombuffer(self._map, np.uint8)
        self._board = whole[:8].view(np.uint64)
        self.bytes = whole[BOARD_BYTES:]
        populate(whole[: BOARD_BYTES + min(touch, capacity)])

    def publish(self, epoch: int) -> None:
        """Show the shard's epoch to the clients of this node."""
        self._board[0] = epoch


class StagingView:
    """A client's side: maps another process's buffer.

    Args:
        pid: the shard's process.
        fd: its descriptor of the buffer.
        capacity: its capacity in bytes.

    Raises:
        OSError: the buffer cannot be opened: another node, container or user.
    """

    def __init__(self, pid: int, fd: int, capacity: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            try:
                self._map = mmap.mmap(own, BOARD_BYTES + capacity)
            finally:
                os.close(own)
        except BaseException:
            os.close(self._pidfd)
            raise
        whole = np.frombuffer(self._map, np.uint8)
        self._board = whole[:8].view(np.uint64)
        self._populated = 0
        self.bytes = whole[BOARD_BYTES:]
        self._alive = process_watch(self._pidfd)

    def part(self, offset: int, length: int) -> np.ndarray:
        """Give a part to write to. Its pages are mapped at once: faults, one by one, would cost more than the copy."""
        end = offset + length
        if end > self._populated:
            populate(self.bytes[self._populated : end])
            self._populated = end
        return self.bytes[offset:end]

    def epoch(self) -> int | None:
        """Give the shard's epoch; None when its process has ended."""
        return int(self._board[0]) if self._alive() else None

    def close(self) -> None:
        """Let the shard's process go; the memory is unmapped when the last view on it goes."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._alive = _never


def process_watch(pidfd: int) -> Callable[[], bool]:
    """Make a function that tells, in a microsecond, whether the process behind `pidfd` still runs."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return lambda: not poll.poll(0)


def populate(block: np.ndarray) -> None:
    """Make the pages of a writable mapping now. Where the kernel cannot (before 5.14), touch them one by one."""
    address = block.ctypes.data
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + block.nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
        block[:: mmap.PAGESIZE] = 0


def _never() -> bool:
    return False
