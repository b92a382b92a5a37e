"""Buffers of a reader: memory is used again once no array of it is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.actors.memory.buffers import PAGE_BYTES, Buffers


def test_memory_is_used_again_when_no_array_is_left() -> None:
    buffers = Buffers()
    first = buffers.block(buffers.take(PAGE_BYTES + 1))
    part = first[5:9]
    second = buffers.block(buffers.take(PAGE_BYTES + 1))
    place = first.ctypes.data
    assert second.ctypes.data != place
    del first
    third = buffers.block(buffers.take(PAGE_BYTES + 1))
    assert third.ctypes.data != place
    del part
    assert buffers.block(buffers.take(PAGE_BYTES + 2)).ctypes.data == place


def test_no_more_is_kept_than_was_in_use_at_once() -> None:
    buffers = Buffers()
    for pages in range(1, 20):
        buffers.block(buffers.take(pages * PAGE_BYTES))
    assert buffers._free_bytes <= 19 * PAGE_BYTES
    assert sum(map(len, buffers._free)) == buffers._free_bytes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * PAGE_BYTES)), max_size=20))
def test_arrays_that_live_keep_their_bytes(steps: Sequence[tuple[int, int]]) -> None:
    buffers = Buffers()
    alive: dict[int, tuple[np.ndarray, int]] = {}
    for number, (key, nbytes) in enumerate(steps):
        memory = buffers.take(nbytes)
        memory[:1] = memory[-1:] = bytes([number])[:nbytes]
        alive[key] = (buffers.block(memory), number)
        assert alive[key][0].nbytes == nbytes
        assert all(b.nbytes == 0 or b[0] == b[-1] == n for b, n in alive.values())
