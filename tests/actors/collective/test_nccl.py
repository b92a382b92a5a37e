"""Groups over NCCL: their logic on a stand-in of CUDA; on GPUs, where there are any, all of it.

Rules
- Members are threads. One that "dies" has its connections ended without a word.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tensorvine.actors.collective.nccl import cuda
from tensorvine.actors.collective.nccl.backend import NcclBackend, NcclGroup
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError, TensorVineError

from tests.support.groups import gpus
from tests.support.stand_in_cuda import TYPES, DeviceArray, StandIn, World
from tests.support.waiting import eventually

HOST = "127.0.0.1"
_serial = count()


@contextmanager
def groups(backends: list[NcclBackend], timeout: float = 20.0) -> Iterator[list[NcclGroup]]:
    size, name = len(backends), f"test-{next(_serial)}"
    offers = [backend.offer() for backend in backends]
    endpoints = [offer.endpoint for offer in offers]
    with ThreadPoolExecutor(size) as pool:
        joining = [
            pool.submit(
                backends[rank].join,
                offers[rank],
                name,
                epoch=0,
                rank=rank,
                size=size,
                endpoints=endpoints,
                timeout=timeout,
            )
            for rank in range(size)
        ]
    joined = [future.result() for future in joining]
    try:
        yield joined
    finally:
        for group in joined:
            group.close()


def stand_ins(size: int, world: World | None = None, types: dict[str, int] | None = None) -> list[NcclBackend]:
    world = world or World()
    return [NcclBackend(HOST, StandIn(world, f"gpu-{rank}", types)) for rank in range(size)]


def each(members: list[NcclGroup], act: Callable[[NcclGroup], Any]) -> list[Any]:
    """Let all members act at once; an error of ours is its result."""

    def run(group: NcclGroup) -> Any:
        try:
            return act(group)
        except TensorVineError as exc:
            return exc

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def die(group: NcclGroup) -> None:
    """End a member's connections as the end of its process would."""
    for link in group._connections._links.values():
        link.socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def three() -> Iterator[list[NcclGroup]]:
    """For tests that break nothing."""
    with groups(stand_ins(3)) as joined:
        yield joined


def on_device(values: np.ndarray) -> DeviceArray:
    return DeviceArray(values)


def on_host(values: np.ndarray) -> np.ndarray:
    return values


def mixed(values: np.ndarray) -> Any:
    """Members that keep their arrays here and there."""
    return DeviceArray(values) if next(_serial) % 2 else values


PLACES = pytest.mark.parametrize("place", [on_device, on_host, mixed])


# ---- what moves ---------------------------------------------------------------------------------------


@PLACES
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.bool_, np.complex128])
def test_messages_carry_any_dtype_in_the_order_of_the_calls(three: list[NcclGroup], place: Any, dtype: Any) -> None:
    def act(group: NcclGroup) -> None:
        left, right = (group.rank - 1) % 3, (group.rank + 1) % 3
        sizes = (5, 0, 1000, 5)
        sent = [np.full(size, (group.rank + 2 * n) % 5, dtype) for n, size in enumerate(sizes)]
        received = [np.full(size, 4, dtype) for size in sizes]
        works = [group.isend(place(array), right) for array in sent]
        works += [group.irecv(place(array), left) for array in received]
        for work in works:
            work.wait()
        for n, array in enumerate(received):
            assert array.tobytes() == np.full(sizes[n], (left + 2 * n) % 5, dtype).tobytes()

    assert each(three, act) == [None] * 3


def test_messages_and_collectives_wait_for_nothing_that_they_have_nothing_to_do_with(three: list[NcclGroup]) -> None:
    def act(group: NcclGroup) -> Any:
        peers = [rank for rank in range(3) if rank != group.rank]
        mine = np.full(1000, group.rank, np.int32)
        theirs = {peer: np.full(1000, -1, np.int32) for peer in peers}
        works = [group.isend(DeviceArray(mine), peer) for peer in peers]
        group.barrier()  # nobody receives yet
        total = np.full(3, group.rank + 1.0)
        group.all_reduce(DeviceArray(total), "mean")
        works += [group.irecv(DeviceArray(theirs[peer]), peer) for peer in reversed(peers)]
        for work in works:
            work.wait()
            assert work.done()
        assert all((array == peer).all() for peer, array in theirs.items())
        return total.tolist()

    assert each(three, act) == [[2.0] * 3] * 3


