"""Groups over Gloo: what its library does not do by itself. What all groups do is in test_groups*.py.

Rules
- Members are threads, as Gloo does not mind.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
from tensorvine.actors.collective import brought
from tensorvine.actors.collective.brought import code_of
from tensorvine.actors.collective.gloo import library as gloo_library
from tensorvine.actors.collective.gloo.agreeing import SMALL_BYTES
from tensorvine.actors.collective.gloo.backend import GlooBackend, GlooGroup
from tensorvine.actors.collective.gloo.messages import UNREAD
from tensorvine.actors.collective.gloo.store import Values
from tensorvine.actors.collective.links import PAYLOAD_BYTES, Frame
from tensorvine.actors.collective.member import TimedOutError
from tensorvine.actors.collective.standing import Standing
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError
from tensorvine.store.waiting import Deadline

from tests.support.gloo_groups import HOST, each, groups
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def three() -> Iterator[list[GlooGroup]]:
    """For tests that break nothing."""
    with groups(3) as joined:
        yield joined


@pytest.fixture(scope="module")
def two() -> Iterator[list[GlooGroup]]:
    """For tests that break nothing."""
    with groups(2) as joined:
        yield joined


# ---- what moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@pytest.mark.parametrize(
    "dtype",
    [np.float32, ml_dtypes.bfloat16, np.int64, np.int16, np.uint32, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_dtypes_that_gloo_lacks_are_reduced_as_well(three: list[GlooGroup], dtype: Any, op: Any) -> None:
    arrays = [np.array([rank + 1, 2 - rank, 0, 4 * rank], dtype) for rank in range(3)]
    wide = np.complex64 if dtype is np.complex64 else np.bool_ if dtype is np.bool_ else np.float64
    combine = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    expected = combine.reduce([array.astype(wide) for array in arrays])
    expected = (expected / 3 if op == "mean" else expected).astype(dtype)
    found = each(three, lambda group: group.all_reduce(arrays[group.rank], op))
    if op == "mean" and np.dtype(dtype).name in ("int64", "int16", "uint32", "bool"):
        assert all("expected floating-point or complex numbers for a mean" in str(error) for error in found)
        assert all(isinstance(error, TensorMismatchError) for error in found)
        return
    assert found == [None] * 3
    for array in arrays:
        assert array.tobytes() == expected.tobytes(), (array, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64], ids=["by Gloo", "by NumPy"])
def test_all_ranks_get_the_same_bits_each_time(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    arrays = [(rng.standard_normal(10_007) * 10.0 ** rng.integers(-6, 6, 10_007)).astype(dtype) for _ in range(4)]
    seen: set[bytes] = set()
    for _ in range(2):
        with groups(4) as members:
            for _ in range(2):
                copies = [array.copy() for array in arrays]
                each(members, lambda group, copies=copies: group.all_reduce(copies[group.rank], "mean"))
                seen |= {copy.tobytes() for copy in copies}
    assert len(seen) == 1


def test_messages_and_collectives_under_way_at_once_do_not_disturb_each_other(three: list[GlooGroup]) -> None:
    sizes = [7, 7, 0, 70_000, 1, 300_000, 7]

    def act(group: GlooGroup) -> None:
        left, right = (group.rank - 1) % 3, (group.rank + 1) % 3
        sent = [np.full(size, 10 * group.rank + place, np.uint8) for place, size in enumerate(sizes)]
        received = [np.zeros(size, np.uint8) for size in sizes]
        whole, total = np.full(9, group.rank), np.full(5, group.rank)
        works = []
        for place in range(len(sizes)):
            works.append(group.isend(sent[place], right))
            if place == 2:
                works.append(group.iall_gather(whole, [0, 4, 4, 9]))
            if place == 4:
                works.append(group.iall_reduce(total))
        works += [group.irecv(array, left) for array in received]
        works.append(group.ibarrier())
        for work in reversed(works):
            work.wait()
        for place, array in enumerate(received):
            assert (array == 10 * left + place).all(), place
        assert whole.tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2]
        assert total.tolist() == [3] * 5

    assert each(three, act) == [None] * 3


def test_more_small_messages_than_may_be_untaken_keep_the_order_of_the_calls(three: list[GlooGroup]) -> None:
    """Large ones are among them, and go another way."""
    sizes = [10] * (2 * UNREAD) + [SMALL_BYTES // 4 + 1, 10, SMALL_BYTES // 4, SMALL_BYTES] + [10] * UNREAD

    def act(group: GlooGroup) -> None:
        arrays = [np.full(size, place, np.int32) for place, size in enumerate(sizes)]
        if group.rank == 0:
            works = [group.isend(array, 1) for array in arrays]
            assert not any(work.ended for work in works)
            group.barrier()  # nobody receives before
            for work in works:
                work.wait()
        else:
            group.barrier()
        if group.rank == 1:
            for array in arrays:
                into = np.zeros_like(array)
                group.recv(into, 0)
                assert (into == array).all()

    assert each(three, act) == [None] * 3


def test_a_message_that_nobody_holds_arrives_all_the_same(three: list[GlooGroup]) -> None:
    def act(group: GlooGroup) -> Any:
        if group.rank == 0:
            group.isend(np.arange(200_000), 1)
            gc.collect()
        elif group.rank == 1:
            array = np.zeros(200_000, np.int64)
            group.recv(array, 0)
            return bool((array == np.arange(200_000)).all())
        return None

    assert each(three, act) == [None, True, None]
    each(three, lambda group: group.barrier())


def test_what_is_only_sent_may_be_read_only(three: list[GlooGroup]) -> None:
    def act(group: GlooGroup) -> list[int]:
        array = np.arange(4) if group.rank == 1 else np.zeros(4, np.int64)
        array.flags.writeable = group.rank != 1
        group.broadcast(array, root=1)
        if group.rank == 1:
            group.send(array[1:], 0)
        elif group.rank == 0:
            group.recv(array[:3], 1)
        return array.tolist()

    assert each(three, act) == [[1, 2, 3, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_done_tells_the_end_of_a_message_that_nobody_waits_for(three: list[GlooGroup]) -> None:
    there, array = threading.Event(), np.zeros(4)

    def act(group: GlooGroup) -> None:
        if group.rank == 0:
            work = group.irecv(array, 1)
            assert not work.done()
            there.set()
            eventually(work.done, "the message to end", pause=0.002)
            assert array.tolist() == [1] * 4
            work.wait()
            work.wait(timeout=0.001)
        elif group.rank == 1:
            assert there.wait(10)
            group.send(np.ones(4), 0)

    assert each(three, act) == [None] * 3


def test_groups_overlap_and_have_other_orders_of_the_same_members() -> None:
    with groups(2, name="same") as first, groups(2, name="same", epoch=1, order=[1, 0]) as second:
        turned = [second[1], second[0]]

        def act(group: GlooGroup) -> list[int]:
            other = turned[group.rank]
            mine, theirs = np.full(2, group.rank), np.full(2, group.rank)
            works = [group.ibroadcast(mine, root=0), other.ibroadcast(theirs, root=0)]
            for work in works:
                work.wait()
            return [*mine, *theirs]

        assert each(first, act) == [[0, 0, 1, 1]] * 2


def test_pytorch_s_default_group_is_left_alone(three: list[GlooGroup]) -> None:
    import torch.distributed

    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: group.isend(np.zeros(1), 3), "expected another rank from 0 to 2"),
        (lambda group: group.irecv(np.zeros(1), group.rank), "this rank"),
        (lambda group: group.ibroadcast(np.zeros(1), -1), "expected a root"),
        (lambda group: group.iall_reduce(np.zeros(1), "median"), "expected one of sum, mean"),
        (lambda group: group.iall_gather(np.zeros(3), [0, 2, 1, 3]), "expected 4 rising bounds"),
        (lambda group: group.iall_gather(np.zeros(3), [0, 1, 2, 4]), "expected 4 rising bounds"),
        (lambda group: group.iall_gather(np.zeros(3), [0, 3]), "expected 4 rising bounds"),
        (lambda group: group.ibarrier(timeout=0), "expected a finite timeout above 0"),
    ],
)
def test_wrong_arguments_are_refused_and_break_nothing(three: list[GlooGroup], call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(three[0])
    assert each(three, lambda group: group.barrier()) == [None] * 3


# ---- two ranks, large arrays: Gloo begins before they have told each other ----------------------------


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(dtype, op) for dtype in (np.float32, ml_dtypes.bfloat16) for op in ("sum", "mean", "min", "max", "product")]
    + [(dtype, op) for dtype in (np.int64, np.uint16) for op in ("sum", "min", "max", "product")],
)
def test_two_ranks_combine_large_arrays_as_small_ones(two: list[GlooGroup], dtype: Any, op: Any) -> None:
    rng = np.random.default_rng(5)
    arrays = [(rng.standard_normal(SMALL_BYTES + 3) * 9).astype(dtype) for _ in range(2)]
    short = [np.concatenate((array[:100], array[-100:])) for array in arrays]
    for batch in (arrays, short):
        assert each(two, lambda group, batch=batch: group.all_reduce(batch[group.rank], op)) == [None] * 2
        assert batch[0].tobytes() == batch[1].tobytes()
    assert arrays[0][:100].tobytes() + arrays[0][-100:].tobytes() == short[0].tobytes()


def test_many_large_collectives_of_two_ranks_at_once_keep_apart(two: list[GlooGroup]) -> None:
    def act(group: GlooGroup) -> None:
        arrays = [np.full(SMALL_BYTES, 10 * place + group.rank, np.int32) for place in range(9)]
        calls = [group.iall_reduce, lambda array: group.ibroadcast(array, 1), group.iall_gather]
        works = [calls[place % 3](array) for place, array in enumerate(arrays)]
        for work in reversed(works):
            work.wait()
        half = SMALL_BYTES // 2
        for place, array in enumerate(arrays):
            first, second = [(20 * place + 1,) * 2, (10 * place + 1,) * 2, (10 * place, 10 * place + 1)][place % 3]
            assert (array[:half] == first).all(), place
            assert (array[half:] == second).all(), place

    assert each(two, act) == [None] * 2


DIFFERENT: dict[str, tuple[Callable[[GlooGroup, Any], Any], Callable[[GlooGroup, Any], Any]]] = {
    "root": (lambda g, a: g.ibroadcast(a, 0), lambda g, a: g.ibroadcast(a, 1)),
    "both receive": (lambda g, a: g.ibroadcast(a, 1), lambda g, a: g.ibroadcast(a, 0)),
    "size": (lambda g, a: g.iall_reduce(a), lambda g, a: g.iall_reduce(a[1:])),
    "dtype": (lambda g, a: g.ibroadcast(a, 1), lambda g, a: g.ibroadcast(a.view(np.int32), 1)),
    "bounds": (lambda g, a: g.iall_gather(a, [0, 9, len(a)]), lambda g, a: g.iall_gather(a, [0, 8, len(a)])),
    "kind": (lambda g, a: g.iall_gather(a), lambda g, a: g.iall_reduce(a)),
}
"""What ranks 0 and 1 start."""


@pytest.mark.parametrize("case", DIFFERENT)
def test_two_ranks_that_differ_write_nothing_there_nor_behind(case: str) -> None:
    arrays = [np.full(SMALL_BYTES, rank + 1, np.float32) for rank in range(2)]
    behind = [array.copy() for array in arrays]

    def act(group: GlooGroup) -> None:
        work = DIFFERENT[case][group.rank](group, arrays[group.rank])
        with pytest.raises(TensorMismatchError, match="expected the same of all ranks"):
            group.all_gather(behind[group.rank])
        work.wait()

    with groups(2) as members:
        assert [type(error) for error in each(members, act)] == [TensorMismatchError] * 2
    for rank in range(2):
        assert (arrays[rank] == rank + 1).all()
        assert (behind[rank] == rank + 1).all()


# ---- what it opens, and what members tell each other to connect ---------------------------------------


def test_nothing_listens_but_gloo_s_own_end_of_each_member() -> None:
    """PyTorch's store would tell and do whatever a stranger asks, at a port, for as long as the group lives."""

    def ports() -> set[int]:
        here = psutil.Process().net_connections("tcp")
        return {one.laddr.port for one in here if one.status == psutil.CONN_LISTEN}

    before = ports()
    with groups(3) as members, ExitStack() as stack:
        opened = ports() - before
        assert len(opened) == len(members)
        for port in opened:
            stack.enter_context(socket.create_connection((HOST, port), 60)).sendall(b"x" * 4)
        array = np.ones(3, np.float32)
        assert each(members, lambda group: group.all_reduce(array.copy())) == [None] * 3


