"""Segments: layout, cutting, live slots, compacting, files."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.segments.segment import (
    ALIGNMENT,
    COMPACT_WHEN_DEAD,
    GONE,
    REWRITE_WHEN_DEAD,
    SEGMENT_BYTES,
    File,
    Segment,
    layout,
    pack,
    padded,
    split,
)

sizes = st.lists(st.integers(0, 300), max_size=8)
SLOTS = st.sets(st.integers(0, 5))


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


class TestLive:
    @given(
        st.lists(st.integers(0, 300), min_size=1, max_size=6),
        st.lists(st.lists(st.integers(0, 7))),
    )
    def test_the_live_slots_are_those_of_a_plain_set(self, sizes: list[int], freed: list[list[int]]) -> None:
        """An order may come twice, and name slots that were never here."""
        segment = Segment((0, 1), b"", tuple(sizes))
        plain = set(range(len(sizes)))
        for slots in freed:
            segment.free(slots)
            plain -= set(slots)
            assert segment.live_slots == sorted(plain)
            assert segment.resident_bytes(segment.live) == sum(sizes[slot] for slot in plain)
            assert segment.has(range(len(sizes)))
        assert not segment.has([len(sizes)])
        assert not segment.has([-1])


class TestCompaction:
    @given(st.lists(st.integers(0, 300), min_size=1, max_size=6), SLOTS)
    def test_a_compacted_block_holds_the_live_slots_and_nothing_else(self, sizes: list[int], kept: set[int]) -> None:
        kept = {slot for slot in kept if slot < len(sizes)}
        segment = Segment((0, 1), "old", tuple(sizes))
        gone = set(range(len(sizes))) - kept
        segment.free(gone)
        offsets, length = segment.compacted()
        new, expected = layout([sizes[slot] for slot in sorted(kept)])
        assert [offset for offset in offsets if offset != GONE] == new
        assert length == expected
        segment.move("new", offsets, length)
        assert (segment.handle, segment.allocated, segment.generation) == ("new", length, 1)
        assert not segment.wants_compaction
        assert segment.has(kept)
        assert not any(segment.has([slot]) for slot in gone)

    def test_compaction_pays_once_more_than_a_quarter_is_dead(self) -> None:
        segment = Segment((0, 1), b"", (64,) * 8)
        segment.free([6, 7])
        assert COMPACT_WHEN_DEAD == (8 - 6) / 8
        assert not segment.wants_compaction
        segment.free([5])
        assert segment.wants_compaction

    def test_a_segment_without_live_slots_is_freed_not_compacted(self) -> None:
        segment = Segment((0, 1), b"", (64,))
        segment.free([0])
        assert not segment.wants_compaction

    def test_padding_is_not_dead(self) -> None:
        assert not Segment((0, 1), b"", (1,) * 8).wants_compaction


class TestFiles:
    @given(
        st.lists(st.integers(0, 300), min_size=1, max_size=6), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))
    )
    def test_a_slot_is_where_a_file_or_a_block_has_it(self, sizes: list[int], freed: set[int], read: set[int]) -> None:
        """A segment that was written, lost slots, left the memory, and was read again in part."""
        every = set(range(len(sizes)))
        segment = Segment((0, 1), "block", tuple(sizes), keeper=True)
        segment.file_is(File("name", 0, 9, frozenset(every)))
        assert segment.is_safe
        segment.free(freed)
        live = every - freed
        segment.move(None, *segment.arranged(()))
        assert segment.allocated == 0
        assert segment.absent(every) == sorted(live)
        offsets, length = segment.arranged(live & read)
        segment.move("other", offsets, length)
        assert segment.absent(live) == sorted(live - read)
        assert all(isinstance(segment.offsets[slot], int) for slot in live & read)
        dead = sum(sizes[slot] for slot in every & freed)
        assert segment.wants_rewriting == (bool(live) and dead > REWRITE_WHEN_DEAD * sum(sizes))
        segment.keeper = False
        assert not segment.wants_rewriting

    def test_what_a_new_file_lacks_and_no_block_has_is_gone(self) -> None:
        segment = Segment.on_disk((0, 1), (4, 4, 4), File("old", 0, 9, frozenset({0, 2})), generation=5)
        assert (segment.live, segment.has([1])) == ({0, 2}, False)
        segment.file_is(File("new", 1, 9, frozenset({2})))
        assert [segment.has([slot]) for slot in range(3)] == [False, False, True]
        assert segment.file is not None
        assert segment.file.name == "new"
