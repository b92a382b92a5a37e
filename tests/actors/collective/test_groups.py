"""What every collective group does, whatever carries its bytes: one contract for all back ends.

Rules
- Members are threads of this process. What needs a member that is a process is in test_group_failures.py.
- Groups that no test breaks are shared by the tests of this file.
"""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.actors.collective.connect import connect, renew
from tensorvine.actors.collective.group import OPS, Group
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError

from tests.support.groups import MIB, at_once, each, gpus, groups, held, join, new_name, wait_until
from tests.support.stand_in_cuda import TYPES, stand_in_gpus

BACKENDS = ("shared", "gloo", "nccl")
NUMPY = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]
NUMPY += ["float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"]
OTHERS = [name for name, item in vars(ml_dtypes).items() if isinstance(item, type) and issubclass(item, np.generic)]
DTYPES = [np.dtype(name) for name in NUMPY] + [np.dtype(getattr(ml_dtypes, name)) for name in sorted(OTHERS)]
FRACTIONS = [dtype for dtype in DTYPES if "float" in dtype.name or "complex" in dtype.name]
NUMPY_NAMES = {np.dtype(name).name for name in NUMPY} - {"float16"}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "gloo":
        pytest.importorskip("torch")
    with stand_in_gpus() if request.param == "nccl" and gpus() < 2 else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def joined(backend: str) -> Iterator[Callable[[int], list[Group]]]:
    """Groups by size, for tests that break nothing."""
    made: dict[int, list[Group]] = {}
    with ExitStack() as stack:

        def of(size: int) -> list[Group]:
            if size not in made:
                made[size] = stack.enter_context(groups(backend, size))
            return made[size]

        yield of


def numbers(dtype: np.dtype[Any], length: int, rank: int) -> np.ndarray:
    """Numbers that every dtype has, other ones on each rank: 0 and 1 mostly."""
    values = (np.arange(length) // (rank + 1) + rank) % 2
    return values.astype(dtype)


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    nan = (found != found) & (expected != expected)
    return found.dtype == expected.dtype and bool(((found == expected) | nan).all())


# ---- what moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 1001, MIB + 1])
def test_broadcast(joined, size, length):
    def act(group: Group) -> None:
        for root in range(size):
            array = np.full(length, group.rank * 10 + root, np.uint8)
            group.broadcast(array, root)
            assert (array == root * 11).all()

    assert each(joined(size), act) == [None] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 1001, MIB + 1])
def test_all_gather_of_even_parts(joined, size, length):
    expected = np.arange(length, dtype=np.int32)

    def act(group: Group) -> None:
        array = np.full(length, -1, np.int32)
        part, rest = divmod(length, size)
        first = group.rank * part + min(group.rank, rest)
        end = first + part + (group.rank < rest)
        array[first:end] = expected[first:end]
        group.all_gather(array)
        assert same(array, expected)

    assert each(joined(size), act) == [None] * size


@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        (1, [0, 5]),
        (2, [0, 0, 7]),
        (3, [2, 2, 2, 2]),
        (3, [0, 5, 5, 6]),
        (3, [1, 1, 70_000, 300_001]),
        (4, [0, 40_000, 40_000, 40_000, 40_003]),
    ],
)
def test_all_gather_of_uneven_and_empty_parts_leaves_the_rest_as_it_is(joined, size, bounds):
    def act(group: Group) -> None:
        array = np.full(bounds[-1] + 3, -1, np.int16)
        array[bounds[group.rank] : bounds[group.rank + 1]] = group.rank
        expected = np.full_like(array, -1)
        for rank in range(size):
            expected[bounds[rank] : bounds[rank + 1]] = rank
        group.all_gather(array, np.array(bounds))
        assert same(array, expected)

    assert each(joined(size), act) == [None] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 1001, MIB // 2 + 1])
def test_all_reduce(joined, size, length):
    arrays = [np.arange(length, dtype=np.float32) % 977 + rank for rank in range(size)]
    expected = np.sum(arrays, axis=0, dtype=np.float32)

    def act(group: Group) -> None:
        array = arrays[group.rank].copy()
        group.all_reduce(array)
        assert same(array, expected)

    assert each(joined(size), act) == [None] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [0, 1, 1001, 8 << 10, (8 << 10) + 1, MIB + 1, 5 * MIB])
