"""How much memory a call takes: as Python's allocations, NumPy's and those of zlib and Zstandard's bytes included.

Arrow's own memory is counted by its pool; what neither sees is held by a limit of the process.
"""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from tensorvine.store.bounds.allowance import allowed
from tensorvine.store.errors import CorruptDataError

ROOM = 1 << 30
"""Bytes of address space that a call may take beyond what the process has."""


@contextmanager
def limited(room: int = ROOM) -> Iterator[None]:
    """Have the system refuse memory beyond what the process has and `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes that a call takes at most at one time."""
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    tracemalloc.start()
    try:
        with limited():
            call()
        return tracemalloc.get_traced_memory()[1] + max(0, pool.max_memory() - before)
    finally:
        tracemalloc.stop()


def check_refused(call: Callable[[], object], given: int, match: str) -> None:
    """Have a call refuse what it is given, without taking more memory than it may for so many bytes."""

    def refused() -> None:
        with pytest.raises(CorruptDataError, match=match):
            call()

    assert peak_of(refused) <= allowed(given)
