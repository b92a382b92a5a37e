"""Holders of versions that do not exist: they go, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.handoff import strays
from tensorvine.actors.shard.handoff.strays import Strays
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.holders import Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import ShardState

from tests.support.contexts import context_of

HERE, FIRST, SECOND = 0, (0, 7), (0, 8)
FACTS = {ModelRef("committed", 1): (None, True), ModelRef("retired", 1): (None, False)}
"""By the ledger here; of `begun@1`, whose home died before it told anybody, it says nothing."""


class Homes:
    """The other shards: they know no version but some."""

    def __init__(self) -> None:
        self.topology = Topology("strays", (0, 1), "starter")
        self.knows: set[ModelRef] = set()
        self.asked: list[list[ModelRef]] = []
        self.meanwhile = lambda: None

    def call(self, shard: int, request: Request[Any], timeout: float) -> Any:
        refs, version = request.arguments
        assert (shard, request.remote, version) == (1, ShardCalls.unknown, self.topology.version)
        self.asked.append(list(refs))
        self.meanwhile()
        return [ref for ref in refs if ref not in self.knows]


@pytest.fixture
def homes() -> Homes:
    return Homes()


@pytest.fixture
def state() -> ShardState:
    """Segments here of three versions at home elsewhere."""
    state = ShardState(HERE, lambda name: 1)
    state.open("client", now=0.0)
    for segment in (FIRST, SECOND):
        state.adopt(Save("client", segment[1]), segment, b"abcdefgh", [4, 4])
    state.ledger.note(FACTS)
    state.hold(ModelRef("committed", 1), {FIRST: [0]})
    state.hold(ModelRef("retired", 1), {FIRST: [1]})
    state.hold(ModelRef("begun", 1), {SECOND: [0, 1]})
    for segment in (FIRST, SECOND):
        state.release(Save("client", segment[1]))
    return state


@pytest.fixture(autouse=True)
def _always_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strays, "LOOK_S", 0.0)


def strays_of(state: ShardState, homes: Homes, *, calm: bool = True) -> Strays:
    return Strays(context_of(state, homes), lambda: calm)


def test_what_two_looks_found_and_its_home_does_not_know_goes(state: ShardState, homes: Homes) -> None:
    found = strays_of(state, homes)
    assert found.look() == 0
    assert homes.asked == []
    assert found.look() == 2
    assert homes.asked == [[ModelRef("begun", 1), ModelRef("retired", 1)]]
    assert state.version_holders() == [ModelRef("committed", 1)]
    assert state.segment(SECOND) is None
    assert state.held(ModelRef("committed", 1)) == {FIRST: [0]}


def test_what_its_home_knows_stays(state: ShardState, homes: Homes) -> None:
    """A commit on its way, or a version that is retired and pinned."""
    homes.knows = {ModelRef("begun", 1), ModelRef("retired", 1)}
    found = strays_of(state, homes)
    assert [found.look() for _ in range(3)] == [0, 0, 0]
    assert len(state.version_holders()) == 3


def test_what_is_held_anew_while_its_home_is_asked_stays(state: ShardState, homes: Homes) -> None:
    """The home started again, and gives the number again."""
    found = strays_of(state, homes)
    homes.meanwhile = lambda: found.held(ModelRef("begun", 1))
    assert [found.look(), found.look()] == [0, 1]
    assert state.held(ModelRef("begun", 1)) == {SECOND: [0, 1]}


def change(topology: Topology) -> Topology:
    """Have a shard join: names move until it is settled."""
    return topology.grown((2,))


def test_nothing_goes_while_names_move(state: ShardState, homes: Homes) -> None:
    found = strays_of(state, homes)
    homes.topology = change(homes.topology)
    assert [found.look() for _ in range(3)] == [0, 0, 0]
    assert homes.asked == []
    homes.topology = homes.topology.settled()
    assert [found.look(), found.look()] == [0, 2]


def test_an_answer_counts_for_nothing_when_names_have_moved_meanwhile(state: ShardState, homes: Homes) -> None:
    def moved() -> None:
        homes.topology = change(homes.topology).settled()

    found = strays_of(state, homes)
    homes.meanwhile = moved
    assert [found.look(), found.look()] == [0, 0]
    assert len(state.version_holders()) == 3


def test_nothing_goes_before_others_have_said_what_they_name(state: ShardState, homes: Homes) -> None:
    found = strays_of(state, homes, calm=False)
    assert [found.look() for _ in range(3)] == [0, 0, 0]
    assert homes.asked == []


def test_a_home_that_does_not_answer_is_asked_again(state: ShardState, homes: Homes) -> None:
    def dead() -> None:
        raise ShardUnavailableError("shard 1 died")

    found = strays_of(state, homes)
    homes.meanwhile = dead
    assert [found.look(), found.look()] == [0, 0]
    homes.meanwhile = lambda: None
    assert found.look() == 2


def test_of_names_that_are_at_home_here_the_state_itself_tells(state: ShardState, homes: Homes) -> None:
    state.home_of = lambda name: HERE
    found = strays_of(state, homes)
    assert [found.look(), found.look()] == [0, 2]
    assert homes.asked == []
    assert state.version_holders() == [ModelRef("committed", 1)]