def test_messages_arrive_in_their_order(joined, size, length):
    def act(group: Group) -> None:
        right, left = (group.rank + 1) % size, (group.rank - 1) % size
        sends = [group.isend(np.full(length, 10 * group.rank + turn, np.uint8), right) for turn in range(3)]
        for turn in range(3):
            array = np.zeros(length, np.uint8)
            group.recv(array, left)
            assert (array == 10 * left + turn).all()
        for work in sends:
            work.wait()

    assert each(joined(size), act) == [None] * size


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_is_carried(joined, backend, dtype):
    def act(group: Group) -> None:
        array = numbers(dtype, 101, group.rank)
        into = np.zeros_like(array)
        work = group.isend(array, 1 - group.rank)
        group.recv(into, 1 - group.rank)
        work.wait()
        assert same(into, numbers(dtype, 101, 1 - group.rank))
        group.broadcast(into, 1)
        assert same(into, numbers(dtype, 101, 0))
        array[40:] = 0
        whole = np.concatenate([array, array])
        group.all_gather(whole, [101 * group.size // 2 - 101, 101, 202])
        assert same(whole[:40], numbers(dtype, 40, 0))

    assert each(joined(2), act) == [None] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_is_reduced(joined, backend, dtype):
    combine = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
    wide = np.dtype(dtype if dtype.name in NUMPY_NAMES else np.complex64 if "complex" in dtype.name else np.float32)

    def act(group: Group) -> None:
        for op in OPS:
            array = numbers(dtype, 103, group.rank)
            if op == "mean" and dtype not in FRACTIONS:
                with pytest.raises(TensorMismatchError, match="complex numbers for a mean; found"):
                    group.all_reduce(array, op)
                continue
            if backend == "nccl" and dtype.name not in TYPES:
                with pytest.raises(TensorMismatchError, match="all_reduce: expected one of int8, uint8"):
                    group.all_reduce(array, op)
                continue
            group.all_reduce(array, op)
            expected = combine[op].reduce([numbers(dtype, 103, rank).astype(wide) for rank in range(3)], dtype=wide)
            expected = (expected / 3 if op == "mean" else expected).astype(dtype)
            assert same(array, expected), (op, array, expected)

    assert each(joined(3), act) == [None] * 3


def test_numbers_without_end_are_reduced_to_what_they_are(joined):
    def act(group: Group) -> list[float]:
        array = np.array([3e38, np.inf, np.nan, 60_000], np.float32)
        small = np.array([60_000, -np.inf], np.float16)
        group.all_reduce(array)
        group.all_reduce(small)
        return [*array.tolist(), *small.tolist()]

    for found in each(joined(2), act):
        np.testing.assert_array_equal(found, [np.inf, np.inf, np.nan, 120_000, np.inf, -np.inf])


@pytest.mark.parametrize("op", ["sum", "mean", "product"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_all_ranks_get_the_same_bits_each_time(backend, joined, dtype, op):
    if backend == "nccl" and dtype not in TYPES:
        pytest.skip(f"NCCL reduces no {dtype}")
    rng = np.random.default_rng(5)
    arrays = [(rng.standard_normal(300_007) * 10.0 ** rng.integers(-4, 4, 300_007)).astype(dtype) for _ in range(3)]
    seen: set[bytes] = set()

    def act(group: Group) -> None:
        array = arrays[group.rank].copy()
        group.all_reduce(array, op)
        seen.add(array.tobytes())

    for _ in range(3):
        assert each(joined(3), act) == [None] * 3
    with groups(backend, 3) as others:
        assert each(others, act) == [None] * 3
    assert len(seen) == 1


def test_a_part_of_an_array_is_carried_in_place(joined):
    def act(group: Group) -> None:
        array = np.zeros((6, 50_000), np.float32)
        whole = array.reshape(-1)
        if group.rank == 0:
            array[2:4] = 1
            group.send(array[2:4], 1)
            group.send(whole[7:9], 1)
        else:
            group.recv(array[3:5], 0)
            group.recv(whole[-2:], 0)
            assert (array[3:5] == 1).all()
            assert array.sum() == 100_000
        array[:] = group.rank
        group.broadcast(array[1], 1)
        group.all_reduce(whole[50_000:50_003])
        assert array[1, :3].tolist() == [2] * 3
        assert (array[1, 3:] == 1).all()
        assert (array[[0, 2, 3, 4, 5]] == group.rank).all()

    assert each(joined(2), act) == [None] * 2


def test_arrays_of_pytorch_and_tensorflow(joined):
    torch = pytest.importorskip("torch")
    tensorflow = pytest.importorskip("tensorflow")

    def act(group: Group) -> None:
        if group.rank == 0:
            group.send(tensorflow.range(5.0), 1)
            group.send(torch.arange(5, dtype=torch.bfloat16), 1)
            group.broadcast(tensorflow.constant([7, 8]), 0)
            return
        tensor, other = torch.zeros(2, 5), torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        group.recv(tensor[1], 0)
        group.recv(other, 0)
        assert tensor.tolist() == [[0] * 5, [0, 1, 2, 3, 4]]
        assert other.tolist() == [0, 1, 2, 3, 4]
        pair = torch.zeros(2, dtype=torch.int32)
        group.broadcast(pair, 0)
        assert pair.tolist() == [7, 8]
        with pytest.raises(TensorMismatchError, match="expected an array that can be written to"):
            group.irecv(tensorflow.zeros(3), 0)

    assert each(joined(2), act) == [None] * 2

    def reduce(group: Group) -> list[float]:
        tensor = torch.full((3,), group.rank + 1.0, dtype=torch.bfloat16)
        group.all_reduce(tensor, "mean")
        return tensor.tolist()

    assert each(joined(2), reduce) == [[1.5] * 3] * 2


def test_matrices_and_masked_arrays_are_their_memory(joined):
    def act(group: Group) -> list[list[float]]:
        matrix, masked = np.zeros((2, 2)).view(np.matrix), np.ma.masked_array([0.0, 0.0], [True, False])
        matrix[group.rank] = group.rank + 1
        masked.data[group.rank] = group.rank + 1
        group.all_gather(matrix)
        group.all_gather(masked)
        return [matrix.tolist(), masked.data.tolist()]

    assert each(joined(2), act) == [[[[1, 1], [2, 2]], [1, 2]]] * 2


def test_what_is_only_read_may_be_read_only(joined):
    array = np.arange(3000)
    array.flags.writeable = False

    def act(group: Group) -> None:
        if group.rank == 0:
            group.send(array, 1)
            group.broadcast(array, 0)
        else:
            into = np.zeros_like(array)
            group.recv(into, 0)
            group.broadcast(into, 0)
            assert same(into, array)

    assert each(joined(2), act) == [None] * 2


def test_memory_that_only_the_group_keeps_is_kept(joined):
    def act(group: Group) -> None:
        if group.rank == 0:
            for turn in range(4):
                group.isend(np.full(200_000, turn), 1)
            gc.collect()
            group.barrier()
        else:
            group.barrier()
            for turn in range(4):
                array = np.zeros(200_000, np.int64)
                group.recv(array, 0)
                assert (array == turn).all()
        group.barrier()

    assert each(joined(2), act) == [None] * 2


# ---- many at once -------------------------------------------------------------------------------------

LENGTHS = st.sampled_from([0, 1, 7, 1001, 8 << 10, (8 << 10) + 1, 100_003, MIB + 1])
RANKS = st.integers(0, 2)
STEP = st.one_of(
    st.tuples(st.just("message"), LENGTHS, st.permutations(range(3)).map(lambda order: tuple(order[:2]))),
    st.tuples(st.just("broadcast"), LENGTHS, RANKS),
    st.tuples(st.just("all_gather"), LENGTHS, st.lists(st.integers(0, 60), min_size=2, max_size=2).map(sorted)),
    st.tuples(st.just("all_reduce"), LENGTHS, st.sampled_from(["sum", "min", "max"])),
    st.tuples(st.just("barrier"), st.just(0), st.none()),
)
PROGRAM = st.lists(st.tuples(STEP, st.tuples(*[st.integers(-1, 4)] * 3)), min_size=1, max_size=14)
"""Steps in an order that all ranks keep; and for each rank, how many steps behind it waits for the end: -1, not now."""


class Player:
    """One rank's way through a program, beside what a plain model says must come of it."""

    def __init__(self, group: Group, program: list[Any]) -> None:
        self._group = group
        self._program = program
        self._works: list[Any] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []

    def play(self) -> None:
        for turn, (step, lags) in enumerate(self._program):
            self._start(turn, *step)
            lag = lags[self._group.rank]
            if 0 <= lag < len(self._works):
                self._works[-1 - lag].wait()
        for work in reversed(self._works):
            work.wait()
            assert work.done()
        for turn, (found, expected) in enumerate(self._arrays):
            np.testing.assert_array_equal(found, expected, f"{turn}: {self._program}")

    def _start(self, turn: int, kind: str, length: int, detail: Any) -> None:
        group, rank = self._group, self._group.rank
        before = [(np.arange(length) * 3 + 50 * one + turn) % 199 for one in range(3)]
        array = before[rank].astype(np.int32)
        if kind == "message":
            source, target = detail
            if rank == source:
                self._note(group.isend(array, target), array, before[source])
            elif rank == target:
                self._note(group.irecv(array, source), array, before[source])
        elif kind == "broadcast":
            self._note(group.ibroadcast(array, detail), array, before[detail])
        elif kind == "all_gather":
            bounds = [0, *(length * cut // 60 for cut in detail), length]
            expected = np.concatenate([before[one][bounds[one] : bounds[one + 1]] for one in range(3)])
            self._note(group.iall_gather(array, bounds), array, expected)
        elif kind == "all_reduce":
            combine = {"sum": np.add, "min": np.minimum, "max": np.maximum}[detail]
            self._note(group.iall_reduce(array, detail), array, combine.reduce(before))
        else:
            self._note(group.ibarrier(), array, array)

    def _note(self, work: Any, found: np.ndarray, expected: np.ndarray) -> None:
        self._works.append(work)
        self._arrays.append((found, expected))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=PROGRAM)
def test_any_program_of_operations_does_what_a_plain_model_does(backend, program):
    with groups(backend, 3) as members:
        assert each(members, lambda group: Player(group, program).play()) == [None] * 3


def test_threads_of_a_member_send_at_once(joined):
    """Each message is whole, and each is received once, whichever thread was first."""
    count, length = 20, 20_000

    def act(group: Group) -> Any:
        def send(thread: int) -> None:
            for turn in range(count):
                group.send(np.full(length, 100 * thread + turn), 1)

        if group.rank == 0:
            return at_once([lambda: send(0), lambda: send(1), lambda: [group.barrier() for _ in range(count)]])
        came: list[int] = []

        def receive() -> None:
            for _ in range(2 * count):
                array = np.zeros(length, np.int64)
                group.recv(array, 0)
                assert (array == array[0]).all()
                came.append(int(array[0]))

        at_once([receive, lambda: [group.barrier() for _ in range(count)]])
        return came

    came = each(joined(2), act)[1]
    assert sorted(came) == [100 * thread + turn for thread in range(2) for turn in range(count)]
    assert [value for value in came if value < 100] == list(range(count))


def test_groups_overlap_in_other_orders_of_the_same_members(backend):
    meeting, name = LocalRendezvous(), new_name()

    def member(place: int) -> list[int]:
        with (
            join(backend, place, 3, name=name, rendezvous=meeting) as first,
            join(backend, 2 - place, 3, name=f"{name}-turned", rendezvous=meeting) as second,
            join(backend, (place + 1) % 3, 3, name=name, epoch=1, rendezvous=meeting) as third,
        ):
            arrays = [np.full(50_000, place) for _ in range(3)]
            works = [group.ibroadcast(array, 0) for group, array in zip((third, first, second), arrays, strict=True)]
            for work in reversed(works):
                work.wait()
            second.barrier()
            return [int(array[-1]) for array in arrays]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(member, range(3))) == [[2, 0, 2]] * 3


# ---- joining and leaving ------------------------------------------------------------------------------


def test_members_join_and_leave_by_the_next_epoch(backend):
    meeting, name = LocalRendezvous(), new_name()
    known = {"rendezvous": meeting, "timeout": 15.0}

    def total(group: Group) -> int:
        array = np.ones(1000, np.int32)
        group.all_reduce(array)
        assert (array == array[0]).all()
        return int(array[0])

    def stays(rank: int) -> list[int]:
        first = join(backend, rank, 3, name=name, **known)
        found = [total(first)]
        second = renew(first, 1 - rank, 2, rendezvous=meeting)  # in another order
        assert (second.epoch, second.size, second.rank, second.timeout) == (1, 2, 1 - rank, 15.0)
        with pytest.raises(PeerLostError, match="this member has left"):
            first.barrier()
        found.append(total(second))
        with renew(second, rank, 4, timeout=14.0, rendezvous=meeting) as third:
            assert (third.name, third.timeout, third.backend) == (name, 14.0, backend)
            return [*found, total(third)]

    def goes() -> list[int]:
        with join(backend, 2, 3, name=name, **known) as group:
            return [total(group)]

    def comes(rank: int) -> list[int]:
        with join(backend, rank, 4, name=name, epoch=2, **known) as group:
            return [total(group)]

    found = at_once([lambda: stays(0), lambda: stays(1), goes, lambda: comes(2), lambda: comes(3)])
    assert found == [[3, 2, 4], [3, 2, 4], [3], [4], [4]]


def test_who_does_not_come_is_named_in_time(backend):
    meeting, name = LocalRendezvous(), new_name()
    begun = time.monotonic()
    found = at_once(
        [lambda rank=rank: join(backend, rank, 4, name=name, rendezvous=meeting, timeout=1.0) for rank in (0, 2)]
    )
    assert time.monotonic() - begun < 15
    assert [type(error) for error in found] == [OperationTimeoutError] * 2
    assert any(f"group '{name}', epoch 0" in str(error) and "1, 3 did not" in str(error) for error in found)
    with groups(backend, 2, name=name, rendezvous=meeting) as members:  # nothing is left of it
        assert each(members, lambda group: group.barrier()) == [None] * 2


def test_two_who_come_as_the_same_rank_are_told_apart(backend):
    meeting, name = LocalRendezvous(), new_name()
    twice = [lambda: join(backend, 0, 2, name=name, rendezvous=meeting, timeout=20.0)] * 2
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(call) for call in twice]
        wait_until(lambda: any(future.done() for future in first), "one to be refused")
        second = join(backend, 1, 2, name=name, rendezvous=meeting)
    errors = [future.exception() for future in first]
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "ValueError"]
    assert any(f"group '{name}', epoch 0: expected one rank 0" in str(error) for error in errors)
    second.close()
    next(future.result() for future in first if future.exception() is None).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "size": 2}, "expected a rank from 0 to size - 1; found rank 2 of 2"),
        ({"rank": -1, "size": 2}, "found rank -1 of 2"),
        ({"rank": 0, "size": 0}, "found rank 0 of 0"),
        ({"rank": 0, "size": 1, "backend": "mpi"}, "backend: expected auto, shared, gloo, nccl; found 'mpi'"),
        ({"rank": 0, "size": 1, "timeout": 0}, "expected a time above 0"),
        ({"rank": 0, "size": 1, "timeout": float("nan")}, "expected a time above 0"),
        ({"rank": 0, "size": 1, "epoch": -1}, "an epoch from 0; found 20.0 s, epoch -1"),
    ],
)
def test_a_join_with_wrong_arguments_is_refused(arguments, message):
    options = {"backend": "shared", "timeout": 20.0, "rendezvous": LocalRendezvous(), **arguments}
    with pytest.raises(ValueError, match=message):
        connect("wrong", options.pop("rank"), options.pop("size"), **options)


