"""Which shards join and drain as nodes come and go, against a model of a cluster."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.planner.membership import (
    JOIN_MOST,
    LONGEST_PAUSE_S,
    PAUSE_S,
    SETTLE_S,
    Membership,
    Move,
    check_rule,
    selects,
)
from tensorvine.store.errors import OptionError


class Cluster:
    """Nodes, shards on them, and changes that are made at once; what a lost node had starts again elsewhere."""

    def __init__(self, nodes: int, count: int | None, least: int, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  a test's
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.leaving: set[str] = set()
        self.count = count
        self.at = {number: self.nodes[number % nodes] for number in range(count or nodes)}
        self.least = least
        self.membership = Membership(least)
        self.made: list[Move] = []
        self.now = 0.0
        self._nodes, self._shards = nodes, len(self.at)

    @property
    def staying(self) -> list[str]:
        return [node for node in self.nodes if node not in self.leaving]

    def join(self) -> None:
        self.nodes.append(f"n{self._nodes}")
        self._nodes += 1

    def warn(self) -> None:
        if len(self.staying) > 1:
            self.leaving.add(self.random.choice(self.staying))

    def lose(self) -> None:
        if len(self.staying) > 1:
            lost = self.random.choice(sorted(self.leaving) or self.nodes)
            self.nodes.remove(lost)
            self.leaving.discard(lost)
            for shard, node in self.at.items():
                if node == lost:
                    self.at[shard] = self.random.choice(self.nodes)

    def step(self) -> Move:
        """Make the next change, if there is one."""
        self.now += 1.0
        move = self.membership.observe(self.now, self.staying, self.at, self.count)
        for node in move.join:
            assert node in self.staying
            self.at[self._shards] = node
            self._shards += 1
        if move.drain:
            assert not move.join
            del self.at[self.random.choice(move.drain)]
            assert len(self.at) >= self.least
        if move:
            self.membership.succeeded(move)
            self.made.append(move)
        return move

    def settle(self) -> None:
        calm = 0
        for _ in range(2000):
            calm = 0 if self.step() else calm + 1
            if calm > 2 * SETTLE_S:
                return
        pytest.fail(f"it never settles: {self.made[-10:]}")


EVENTS = st.lists(st.sampled_from(["join", "warn", "lose", "step"]), max_size=20)


@given(st.integers(1, 4), st.integers(1, 3), EVENTS, st.integers(0, 1 << 16))
def test_each_node_that_stays_comes_to_have_one_shard(nodes: int, least: int, events: list[str], seed: int) -> None:
    cluster = Cluster(nodes, None, min(least, nodes), seed)
    for event in events:
        getattr(cluster, event)()
    cluster.settle()
    per_node = [sum(node == here for node in cluster.at.values()) for here in cluster.staying]
    assert set(cluster.at.values()) <= set(cluster.staying), "none is left on a node that leaves"
    assert all(per_node)
    assert sum(per_node) == max(len(cluster.staying), cluster.least)


@given(st.integers(1, 4), st.integers(1, 6), EVENTS, st.integers(0, 1 << 16), st.integers(1, 6))
def test_a_number_means_that_number(nodes: int, count: int, events: list[str], seed: int, later: int) -> None:
    cluster = Cluster(nodes, count, 1, seed)
    for event in events:
        getattr(cluster, event)()
    cluster.settle()
    assert len(cluster.at) == count
    assert set(cluster.at.values()) <= set(cluster.staying)
    cluster.count = later
    cluster.settle()
    assert len(cluster.at) == later


def test_a_node_that_leaves_hands_over_before_another_one_is_joined() -> None:
    assert Membership(1).observe(0.0, ["a", "c"], {0: "a", 1: "b"}, None) == Move(drain=(1,))


def test_the_last_one_drains_when_another_one_is_there() -> None:
    membership = Membership(1)
    assert membership.observe(0.0, ["b"], {0: "a"}, None) == Move(join=("b",))
    assert membership.observe(1.0, [], {0: "a"}, None) == Move()


def test_a_node_that_came_back_soon_moves_no_bytes() -> None:
    membership = Membership(1)
    at = {0: "a", 1: "a"}
    assert membership.observe(0.0, ["a"], at, None) == Move()
    assert membership.observe(SETTLE_S - 1, ["a", "b"], at, None) == Move(join=("b",))
    assert membership.observe(SETTLE_S, ["a", "b"], at | {2: "b"}, None) == Move(drain=(0, 1))


def test_what_failed_waits_longer_each_time_and_alone() -> None:
    membership = Membership(1)
    at = {0: "a"}
    move = membership.observe(0.0, ["a", "b", "c"], at, None)
    assert move == Move(join=("b", "c"))
    assert not membership.failed(0.0, move)
    assert membership.observe(PAUSE_S / 2, ["a", "b", "c", "d"], at, None) == Move(join=("d",)), "nobody waits for them"
    move = membership.observe(PAUSE_S, ["a", "b", "c"], at, None)
    assert move == Move(join=("b",)), "one that failed is tried alone"
    assert membership.failed(PAUSE_S, move)
    assert membership.observe(PAUSE_S, ["a", "b", "c"], at, None) == Move(join=("c",))
    now = PAUSE_S
    for _ in range(20):
        now += LONGEST_PAUSE_S
        move = membership.observe(now, ["a", "b"], at, None)
        assert move == Move(join=("b",)), "it is given up never"
        membership.failed(now, move)


def test_a_shard_that_cannot_drain_keeps_no_node_waiting() -> None:
    membership = Membership(1)
    membership.failed(0.0, Move(drain=(1,)))
    assert membership.observe(1.0, ["a", "c"], {0: "a", 1: "b"}, None) == Move(join=("c",))
    assert membership.observe(PAUSE_S, ["a", "c"], {0: "a", 1: "b", 2: "c"}, None) == Move(drain=(1,))


def test_of_shards_that_cannot_drain_each_is_tried() -> None:
    membership, at = Membership(1), {0: "x", 1: "y", 2: "a"}
    assert membership.observe(0.0, ["a"], at, None) == Move(drain=(0, 1))
    membership.failed(0.0, Move(drain=(0, 1)))
    assert membership.observe(PAUSE_S, ["a"], at, None) == Move(drain=(0,)), "alone, now"
    membership.failed(PAUSE_S, Move(drain=(0,)))
    assert membership.observe(PAUSE_S, ["a"], at, None) == Move(drain=(1,))


def test_a_crowd_that_cannot_be_thinned_keeps_no_other_waiting() -> None:
    membership, at = Membership(1), {0: "a", 1: "a", 2: "b", 3: "b"}
    membership.observe(0.0, ["a", "b"], at, None)
    assert membership.observe(SETTLE_S, ["a", "b"], at, None) == Move(drain=(0, 1))
    membership.failed(SETTLE_S, Move(drain=(0, 1)))
    assert membership.observe(SETTLE_S, ["a", "b"], at, None) == Move(drain=(2, 3))


def test_a_node_whose_shards_start_elsewhere_is_one_that_failed() -> None:
    """Ray may put an actor on another node than the one that was asked for."""
    membership, at, made = Membership(1), {0: "a"}, 0
    for second in range(600):
        move = membership.observe(float(second), ["a", "b"], at, None)
        for _ in move.join:
            made += 1
            at[made] = "a"
        if move.drain:
            del at[move.drain[-1]]
        membership.succeeded(move)
        assert len(at) <= 4
    assert 5 < made < 20


@pytest.mark.parametrize("count", [None, 100])
def test_not_all_of_many_join_at_once(count: int | None) -> None:
    move = Membership(1).observe(0.0, [f"n{i}" for i in range(100)], {0: "n0"}, count)
    assert len(move.join) == JOIN_MOST


def test_fewer_shards_than_replicas_there_never_are() -> None:
    membership = Membership(2)
    assert membership.observe(0.0, ["a"], {0: "a", 1: "b"}, None) == Move(join=("a",)), "then one drains"
    assert membership.observe(1.0, ["a"], {0: "a", 1: "b", 2: "a"}, None) == Move(drain=(1,))
    assert membership.observe(99.0, ["a"], {0: "a", 2: "a"}, None) == Move()


WRONG: list[Any] = [
    "tensorvine=1",
    {1: 1},
    {"": 1},
    {"tensorvine": 0},
    {"tensorvine": -1.0},
    {"tensorvine": float("nan")},
    {"tensorvine": True},
    {"tensorvine": None},
    {"label": ""},
]


@pytest.mark.parametrize("rule", WRONG, ids=str)
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    with pytest.raises(OptionError, match="nodes: expected a mapping such as"):
        check_rule(rule)


def test_a_rule_asks_for_amounts_and_for_labels() -> None:
    rule = check_rule({"tensorvine": 1, "zone": "a"})
    assert selects(rule, {"tensorvine": 1.0, "CPU": 8.0}, {"zone": "a", "other": "x"})
    assert not selects(rule, {"tensorvine": 0.5}, {"zone": "a"})
    assert not selects(rule, {"tensorvine": 1.0}, {"zone": "b"})
    assert not selects(rule, {"tensorvine": 1.0}, {})
    assert selects({}, {}, {})