@PLACES
@pytest.mark.parametrize("root", range(3))
def test_broadcasts(three: list[NcclGroup], place: Any, root: int) -> None:
    arrays = [np.full(9, 10 * rank, np.int16) for rank in range(3)]
    arrays[root].flags.writeable = False
    assert each(three, lambda group: group.broadcast(place(arrays[group.rank]), root)) == [None] * 3
    assert [array.tolist() for array in arrays] == [[10 * root] * 9] * 3


@PLACES
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 7], [1, 2, 6, 6], [0, 0, 0, 7]])
def test_all_gathers_in_place(three: list[NcclGroup], place: Any, bounds: list[int] | None) -> None:
    edges = bounds or [0, 3, 5, 7]
    expected = np.full(7, -1, ml_dtypes.bfloat16)
    for rank in range(3):
        expected[edges[rank] : edges[rank + 1]] = rank

    def act(group: NcclGroup) -> bytes:
        array = np.full(7, -1, ml_dtypes.bfloat16)
        array[edges[group.rank] : edges[group.rank + 1]] = group.rank
        group.all_gather(place(array), bounds)
        return array.tobytes()

    assert each(three, act) == [expected.tobytes()] * 3


@PLACES
@pytest.mark.parametrize(("op", "expected"), [("sum", 9), ("mean", 3), ("min", 2), ("max", 4), ("product", 24)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_all_reduces(three: list[NcclGroup], place: Any, op: Any, expected: int, dtype: Any) -> None:
    arrays = [np.full(6, rank + 2, dtype) for rank in range(3)]
    assert each(three, lambda group: group.all_reduce(place(arrays[group.rank]), op)) == [None] * 3
    assert [array.tolist() for array in arrays] == [[expected] * 6] * 3


def test_what_is_not_there_yet_is_waited_for(three: list[NcclGroup]) -> None:
    ready, values = threading.Event(), np.zeros(4)

    def act(group: NcclGroup) -> Any:
        if group.rank == 0:
            work = group.isend(DeviceArray(values, ready), 1)
            assert not work.done()
            values[:] = 7
            ready.set()
            work.wait()
        elif group.rank == 1:
            found = np.zeros(4)
            group.recv(found, 0)
            return found.tolist()
        return None

    assert each(three, act)[1] == [7.0] * 4


def test_a_group_of_one_has_nobody_to_wait_for() -> None:
    with groups(stand_ins(1)) as (alone,):
        array = np.arange(3.0)
        for work in (alone.ibarrier(), alone.ibroadcast(array), alone.iall_gather(array), alone.iall_reduce(array)):
            work.wait()
        assert array.tolist() == [0, 1, 2]


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda group: group.isend(np.zeros(1), 3), ValueError, "expected another rank from 0 to 2"),
        (lambda group: group.irecv(np.zeros(1), group.rank), ValueError, "this rank"),
        (lambda group: group.ibroadcast(np.zeros(1), 3), ValueError, "expected a root"),
        (lambda group: group.iall_reduce(np.zeros(1), "median"), ValueError, "expected one of sum, mean"),
        (lambda group: group.iall_gather(np.zeros(3), [0, 2, 1, 3]), ValueError, "expected 4 rising bounds"),
        (lambda group: group.ibarrier(timeout=-1), ValueError, "expected a finite timeout above 0"),
        (lambda group: group.iall_reduce(np.zeros(3, np.int16)), TensorMismatchError, "expected one of int8, uint8"),
        (lambda group: group.iall_reduce(np.zeros(3, np.int32), "mean"), TensorMismatchError, "for a mean"),
        (lambda group: group.isend(DeviceArray(np.zeros((4, 4))[:, :2]), 1), TensorMismatchError, "contiguous"),
        (lambda group: group.isend([1, 2], 1), TensorMismatchError, "array of numbers"),
    ],
)
def test_wrong_arguments_are_refused_and_break_nothing(
    three: list[NcclGroup], call: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        call(three[0])
    assert each(three, lambda group: group.barrier()) == [None] * 3


def test_what_is_read_only_is_sent_and_not_written_to(three: list[NcclGroup]) -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(TensorMismatchError, match="read-only"):
        three[0].irecv(DeviceArray(array), 1)


def test_dtypes_that_an_older_nccl_does_not_reduce_are_refused() -> None:
    older = {name: number for name, number in TYPES.items() if name != "bfloat16"}
    with groups(stand_ins(1, types=older)) as (alone,), pytest.raises(TensorMismatchError, match="found bfloat16"):
        alone.iall_reduce(np.zeros(3, ml_dtypes.bfloat16))


def test_two_ranks_on_one_gpu_are_refused_by_all() -> None:
    world = World()
    backends = [NcclBackend(HOST, StandIn(world, name)) for name in ("a", "b", "a")]
    offers = [backend.offer() for backend in backends]
    endpoints = [offer.endpoint for offer in offers]
    for rank, backend in enumerate(backends):
        with pytest.raises(ValueError, match=r"a GPU for each rank; found ranks 0 and 2 on the same one \(a\)"):
            backend.join(offers[rank], "shared", epoch=0, rank=rank, size=3, endpoints=endpoints, timeout=5.0)


# ---- what fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "expected"), [(8, 16), (16, 8), (8, 0), (0, 8)])
def test_a_message_of_another_size_is_an_error_for_both(sent: int, expected: int) -> None:
    def act(group: NcclGroup) -> None:
        if group.rank == 0:
            group.send(DeviceArray(np.zeros(sent, np.uint8)), 1)
            group.barrier()  # an empty message has left by now
        else:
            group.recv(DeviceArray(np.zeros(expected, np.uint8)), 0)

    with groups(stand_ins(2)) as members:
        begun = time.monotonic()
        found = each(members, act)
        assert [type(error) for error in found] == [TensorMismatchError] * 2, found
        assert all(f"expected {expected} bytes; found {sent}" in str(error) for error in found)
        assert time.monotonic() - begun < 10


def is_broken(group: NcclGroup) -> bool:
    with group.standing.changed:
        return group.standing.reason is not None or group.standing.lacks(range(group.size))


def test_who_is_silent_is_named_and_the_first_reason_stays() -> None:
    with groups(stand_ins(3)) as members:
        late = each(members, lambda group: None if group.rank == 1 else group.barrier(timeout=1.0))
        assert [type(error) for error in late] == [OperationTimeoutError, type(None), OperationTimeoutError]
        assert all("barrier: expected rank 1 to take part" in str(late[rank]) for rank in (0, 2))
        for group in members:
            eventually(lambda group=group: is_broken(group), "who was not late hears of it")
            with pytest.raises(OperationTimeoutError, match="barrier: expected rank 1"):
                group.barrier(timeout=5)


@pytest.mark.parametrize("call", ["recv", "send"])
def test_a_message_that_nobody_sends_or_takes_names_who_should_have(call: str) -> None:
    with groups(stand_ins(2)) as members:
        work = getattr(members[0], f"i{call}")(DeviceArray(np.zeros(4)), 1)
        assert not work.done()
        with pytest.raises(OperationTimeoutError, match=f"{call} of 32 bytes: expected rank 1"):
            work.wait(timeout=0.05)
        assert work.done()


PHASES: dict[str, Callable[[NcclGroup], Any]] = {
    "before it sends": lambda group: group.irecv(DeviceArray(np.zeros(4)), 2),
    "before it receives": lambda group: group.isend(DeviceArray(np.zeros(4)), 2),
    "before a collective": lambda group: group.iall_reduce(DeviceArray(np.zeros(4))),
    "in nothing of it": lambda group: group.irecv(DeviceArray(np.zeros(4)), 1 - group.rank),
}


@pytest.mark.parametrize("phase", PHASES)
def test_who_died_is_named_by_all(phase: str) -> None:
    with groups(stand_ins(3)) as members:
        works = [PHASES[phase](group) for group in members[:2]]
        die(members[2])
        if phase == "in nothing of it":
            with pytest.raises(PeerLostError, match="rank 2 died"):
                members[0].barrier()
        begun = time.monotonic()
        for work in works:
            with pytest.raises(PeerLostError, match="rank 2 died"):
                work.wait()
        assert time.monotonic() - begun < 10
        for group in members[:2]:
            with pytest.raises(PeerLostError, match="rank 2 died"):
                group.barrier()


def test_what_goes_on_without_who_left_does() -> None:
    with groups(stand_ins(3)) as members:
        members[2].close()
        array = np.zeros(3)

        def act(group: NcclGroup) -> None:
            if group.rank == 0:
                group.send(np.ones(3), 1)
            else:
                group.recv(array, 0)

        assert each(members[:2], act) == [None] * 2
        assert array.tolist() == [1] * 3
        with pytest.raises(PeerLostError, match="rank 2 left"):
            members[0].barrier()


def test_what_nccl_reports_is_an_error_of_the_operation() -> None:
    world = World()
    with groups(stand_ins(2, world)) as members:
        work = members[0].irecv(DeviceArray(np.zeros(4)), 1)
        members[1].isend(DeviceArray(np.zeros(4), threading.Event()), 0)
        world.trouble = "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
        with pytest.raises(PeerLostError, match=r"NCCL_ERROR_REMOTE_ERROR|reported by rank 1"):
            work.wait()


def test_closing_ends_waits_and_threads() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with groups(stand_ins(2)) as members:
        work = members[0].irecv(DeviceArray(np.zeros(4)), 1)
        failed: queue.SimpleQueue[str] = queue.SimpleQueue()

        def wait() -> None:
            try:
                work.wait()
            except PeerLostError as exc:
                failed.put(str(exc))

        waiting = threading.Thread(target=wait)
        waiting.start()
        members[0].close()
        members[0].close()
        waiting.join(5)
        assert "this member has left" in failed.get(timeout=1)
        with pytest.raises(PeerLostError, match="this member has left"):
            members[0].barrier()
    end = time.monotonic() + 5
    while {thread.name for thread in threading.enumerate()} - before and time.monotonic() < end:
        time.sleep(0.005)
    assert {thread.name for thread in threading.enumerate()} <= before


# ---- GPUs ---------------------------------------------------------------------------------------------


def real(size: int) -> list[NcclBackend]:
    import cupy

    backends: list[NcclBackend] = []
    for device in range(size):
        with cupy.cuda.Device(device):
            backends.append(NcclBackend(HOST, cuda.Cuda()))
    return backends


@pytest.mark.skipif(gpus() < 1, reason="needs CuPy and a GPU")
@pytest.mark.parametrize("where", ["device", "host"])
def test_nccl_itself_with_one_rank(where: str) -> None:
    import cupy

    with groups(real(1)) as (alone,):
        values = np.arange(5, dtype=np.float32)
        array = cupy.asarray(values) if where == "device" else values.copy()
        alone.barrier()
        for op in ("sum", "mean", "min", "max", "product"):
            alone.all_reduce(array, op)
        alone.broadcast(array)
        alone.all_gather(array)
        found = array.get() if where == "device" else array
        assert found.tolist() == values.tolist()


@pytest.mark.skipif(gpus() < 1, reason="needs CuPy and a GPU")
def test_a_gpu_has_one_name_and_refuses_a_second_rank() -> None:
    backends = [*real(1), *real(1)]
    offers = [backend.offer() for backend in backends]
    endpoints = [offer.endpoint for offer in offers]
    for rank, backend in enumerate(backends):
        with pytest.raises(ValueError, match="a GPU for each rank"):
            backend.join(offers[rank], "one-gpu", epoch=0, rank=rank, size=2, endpoints=endpoints, timeout=5.0)


@pytest.mark.skipif(gpus() < 2, reason="needs CuPy and two GPUs")
def test_nccl_itself_with_two_ranks() -> None:
    import cupy

    def act(group: NcclGroup) -> list[float]:
        with cupy.cuda.Device(group.rank):
            array = cupy.full(1 << 20, group.rank + 1, cupy.float32)
            group.all_reduce(array, "mean")
            halves = cupy.full(1 << 20, group.rank, cupy.float32)
            group.all_gather(halves)
            received = cupy.zeros(1 << 20, cupy.float32)
            works = [group.isend(array, 1 - group.rank), group.irecv(received, 1 - group.rank)]
            for work in works:
                work.wait()
            host = np.full(1 << 23, group.rank, np.float32)
            group.broadcast(host, root=1)
            return [float(x) for x in (array[0], halves[0], halves[-1], received[-1], host[0], host[-1])]

    with groups(real(2)) as members:
        assert each(members, act) == [[1.5, 0, 1, 1.5, 1, 1]] * 2
