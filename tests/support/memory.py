"""How much memory a call takes: as Python's allocations, NumPy's and those of zlib and Zstandard's bytes included.

Arrow's own memory is counted by its pool. The process gets no limit meanwhile: where a library's thread gets no memory,
it crashes.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pyarrow as pa
import pytest
from tensorvine.store.bounds.allowance import allowed
from tensorvine.store.errors import CorruptDataError


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes that a call takes at most at one time."""
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    tracemalloc.start()
    try:
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
