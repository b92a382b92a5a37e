"""Names on their way from one home to another: what is remembered of them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import RecoveryInfo
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.handoff import name_handoff
from tensorvine.actors.shard.handoff.name_handoff import NameHandoff
from tensorvine.actors.shard.replicas.securing import Securing
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.holders import Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.ledger import Told
from tensorvine.store.versions.version import Draft

from tests.support.contexts import context_of

HERE = 0
BEFORE = Topology("names", (0, 1), "starter")
AFTER = BEFORE.warned((HERE,)).shrunk((HERE,))
LEFT = tuple(name for name in map("m{}".format, range(20)) if BEFORE.home(name) == HERE)[:3]
"""Names that go from here to shard 1."""


class Others:
    """The other shards: they take what they are sent, unless they are down."""

    def __init__(self) -> None:
        self.topology = self.topology_after = AFTER
        self.refusals = 0
        self.sender = (HERE, 0)
        self.seen: list[dict[str, int]] = []
        self.delivered = dict[str, int]

    async def ask(self, shard: int, request: Request[Any]) -> int:
        self.seen.append(self.delivered())
        if request.remote is ShardCalls.take and self.refusals:
            self.refusals -= 1
            raise ShardUnavailableError(f"shard {shard} died")
        return 0


def name_handoff_of(others: Others, recovery_info: RecoveryInfo | None = None) -> NameHandoff:
    """A shard that is home to some names, and is to hand them over."""
    state = ShardState(HERE, others.topology.home)
    for name in LEFT if recovery_info is None else ():
        state.open("client", now=0.0)
        draft = Draft(
            name=name,
            save=Save("client", 1),
            parent=None,
            quality=None,
            metadata="{}",
            graph_key=b"key",
            architecture=(ModelGraph(()).to_json(), None),
            body=b"",
            holds={},
            bytes_owned=0,
            bytes_total=0,
        )
        state.publish(state.begin_commit(draft), draft, created_ns=1)
    context = context_of(state, others, recovery_info=recovery_info)
    made = NameHandoff(context, None, None, Securing(context, None, None, cast("Any", None)))
    others.delivered = lambda: made.delivered
    return made


@pytest.mark.parametrize(("limit", "value"), [("CHUNK_NAMES", 1), ("CHUNK_BYTES", 0)])
def test_what_has_arrived_is_remembered_and_what_is_on_its_way_is_not(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_handoff, "RETRY_S", (0.0, 0.0))
    monkeypatch.setattr(name_handoff, limit, value)
    others = Others()
    others.refusals = 2
    giver = name_handoff_of(others)
    assert asyncio.run(giver.hand_over()).names == 3
    assert [len(known) for known in others.seen] == [0, 0, 0, 1, 2, 3]  # two refusals, three names, "arrived"
    assert giver.delivered == dict.fromkeys(LEFT, 1)
    others.topology = AFTER.settled()
    assert giver.delivered == {}


def test_the_next_change_begins_with_nothing() -> None:
    others = Others()
    giver = name_handoff_of(others)
    asyncio.run(giver.hand_over())
    giver.learn(AFTER.settled())
    giver.learn(AFTER.settled().grown((5,)))
    assert giver.delivered == {}


def test_one_that_starts_again_knows_from_the_planner_what_an_earlier_life_delivered() -> None:
    others = Others()
    elsewhere = next(name for name in map("m{}".format, range(20)) if BEFORE.home(name) == 1)
    recovery_info = RecoveryInfo(AFTER, (), Told({}), {LEFT[0]: 1, elsewhere: 1})
    assert name_handoff_of(others, recovery_info).delivered == {LEFT[0]: 1}


def test_the_version_that_was_delivered_is_not_here_any_more() -> None:
    others = Others()
    giver = name_handoff_of(others)
    asyncio.run(giver.hand_over())
    assert all(giver._state.known(ModelRef(name, 1)) is None for name in LEFT)
