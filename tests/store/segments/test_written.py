"""Which bytes of a part are written, compared with a count of each byte."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.segments.written import Box, Written

Shape = tuple[int, ...]


@st.composite
def tiled(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """A tensor, and the pieces of a regular cut of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    bounds = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    return shape, list(product(*(list(pairwise(at)) for at in bounds)))


@st.composite
def any_boxes(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """A tensor and pieces of it, most of which do not cover it once: a cut of it with pieces left out, moved, added."""
    shape, boxes = draw(tiled())
    boxes = draw(st.lists(st.sampled_from(boxes), unique=True)) if draw(st.booleans()) else boxes

    def box() -> Box:
        ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
        return tuple((start, stop) for start, stop in ends)

    return shape, boxes + [box() for _ in range(draw(st.integers(0, 3)))]


def written(shape: Shape, boxes: list[Box]) -> tuple[Written, np.ndarray]:
    """Record pieces; count the different ones on each element."""
    record, times = Written(), np.zeros(shape, int)
    for box in boxes:
        if record.add(0, shape, box):
            times[tuple(slice(*ends) for ends in box)] += 1
    return record, times


@given(tiled())
def test_the_pieces_of_a_cut_are_complete_in_any_order_and_twice(case: tuple[Shape, list[Box]]) -> None:
    shape, boxes = case
    record, _ = written(shape, [*reversed(boxes), *boxes])
    assert record.fault([prod(shape)]) is None


@given(any_boxes())
def test_a_part_is_complete_if_each_byte_is_written_once(case: tuple[Shape, list[Box]]) -> None:
    record, times = written(*case)
    assert (record.fault([times.size]) is None) == bool((times == 1).all())


def test_bricks_that_no_cut_goes_through_are_complete() -> None:
    around: list[Box] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1))]
    record, _ = written((3, 3), around)
    assert record.fault([9]) == "tensor 0: 1 to 2 of axis 0, 1 to 2 of axis 1, written by no chunk"
    record.add(0, (3, 3), ((1, 2), (1, 2)))
    assert record.fault([9]) is None


def test_many_chunks_and_many_axes_take_no_long_time() -> None:
    """One look for each piece and axis: a comparison of each pair, or of all corners, would not end here."""
    record, length = Written(), 50_000
    for at in range(length):
        record.add(0, (length,), ((at, at + 1),))
    assert record.fault([length]) is None
    shape = (1,) * 40 + (2,) * 20
    record = Written()
    record.add(0, shape, tuple((0, n) for n in shape))
    assert record.fault([prod(shape)]) is None
