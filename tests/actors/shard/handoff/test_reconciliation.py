"""What a shard that started again does with what it brought back, until the other homes have said what they name."""

from __future__ import annotations

from typing import Any

import pytest
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.handoff.reconciliation import Reconciliation
from tensorvine.planner.topology import Topology
from tensorvine.store.holders import Reason
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId, Stored
from tensorvine.store.shard import ShardState

from tests.support.contexts import context_of

SEGMENT: SegmentId = (0, 7)


class Others:
    """The other shards, and what each of them names here."""

    def __init__(self) -> None:
        self.topology = Topology("claims", (0, 1, 2), "starter")
        self.named: dict[int, dict[str, dict[SegmentId, list[int]]]] = {1: {}, 2: {}}
        self.asked: list[int] = []

    @property
    def others(self) -> list[int]:
        return [shard for shard in self.topology.alive if shard]

    def call(self, shard: int, request: Request[Any], timeout: float) -> Any:
        assert (request.remote, request.arguments) == (ShardCalls.claims, (0,))
        self.asked.append(shard)
        return self.named[shard]

    def leave(self) -> None:
        """All others drain."""
        self.topology = self.topology.warned((1, 2)).shrunk((1, 2)).settled()


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def state() -> ShardState:
    """One segment that the disk brought back, of a version at home elsewhere."""
    state = ShardState(0, lambda name: 1)
    state.recover(SEGMENT, [4, 4], Stored("a.0", 0, 8, frozenset({0, 1})))
    state.hold(ModelRef("m", 1), {SEGMENT: [0]})
    state.hold_all(Reason.RESTORED)
    return state


def claims_of(state: ShardState, others: Others) -> Reconciliation:
    return Reconciliation(context_of(state, others), [ModelRef("m", 1)])


def test_what_nobody_names_goes_when_all_have_answered(state: ShardState, others: Others) -> None:
    reconciliation = claims_of(state, others)
    reconciliation.gather()
    assert others.asked == [1, 2]
    assert not reconciliation.open
    assert state.segment(SEGMENT) is None


def test_what_is_named_stays_and_nothing_else_holds_it(state: ShardState, others: Others) -> None:
    others.named[1] = {ModelRef("m", 2): {SEGMENT: [0]}}
    claims_of(state, others).gather()
    assert state.version_holders() == [ModelRef("m", 2)]
    assert not state.is_holder(Reason.RESTORED)


def test_when_all_others_have_left_before_they_answered_nothing_stays_for_ever(
    state: ShardState, others: Others
) -> None:
    reconciliation = claims_of(state, others)
    others.leave()
    reconciliation.gather()
    assert not reconciliation.open
    assert not state.is_holder(Reason.RESTORED)


def test_an_answer_to_an_earlier_question_says_nothing_of_what_came_since(state: ShardState, others: Others) -> None:
    reconciliation = claims_of(state, others)
    call = others.call

    def meanwhile(*arguments: Any) -> Any:
        others.call = call  # type: ignore[method-assign]
        state.hold(ModelRef("m", 3), {SEGMENT: [0]})  # brought back while they are asked
        reconciliation.ask_anew([ModelRef("m", 3)])
        return call(*arguments)

    others.call = meanwhile  # type: ignore[method-assign]
    reconciliation.gather()
    assert reconciliation.open
    assert state.is_holder(Reason.RESTORED)
    reconciliation.gather()
    assert others.asked == [1, 2, 1, 2]
    assert not reconciliation.open
    assert state.version_holders() == []


def test_what_a_home_lets_go_while_it_is_asked_is_not_held_again(state: ShardState, others: Others) -> None:
    others.named[1] = {ModelRef("m", 1): {SEGMENT: [0]}}
    reconciliation = claims_of(state, others)
    reconciliation.released(ModelRef("m", 1))
    state.release(ModelRef("m", 1))
    reconciliation.gather()
    assert state.version_holders() == []


def test_what_a_name_that_came_here_meanwhile_does_not_name_any_more_goes(state: ShardState, others: Others) -> None:
    """Its former home let go of it while this shard could not hear, and has left."""
    reconciliation = claims_of(state, others)
    others.leave()
    state.home_of = lambda name: 0
    reconciliation.gather()
    assert state.version_holders() == []
    assert state.segment(SEGMENT) is None
