"""Gradients averaged beside the backward pass: over a real group of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.group import Group
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.actors.training.reducer import Reducer, buckets_of
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError

WAIT_S = 30.0
SOON_S = 0.2
SIZES = (3, 1000, 5, 0, 40_000, 2, 7, 1)
"""Elements of gradients, in the order of the backward pass."""
BUCKET = 4096

_serial = count(1)


@contextmanager
def groups(size: int, timeout: float = WAIT_S) -> Iterator[list[Group]]:
    """The ends of a group, one for each rank, all in this process."""
    name, rendezvous = f"reducer-{next(_serial)}", LocalRendezvous()

    def join(rank: int) -> Group:
        return connect(name, rank, size, backend="shared", timeout=timeout, rendezvous=rendezvous)

    with ThreadPoolExecutor(size) as pool:
        joined = list(pool.map(join, range(size)))
    try:
        yield joined
    finally:
        for group in joined:
            group.close()


@pytest.fixture
def pair() -> Iterator[list[Group]]:
    with groups(2) as joined:
        yield joined


def at_all(joined: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(joined)) as pool:
        return list(pool.map(work, joined))


def gradients_of(rank: int, step: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return [rng.normal(size=length).astype(dtype) for length in SIZES]


def reducer_of(group: Group | None, **arguments: Any) -> Reducer:
    return Reducer(group, [4 * length for length in SIZES], BUCKET, **arguments)


# ---- buckets -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["float32", "int8"])), max_size=30), st.integers(1, 60))
def test_buckets_hold_each_gradient_once_in_order_and_one_dtype(gradients, most):
    sizes, dtypes = [size for size, _ in gradients], [dtype for _, dtype in gradients]
    buckets = buckets_of(sizes, dtypes, most)
    assert sorted(index for bucket in buckets for index in bucket.members) == list(range(len(sizes)))
    for bucket in buckets:
        assert list(bucket.members) == sorted(bucket.members)
        assert len({dtypes[index] for index in bucket.members}) == 1
        assert bucket.nbytes == sum(sizes[index] for index in bucket.members)
        assert bucket.nbytes <= most or len(bucket.members) == 1
    assert [bucket.members[-1] for bucket in buckets] == sorted(bucket.members[-1] for bucket in buckets)


@pytest.mark.parametrize(
    "arguments",
    [{"sizes": [-1]}, {"bucket_bytes": 0}, {"dtypes": ["float32"]}, {"names": ["a"]}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="reducer: expected"):
        Reducer(None, **{"sizes": [1, 2], **arguments})


# ---- means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_mean_step_after_step_in_whatever_order_gradients_come(size):
    def train(group: Group) -> list[list[np.ndarray]]:
        rng, steps = np.random.default_rng(group.rank), []
        with reducer_of(group) as reducer:
            for step in range(4):
                mine = gradients_of(group.rank, step)
                reducer.begin()
                for index in rng.permutation(len(mine)):
                    reducer.ready(index, mine[index])
                for index in rng.permutation(len(mine)):
                    reducer.wait(index, WAIT_S)
                reducer.wait_all(WAIT_S)
                steps.append(mine)
        return steps

    with groups(size) as joined:
        found = at_all(joined, train)
    for step in range(4):
        expected = [np.mean(parts, axis=0) for parts in zip(*(gradients_of(r, step) for r in range(size)), strict=True)]
        for index, mean in enumerate(expected):
            np.testing.assert_allclose(found[0][step][index], mean, rtol=1e-5, atol=1e-6)
            for rank in range(1, size):
                assert np.array_equal(found[rank][step][index], found[0][step][index])


def test_the_same_gradients_give_the_same_bits_in_another_run():
    def once() -> list[list[np.ndarray]]:
        def train(group: Group) -> list[np.ndarray]:
            mine = gradients_of(group.rank, 0)
            with reducer_of(group) as reducer:
                reducer.begin()
                for index, gradient in enumerate(mine):
                    reducer.ready(index, gradient)
                reducer.wait_all()
            return mine

        with groups(3) as joined:
            return at_all(joined, train)

    one, other = once(), once()
    for mine, theirs in zip(one, other, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_gradients_of_several_dtypes(pair):
    dtypes = ["float32", "float64", "float32", "float16", "float64"]

    def train(group: Group) -> list[np.ndarray]:
        mine = [np.full(6, group.rank + index, dtype) for index, dtype in enumerate(dtypes)]
        with Reducer(group, [array.nbytes for array in mine], dtypes=dtypes) as reducer:
            reducer.begin()
            for index, gradient in enumerate(mine):
                reducer.ready(index, gradient.reshape(2, 3))
            reducer.wait_all()
        return mine

    for found in at_all(pair, train):
        assert [array.tolist() for array in found] == [[index + 0.5] * 6 for index in range(len(dtypes))]
        assert [array.dtype.name for array in found] == dtypes


def test_a_bucket_is_reduced_while_the_rest_of_the_backward_pass_goes_on(pair):
    def train(group: Group) -> float:
        early, late = np.full(8, float(group.rank)), np.zeros(8)
        with Reducer(group, [64, 64], 64, dtypes=["float64"] * 2) as reducer:
            reducer.begin()
            reducer.ready(0, early)
            reducer.wait(0, WAIT_S)
            mean = early[0]
            reducer.ready(1, late)
            reducer.wait_all(WAIT_S)
        return mean

    assert at_all(pair, train) == [0.5, 0.5]


def test_a_single_rank_keeps_what_it_has():
    with groups(1) as (alone,):
        for group in (None, alone):
            reducer, mine = reducer_of(group), gradients_of(0, 0)
            before = set(threading.enumerate())
            reducer.begin()
            for index, gradient in enumerate(mine):
                reducer.ready(index, gradient)
                reducer.wait(index, 0.0)
            reducer.wait_all(0.0)
            reducer.close()
            assert set(threading.enumerate()) <= before
            assert all(np.array_equal(a, b) for a, b in zip(mine, gradients_of(0, 0), strict=True))


# ---- trouble -------------------------------------------------------------------------------------------------


def test_ready_returns_while_no_peer_is_there(pair):
    mine = gradients_of(0, 0)
    with reducer_of(pair[0]) as reducer:
        reducer.begin()
        began = time.monotonic()
        for index, gradient in enumerate(mine):
            reducer.ready(index, gradient)
        assert time.monotonic() - began < WAIT_S / 10
        with pytest.raises(OperationTimeoutError, match=r"expected the mean of gradient '0' .* other ranks are late"):
            reducer.wait(0, SOON_S)
        pair[0].close()


def test_a_gradient_that_never_comes_is_named(pair):
    with reducer_of(pair[0], names=[f"layer{index}" for index in range(len(SIZES))]) as reducer:
        reducer.begin()
        reducer.ready(1, np.zeros(SIZES[1], np.float32))
        with pytest.raises(
            OperationTimeoutError, match="'layer0', 'layer2', 'layer3', 'layer4' and 3 more are missing"
        ):
            reducer.wait(1, SOON_S)
        with pytest.raises(OperationTimeoutError, match=r"rank 0: expected the mean of all gradients within 0.2 s"):
            reducer.wait_all(SOON_S)


def test_a_step_that_was_not_finished_lets_no_other_begin(pair):
    with reducer_of(pair[0]) as reducer:
        reducer.begin()
        reducer.ready(0, np.zeros(SIZES[0], np.float32))
        with pytest.raises(PeerLostError, match=r"expected all gradients of the previous step; '1', .* are missing"):
            reducer.begin()


def test_a_peer_that_leaves_fails_every_wait_and_the_next_step(pair):
    with reducer_of(pair[0]) as reducer:
        reducer.begin()
        for index, gradient in enumerate(gradients_of(0, 0)):
            reducer.ready(index, gradient)
        pair[1].close()
        for wait in (lambda: reducer.wait(0), lambda: reducer.wait(4), reducer.wait_all, reducer.begin):
            with pytest.raises(PeerLostError, match="rank 1"):
                wait()


def test_a_peer_that_is_silent_is_named():
    with groups(2) as joined:
        joined[0].timeout = SOON_S
        with reducer_of(joined[0]) as reducer:
            reducer.begin()
            for index, gradient in enumerate(gradients_of(0, 0)):
                reducer.ready(index, gradient)
            with pytest.raises(OperationTimeoutError, match="rank 1"):
                reducer.wait_all(WAIT_S)


@pytest.mark.parametrize(
    ("index", "array", "error", "match"),
    [
        (len(SIZES), np.zeros(3, np.float32), ValueError, "expected a gradient's index below 8; found 8"),
        (-1, np.zeros(1, np.float32), ValueError, "expected a gradient's index below 8; found -1"),
        (1, np.zeros(3, np.float32), TensorMismatchError, "gradient '1': expected 4000 bytes of float32; found 12"),
        (0, np.zeros(3, np.int32), TensorMismatchError, "gradient '0': .* of float32; found 12 of int32"),
        (0, np.zeros(6, np.float32)[::2], TensorMismatchError, "gradient '0'"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_and_may_come_again(pair, index, array, error, match):
    with reducer_of(pair[0]) as reducer:
        reducer.begin()
        with pytest.raises(error, match=match):
            reducer.ready(index, array)
        for place, gradient in enumerate(gradients_of(0, 0)):
            reducer.ready(place, gradient)
        pair[0].close()


def test_a_gradient_comes_once_a_step_and_in_a_step(pair):
    with reducer_of(pair[0]) as reducer:
        with pytest.raises(ValueError, match=r"gradient '0': expected it once; found it before begin\(\)"):
            reducer.ready(0, np.zeros(3, np.float32))
        reducer.begin()
        reducer.ready(0, np.zeros(3, np.float32))
        with pytest.raises(ValueError, match="gradient '0': expected it once; found it twice"):
            reducer.ready(0, np.zeros(3, np.float32))


def test_closing_wakes_who_waits(pair):
    reducer = reducer_of(pair[0])
    reducer.begin()
    reducer.ready(0, np.zeros(3, np.float32))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reducer.wait, 0, WAIT_S)
        reducer.close()
        with pytest.raises(PeerLostError, match="expected an open reducer; it was closed"):
            waiting.result(WAIT_S)
    reducer.close()
    with pytest.raises(PeerLostError, match="closed"):
        reducer.begin()