def test_members_that_want_different_things_hear_of_it():
    meeting = {"rendezvous": LocalRendezvous(), "timeout": 5.0}
    found = at_once(
        [
            lambda: connect("mixed", 0, 2, backend="shared", **meeting),
            lambda: connect("mixed", 1, 2, backend="auto", **meeting),
        ]
    )
    assert "expected back end 'shared' of all ranks; found 'auto' of rank 1" in str(found[0])
    assert "expected back end 'auto' of all ranks; found 'shared' of rank 0" in str(found[1])


def test_auto_is_shared_memory_on_one_machine():
    with groups("auto", 3) as members:
        assert [group.backend for group in members] == ["shared"] * 3


class FarAway(LocalRendezvous):
    """Shows rank 1's endpoint as that of another machine."""

    def exchange(self, key: str, rank: int, size: int, endpoint: Any, timeout: float) -> list[dict[str, Any]]:
        endpoints = super().exchange(key, rank, size, endpoint, timeout)
        if "machine" in endpoints[1].get("endpoint", {}):
            endpoints[1] = {**endpoints[1], "endpoint": {**endpoints[1]["endpoint"], "machine": "another"}}
        return endpoints


def test_auto_is_gloo_where_a_member_is_elsewhere_and_says_why_once(caplog):
    pytest.importorskip("torch")
    caplog.set_level(logging.INFO)
    with groups("auto", 3, name="far", rendezvous=FarAway()) as members:
        assert [group.backend for group in members] == ["gloo"] * 3
        assert each(members, lambda group: group.barrier()) == [None] * 3
    said = [record.getMessage() for record in caplog.records if "Gloo" in record.getMessage()]
    assert len(said) == 1
    assert "group 'far', epoch 0" in said[0]
    assert "rank 1 is on another machine" in said[0]


