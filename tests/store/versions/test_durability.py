"""What a restart would find on disk of what a shard holds, and what comes back from a replica's memory."""

from __future__ import annotations

from itertools import combinations

import pytest
from tensorvine.store.holders import Drain, Reason, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import ABSENT, GONE, Stored, layout
from tensorvine.store.versions.segments import SegmentTable


class TestTakingBack:
    """What a replica kept comes back into the table of segments."""

    @pytest.mark.parametrize("slots", [c for n in range(4) for c in combinations(range(3), n)])
    @pytest.mark.parametrize("on_disk", [c for n in range(4) for c in combinations(range(3), n)])
    def test_beside_what_the_disk_has(self, slots: tuple[int, ...], on_disk: tuple[int, ...]) -> None:
        sizes = (100, 0, 7)
        table = SegmentTable(0)
        if on_disk:
            known = [sizes[slot] if slot in on_disk else 0 for slot in range(max(on_disk) + 1)]
            table.recover((0, 9), known, Stored("f", 0, 500, frozenset(on_disk)))
            table.hold(ModelRef("m", 1), {(0, 9): on_disk})
        table.take_back((0, 9), "block", sizes, slots)
        segment = table.segment((0, 9))
        assert segment is not None
        starts = dict(zip(slots, layout([sizes[slot] for slot in slots])[0], strict=True))
        expected = [starts.get(s, ABSENT if s in on_disk else GONE) for s in range(3)]
        assert list(segment.offsets) == expected
        table.hold(ModelRef("m", 2), {(0, 9): sorted({*slots, *on_disk})})
        table.check()
        table.release(Reason.RESTORED)
        table.check()
        assert set(segment.live_slots) == {*slots, *on_disk}
        table.release(ModelRef("m", 1))
        table.release(ModelRef("m", 2))
        assert table.segment((0, 9)) is None
        assert table.residents.freed == ["block"]
        table.check()

    def test_what_nobody_names_goes_when_all_homes_have_answered(self) -> None:
        table = SegmentTable(0)
        table.take_back((0, 1), "one", (4,), (0,))
        table.take_back((0, 2), "two", (4,), (0,))
        table.hold(ModelRef("m", 1), {(0, 1): [0]})
        assert table.durability.unsaved() == {(0, 1), (0, 2)}
        table.release(Reason.RESTORED)
        assert (table.durability.unsaved(), table.residents.freed) == ({(0, 1)}, ["two"])

    def test_only_what_versions_hold_and_no_file_has_is_to_be_replicated(self) -> None:
        table = SegmentTable(0)
        table.adopt(Save("client", 1), (0, 1), "staged", [4])
        table.adopt(ModelRef("m", 1), (0, 2), "held", [4])
        table.adopt(ModelRef("m", 2), (0, 3), "on disk", [4])
        table.store((0, 3), Stored("f", 0, 500, frozenset({0})))
        assert table.durability.unsaved() == {(0, 2), (0, 3)}
        table.durability.written(ModelRef("m", 2))
        assert table.durability.unsaved() == {(0, 2)}

    def test_what_waits_for_the_disk_names_what_must_not_be_found_by_another_manifest_only(self) -> None:
        table = SegmentTable(0)
        table.adopt(ModelRef("m", 1), (0, 1), "block", [4, 4, 4])
        table.store((0, 1), Stored("f", 0, 500, frozenset({0, 1, 2})))
        table.durability.written(ModelRef("m", 1))
        assert table.durability.awaited([(0, 1), (0, 2)]) == {}
        table.hold(ModelRef("n", 1), {(0, 1): [1]})
        table.hold(ModelRef("n", 2), {(0, 1): [2]})
        assert table.durability.awaited([(0, 1), (0, 2)]) == {(0, 1): [1, 2]}
        table.durability.written(ModelRef("n", 1))
        assert table.durability.awaited([(0, 1)]) == {(0, 1): [2]}

    def test_a_file_is_worth_as_much_as_the_manifests_that_name_what_is_needed_of_it(self) -> None:
        table, segment = SegmentTable(0), (0, 1)
        table.adopt(ModelRef("m", 1), segment, "block", [4, 4])
        table.store(segment, Stored("f", 0, 500, frozenset({0, 1})))
        assert not table.durability.rests(segment)
        table.durability.written(ModelRef("m", 1))
        table.hold(ModelRef("n", 1), {segment: [0]})  # waits for the disk, but a restart finds what it needs by m@1
        assert table.durability.rests(segment)
        assert table.durability.uncovered() == set()
        table.durability.leaves(ModelRef("m", 1))
        assert not table.durability.rests(segment)
        table.release(ModelRef("m", 1))
        assert table.durability.uncovered() == {segment}
        table.durability.written(ModelRef("n", 1))
        assert table.durability.rests(segment)
        table.hold(ModelRef("n", 1), {segment: [0]})  # told again
        assert table.durability.rests(segment)
        table.release(ModelRef("n", 1))
        assert table.durability.rests(segment)

    def test_what_moves_to_another_shard_is_known_there_to_be_on_disk_or_not(self) -> None:
        table, successor, segment = SegmentTable(0), SegmentTable(1), (0, 1)
        successor.where = lambda _: 1
        table.adopt(ModelRef("m", 1), segment, "block", [4, 4])
        table.store(segment, Stored("f", 0, 500, frozenset({0, 1})))
        table.hold(ModelRef("n", 1), {segment: [0]})
        table.durability.written(ModelRef("n", 1))
        successor.inherit(table.moving(segment), Drain(0, 1))
        successor.release(Drain(0, 1))
        assert not successor.durability.rests(segment)
        successor.durability.written(ModelRef("m", 1))
        assert successor.durability.rests(segment)
