"""Which shards there are while they come and go."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.planner.owner import Owner
from tensorvine.planner.topology import Topology

Steps = st.lists(st.tuples(st.sampled_from(["grow", "drain", "leave"]), st.lists(st.integers(0, 12), min_size=1)))


def topology(shards: int = 2) -> Topology:
    return Topology("repo", tuple(range(shards)), "starter", "s3://bucket/p", 2, nodes={"gpus": 1.0})


def changed(before: Topology, what: str, drawn: list[int]) -> Topology | None:
    """Carry out a change; None: it is refused."""
    some = [now for now in drawn if now in before.shards]
    try:
        if what == "grow":
            return before.grown(len(drawn))
        return before.draining(some) if what == "drain" else before.left(some)
    except ValueError:
        assert set(some) == set(before.shards)
        return None


@given(st.integers(1, 4), Steps)
def test_after_each_change(shards: int, steps: list[tuple[str, list[int]]]) -> None:
    """Versions count up, no number is given twice, and a shard that stays is left."""
    now = topology(shards)
    used = set(now.shards)
    for what, drawn in steps:
        after = changed(now, what, drawn)
        if after is None:
            continue
        new = set(after.shards) - set(now.shards)
        assert after.version == now.version + 1
        assert not new & used
        used |= new
        assert after.next > max(used)
        assert list(after.shards) == sorted(set(after.shards))
        assert after.shards
        assert set(after.leaving) <= set(after.shards)
        assert sorted((*after.staying, *after.leaving)) == list(after.shards)
        assert new == set(range(now.next, now.next + len(drawn)) if what == "grow" else ())
        assert Topology.from_json(after.to_json()) == after
        now = after


def test_numbers_of_shards_are_never_used_twice() -> None:
    now = topology().grown(1).left([2]).grown(1)
    assert now.shards == (0, 1, 3)
    assert now.left([3]).grown(1).shards == (0, 1, 4)


def test_a_drain_replaces_the_one_before_and_is_given_up_by_an_empty_one() -> None:
    now = topology(3).draining([0])
    assert (now.leaving, now.staying) == ((0,), (1, 2))
    assert now.draining([1]).leaving == (1,)
    assert now.draining([]).staying == (0, 1, 2)
    assert now.grown(1).leaving == (0,)
    assert now.left([0]).leaving == ()


def test_the_last_shard_stays() -> None:
    with pytest.raises(ValueError, match=r"drain of \[0, 1\]: expected a shard to be left; found only \[0, 1\]"):
        topology().draining([0, 1])
    with pytest.raises(ValueError, match=r"end of \[0, 1\]: expected a shard to be left; found only \[0, 1\]"):
        topology().left([0, 1])


def test_its_text_has_all_of_it_and_a_change_keeps_what_it_is_not_about() -> None:
    now = Topology("repo", (0, 1), "starter", "/path", 3, owner=Owner("ada", 1000, "node-7"), nodes={"gpus": 1.0})
    after = now.grown(2).draining([1]).left([0])
    for field in ("repository", "started_by", "path", "replicas", "owner", "nodes"):
        assert getattr(after, field) == getattr(now, field)
    assert Topology.from_json(now.to_json()) == now
    assert json.loads(now.to_json())["path"] == "/path"
    assert "/path" not in repr(now)
