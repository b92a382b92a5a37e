"""A shard's memory, shared with the clients of its node: what is written there is never copied again.

Rules
- M1. The memory is a memfd: it has no name in any file system, so nothing is left behind however its processes end.
  Clients open it through the shard's `/proc/PID/fd`; where they cannot, blocks are carried (`transports`). Other users
  cannot, by the mode of the memory and by that of the process. Its size is sealed: a client that could cut it would end
  the shard and all readers by a signal. Ids of processes and numbers of descriptors are used again, so a client maps
  only the file, by device and inode, that the shard named.
- M2. Its first page says what pages went back to the system, and which are ahead of need. Only the shard writes it.
  Which version is the latest of its name stands on the catalog's version page (`counters`).
- M3. Parts are granted by the shard (`store.segments.arena`), and each is written by the one client that it was granted
  to, before anybody else may see it. A part returns when its segment or its save is gone and nobody has a lock on it;
  never by time alone: a paused client could write into what has become another's. A writer has the lock that readers
  have for as long as any array on the part lives, those of its helper threads included.
- M4. In front of every block stands its header (`store.segments.blockheader`). Readers lock a block first and compare
  its header second; the shard clears the header first and looks for locks second. So either the reader sees that the
  block is not what it was told of, or the shard sees the reader and leaves the block as it is. No answer about a place
  is believed: a wrong one is noticed here.
- M5, M6. Locks of readers and writers: see `locks`.
- M10. Pages of memory that nobody has may go back to the system. The shard counts that on the version page, by regions
  of the memory, after they went and before it grants the memory: a client that finds another count makes its pages
  there again. Beside the counts stands where the next grants will come from, as far as pages are there: a client
  maps those ahead. What stands there stays for a second after it is taken away.
- M7. Readers map the memory without write permission: a write through a view is an error of the writer, not of all.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import select
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from ...store.errors import ShardUnavailableError
from ...store.segments.arena import Part
from ...store.segments.blockheader import CLEARED, HEADER_BYTES
from .holes import bytes_resident, data_in, punch
from .locks import PAGE_BYTES, PartLocks, is_locked
from .pages import REGIONS, Pages

log = logging.getLogger(__name__)

SMALLEST_BYTES = 64 << 10
"""Blocks of fewer bytes stay out of this memory, so that headers take less than a thousandth of it."""

STEP_BYTES = 16 << 20
"""Pages are mapped ahead, and given back, in steps of so many bytes: 1 to 2 ms, or 6 where they are made."""
_AHEAD = 0
"""Where on the first page stand, in words of 8 bytes, how many spans are ahead, and then which, and then of each region
how often pages went."""
_MOST_SPANS = 16
_GONE = _AHEAD + 1 + 2 * _MOST_SPANS
_WORDS = _GONE + REGIONS

FileId = tuple[int, int]
"""Device and inode of a file."""
_ADD_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1033, 1, 2, 4  # builds of Python against old headers lack the names


def size_for(capacity: int) -> int:
    """Return the bytes of memory that hold blocks of `capacity` bytes together, each with its header."""
    return capacity + (capacity // SMALLEST_BYTES + 1) * HEADER_BYTES


class SharedMemory:
    """The shard's side: makes the memory and owns it.

    Args:
        capacity: bytes for segments. Pages are made when they are first used.
        touch: bytes at the low end whose pages are made now.

    Raises:
        ShardUnavailableError: this kernel has no locks that tell the shard who reads (Linux before 3.15, gVisor), or
            cannot seal the memory's size (Linux before 3.17).
    """

    def __init__(self, capacity: int, touch: int = 0) -> None:
        self.capacity = capacity
        self.size = size_for(capacity)
        self.fd = os.memfd_create("tensorvine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, PAGE_BYTES + self.size)
        try:
            is_locked(self.fd, 0)
        except OSError as exc:
            raise ShardUnavailableError(
                f"shared memory: expected a kernel with open file description locks (Linux 3.15 or later): {exc}"
            ) from exc
        seal_size(self.fd)
        self.file = file_id(self.fd)
        self._map = mmap.mmap(self.fd, PAGE_BYTES + self.size)
        whole = np.frombuffer(self._map, np.uint8)
        self._page = whole[: 8 * _WORDS].view(np.uint64)
        self._blocks = whole[PAGE_BYTES:]
        self._pages = Pages(self.fd, self._blocks)
        self._pages.part(Part(0, min(touch, capacity)))
        self._locks = PartLocks(self.fd)

    def part(self, part: Part) -> np.ndarray:
        """Return a part's bytes."""
        return self._pages.part(part)

    # ---- pages ----------------------------------------------------------------------------------------

    @property
    def bytes_resident(self) -> int:
        """Bytes that the system has given pages to, the version page included."""
        return bytes_resident(self.fd)

    def unmade(self, start: int, end: int) -> bool:
        """Tell whether this process has not mapped all pages between two offsets."""
        return self._pages.unmade(start, end)

    def make(self, start: int, end: int) -> None:
        """Make and map pages ahead of need; what is in those that there are stays as it is.

        Raises:
            StoreFullError: the system has no memory for them.
        """
        self._pages.make(start, end)

    def show_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Show where the next grants will come from, as far as there are pages."""
        shown = spans[:_MOST_SPANS]
        self._page[_AHEAD] = 0
        self._page[_AHEAD + 1 : _AHEAD + 1 + 2 * len(shown)] = [at for span in shown for at in span]
        self._page[_AHEAD] = len(shown)

    def data_in(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return where, between two offsets, there are pages."""
        return [(a - PAGE_BYTES, b - PAGE_BYTES) for a, b in data_in(self.fd, PAGE_BYTES + start, PAGE_BYTES + end)]

    def punch(self, start: int, end: int) -> None:
        """Give pages, which are whole chunks, back to the system, and then count that. Nobody may have them meanwhile.

        Raises:
            OSError: the system does not take them.
        """
        try:
            punch(self.fd, PAGE_BYTES + start, end - start)
        finally:
            self._page[_GONE:][self._pages.regions(start, end)] += np.uint64(1)
            self._pages.forget(start, end)

    # ---- blocks ---------------------------------------------------------------------------------------

    def label(self, part: Part, header: bytes) -> None:
        """Write the header of the block that lies in a part from now on."""
        self._header(part)[:] = np.frombuffer(header, np.uint8)

    def clear(self, part: Part) -> None:
        """Have nobody take what lies in a part for a block any more. To be done before `is_read` is asked."""
        self._header(part)[:] = np.frombuffer(CLEARED, np.uint8)

    def read(self, part: Part) -> np.ndarray:
        """Return a part's bytes, kept in place for as long as the array or a view on it lives."""
        view = self.part(part)[:]
        return self._locks.guard(np.frombuffer(view.data, np.uint8), part)

    def held(self, part: Part) -> contextlib.AbstractContextManager[None]:
        """Keep a part in place while it is being filled, whatever becomes of those who had it granted."""
        return self._locks.held(part)

    def is_read(self, part: Part) -> bool:
        """Tell whether any process has an array on this part. Call it after `clear`."""
        return is_locked(self.fd, part.offset)

    def is_read_by_others(self, part: Part, own: int = 1) -> bool:
        """Tell whether anything else than `own` arrays of this process is on this part."""
        return self._locks.is_taken(part, own)

    def _header(self, part: Part) -> np.ndarray:
        return self._blocks[part.offset - HEADER_BYTES : part.offset]


