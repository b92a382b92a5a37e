"""The pure rule of how many shards a repository needs: bounds, hysteresis, and wrong arguments."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.planner.scaling import SLACK, ScalePolicy, Scaler, ShardLoad

CAPACITY = 1000


def spread(held: float, requests: float, count: int) -> dict[int, ShardLoad]:
    """A load that is spread evenly over shards."""
    return {i: ShardLoad(math.ceil(held / count), CAPACITY, int(requests / count)) for i in range(count)}


class Cluster:
    """A repository whose shards follow the advice at once; one observation a second."""

    def __init__(self, policy: ScalePolicy, nodes: int, count: int = 1) -> None:
        self.scaler, self.nodes, self.count = Scaler(policy), nodes, count
        self.now_s, self.asked = 0.0, 0.0
        self.counts: list[int] = []

    def go(self, seconds: int, held: float, rate: float) -> int:
        for _ in range(seconds):
            self.now_s += 1.0
            self.asked += rate
            self.count = self.scaler.observe(self.now_s, self.nodes, self._loads(held))
            self.counts.append(self.count)
        return self.count

    def _loads(self, held: float) -> dict[int, ShardLoad]:
        return spread(held, self.asked, self.count)


class TestJoining:
    def test_bytes(self) -> None:
        cluster = Cluster(ScalePolicy(full=0.5, join_after_s=2.0), nodes=8)
        assert cluster.go(2, held=1600, rate=0) == 1, "it must last"
        assert cluster.go(1, held=1600, rate=0) == 4
        assert cluster.go(50, held=1600, rate=0) == 4

    def test_requests(self) -> None:
        cluster = Cluster(ScalePolicy(requests_per_s=100, join_after_s=1.0), nodes=8)
        assert cluster.go(4, held=0, rate=250) == 3

    def test_a_burst_shorter_than_the_patience_changes_nothing(self) -> None:
        cluster = Cluster(ScalePolicy(join_after_s=5.0), nodes=8)
        for _ in range(10):
            cluster.go(4, held=5000, rate=0)
            assert cluster.go(1, held=0, rate=0) == 1

    def test_nodes_bound_it_and_new_nodes_raise_the_bound(self) -> None:
        cluster = Cluster(ScalePolicy(join_after_s=0.0), nodes=2)
        assert cluster.go(5, held=9000, rate=0) == 2
        cluster.nodes = 5
        assert cluster.go(5, held=9000, rate=0) == 5

    def test_a_bound_of_the_policy_replaces_that_of_the_nodes(self) -> None:
        assert Cluster(ScalePolicy(most=6, join_after_s=0.0), nodes=2).go(5, held=9000, rate=0) == 6


class TestDraining:
    def test_one_at_a_time_and_only_after_a_while(self) -> None:
        cluster = Cluster(ScalePolicy(drain_after_s=10.0), nodes=8, count=4)
        assert cluster.go(10, held=0, rate=0) == 4
        assert cluster.go(1, held=0, rate=0) == 3
        assert cluster.go(100, held=0, rate=0) == 1

    def test_the_least_stays(self) -> None:
        assert Cluster(ScalePolicy(least=3, drain_after_s=0.0), nodes=8, count=5).go(50, held=0, rate=0) == 3

    def test_nodes_that_left_take_their_shards_along_at_once(self) -> None:
        cluster = Cluster(ScalePolicy(drain_after_s=1000.0), nodes=2, count=4)
        assert cluster.go(2, held=0, rate=0) == 2

    def test_a_counter_that_began_anew_is_no_negative_rate(self) -> None:
        scaler = Scaler(ScalePolicy(requests_per_s=10, join_after_s=0.0))
        assert scaler.observe(0.0, 4, {0: ShardLoad(0, CAPACITY, 1000)}) == 1
        assert scaler.observe(1.0, 4, {0: ShardLoad(0, CAPACITY, 25)}) == 3


@given(
    held=st.floats(0, 50_000),
    rate=st.floats(0, 5_000),
    nodes=st.integers(1, 40),
    count=st.integers(1, 40),
    full=st.floats(0.1, 1.0),
)
def test_a_steady_load_settles_where_it_is_carried(held: float, rate: float, nodes: int, count: int, full: float):
    policy = ScalePolicy(full=full, requests_per_s=100, join_after_s=1.0, drain_after_s=3.0)
    cluster = Cluster(policy, nodes, count)
    settled = cluster.go(300, held, rate)
    assert cluster.go(100, held, rate) == settled
    assert set(cluster.counts[-100:]) == {settled}, "it does not swing"
    assert 1 <= settled <= nodes
    if settled < nodes:
        assert held / (settled * CAPACITY) <= full * 1.01
        assert rate / settled <= policy.requests_per_s * 1.05
    if settled > 1:
        fewer = settled - 1
        assert math.ceil(held / fewer) >= SLACK * full * CAPACITY * 0.99 or rate / fewer >= SLACK * 100 * 0.95, (
            "no more than needed"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"least": 0}, "least: expected at least 1 shard; found 0"),
        ({"least": 3, "most": 2}, "most: expected at least 3, the value of least; found 2"),
        ({"full": 0.0}, "full: expected a share above 0"),
        ({"full": 1.5}, "full: expected a share above 0 and at most 1; found 1.5"),
        ({"full": math.nan}, "full"),
        ({"requests_per_s": 0}, "requests_per_s"),
        ({"join_after_s": -1}, "join_after_s"),
        ({"drain_after_s": math.nan}, "drain_after_s"),
    ],
)
def test_wrong_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalePolicy(**arguments)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("nodes", "shards"), [(0, {0: ShardLoad(0, 1, 0)}), (1, {})])
def test_nothing_to_observe(nodes: int, shards: dict[int, ShardLoad]) -> None:
    with pytest.raises(ValueError, match="at least one shard and one node"):
        Scaler(ScalePolicy()).observe(0.0, nodes, shards)
