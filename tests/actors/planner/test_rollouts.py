"""Turns to update: never more than allowed, and none is kept by a consumer that died."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors.planner.rollouts import LEASE_S, Rollouts

STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "end", "wait"]), st.integers(0, 4), st.floats(0.0, LEASE_S)), max_size=60
)


@given(STEPS, st.integers(1, 3))
def test_turns_are_as_a_list_of_leases_says(steps: list[tuple[str, int, float]], most: int) -> None:
    now = 0.0
    rollouts = Rollouts(lambda: now)
    leases: dict[str, float] = {}
    for what, who, seconds in steps:
        consumer = str(who)
        leases = {each: ends for each, ends in leases.items() if ends > now}
        if what == "wait":
            now += seconds
        elif what == "end":
            rollouts.ended("net", consumer)
            leases.pop(consumer, None)
        else:
            allowed = consumer in leases or len(leases) < most
            assert rollouts.turn("net", consumer, most) is allowed
            leases |= {consumer: now + LEASE_S} if allowed else {}
            assert len(leases) <= most


def test_models_do_not_wait_for_each_other() -> None:
    rollouts = Rollouts()
    assert rollouts.turn("one", "a", 1)
    assert rollouts.turn("two", "a", 1)
    assert not rollouts.turn("one", "b", 1)
