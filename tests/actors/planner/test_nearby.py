"""Which shard of its node a client is told of: by the planner, or by all shards in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from tensorvine.actors.planner import nearby as module
from tensorvine.actors.planner.nearby import TOLD_S, Nearby
from tensorvine.actors.rpc.channel import Channel
from tensorvine.store.errors import OperationTimeoutError, ShardUnavailableError
from tensorvine.store.waiting import NEVER

HERE, THERE = "here", "there"


class Shards:
    """Shards on two nodes, and a planner that tells what it is given."""

    def __init__(self, nodes: Sequence[str], told: object) -> None:
        self.nodes, self.told = list(nodes), told
        self.asked, self.met = 0, list[int]()
        self.nearby = Nearby(cast(Channel, self), HERE, self.node_of)

    def call(self, _: object, timeout: float) -> Any:
        assert timeout <= module.ASK_S
        self.asked += 1
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    def node_of(self, shard: int, _: object) -> str:
        self.met.append(shard)
        return self.nodes[shard]

    def choose(self, home: int | None, version: int = 1, leaving: int | None = None) -> int:
        staying = [shard for shard in range(len(self.nodes)) if shard != leaving]
        return self.nearby.choose(home, staying, version, NEVER)


def test_a_home_that_is_here_needs_nobody() -> None:
    shards = Shards([THERE, HERE, HERE], (1, 2))
    assert shards.choose(2) == 2
    assert (shards.asked, shards.met) == (0, [2])


def test_else_the_planner_says_which_and_the_others_are_not_met() -> None:
    shards = Shards([THERE, THERE, HERE], (2,))
    assert [shards.choose(home) for home in (1, None, 1)] == [2, 2, 2]
    assert (shards.asked, shards.met) == (1, [1, 2, 2, 1, 2])


def test_where_none_is_here_the_home_holds_it() -> None:
    shards = Shards([THERE, THERE, THERE], ())
    assert [shards.choose(1), shards.choose(None), shards.choose(1, leaving=1)] == [1, 0, 0]
    assert (shards.asked, shards.met) == (1, [1])


def test_one_that_started_again_elsewhere_or_leaves_is_not_chosen() -> None:
    assert Shards([THERE, HERE, THERE], (2,)).choose(0) == 0
    assert Shards([THERE, HERE, HERE], (1, 2)).choose(0, leaving=1) == 2


@pytest.mark.parametrize("told", [None, ShardUnavailableError("away"), OperationTimeoutError("late")], ids=repr)
def test_without_the_planners_word_all_are_asked(told: object) -> None:
    shards = Shards([THERE, THERE, HERE], told)
    assert shards.choose(1) == 2
    assert shards.met == [1, 0, 1, 2]


@pytest.mark.parametrize("later", [None, OperationTimeoutError("late")], ids=["started again", "late"])
def test_the_last_word_counts_until_the_topology_changes(monkeypatch: pytest.MonkeyPatch, later: object) -> None:
    now = 100.0
    monkeypatch.setattr("tensorvine.store.waiting.time.monotonic", lambda: now)
    shards = Shards([THERE, THERE, HERE], (2,))
    assert shards.choose(1) == 2
    now += TOLD_S
    shards.told = later
    assert shards.choose(1) == 2
    assert shards.choose(1) == 2
    assert 0 not in shards.met
    assert shards.asked == 2
    shards.told = ()
    assert shards.choose(1, version=2) == 1
    assert shards.asked == 3