# ---- wrong arguments ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Group], Any], type[Exception], str]] = {
    "no such rank": (lambda g: g.isend(np.zeros(1), 2), ValueError, "expected another rank from 0 to 1; found it, 2"),
    "a negative rank": (lambda g: g.irecv(np.zeros(1), -1), ValueError, "expected another rank from 0 to 1"),
    "itself": (lambda g: g.isend(np.zeros(1), g.rank), ValueError, "found this rank"),
    "no such root": (lambda g: g.ibroadcast(np.zeros(1), 2), ValueError, "expected a root from 0 to 1; found 2"),
    "no such op": (lambda g: g.iall_reduce(np.zeros(1), "median"), ValueError, "expected one of sum, mean"),
    "too few bounds": (lambda g: g.iall_gather(np.zeros(4), [0, 4]), ValueError, "expected 3 rising bounds"),
    "falling bounds": (lambda g: g.iall_gather(np.zeros(4), [0, 3, 2]), ValueError, "expected 3 rising bounds"),
    "bounds beyond": (lambda g: g.iall_gather(np.zeros(4), [0, 3, 5]), ValueError, "rising bounds from 0 to 4"),
    "bounds below": (lambda g: g.iall_gather(np.zeros(4), [-1, 3, 4]), ValueError, "expected 3 rising bounds"),
    "no time": (lambda g: g.isend(np.zeros(1), 1 - g.rank, timeout=0), ValueError, "expected a timeout above 0"),
    "negative time": (lambda g: g.ibarrier(timeout=-1), ValueError, "expected a timeout above 0"),
    "no number of a time": (lambda g: g.ibarrier(timeout=float("nan")), ValueError, "expected a timeout above 0"),
    "time without end": (lambda g: g.ibarrier(timeout=float("inf")), ValueError, "expected a timeout above 0"),
    "not contiguous": (
        lambda g: g.isend(np.zeros((4, 4))[:, 1], 1 - g.rank),
        TensorMismatchError,
        "send: expected a contiguous",
    ),
    "every other": (
        lambda g: g.iall_reduce(np.zeros(8)[::2]),
        TensorMismatchError,
        "all_reduce: expected a contiguous",
    ),
    "read-only": (
        lambda g: g.irecv(np.frombuffer(b"abcd", np.uint8), 1 - g.rank),
        TensorMismatchError,
        "recv: expected an array that can be written to",
    ),
    "read-only to gather": (
        lambda g: g.iall_gather(np.frombuffer(b"abcd", np.uint8)),
        TensorMismatchError,
        "can be written to",
    ),
    "objects": (
        lambda g: g.isend(np.array([{}, None]), 1 - g.rank),
        TensorMismatchError,
        "expected an array of numbers",
    ),
    "text": (lambda g: g.ibroadcast(np.array(["a"]), 0), TensorMismatchError, "expected an array of numbers"),
    "a list": (lambda g: g.isend([1, 2], 1 - g.rank), TensorMismatchError, "found list"),
    "a number": (lambda g: g.irecv(np.float32(1), 1 - g.rank), TensorMismatchError, "expected"),
    "other byte order": (lambda g: g.isend(np.zeros(2, ">f4"), 1 - g.rank), TensorMismatchError, "byte order"),
    "a mean of whole numbers": (
        lambda g: g.iall_reduce(np.zeros(2, int), "mean"),
        TensorMismatchError,
        "for a mean; found int64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_and_break_nothing(joined, case):
    call, error, message = REFUSED[case]
    members = joined(2)
    with pytest.raises(error, match=message) as caught:
        call(members[1])
    assert members[1].name in str(caught.value)
    assert each(members, lambda group: group.barrier()) == [None] * 2


# ---- what breaks a group ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "into", "told"),
    [
        (np.zeros(100, np.uint8), np.zeros(50, np.uint8), "expected 50 bytes; found 100"),
        (np.zeros(50, np.uint8), np.zeros(100, np.uint8), "expected 100 bytes; found 50"),
        (np.zeros(0, np.uint8), np.zeros(1, np.uint8), "expected 1 bytes; found 0"),
        (np.zeros(MIB, np.uint8), np.zeros(100, np.uint8), f"expected 100 bytes; found {MIB}"),
        (np.zeros(100, np.uint8), np.zeros(MIB, np.uint8), f"expected {MIB} bytes; found 100"),
        (np.zeros(3 * MIB, np.uint8), np.zeros(MIB, np.uint8), f"expected {MIB} bytes; found {3 * MIB}"),
        (np.zeros(9, np.float32), np.zeros(9, np.int32), "expected int32; found float32"),
        (np.zeros(MIB, np.float32), np.zeros(MIB, np.int32), "expected int32; found"),
    ],
    ids=["less room", "more room", "nothing", "far less room", "far more room", "long", "dtype", "dtype of a long one"],
)
def test_a_message_of_another_size_or_dtype_fails_at_both_ends(backend, sent, into, told):
    def act(group: Group) -> Any:
        if group.rank == 0:
            group.send(sent + 1, 1)
            group.barrier()  # a small message is sent once it is on its way
        else:
            group.recv(into, 0)

    with groups(backend, 2) as members:
        found = each(members, act)
        assert [type(error) for error in found] == [TensorMismatchError] * 2, found
        assert all(f"message from rank 0 to rank 1: {told}" in str(error) for error in found), found
        assert not into.any()
        with pytest.raises(TensorMismatchError, match="message from rank 0"):
            members[0].barrier()