class MemoryView:
    """A client's side: maps another process's memory.

    Args:
        pid: the shard's process.
        fd: its descriptor of the memory.
        file: the file behind that descriptor.
        capacity: its capacity in bytes.

    Raises:
        OSError: it cannot be opened: another node, container or user.
        ShardUnavailableError: the descriptor is of another file: the shard has ended and another process has its id,
            or ids of processes mean others here than there.
    """

    def __init__(self, pid: int, fd: int, file: FileId, capacity: int) -> None:
        pidfd = os.pidfd_open(pid)  # before the memory is opened: if that is the shard's, so is this
        self._close_pidfd = weakref.finalize(self, os.close, pidfd)
        self._process_runs = process_watch(pidfd)
        own = open_of(pid, fd, file)
        weakref.finalize(self, os.close, own)
        is_locked(own, 0)  # else it would be found out in the middle of a read
        self._size = size_for(capacity)
        length = PAGE_BYTES + self._size
        readable = mmap.mmap(own, length, prot=mmap.PROT_READ)
        self._locks = PartLocks(own, readable)
        self._readable = memoryview(readable)
        self._writable = memoryview(mmap.mmap(own, length))
        self._page = page = np.frombuffer(self._readable[: 8 * _WORDS], np.uint64)
        self._pages = Pages(own, np.frombuffer(self._writable, np.uint8)[PAGE_BYTES:], page[_GONE:])

    @property
    def alive(self) -> bool:
        """Whether the shard's process still runs."""
        return self._process_runs()

    def part(self, part: Part, helper: Executor | None = None) -> np.ndarray:
        """Return a granted part to write to, locked in place for as long as the array or a view on it lives.

        Args:
            part: which.
            helper: makes half of its pages, where they are many.

        Raises:
            StoreFullError: the system has no memory for it.
        """
        start = PAGE_BYTES + part.offset
        block = np.frombuffer(self._writable[start : start + part.length], np.uint8)
        block = self._locks.guard(block, part, writes=True)
        self._pages.part(part, helper, block)
        return block

    def map_ahead(self) -> bool:
        """Map some of the pages that the next grants will come from; False: all are mapped that there are.

        Raises:
            StoreFullError: the system has no memory, not even to map them.
        """
        words = self._page[:_GONE].tolist()
        count = min(words[_AHEAD], _MOST_SPANS)
        spans = zip(words[_AHEAD + 1 :: 2], words[_AHEAD + 2 :: 2], strict=True)
        for start, end in [*spans][:count]:
            for at in range(start, min(end, self._size), STEP_BYTES):
                stop = min(at + STEP_BYTES, end, self._size)
                if self._pages.unmade(at, stop):
                    self._pages.make(at, stop)
                    return True
        return False

    def read(self, part: Part, header: bytes) -> np.ndarray | None:
        """Return a block's bytes, read-only, locked in place for as long as the array or a view on it lives.

        None: what lies in the part is not, or is no longer, the block with this header.
        """
        start = PAGE_BYTES + part.offset
        block = np.frombuffer(self._readable[start : start + part.length], np.uint8)
        block = self._locks.guard(block, part)
        return block if self.header(part) == header else None

    def header(self, part: Part) -> bytes:
        """Return what stands in front of a part; whoever has it locked sees what was written last."""
        start = PAGE_BYTES + part.offset
        return bytes(self._readable[start - HEADER_BYTES : start])

    def close(self) -> None:
        """Let the shard's process go. The memory is unmapped when the last array on it goes."""
        self._process_runs = _never
        self._close_pidfd()


