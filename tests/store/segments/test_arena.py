"""The arena's bookkeeping, held to a map that says of every byte whose it is."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensorvine.store.segments.arena import KEPT, Arena
from tensorvine.store.segments.segment import ALIGNMENT

UNIT = ALIGNMENT
SAVERS = ("a/1", "a/2", "b/1")


class ByteMap(RuleBasedStateMachine):
    """Grants, hand-overs and frees, on an arena of a few units and perhaps a rest that is too small for one."""

    @initialize(capacity=st.integers(0, 20 * UNIT))
    def start(self, capacity: int) -> None:
        self.arena = Arena(capacity)
        self.bytes: list[str | None] = [None] * capacity
        self.parts: dict[int, tuple[int, str]] = {}

    def first_fit(self, length: int) -> int | None:
        starts = range(0, len(self.bytes) - length + 1, UNIT)
        return next((at for at in starts if not any(who is not None for who in self.bytes[at : at + length])), None)

    def fill(self, offset: int, length: int, owner: str | None) -> None:
        self.bytes[offset : offset + length] = [owner] * length

    @rule(owner=st.sampled_from(SAVERS), sizes=st.lists(st.integers(0, 6 * UNIT), max_size=4), least=st.integers(1, 4))
    def grant(self, owner: str, sizes: list[int], least: int) -> None:
        before = list(self.bytes)
        expected: dict[int, tuple[int, str]] = {}
        for size in sizes:
            length = max(-(-size // UNIT), 1) * UNIT
            offset = self.first_fit(length)
            if offset is None:
                break
            self.fill(offset, length, owner)
            expected[offset] = (length, owner)
        if len(expected) < least:
            self.bytes, expected = before, {}
        self.parts |= expected
        assert self.arena.grant(owner, sizes, least) == list(expected)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.parts)))
        length, _ = self.parts[offset]
        self.arena.give(offset, KEPT)
        self.parts[offset] = (length, KEPT)
        self.fill(offset, length, KEPT)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Free a part, or an offset at which none starts."""
        offset = data.draw(st.integers(-1, 20).map(lambda unit: unit * UNIT))
        self.arena.free(offset)
        length, _ = self.parts.pop(offset, (0, ""))
        if length:
            self.fill(offset, length, None)

    @rule(owner=st.sampled_from(SAVERS))
    def free_all_of_an_owner(self, owner: str) -> None:
        parts = self.arena.parts_of(owner)
        assert {part.offset: part.length for part in parts} == {
            offset: length for offset, (length, who) in self.parts.items() if who == owner
        }
        for part in parts:
            self.arena.free(part.offset)
            del self.parts[part.offset]
            self.fill(part.offset, part.length, None)

    @invariant()
    def every_byte_has_the_owner_of_the_map(self) -> None:
        owners = {who for _, who in self.parts.values()}
        assert self.arena.owners() == owners - {KEPT}
        for offset in range(0, len(self.bytes) + 1, UNIT):
            assert self.arena.owner_of(offset) == self.parts.get(offset, (0, None))[1]
        assert self.arena.used(kept=True) == self.bytes.count(KEPT)
        assert self.arena.used(kept=False) == len(self.bytes) - self.bytes.count(KEPT) - self.bytes.count(None)

    def teardown(self) -> None:
        """Once everything is free, it is one part: as much as there is fits in one piece."""
        if not hasattr(self, "arena"):
            return
        for offset in list(self.parts):
            self.arena.free(offset)
        assert self.arena.used(kept=True) == self.arena.used(kept=False) == 0
        whole = len(self.bytes) // UNIT * UNIT
        assert self.arena.grant("all", [whole]) == ([0] if whole else [])


TestByteMap = ByteMap.TestCase
TestByteMap.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_two_savers_that_want_more_than_fits_both_get_a_part() -> None:
    arena = Arena(4 * UNIT)
    assert arena.grant("a/1", [UNIT] * 3) == [0, UNIT, 2 * UNIT]
    assert arena.grant("b/1", [UNIT] * 3) == [3 * UNIT]
    for part in arena.parts_of("a/1"):
        arena.free(part.offset)
    assert arena.grant("b/1", [UNIT] * 2) == [0, UNIT]


def test_the_lowest_room_is_used_again_first() -> None:
    arena = Arena(4 * UNIT)
    arena.grant("a/1", [UNIT] * 3)
    arena.free(UNIT)
    arena.free(0)
    assert arena.grant("b/1", [UNIT, 2 * UNIT, UNIT]) == [0]
    assert arena.grant("b/1", [UNIT, UNIT]) == [UNIT, 3 * UNIT]


def test_an_empty_tensor_takes_a_place_of_its_own() -> None:
    arena = Arena(2 * UNIT)
    assert arena.grant("a/1", [0, 0, 0]) == [0, UNIT]


@pytest.mark.parametrize("capacity", [0, 1, UNIT - 1])
def test_an_arena_too_small_for_one_tensor_grants_nothing(capacity: int) -> None:
    assert Arena(capacity).grant("a/1", [1]) == []