LENGTHS_OF_WAYS = {"small": 10, "large": MIB}
"""In numbers of 4 bytes: back ends carry them in different ways."""
DIFFER: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str]] = {
    "more at the root": (
        lambda g, a: g.broadcast(a[1:], 1),
        lambda g, a: g.broadcast(a, 1),
        "broadcast of rank 1, float32 of shape ({less},)",
        "broadcast of rank 1, float32 of shape ({n},)",
    ),
    "less at the root": (
        lambda g, a: g.broadcast(a, 1),
        lambda g, a: g.broadcast(a[1:], 1),
        "broadcast of rank 1, float32 of shape ({n},)",
        "broadcast of rank 1, float32 of shape ({less},)",
    ),
    "dtype of a broadcast": (
        lambda g, a: g.broadcast(a, 0),
        lambda g, a: g.broadcast(a.view(np.int32), 0),
        "broadcast of rank 0, float32 of shape ({n},)",
        "broadcast of rank 0, int32 of shape ({n},)",
    ),
    "shape": (
        lambda g, a: g.broadcast(a.reshape(2, -1), 2),
        lambda g, a: g.broadcast(a.reshape(-1, 2), 2),
        "broadcast of rank 2, float32 of shape (2, {half})",
        "broadcast of rank 2, float32 of shape ({half}, 2)",
    ),
    "root": (
        lambda g, a: g.broadcast(a, 0),
        lambda g, a: g.broadcast(a, 1),
        "broadcast of rank 0, float32 of shape ({n},)",
        "broadcast of rank 1, float32 of shape ({n},)",
    ),
    "size of a reduction": (
        lambda g, a: g.all_reduce(a),
        lambda g, a: g.all_reduce(a[1:]),
        "all_reduce (sum), float32 of shape ({n},)",
        "all_reduce (sum), float32 of shape ({less},)",
    ),
    "dtype of a reduction": (
        lambda g, a: g.all_reduce(a),
        lambda g, a: g.all_reduce(a.view(np.int32)),
        "all_reduce (sum), float32 of shape ({n},)",
        "all_reduce (sum), int32 of shape ({n},)",
    ),
    "reduction": (
        lambda g, a: g.all_reduce(a),
        lambda g, a: g.all_reduce(a, "max"),
        "all_reduce (sum), float32 of shape ({n},)",
        "all_reduce (max), float32 of shape ({n},)",
    ),
    "size of a whole": (
        lambda g, a: g.all_gather(a),
        lambda g, a: g.all_gather(a[:-2]),
        "all_gather of parts from 0, ",
        "all_gather of parts from 0, ",
    ),
    "bounds": (
        lambda g, a: g.all_gather(a, [0, 4, 6, len(a)]),
        lambda g, a: g.all_gather(a, [0, 5, 6, len(a)]),
        "all_gather of parts from 0, 4, 6, {n}, float32",
        "all_gather of parts from 0, 5, 6, {n}, float32",
    ),
    "kind": (
        lambda g, a: g.all_gather(a),
        lambda g, a: g.all_reduce(a),
        "all_gather of parts from 0, ",
        "all_reduce (sum), float32 of shape ({n},)",
    ),
    "barrier": (
        lambda g, a: g.barrier(),
        lambda g, a: g.all_reduce(a),
        "barrier",
        "all_reduce (sum), float32 of shape ({n},)",
    ),
    "larger call": (
        lambda g, a: g.all_reduce(a, part_of="reduce to rank 0"),
        lambda g, a: g.all_reduce(a, part_of="reduce to rank 2"),
        "reduce to rank 0 by all_reduce (sum), float32 of shape ({n},)",
        "reduce to rank 2 by all_reduce (sum), float32 of shape ({n},)",
    ),
}
"""What ranks 0 and 2 do, and what rank 1 does; and what errors say of both."""