def process_watch(pidfd: int) -> Callable[[], bool]:
    """Make a function that tells, in a microsecond, whether the process behind `pidfd` still runs."""

    def alive() -> bool:
        poll = select.poll()  # one object would refuse two threads at once
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)

    return alive


def seal_size(fd: int) -> None:
    """Have the kernel refuse to cut or lengthen the memory, whoever asks, and to take that back."""
    try:
        fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
    except OSError as exc:
        raise ShardUnavailableError(
            f"shared memory: expected a kernel that seals its size (Linux 3.17 or later): {exc}"
        ) from exc


def file_id(fd: int) -> FileId:
    """Return which file a descriptor is of: its device and inode."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def open_of(pid: int, fd: int, file: FileId) -> int:
    """Open a process's descriptor if it is of this file. What else it may be, a pipe or a device, is only looked at."""
    looked_at = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH)
    try:
        found = file_id(looked_at)
        if found != file:
            raise ShardUnavailableError(
                f"shared memory: expected descriptor {fd} of process {pid} to be of device and inode {file}; found "
                f"{found}: the process has ended, or this process has another namespace of process ids"
            )
        return os.open(f"/proc/self/fd/{looked_at}", os.O_RDWR)
    finally:
        os.close(looked_at)


def _never() -> bool:
    return False