def test_who_fails_while_gloo_connects_is_named_at_once() -> None:
    """The others do not wait for it until their time is over."""

    class Failing(GlooBackend):
        def _attach(self, *_: Any) -> None:
            raise OSError("no device")

    backends = [GlooBackend(HOST), GlooBackend(HOST), Failing(HOST)]
    offers = [backend.offer() for backend in backends]
    endpoints = [offer.endpoint for offer in offers]

    def join(rank: int) -> Exception:
        with pytest.raises((PeerLostError, OSError)) as caught:
            backends[rank].join(offers[rank], "f", epoch=0, rank=rank, size=3, endpoints=endpoints, timeout=600.0)
        return caught.value

    with ThreadPoolExecutor(3) as pool:
        found = [str(error) for error in pool.map(join, range(3))]
    assert found[2] == "no device"
    assert all("connect: rank 2 left" in text for text in found[:2]), found


class TestValues:
    def pair(self) -> tuple[Values, Values, list[Frame]]:
        sent: list[Frame] = []
        return Values(Standing("g"), [1], sent.append), Values(Standing("g"), [0], ignore), sent

    def test_long_ones_come_in_pieces_one_after_another(self) -> None:
        here, there, sent = self.pair()
        long = os.urandom(3 * PAYLOAD_BYTES)
        here.set("0/0", long)
        here.set("0/1", b"")
        assert all(len(frame.payload) <= PAYLOAD_BYTES for frame in sent)
        for frame in sent:
            there.take(0, frame)
        for one in (here, there):
            assert one.get("0/0", Deadline.after(0)) == long
            assert one.get("0/1", Deadline.after(0)) == b""

    def test_who_waits_for_one_is_told_when_it_comes_when_its_setter_is_lost_and_when_the_time_is_over(self) -> None:
        here, there, sent = self.pair()
        with ThreadPoolExecutor(2) as pool:
            coming, lost = (pool.submit(there.get, key, Deadline.after(600)) for key in ("a", "b"))
            here.set("a", b"1")
            there.take(0, sent[0])
            assert coming.result(60) == b"1"
            assert not lost.done()
            with there._standing.changed:
                there._standing.lose(0, "died")
            with pytest.raises(ConnectionError, match="'b'"):
                lost.result(60)
        with pytest.raises(TimedOutError, match="'c'"):
            here.get("c", Deadline.after(0))


