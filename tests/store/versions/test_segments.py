"""A shard's segments between memory and disk, held to plain sets over random histories.

Rules
- The plain model knows who names which slot and what lies where, and nothing of counts or cascades: what is needed is
  derived anew after each step.
- The machine plays the shell: blocks are copied and files written first, and only later handed in, when holders may
  have come and gone. Files of different segments are written at once, one of each.
- Every block has the bytes that belong to its slots, so that a wrong offset shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensorvine.store.archive.segmentfile import Slot
from tensorvine.store.errors import CorruptDataError, ModelLostError
from tensorvine.store.holders import FileOf, Holder, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import ABSENT, GONE, Offset, SegmentId, Stored, layout
from tensorvine.store.versions.segments import SegmentTable

HOLDERS = (ModelRef("m", 1), ModelRef("m", 2), ModelRef("n", 1), Save("c", 1))
SIZES = (0, 1, 64, 100)


@dataclass
class Known:
    """What the plain model knows of a segment."""

    sizes: list[int]
    memory: set[int]
    gone: set[int] = field(default_factory=set[int])
    stored: Stored | None = None

    @property
    def disk(self) -> frozenset[int]:
        return self.stored.slots if self.stored is not None else frozenset()


@dataclass
class Copy:
    """A block that was copied, or read from disk, and is not handed in yet."""

    segment: SegmentId
    generation: int
    block: bytearray
    offsets: tuple[Offset, ...]
    length: int


class Segments(RuleBasedStateMachine):
    """Holding, releasing, storing, evicting, loading, compacting and cooling on one shard."""

    @initialize()
    def start(self) -> None:
        self.serial = 0
        self.files = 0
        self.renew()

    def renew(self) -> None:
        self.table = SegmentTable(0)
        self.known: dict[SegmentId, Known] = {}
        self.held: dict[str, dict[SegmentId, set[int]]] = {}
        self.cold: set[str] = set()
        self.copies: list[Copy] = []
        self.writes: dict[SegmentId, Stored] = {}
        self.blocks: list[bytearray] = []
        self.names: set[str] = set()

    # ---- holders ------------------------------------------------------------------------------------------

    @rule(holder=st.sampled_from(HOLDERS), sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4))
    def adopt(self, holder: Holder, sizes: list[int]) -> None:
        self.serial += 1
        segment = (0, self.serial)
        self.known[segment] = Known(sizes, set(range(len(sizes))))
        offsets, length = layout(sizes)
        block = self.block(segment, tuple(offsets), length)
        self.table.adopt(holder, segment, block, sizes)
        self.blocks.append(block)
        self.held.setdefault(holder, {})[segment] = set(range(len(sizes)))
        with pytest.raises(CorruptDataError, match="in use"):
            self.table.adopt(holder, segment, b"", sizes)

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def hold(self, data: st.DataObject, holder: Holder) -> None:
        wanted: dict[SegmentId, set[int]] = {}
        for segment in data.draw(st.lists(self.segments(), unique=True, min_size=1, max_size=2)):
            count = len(self.known[segment].sizes) if segment in self.known else 1
            wanted[segment] = data.draw(st.sets(st.integers(0, count - 1)))
        holds = {segment: sorted(slots) for segment, slots in wanted.items()}
        if not wanted.keys() <= self.known.keys():
            with pytest.raises(ModelLostError, match=str(holder)):
                self.table.hold(holder, holds)
        elif any((slots - self.held.get(holder, {}).get(s, set())) & self.known[s].gone for s, slots in wanted.items()):
            with pytest.raises(CorruptDataError, match=str(holder)):
                self.table.hold(holder, holds)
        else:
            self.table.hold(holder, holds)
            for segment, slots in wanted.items():
                self.held.setdefault(holder, {}).setdefault(segment, set()).update(slots)

    @rule(holder=st.sampled_from(HOLDERS))
    def release(self, holder: Holder) -> None:
        self.table.release(holder)
        self.held.pop(holder, None)
        self.cold.discard(holder)
        self.drop_unneeded()

    @rule(holder=st.sampled_from(HOLDERS))
    def cool(self, holder: Holder) -> None:
        self.table.residents.cool(holder)
        if holder in self.held:
            self.cold.add(holder)
        for segment in self.held.get(holder, {}):
            found = self.table.segment(segment)
            assert found is not None
            if found.stored is not None and self.only_cold(segment) and self.live(segment) <= self.known[segment].disk:
                assert found.handle is None

    # ---- memory -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(data=st.data(), compact=st.booleans())
    def copy(self, data: st.DataObject, compact: bool) -> None:
        """Copy what lives in memory, or bring slots from disk as well."""
        segment = data.draw(st.sampled_from(sorted(self.known)))
        known, found = self.known[segment], self.table.segment(segment)
        assert found is not None
        here = self.live(segment) & known.memory
        if compact:
            if not found.wants_compaction:
                return
            assert segment in self.table.residents.compactable
            offsets, length = found.compacted()
        else:
            there = sorted(self.live(segment) & known.disk)
            offsets, length = found.arranged(
                here | data.draw(st.sets(st.sampled_from(there)) if there else st.just(set()))
            )
        block = self.block(segment, offsets, length)
        self.copies.append(Copy(segment, found.generation, block, offsets, length))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        copy = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        known = self.known.get(copy.segment)
        found = self.table.segment(copy.segment)
        newest = found is not None and found.generation == copy.generation
        taken = self.table.residents.move(copy.segment, copy.generation, copy.block, copy.offsets, copy.length)
        if known is None:
            assert not taken
            return
        has = {slot for slot, offset in enumerate(copy.offsets) if isinstance(offset, int)}
        absent = {slot for slot, offset in enumerate(copy.offsets) if offset == ABSENT}
        assert taken == (newest and self.live(copy.segment) <= has | (absent & known.disk))
        if taken:
            self.blocks.append(copy.block)
            known.memory = has
            known.gone = set(range(len(known.sizes))) - has - absent

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        segment = data.draw(self.segments())
        possible = {s for s in self.known if self.in_memory(s) and self.live(s) <= self.known[s].disk}
        possible = {s for s in possible if self.known[s].stored is not None}
        assert set(self.table.residents.evictable()) == possible
        assert self.table.residents.evict(segment) is (segment in possible)
        if segment in possible:
            self.forget_memory(segment)

    # ---- disk ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def begin_write(self, data: st.DataObject) -> None:
        """Write a file: the old rows that live, and other live slots from memory, some against older tensors."""
        segment = data.draw(st.sampled_from(sorted(self.known)))
        if segment in self.writes:
            return
        known, live = self.known[segment], self.live(segment)
        new = sorted((live & known.memory) - known.disk)
        chosen = data.draw(st.sets(st.sampled_from(new))) if new else set[int]()
        chains = {slot: chain for slot, chain in known.stored.bases.items() if slot in live} if known.stored else {}
        places = sorted(
            (other, slot)
            for other in self.known
            if other < segment
            for slot in self.live(other) & self.known[other].disk
        )
        for slot in chosen:
            base = data.draw(st.none() | st.sampled_from(places)) if places else None
            if base is not None:
                stored = self.known[base[0]].stored
                assert stored is not None
                chains[slot] = (base, *stored.bases.get(base[1], ()))
        self.files += 1
        generation = known.stored.generation + 1 if known.stored else 0
        slots = frozenset((known.disk & live) | chosen)
        self.writes[segment] = Stored(f"file-{self.files}", generation, 10 * self.files, slots, chains)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self.writes)))
        stored, known = self.writes.pop(segment), self.known.get(segment)
        bases = {slot for base, slot in self.file_holds() if base == segment}
        if known is None or not (self.live(segment) - known.memory) | bases <= stored.slots:
            assert not self.table.store(segment, stored)
            assert self.table.dead_files.pop() == stored.name
            return
        nearest = [chain[0] for chain in stored.bases.values()]
        here = {base: other.disk - other.gone for base, other in self.known.items()}
        if any(slot not in here.get(base, ()) for base, slot in nearest):
            with pytest.raises((ModelLostError, CorruptDataError)):
                self.table.store(segment, stored)
            assert self.table.dead_files.pop() == stored.name
            return
        assert self.table.store(segment, stored)
        self.names.add(stored.name)
        known.stored = stored
        known.gone = set(range(len(known.sizes))) - known.memory - stored.slots
        self.drop_unneeded()

    @rule()
    def restart(self) -> None:
        """Start again with the versions that are wholly on disk, and with what their tensors are encoded against."""
        old, held = self.known, self.held
        self.renew()
        chains: dict[Slot, tuple[Slot, ...]] = {}
        named: dict[SegmentId, set[int]] = {}
        for holder, holds in held.items():
            if not isinstance(holder, ModelRef) or not all(
                slots <= old[segment].disk for segment, slots in holds.items()
            ):
                continue
            self.held[holder] = {segment: set(slots) for segment, slots in holds.items() if slots}
            waiting = [(segment, slot) for segment, slots in holds.items() for slot in slots]
            while waiting:
                segment, slot = waiting.pop()
                named.setdefault(segment, set()).add(slot)
                stored = old[segment].stored
                assert stored is not None
                if slot in stored.bases:
                    chains[segment, slot] = stored.bases[slot]
                    waiting.append(stored.bases[slot][0])
        for segment, slots in named.items():
            stored, sizes = old[segment].stored, old[segment].sizes[: max(slots) + 1]
            assert stored is not None
            bases = {slot: chains[segment, slot] for slot in slots if (segment, slot) in chains}
            stored = Stored(stored.name, stored.generation, stored.nbytes, frozenset(slots), bases)
            self.known[segment] = Known(sizes, set(), set(range(len(sizes))) - slots, stored)
            self.names.add(stored.name)
            self.table.recover(segment, sizes, stored)
        for holder, holds in self.held.items():
            self.table.hold(holder, {segment: sorted(slots) for segment, slots in holds.items()})
        self.held = {holder: holds for holder, holds in self.held.items() if holds}
        for (segment, _), chain in chains.items():
            self.table.hold(FileOf(segment[1]), {chain[0][0]: [chain[0][1]]})
        assert self.table.drop_unheld() == set()

    # ---- what holds after each step -------------------------------------------------------------------------

    @invariant()
    def memory_is_left_only_by_what_is_on_disk(self) -> None:
        for segment, known in self.known.items():
            found = self.table.segment(segment)
            assert found is not None
            here = {slot for slot, offset in enumerate(found.offsets) if isinstance(offset, int)}
            if here != known.memory or (found.handle is None and self.in_memory(segment)):
                assert found.handle is None
                assert here == set()
                assert self.only_cold(segment)
                assert self.live(segment) <= known.disk
                self.forget_memory(segment)

    @invariant()
    def what_is_needed_is_here_and_nothing_else(self) -> None:
        assert set(self.table._segments) == set(self.known)
        for segment, known in self.known.items():
            found, live = self.table.segment(segment), self.live(segment)
            assert found is not None
            assert set(found.live_slots) == live
            assert live <= known.memory | known.disk
            assert {slot for base, slot in self.file_holds() if base == segment} <= known.disk
            assert {slot for slot, offset in enumerate(found.offsets) if offset == GONE} == known.gone
            assert found.stored == known.stored
            for slot in known.memory:
                offset = found.offsets[slot]
                assert isinstance(offset, int)
                assert found.handle[offset : offset + known.sizes[slot]] == self.content(segment, slot)
        absent = {segment: sorted(self.live(segment) - known.memory) for segment, known in self.known.items()}
        everything = {segment: sorted(self.live(segment)) for segment in self.known}
        assert self.table.absent(everything) == {segment: slots for segment, slots in absent.items() if slots}

    @invariant()
    def blocks_and_files_die_exactly_when_nothing_needs_them(self) -> None:
        kept = [found.handle for found in self.table._segments.values() if found.handle is not None]
        for block in self.table.residents.freed:
            self.blocks = [other for other in self.blocks if other is not block]
        assert {id(block) for block in self.blocks} == {id(block) for block in kept}
        assert len(self.blocks) == len(kept)
        self.table.residents.freed = []
        assert len(set(self.table.dead_files)) == len(self.table.dead_files)
        assert set(self.table.dead_files) <= self.names
        self.names -= set(self.table.dead_files)
        assert self.names == {known.stored.name for known in self.known.values() if known.stored is not None}
        self.table.dead_files = []
        assert self.table.outbox == []

    @invariant()
    def totals_are_those_of_the_segments(self) -> None:
        self.table.check()
        assert self.table.totals.tensors == sum(len(self.live(segment)) for segment in self.known)
        assert self.table.totals.live_bytes == sum(
            known.sizes[slot] for segment, known in self.known.items() for slot in self.live(segment) & known.memory
        )
        assert self.table.totals.file_bytes == sum(known.stored.nbytes for known in self.known.values() if known.stored)
        assert self.table.residents.compactable <= set(self.known)
        assert self.table.rewritable <= {segment for segment, known in self.known.items() if known.stored is not None}
        for holder, holds in self.held.items():
            if isinstance(holder, ModelRef):
                assert self.table.held(holder) == {s: sorted(slots) for s, slots in holds.items()}
        assert set(self.table.version_holders()) == {holder for holder in self.held if isinstance(holder, ModelRef)}

    # ---- the plain model ------------------------------------------------------------------------------------

    def segments(self) -> st.SearchStrategy[SegmentId]:
        return st.sampled_from([(0, serial) for serial in range(max(self.serial, 1) + 1)])

    def content(self, segment: SegmentId, slot: int) -> bytes:
        return bytes([(segment[1] * 7 + slot) % 251]) * self.known[segment].sizes[slot]

    def block(self, segment: SegmentId, offsets: tuple[int, ...], length: int) -> bytearray:
        block = bytearray(length)
        for slot, offset in enumerate(offsets):
            if isinstance(offset, int):
                content = self.content(segment, slot)
                block[offset : offset + len(content)] = content
        return block

    def live(self, segment: SegmentId) -> set[int]:
        slots = {slot for holds in self.held.values() for slot in holds.get(segment, ())}
        return slots | {slot for base, slot in self.file_holds() if base == segment}

    def file_holds(self) -> set[Slot]:
        stored = [known.stored for known in self.known.values() if known.stored is not None]
        return {chain[0] for file in stored for chain in file.bases.values()}

    def drop_unneeded(self) -> None:
        while True:
            needed = {segment for holds in self.held.values() for segment in holds}
            needed |= {segment for segment, _ in self.file_holds()}
            if needed == set(self.known):
                return
            self.known = {segment: known for segment, known in self.known.items() if segment in needed}

    def only_cold(self, segment: SegmentId) -> bool:
        return all(holder in self.cold for holder, holds in self.held.items() if segment in holds)

    def in_memory(self, segment: SegmentId) -> bool:
        found = self.table.segment(segment)
        return found is not None and any(block is found.handle for block in self.blocks)

    def forget_memory(self, segment: SegmentId) -> None:
        known = self.known[segment]
        known.memory = set()
        known.gone = set(range(len(known.sizes))) - self.live(segment)


TestSegments = Segments.TestCase
TestSegments.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class TestHistories:
    """Short histories that random ones meet too seldom."""

    def table(self, segments: int, sizes: list[int] | None = None) -> SegmentTable:
        table = SegmentTable(0)
        for serial in range(segments):
            table.adopt(ModelRef("m", serial + 1), (0, serial), bytearray(), sizes or [64, 64, 64, 64])
        return table

    def stored(self, serial: int, slots: set[int], generation: int = 0, **bases: tuple[int, int]) -> Stored:
        """Describe a file; `_3=(1, 2)`: slot 3 is encoded against slot 2 of segment 1."""
        chains = {int(slot[1:]): (((0, base), at),) for slot, (base, at) in bases.items()}
        return Stored(f"{serial}.{generation}", generation, 100, frozenset(slots), chains)

    def test_a_hold_that_is_refused_changes_nothing(self) -> None:
        table = self.table(2)
        for wrong in ({(0, 0): [1], (0, 1): [4]}, {(0, 0): [1], (0, 2): [0]}):
            with pytest.raises((CorruptDataError, ModelLostError)):
                table.hold(ModelRef("n", 1), wrong)
            assert table.version_holders() == [ModelRef("m", 1), ModelRef("m", 2)]
            table.check()
        table.release(ModelRef("m", 1))
        assert table.segment((0, 0)) is None

    def test_a_file_whose_base_went_is_dead_and_holds_nothing(self) -> None:
        table = self.table(3)
        for serial in (0, 1):
            table.store((0, serial), self.stored(serial, {0}))
        table.release(ModelRef("m", 2))
        with pytest.raises(ModelLostError):
            table.store((0, 2), self.stored(2, {0, 1}, _0=(0, 0), _1=(1, 0)))
        assert table.dead_files == ["1.0", "2.0"]
        table.release(ModelRef("m", 1))
        assert table.segment((0, 0)) is None

    @pytest.mark.parametrize("first", ["base", "dependent"])
    def test_a_base_stays_on_disk_whatever_is_written_at_once(self, first: str) -> None:
        table = self.table(2)
        table.store((0, 0), self.stored(0, {0, 1, 2, 3}))
        table.hold(ModelRef("n", 1), {(0, 0): [3]})
        table.release(ModelRef("m", 1))
        rewritten, dependent = self.stored(0, {3}, 1), self.stored(1, {0}, _0=(0, 0))
        if first == "base":
            assert table.store((0, 0), rewritten)
            with pytest.raises(ModelLostError, match=r"expected slots \[0\] of \(0, 0\) to be on disk"):
                table.store((0, 1), dependent)
            assert table.dead_files == ["0.0", "1.0"]
        else:
            assert table.store((0, 1), dependent)
            assert not table.store((0, 0), rewritten)
            assert table.dead_files == ["0.1"]
        table.check()

    def test_a_rewritten_file_lets_go_of_the_bases_that_it_does_not_need(self) -> None:
        table = self.table(3)
        for serial in (0, 1):
            table.store((0, serial), self.stored(serial, {0, 1, 2, 3}))
        table.store((0, 2), self.stored(2, {0, 1}, _0=(0, 0), _1=(1, 0)))
        for holder in (ModelRef("m", 1), ModelRef("m", 2)):
            table.release(holder)
        assert table.dead_files == []
        assert table.store((0, 2), self.stored(2, {0, 1}, 1, _1=(1, 0)))
        assert sorted(table.dead_files) == ["0.0", "2.0"]
        assert table.store((0, 2), self.stored(2, {0, 1}, 2))
        assert sorted(table.dead_files) == ["0.0", "1.0", "2.0", "2.1"]
        table.check()

    def test_bases_on_other_shards_are_let_go_of_by_message(self) -> None:
        chains = {0: (((1, 7), 0), ((2, 8), 0)), 1: (((2, 9), 3),)}
        table = SegmentTable(0)
        table.recover((0, 10), [4, 4], Stored("a.0", 0, 1, frozenset({0, 1}), chains))
        table.hold(ModelRef("m", 1), {(0, 10): [0, 1]})
        table.store((0, 10), Stored("a.1", 1, 1, frozenset({0, 1}), {0: chains[0]}))
        assert table.outbox == [(2, FileOf(10))]
        table.release(ModelRef("m", 1))
        assert table.outbox[1:] == [(1, FileOf(10))]
        assert table.dead_files == ["a.0", "a.1"]

    def test_a_copy_without_a_slot_that_is_on_disk_and_was_held_meanwhile_is_not_taken(self) -> None:
        table = self.table(1)
        table.store((0, 0), self.stored(0, {0, 1, 2, 3}))
        table.hold(ModelRef("n", 1), {(0, 0): [0]})
        table.release(ModelRef("m", 1))
        segment = table.segment((0, 0))
        assert segment is not None
        offsets, length = segment.compacted()
        table.hold(ModelRef("n", 2), {(0, 0): [3]})
        assert not table.residents.move((0, 0), segment.generation, bytearray(length), offsets, length)
        assert isinstance(segment.offsets[3], int)

    def test_a_slot_that_no_manifest_named_is_gone_after_a_start(self) -> None:
        table = SegmentTable(0)
        table.recover((0, 1), [4, 0, 4], Stored("1.0", 0, 1, frozenset({0, 2})))
        with pytest.raises(CorruptDataError, match="n@1 names slot 1"):
            table.hold(ModelRef("n", 1), {(0, 1): [1]})

    def test_a_long_chain_of_files_goes_at_once(self) -> None:
        table = self.table(3000, [1])
        for serial in range(3000):
            table.store((0, serial), self.stored(serial, {0}, **({"_0": (serial - 1, 0)} if serial else {})))
        for serial in range(2999):
            table.release(ModelRef("m", serial + 1))
        assert table.dead_files == []
        table.release(ModelRef("m", 3000))
        assert len(table.dead_files) == 3000
        assert table.version_holders() == []
        table.check()

    def test_a_start_drops_what_only_dropped_files_held(self) -> None:
        table = SegmentTable(0)
        for serial in range(4):
            table.recover((0, serial), [1], self.stored(serial, {0}, **({"_0": (serial - 1, 0)} if serial else {})))
            if serial:
                table.hold(FileOf(serial), {(0, serial - 1): [0]})
        table.hold(ModelRef("m", 1), {(0, 1): [0]})
        assert table.drop_unheld() == {(0, 2), (0, 3)}
        assert sorted(table.dead_files) == ["2.0", "3.0"]

    def test_the_least_recently_used_segment_leaves_first(self) -> None:
        table = self.table(3)
        for serial in range(3):
            table.store((0, serial), self.stored(serial, {0, 1, 2, 3}))
        table.blocks([(0, 0), (0, 1)])
        assert list(table.residents.evictable()) == [(0, 2), (0, 0), (0, 1)]
        for segment in table.residents.evictable():
            assert table.residents.evict(segment)
            assert not table.residents.evict(segment)
        assert list(table.residents.evictable()) == []
