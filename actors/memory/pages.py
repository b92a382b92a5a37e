"""The pages of a shared memory.

Rules
- They are made, many at once, where they are needed for the first time: page by page, when they are written to, it
  takes several times as long. An old kernel makes them without mapping them.
- Memory that the system does not have is a `StoreFullError` here, and not a signal when it is written to.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os

import numpy as np

from ...store.errors import StoreFullError
from ...store.segments.arena import Part
from ...store.segments.blockheader import HEADER_BYTES
from .locks import PAGE_BYTES

log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
CHUNK_BYTES = 2 << 20


class Pages:
    """A writable mapping whose pages are made, many at once, where they are needed for the first time."""

    def __init__(self, fd: int, block: np.ndarray) -> None:
        self._fd = fd
        self._block = block
        self._made = np.zeros(-(-block.nbytes // CHUNK_BYTES), np.bool_)

    def part(self, part: Part) -> np.ndarray:
        """Return a part's bytes."""
        first = max(part.offset - HEADER_BYTES, 0) // CHUNK_BYTES
        last = -(-(part.offset + part.length) // CHUNK_BYTES)
        if not self._made[first:last].all():
            _populate(self._fd, first * CHUNK_BYTES, self._block[first * CHUNK_BYTES : last * CHUNK_BYTES])
            self._made[first:last] = True
        return self._block[part.offset : part.offset + part.length]


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