def ignore(_: Frame) -> None:
    pass


def test_a_member_that_dies_before_it_connects_is_missed_by_name() -> None:
    backend = GlooBackend(HOST)
    offers = [backend.offer() for _ in range(3)]
    endpoints = [offer.endpoint for offer in offers]
    offers[2].close()

    def act(rank: int) -> Any:
        with pytest.raises(OperationTimeoutError, match="expected rank 2 to connect"):
            backend.join(offers[rank], "missing", epoch=0, rank=rank, size=3, endpoints=endpoints, timeout=1.0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))


def test_a_member_whose_peer_is_gone_names_it() -> None:
    backend = GlooBackend(HOST)
    offers = [backend.offer() for _ in range(2)]
    endpoints = [offer.endpoint for offer in offers]
    offers[0].close()
    with pytest.raises(PeerLostError, match="expected rank 0 at 127"):
        backend.join(offers[1], "gone", epoch=0, rank=1, size=2, endpoints=endpoints, timeout=5.0)


def test_tags_differ_where_numbers_or_sizes_do() -> None:
    tags = {
        gloo_library._tag(number, nbytes, kind)
        for number in range(200)
        for nbytes in (*range(200), 1 << 20, (1 << 20) + 1, 1 << 28, 1 << 40)
        for kind in (gloo_library.MESSAGE, gloo_library.PART)
    }
    assert len(tags) == 200 * 204 * 2
    dtypes = [code_of(name) for name in brought._names()]
    assert len({gloo_library._tag(7, 100, gloo_library.MESSAGE, code) for code in dtypes}) == len(set(dtypes))
    assert min(tags) >= 0
    assert max(tags) < gloo_library._NOBODYS < 1 << 31
