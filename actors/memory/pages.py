"""The pages of a shared memory.

Rules
- They are made, many at once, where they are needed for the first time: page by page, when they are written to, it
  takes several times as long. An old kernel makes them without mapping them. Two threads make many faster than one.
- They are asked for as a reader would (`MADV_POPULATE_READ`): of memory that a file shares this makes what is missing,
  too, and maps what there is sixteen pages at a time, writable, which takes a third of the time.
- Memory that the system does not have is a `StoreFullError` here, and not a signal when it is written to.
- Pages may go back to the system while nobody has the memory (M10). So what was made counts as made for as long as
  the count of that, of its region of the memory, is the one that was seen before it was made. The count goes up after
  the pages went: pages that were made in between do not count as made.
- An exception can end the wait for the helper, as in `copying`. The helper's task refers to the part, and so keeps it
  locked until the task ends.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
from concurrent.futures import Executor, wait

import numpy as np

from ...store.errors import StoreFullError
from ...store.segments.arena import Part
from ...store.segments.blockheader import HEADER_BYTES
from ...store.sizes import size
from .locks import PAGE_BYTES

log = logging.getLogger(__name__)

_MADV_POPULATE_READ = 22
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
CHUNK_BYTES = 2 << 20
REGIONS = 256
"""Parts of equal size of a memory; for each is counted how often pages of it went back to the system."""


class Pages:
    """A writable mapping whose pages are made, many at once, where they are needed for the first time.

    Args:
        fd: of the memory.
        block: where it is mapped, from after the version page on.
        gone: how often pages of each region went back to the system, uint64 of `REGIONS`; None: `forget` counts that
            here, by chunks.
    """

    def __init__(self, fd: int, block: np.ndarray, gone: np.ndarray | None = None) -> None:
        self._fd = fd
        self._block = block
        count = -(-block.nbytes // CHUNK_BYTES)
        self._region = np.arange(count) * REGIONS // count
        """Of each chunk."""
        self._gone = gone if gone is not None else np.zeros(count, np.uint64)
        self._counter = self._region if gone is not None else np.arange(count)
        """Of each chunk, the index of its count in `_gone`."""
        self._made = np.zeros(count, np.uint64)
        """One more than the count that was seen before a chunk was made here; 0: it was not. No lock guards it, as
        a process may fork in the middle of anything."""

    def part(self, part: Part, helper: Executor | None = None, locked: np.ndarray | None = None) -> np.ndarray:
        """Return a part's bytes, their pages made; `helper` makes half of many, and refers to `locked` meanwhile."""
        start, end = max(part.offset - HEADER_BYTES, 0), part.offset + part.length
        if self.unmade(start, end):
            self._make_both(start, end, helper, locked)
        return self._block[part.offset : part.offset + part.length]

    def unmade(self, start: int, end: int) -> bool:
        """Tell whether pages between two offsets were not made here yet, or may have gone since."""
        chunks = _chunks(start, end)
        return not (self._made[chunks] == self._gone[self._counter[chunks]] + 1).all()

    def make(self, start: int, end: int, locked: np.ndarray | None = None) -> None:
        """Make the pages between two offsets now, and refer to `locked` meanwhile.

        Raises:
            StoreFullError: the system has no memory for them.
        """
        chunks = _chunks(start, end)
        seen = self._gone[self._counter[chunks]]
        first = chunks.start * CHUNK_BYTES
        _populate(self._fd, first, self._block[first : chunks.stop * CHUNK_BYTES])
        self._made[chunks] = seen + 1

    def regions(self, start: int, end: int) -> slice:
        """Return the regions in which lie the chunks between two offsets."""
        touched = self._region[_chunks(start, end)]
        return slice(int(touched[0]), int(touched[-1]) + 1)

    def forget(self, start: int, end: int) -> None:
        """Count that the pages between two offsets, which are whole chunks, went."""
        self._gone[self._counter[_chunks(start, end)]] += np.uint64(1)

    def _make_both(self, start: int, end: int, helper: Executor | None, locked: np.ndarray | None) -> None:
        middle = (start + end) // 2 // CHUNK_BYTES * CHUNK_BYTES
        if helper is None or middle <= start:
            self.make(start, end)
            return
        other = helper.submit(self.make, middle, end, locked)
        try:
            self.make(start, middle)
        finally:
            wait([other])
        other.result()


def _chunks(start: int, end: int) -> slice:
    return slice(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))


def _populate(fd: int, offset: int, block: np.ndarray) -> None:
    """Make a mapping's pages now, without changing what is in those that there are.

    Args:
        fd: of the memory.
        offset: of the block, after the version page.
        block: where it is mapped.
    """
    start = block.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = block.ctypes.data + block.nbytes - start
    code = _advise(start, length)
    if code in _NO_SUCH_CALL:
        _log_old_kernel()
        code = _allocate(fd, PAGE_BYTES + offset, block.nbytes)
    if code:
        raise StoreFullError(f"shared memory: expected {size(length)} more; the system refused: {os.strerror(code)}")


def _advise(start: int, length: int) -> int:
    """Have the kernel make the pages and map them; gives its error, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_READ)
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
    log.info("shared memory: no MADV_POPULATE_READ (Linux before 5.14): pages are mapped one by one, which is slower")
