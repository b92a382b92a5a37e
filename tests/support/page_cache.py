"""What of a file is in the page cache, looked at without reading it: a read that may not wait reads ahead as well."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def evict(path: Path) -> None:
    """Drop a file's pages from memory; it is synced already."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached(path: Path) -> int:
    """Return how many bytes of a file are in memory, whoever read them."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-view.nbytes // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes), ctypes.c_void_p(pages.ctypes.data)
        ):
            raise OSError(ctypes.get_errno(), "mincore")
        del view
    return int((pages & 1).sum()) * mmap.PAGESIZE
