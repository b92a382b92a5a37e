"""Where names and segments live while shards come and go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.planner.topology import SERIAL_BITS, Topology

NAMES = [f"m{i}" for i in range(400)]
Steps = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=8)


def topology(shards: int = 2) -> Topology:
    return Topology("repo", tuple(range(shards)), "starter")


def changed(before: Topology, steps: list[tuple[bool, int]]) -> Topology:
    """Carry out changes: (grow, how many); a drain that would leave none is left out."""
    now = before
    for number, (grow, count) in enumerate(steps):
        if grow:
            now = now.grown([1000 * number + i + 1 for i in range(count)]).settled()
        elif count < len(now.shards):
            now = now.shrunk(now.shards[:count]).settled()
    return now


class TestNames:
    def test_a_shard_that_joins_takes_its_share_and_no_name_moves_between_others(self) -> None:
        before = topology()
        after = before.grown([1, 2])
        moved = [name for name in NAMES if after.home(name) != before.home(name)]
        assert {after.home(name) for name in moved} == {2, 3}
        assert 0.4 < len(moved) / len(NAMES) < 0.6
        assert all(after.former_home(name) == before.home(name) for name in NAMES)
        assert after.settled().former_home(moved[0]) == after.home(moved[0])

    def test_a_shard_that_drains_leaves_its_own_names_only(self) -> None:
        before = topology(4)
        after = before.shrunk([1])
        assert all(after.home(n) == before.home(n) for n in NAMES if before.home(n) != 1)
        assert {after.home(n) for n in NAMES if before.home(n) == 1} == {0, 2, 3}

    def test_numbers_of_shards_are_never_used_twice(self) -> None:
        now = topology().grown([1]).shrunk([2]).grown([2])
        assert now.shards == (0, 1, 3)
        assert now.shrunk([3]).grown([9]).shards == (0, 1, 4)

    def test_the_last_shard_stays(self) -> None:
        with pytest.raises(ValueError, match="expected a shard to be left"):
            topology().shrunk([0, 1])

    def test_all_that_may_hold_something_are_alive_until_it_has_moved(self) -> None:
        now = topology(3).shrunk([0])
        assert (now.alive, now.settled().alive) == ((0, 1, 2), (1, 2))

    @given(Steps)
    def test_every_step_has_a_version_of_its_own(self, steps: list[tuple[bool, int]]) -> None:
        now = changed(topology(), steps)
        assert now.warned([now.shards[0]]).version == now.version + 1


class TestSegments:
    @settings(max_examples=300)
    @given(Steps, Steps, st.integers(0), st.data())
    def test_a_serial_number_says_for_ever_who_made_it_and_where_it_is(
        self, first: list[tuple[bool, int]], then: list[tuple[bool, int]], drawn: int, data: st.DataObject
    ) -> None:
        made = changed(topology(), first)
        shard = data.draw(st.sampled_from(made.shards))
        serial = made.serial(shard, drawn)
        later = changed(made, then)
        assert made.maker(serial) == shard
        assert later.maker(serial) == shard
        assert later.where((shard, serial)) in later.shards
        if shard in later.shards:
            assert later.where((shard, serial)) == shard

    def test_growing_moves_no_segment(self) -> None:
        before = topology()
        segments = [(shard, before.serial(shard, 7919 * i)) for i in range(100) for shard in (0, 1)]
        after = before.grown([5, 6])
        assert all(after.where(segment) == segment[0] for segment in segments)

    def test_a_drained_shards_segments_are_spread_over_its_successors(self) -> None:
        after = topology(3).shrunk([1])
        successors = [after.where((1, 3 * i + 1)) for i in range(300)]
        assert 100 < successors.count(0) < 200
        assert set(successors) == {0, 2}

    def test_files_of_an_earlier_repository_are_of_the_shards_of_the_start(self) -> None:
        old = 77 << SERIAL_BITS | 12345
        assert topology().maker(old) == old % 2
        assert topology().grown([78]).maker(old) == old % 2
