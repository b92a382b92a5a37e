"""Segments: layout, cutting, counting and compacting."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.errors import CorruptDataError
from tensorvine.store.holders import Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import (
    ALIGNMENT,
    COMPACT_WHEN_DEAD,
    GONE,
    SEGMENT_BYTES,
    Segment,
    layout,
    pack,
    padded,
    split,
)

sizes = st.lists(st.integers(0, 300), max_size=8)
HOLDERS = (ModelRef("m", 1), ModelRef("m", 2), Save("c", 1))


class TestPack:
    @given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 150)), max_size=6), st.randoms())
    def test_each_slot_lies_where_the_layout_has_it_and_nothing_else_is_touched(
        self, places: list[tuple[int, int]], random: Random
    ) -> None:
        source = np.frombuffer(random.randbytes(350), np.uint8)
        starts, length = layout([nbytes for _, nbytes in places])
        expected = np.full(length, 255, np.uint8)
        for (at, nbytes), start in zip(places, starts, strict=True):
            expected[start : start + nbytes] = source[at : at + nbytes]
        block = np.full(length, 255, np.uint8)
        pack(source, places, block)
        np.testing.assert_array_equal(block, expected)


class TestLayout:
    @given(sizes)
    def test_slots_are_aligned_ordered_and_apart(self, sizes: list[int]) -> None:
        offsets, length = layout(sizes)
        assert len(offsets) == len(sizes)
        for offset, size, following in zip(offsets, sizes, [*offsets, length][1:], strict=True):
            assert offset % ALIGNMENT == 0
            assert offset + size <= following < offset + size + ALIGNMENT
        assert length % ALIGNMENT == 0

    @given(st.integers(0, 1 << 50))
    def test_padding_is_the_least_multiple(self, nbytes: int) -> None:
        assert padded(nbytes) % ALIGNMENT == 0
        assert 0 <= padded(nbytes) - nbytes < ALIGNMENT


class TestSplit:
    @given(sizes, st.integers(1, 600))
    def test_runs_cover_all_tensors_in_order_and_only_a_larger_tensor_makes_a_larger_run(
        self, sizes: list[int], limit: int
    ) -> None:
        runs = split(sizes, limit)
        assert [position for run in runs for position in run] == list(range(len(sizes)))
        for run in runs:
            assert len(run)
            length = layout([sizes[i] for i in run])[1]
            assert length <= limit or sum(sizes[i] > 0 for i in run) == 1

    @given(sizes, st.integers(1, 600))
    def test_no_two_neighbours_would_fit_into_one(self, sizes: list[int], limit: int) -> None:
        runs = split(sizes, limit)
        for run, following in pairwise(runs):
            assert layout([sizes[i] for i in [*run, following[0]]])[1] > limit

    def test_nothing_makes_no_segment(self) -> None:
        assert split([]) == []

    def test_a_segment_is_about_32_mib(self) -> None:
        assert split([SEGMENT_BYTES // 2] * 4) == [range(2), range(2, 4)]


class TestCounts:
    @given(
        st.lists(st.integers(0, 300), min_size=1, max_size=6),
        st.lists(st.tuples(st.sampled_from(HOLDERS), st.none() | st.sets(st.integers(0, 5)))),
    )
    def test_counts_are_those_of_a_plain_set_per_holder(
        self, sizes: list[int], steps: list[tuple[str, set[int] | None]]
    ) -> None:
        segment = Segment((0, 1), b"", tuple(sizes))
        plain: dict[str, set[int]] = {}
        for holder, slots in steps:
            if slots is None:
                segment.release(holder)
                plain.pop(holder, None)
            elif max(slots, default=0) < len(sizes):
                segment.hold(holder, slots)
                plain[holder] = plain.get(holder, set()) | slots
            else:
                with pytest.raises(CorruptDataError, match=str(holder)):
                    segment.hold(holder, slots)
            live = set[int]().union(*plain.values())
            segment.check()
            assert {holder: set(slots) for holder, slots in segment.holders.items()} == plain
            assert segment.live_slots == sorted(live)
            assert segment.resident_bytes(live) == sum(sizes[slot] for slot in live)

    def test_a_wrong_count_is_found(self) -> None:
        segment = Segment((0, 1), b"", (4, 4))
        segment.hold(ModelRef("m", 1), [0])
        segment.counts[1] += 1
        with pytest.raises(CorruptDataError, match=r"expected counts \[1, 0\]; found \[1, 1\]"):
            segment.check()

    @pytest.mark.parametrize("slot", [-1, 2])
    def test_a_refused_hold_changes_nothing(self, slot: int) -> None:
        segment = Segment((0, 1), b"", (4, 4))
        with pytest.raises(CorruptDataError, match=f"m@1 names slot {slot}"):
            segment.hold(ModelRef("m", 1), [0, slot])
        assert segment.holders == {}
        assert segment.counts == [0, 0]


class TestCompaction:
    @given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.sets(st.integers(0, 5)))
    def test_a_compacted_block_holds_the_live_slots_and_nothing_else(self, sizes: list[int], kept: set[int]) -> None:
        kept = {slot for slot in kept if slot < len(sizes)}
        segment = Segment((0, 1), "old", tuple(sizes))
        segment.hold(ModelRef("m", 1), kept)
        offsets, length = segment.compacted()
        new, expected = layout([sizes[slot] for slot in sorted(kept)])
        assert [offset for offset in offsets if offset != GONE] == new
        assert length == expected
        segment.move("new", offsets, length)
        assert (segment.handle, segment.allocated, segment.generation) == ("new", length, 1)
        assert not segment.wants_compaction
        segment.hold(ModelRef("m", 2), kept)
        for slot in set(range(len(sizes))) - kept:
            with pytest.raises(CorruptDataError, match=f"expected a live slot; m@3 names slot {slot}"):
                segment.hold(ModelRef("m", 3), [slot])
        segment.check()

    def test_compaction_pays_once_more_than_a_quarter_is_dead(self) -> None:
        segment = Segment((0, 1), b"", (64,) * 8)
        segment.hold(ModelRef("m", 1), range(6))
        assert COMPACT_WHEN_DEAD == (8 - 6) / 8
        assert not segment.wants_compaction
        segment.hold(ModelRef("m", 2), range(5))
        segment.release(ModelRef("m", 1))
        assert segment.wants_compaction

    def test_a_segment_that_nobody_holds_is_freed_not_compacted(self) -> None:
        segment = Segment((0, 1), b"", (64,))
        segment.hold(ModelRef("m", 1), [0])
        segment.release(ModelRef("m", 1))
        assert not segment.wants_compaction

    def test_padding_is_not_dead(self) -> None:
        segment = Segment((0, 1), b"", (1,) * 8)
        segment.hold(ModelRef("m", 1), range(8))
        assert not segment.wants_compaction
