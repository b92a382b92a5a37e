"""What every collective group does, whatever carries its bytes: one contract for all back ends.

Rules
- Members are threads of this process. What needs a member that is a process is in test_group_failures.py.
- Here is what moves, by one operation and by many at once. Joining and leaving are in test_groups_joining.py, what is
  refused and what breaks a group in test_groups_broken.py.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.actors.collective.group import OPS, Group
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.store.errors import TensorMismatchError

from tests.support.groups import MIB, at_once, each, groups, join, new_name
from tests.support.stand_in_cuda import TYPES

NUMPY = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]
NUMPY += ["float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"]
OTHERS = [name for name, item in vars(ml_dtypes).items() if isinstance(item, type) and issubclass(item, np.generic)]
DTYPES = [np.dtype(name) for name in NUMPY] + [np.dtype(getattr(ml_dtypes, name)) for name in sorted(OTHERS)]
FRACTIONS = [dtype for dtype in DTYPES if "float" in dtype.name or "complex" in dtype.name]
NUMPY_NAMES = {np.dtype(name).name for name in NUMPY} - {"float16"}


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
        with pytest.raises(TensorMismatchError, match="expected a writable array"):
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
