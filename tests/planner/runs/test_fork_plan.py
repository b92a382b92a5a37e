"""The plan of a fork: every byte of every clone is covered once, and the ranks share the work."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.planner.runs.forking import ALIGNMENT, ForkPlan, plan_fork

sizes = st.lists(st.one_of(st.integers(0, 50), st.integers(51, 5000)), max_size=12)
ranks = st.integers(1, 6)


def tensors_of(plan: ForkPlan, state: list[bytes]) -> list[list[bytearray]]:
    """Play a plan with real bytes: what each clone has after all messages and gatherings."""
    clones = [[bytearray(len(tensor)) for tensor in state] for _ in plan.counterparts]
    for message in plan.messages:
        for piece in message.pieces:
            clones[message.clone][piece.tensor][piece.begin : piece.end] = state[piece.tensor][piece.begin : piece.end]
    before = [[bytes(tensor) for tensor in clone] for clone in clones]
    for tensor, bounds in plan.gathered.items():
        for clone in clones:
            for other, (begin, end) in enumerate(pairwise(bounds)):
                clone[tensor][begin:end] = before[other][tensor][begin:end]
    return clones


@given(
    sizes=sizes,
    sources=ranks,
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    small=st.integers(0, 600),
    message=st.integers(ALIGNMENT, 2000),
    bundle=st.integers(0, 1500),
    data=st.data(),
)
def test_each_clone_ends_with_the_whole_state(
    sizes: list[int], sources: int, groups: list[int], small: int, message: int, bundle: int, data: st.DataObject
) -> None:
    local = [data.draw(st.booleans()) for _ in sizes]
    plan = plan_fork(sizes, local, sources=sources, groups=groups, small=small, message=message, bundle=bundle)
    state = [bytes((7 * place + byte) % 251 + 1 for byte in range(nbytes)) for place, nbytes in enumerate(sizes)]
    for clone in tensors_of(plan, state):
        assert [bytes(tensor) for tensor in clone] == state
    assert (
        plan.messages
        == plan_fork(sizes, local, sources=sources, groups=groups, small=small, message=message, bundle=bundle).messages
    )
    for source, clone in plan.pairs():
        own = [m for m in plan.messages if (m.source, m.clone) == (source, clone)]
        assert [m.last for m in own] == sorted(m.last for m in own)
        assert own == plan.incoming(clone).get(source, [])
    for found in plan.messages:
        assert found.nbytes <= max(message, bundle, small)
        assert len(found.pieces) == 1 or all(piece.nbytes < small for piece in found.pieces)


@given(sizes=sizes, sources=ranks, clones=ranks)
def test_what_is_cut_leaves_the_ranks_once_in_equal_parts(sizes: list[int], sources: int, clones: int) -> None:
    plan = plan_fork(sizes, [False] * len(sizes), sources=sources, groups=[clones], small=0)
    for tensor, nbytes in enumerate(sizes):
        sent = [
            sum(p.nbytes for m in plan.messages if m.source == rank for p in m.pieces if p.tensor == tensor)
            for rank in range(sources)
        ]
        assert sum(sent) == nbytes
        assert max(sent) - min(sent) <= 2 * ALIGNMENT


def test_as_many_clones_as_ranks_talk_in_pairs() -> None:
    plan = plan_fork([1 << 20] * 3, [False] * 3, sources=4, groups=[4])
    assert plan.pairs() == [(rank, rank) for rank in range(4)]
    assert sorted(plan.gathered) == [0, 1, 2]


def test_what_is_local_goes_whole_from_the_counterpart() -> None:
    plan = plan_fork([1 << 20], [True], sources=2, groups=[3])
    assert [(m.source, m.clone, m.nbytes) for m in plan.messages] == [(0, 0, 1 << 20), (1, 1, 1 << 20), (0, 2, 1 << 20)]
    assert not plan.gathered
    assert plan.counterparts == (0, 1, 0)
    assert plan_fork([1], [True], sources=3, groups=[2, 4]).counterparts == (0, 1, 0, 1, 2, 0)


def test_small_tensors_share_messages_and_do_not_hold_up_large_ones() -> None:
    small, large = 1000, 1 << 20
    plan = plan_fork([small, large, small, small], [False] * 4, sources=1, groups=[1], bundle=1 << 20)
    assert [[piece.tensor for piece in message.pieces] for message in plan.messages] == [[1], [0, 2, 3]]


def test_one_clone_gathers_nothing() -> None:
    assert not plan_fork([1 << 20], [False], sources=3, groups=[1]).gathered


@pytest.mark.parametrize(
    ("sizes", "local", "sources", "clones", "message"),
    [
        ([1], [False], 0, 1, 64),
        ([1], [False], 1, 0, 64),
        ([-1], [False], 1, 1, 64),
        ([1], [], 1, 1, 64),
        ([1], [False], 1, 1, 63),
    ],
)
def test_wrong_arguments_are_refused(
    sizes: list[int], local: list[bool], sources: int, clones: int, message: int
) -> None:
    with pytest.raises(ValueError, match="fork: expected at least 1 rank and clone"):
        plan_fork(sizes, local, sources=sources, groups=[clones], message=message)