ALL_WAYS = ("more at the root", "size of a reduction", "bounds", "kind")
"""Cases that are tried with all lengths; the others with small ones."""


@pytest.mark.parametrize(
    ("case", "length"),
    [(case, length) for case in DIFFER for length in LENGTHS_OF_WAYS if case in ALL_WAYS or length == "small"],
)
def test_collectives_that_differ_are_told_to_all_before_anything_is_written(backend, case, length):
    """Who brought what is said; and all of them live, and find the group broken."""
    most, one, *texts = DIFFER[case]
    n = LENGTHS_OF_WAYS[length]
    texts = [text.format(n=n, less=n - 1, half=n // 2) for text in texts]
    arrays = [np.full(n, rank + 1, np.float32) for rank in range(3)]
    with groups(backend, 3) as members:
        found = each(members, lambda g: (one if g.rank == 1 else most)(g, arrays[g.rank]))
        assert [type(error) for error in found] == [TensorMismatchError] * 3, found
        for error in found:
            assert "expected the same of all ranks; found " in str(error)
            assert all(text in str(error) for text in texts), error
            assert re.search(r"at ranks? 1\b", str(error)), error
            assert re.search(r"at ranks? (0|2|0, 2)\b", str(error)), error
        assert [array.tolist() == [rank + 1] * n for rank, array in enumerate(arrays)] == [True] * 3
        refused = each(members, lambda group: group.barrier())
        assert [type(error) for error in refused] == [TensorMismatchError] * 3, refused


@pytest.mark.parametrize("length", LENGTHS_OF_WAYS)
def test_what_differs_fails_all_that_is_under_way_behind_it(backend, length):
    def act(group: Group) -> None:
        first, second, third = (np.full(LENGTHS_OF_WAYS[length], group.rank, np.int32) for _ in range(3))
        group.iall_reduce(first)
        work = group.iall_reduce(second, "min" if group.rank else "max")
        for wait in (lambda: group.all_reduce(third), work.wait):
            with pytest.raises(TensorMismatchError, match=r"all_reduce \((max|min)\)"):
                wait()
        assert (second == group.rank).all()
        assert (third == group.rank).all()

    with groups(backend, 2) as members:
        assert each(members, act) == [None] * 2


def test_what_is_very_long_in_words_is_compared_whole(backend):
    def act(group: Group) -> None:
        group.all_reduce(np.zeros(3), part_of="x" * 5000 + str(group.rank))

    with groups(backend, 2) as members:
        found = each(members, act)
        assert [type(error) for error in found] == [TensorMismatchError] * 2, found
        assert all(len(str(error)) < 1000 for error in found)


def test_a_broken_group_refuses_with_the_first_reason(backend):
    with groups(backend, 3) as members:
        late = members[0].irecv(np.zeros(MIB), 1, timeout=0.2)
        other = members[0].irecv(np.zeros(3), 2)
        with pytest.raises(OperationTimeoutError, match="rank 1") as first:
            late.wait()
        assert late.done()
        for call in (late.wait, other.wait, lambda: members[0].isend(np.zeros(1), 2), members[0].barrier):
            with pytest.raises(OperationTimeoutError) as again:
                call()
            assert str(again.value) == str(first.value)
        for rank in (1, 2):
            with pytest.raises(OperationTimeoutError, match="told by rank 0"):
                members[rank].recv(np.zeros(3), 0)
        begun = time.monotonic()
        with pytest.raises(OperationTimeoutError, match="told by"):
            members[1].barrier()
        assert time.monotonic() - begun < 15


def test_a_collective_that_not_all_begin_names_who_did_not(backend):
    with groups(backend, 3) as members:
        found = each(members, lambda group: None if group.rank == 1 else group.barrier(timeout=1.0))
        assert [type(error) for error in found] == [OperationTimeoutError, type(None), OperationTimeoutError]
        assert all("barrier: expected rank 1 to take part" in str(found[rank]) for rank in (0, 2)), found


def test_a_wait_may_be_shorter_than_the_operation_s_time(backend):
    with groups(backend, 2) as members:
        begun = time.monotonic()
        with pytest.raises(OperationTimeoutError, match="rank 1"):
            members[0].ibarrier().wait(timeout=0.1)
        assert time.monotonic() - begun < 15


def test_what_failed_is_not_written_to_any_more(backend):
    """An array is given up while its bytes come; afterwards it stays as it is."""
    with groups(backend, 2, timeout=2.0) as members:
        sent, into = np.ones(64 * MIB, np.uint8), np.zeros(64 * MIB, np.uint8)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(lambda: each(members[:1], lambda group: group.send(sent, 1)))
            work = members[1].irecv(into, 0)
            wait_until(lambda: bool(into[0]) or work.done(), "bytes to come")
            try:
                work.wait(timeout=1e-4)
            except OperationTimeoutError:
                stand = into.copy()
                sending.result()
                assert np.array_equal(into, stand)
            else:
                assert into.all()


def test_who_left_is_named_and_harms_nothing_that_goes_on_without_it(backend):
    with groups(backend, 3) as members:
        members[2].close()

        def act(group: Group) -> None:
            array = np.full(MIB, group.rank, np.uint8)
            group.send(array, 1) if group.rank == 0 else group.recv(array, 0)
            assert not array.any()

        assert each(members[:2], act) == [None] * 2
        lost = each(members[:2], lambda group: group.all_reduce(np.ones(3)))
        assert [type(error) for error in lost] == [PeerLostError] * 2
        assert all("rank 2 left" in str(error) for error in lost)


def test_a_member_may_leave_as_soon_as_its_own_part_is_done(backend):
    for _ in range(5):
        with groups(backend, 3) as members:

            def act(group: Group) -> None:
                array = np.full(1000 + MIB * (group.rank == 3), group.rank, np.int32)
                group.all_reduce(array)
                assert (array == 3).all()
                group.barrier()
                group.close()

            assert each(members, act) == [None] * 3


def test_closing_ends_the_waits_of_other_threads(backend):
    with groups(backend, 2) as members:
        works = [members[0].irecv(np.zeros(MIB), 1), members[0].isend(np.zeros(MIB), 1), members[0].ibarrier()]
        begun = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(work.wait) for work in works]
            members[0].close()
            for wait in waiting:
                with pytest.raises(PeerLostError, match="this member has left"):
                    wait.result()
        members[0].close()
        assert all(work.done() for work in works)
        with pytest.raises(PeerLostError, match="this member has left"):
            members[0].barrier()
        with pytest.raises(PeerLostError, match="rank 0 left"):
            members[1].recv(np.zeros(MIB), 0)
        assert time.monotonic() - begun < 15


def test_closing_twice_at_once_and_while_others_start_harms_nobody(backend):
    for _ in range(5):
        with groups(backend, 2) as members:
            began = time.monotonic()

            def start(group: Group = members[0]) -> None:
                while True:
                    group.barrier(timeout=10.0)

            found = at_once([start, start, lambda: each(members[1:], start), members[0].close, members[0].close])
            assert [type(error) for error in found[:2]] == [PeerLostError] * 2
            assert "rank 0 left" in str(found[2][0])
            assert time.monotonic() - began < 15


def test_closed_groups_leave_no_threads_and_no_files(backend):
    def play() -> None:
        with groups(backend, 3) as members:

            def act(group: Group) -> None:
                group.all_reduce(np.ones(MIB))
                array = np.zeros(3 * MIB, np.uint8)
                group.send(array, 1) if group.rank == 0 else group.rank == 1 and group.recv(array, 0)

            assert each(members, act) == [None] * 3
        with groups(backend, 2) as members, pytest.raises(OperationTimeoutError):
            members[0].recv(np.zeros(4), 1, timeout=0.05)
        with pytest.raises(OperationTimeoutError):
            join(backend, 0, 2, name=new_name(), rendezvous=LocalRendezvous(), timeout=0.05)

    play()
    gc.collect()
    before = held()
    for _ in range(3):
        play()
    gc.collect()
    wait_until(lambda: held() <= before, f"{before} threads and files; found {held()}")
