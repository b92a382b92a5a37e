"""Names on their way: a shard that takes them asks the planner first."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tensorvine.actors.planner.planner import Planner
from tensorvine.actors.shard.parts.changes import Changes
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import MovedError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.holders import Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.handover import Bundle
from tensorvine.store.versions.manifest import encode_body
from tensorvine.store.versions.version import Draft

from tests.support.contexts import context_of

SENDER, TAKER = 0, 1
REF = ModelRef("m", 1)


def test_the_planner_refuses_names_of_a_sender_that_has_started_again_since() -> None:
    registry = SimpleNamespace(restarts=lambda: {SENDER: 2})
    planner = SimpleNamespace(
        _lock=threading.RLock(), _registry=registry, _topology=Topology("names", (0, 1), "s"), _arrived={}
    )
    with pytest.raises(MovedError, match="expected the process of shard 0 that sent them; it has restarted"):
        Planner._note_arrival(cast("Any", planner), TAKER, ["m"], SENDER, 1)
    assert planner._arrived == {}
    Planner._note_arrival(cast("Any", planner), TAKER, ["m"], SENDER, 2)
    assert planner._arrived == {"m": TAKER}


def bundle() -> Bundle:
    """A name with one version, as its home hands it over."""
    state = ShardState(SENDER, lambda name: SENDER)
    state.open("client", now=0.0)
    graph = ModelGraph(()).to_json()
    draft = Draft(
        name="m",
        save=Save("client", 1),
        parent=None,
        quality=None,
        metadata="{}",
        graph_key=b"key",
        architecture=(graph, None),
        body=encode_body({}),
        holds={},
        bytes_owned=0,
        bytes_total=0,
    )
    state.publish(state.begin_commit(draft), draft, created_ns=1)
    return state.hand_over(["m"])


class Taker:
    """A shard that takes names, and parts of it that tell what they were asked, and what was to arrive then."""

    def __init__(self, *, refused: bool) -> None:
        self.state = ShardState(TAKER, lambda name: TAKER)
        self.told: list[tuple[str, set[ModelRef]]] = []
        self._refused = refused
        nothing, asked = cast("Any", None), cast("Any", self)
        self.changes = Changes(
            context_of(self.state),
            nothing,
            names=asked,
            segment_handoff=nothing,
            reconciliation=None,
            history=None,
            copying=nothing,
            securing=asked,
            writes=nothing,
        )

    wanted = True

    async def records(self, records: dict[ModelRef, Any]) -> None:
        assert records.keys() == {REF}
        self._tell("records")

    async def announce(self, names: list[str], sender: tuple[int, int]) -> None:
        assert (names, sender) == (["m"], (SENDER, 3))
        self._tell("announce")
        if self._refused:
            raise MovedError("it has started again", 1)

    def take(self, bundle: Bundle, unwritten: list[Any]) -> int:
        return self.state.take_over(bundle, 0.0)

    def _tell(self, what: str) -> None:
        assert self.state.known(REF) is None
        self.told.append((what, set(self.state.arriving)))

    def run(self) -> None:
        asyncio.run(self.changes.take(bundle(), [], (SENDER, 3)))


def test_replicas_have_names_before_the_planner_hears_of_them_and_they_are_here_last() -> None:
    taker = Taker(refused=False)
    taker.run()
    assert taker.told == [("records", {REF}), ("announce", {REF})]
    assert taker.state.known(REF) is not None
    assert not taker.state.arriving


def test_what_is_refused_is_not_taken() -> None:
    taker = Taker(refused=True)
    with pytest.raises(MovedError):
        taker.run()
    assert not taker.state.knows("m")
    assert not taker.state.arriving
