"""What a collective group refuses, what breaks it and what does not, on all back ends.

Rules
- Members are threads of this process. What needs a member that is a process is in test_group_failures.py.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.brought import brought
from tensorvine.actors.collective.group import Group
from tensorvine.actors.collective.links import WORDS_BYTES
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError

from tests.support.forked import in_child, outcomes
from tests.support.groups import MIB, TIMEOUT_S, at_once, each, groups, held, join, new_name
from tests.support.waiting import eventually

# ---- wrong arguments ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Group], Any], type[Exception], str]] = {
    "no such rank": (lambda g: g.isend(np.zeros(1), 2), ValueError, "expected another rank from 0 to 1; found 2"),
    "a negative rank": (lambda g: g.irecv(np.zeros(1), -1), ValueError, "expected another rank from 0 to 1"),
    "itself": (lambda g: g.isend(np.zeros(1), g.rank), ValueError, "found this rank"),
    "no such root": (lambda g: g.ibroadcast(np.zeros(1), 2), ValueError, "expected a root from 0 to 1; found 2"),
    "no such op": (lambda g: g.iall_reduce(np.zeros(1), "median"), ValueError, "expected one of sum, mean"),
    "too few bounds": (lambda g: g.iall_gather(np.zeros(4), [0, 4]), ValueError, "expected 3 rising bounds"),
    "falling bounds": (lambda g: g.iall_gather(np.zeros(4), [0, 3, 2]), ValueError, "expected 3 rising bounds"),
    "bounds beyond": (lambda g: g.iall_gather(np.zeros(4), [0, 3, 5]), ValueError, "rising bounds from 0 to 4"),
    "bounds below": (lambda g: g.iall_gather(np.zeros(4), [-1, 3, 4]), ValueError, "expected 3 rising bounds"),
    "no time": (lambda g: g.isend(np.zeros(1), 1 - g.rank, timeout=0), ValueError, "expected a finite timeout above 0"),
    "negative time": (lambda g: g.ibarrier(timeout=-1), ValueError, "expected a finite timeout above 0"),
    "no number of a time": (
        lambda g: g.ibarrier(timeout=float("nan")),
        ValueError,
        "expected a finite timeout above 0",
    ),
    "time without end": (lambda g: g.ibarrier(timeout=float("inf")), ValueError, "expected a finite timeout above 0"),
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
        "recv: expected a writable array",
    ),
    "read-only to gather": (
        lambda g: g.iall_gather(np.frombuffer(b"abcd", np.uint8)),
        TensorMismatchError,
        "expected a writable array",
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


def test_long_descriptions_that_differ_at_the_end_stay_different():
    """An all-gather of a large group lists many bounds."""
    found = [brought("all_gather", "of parts from " + "0, " * 2000 + last).words for last in "12"]
    assert found[0] != found[1]
    assert max(map(len, found)) <= WORDS_BYTES


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
            with pytest.raises(OperationTimeoutError, match="reported by rank 0"):
                members[rank].recv(np.zeros(3), 0)
        begun = time.monotonic()
        with pytest.raises(OperationTimeoutError, match="reported by"):
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
            eventually(lambda: bool(into[0]) or work.done(), "bytes come", pause=0.001)
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
    # sooner than the groups would time out
    eventually(lambda: held() <= before, f"{before} threads and files", timeout=TIMEOUT_S / 2, pause=0.001)


def test_a_forked_child_can_neither_use_its_parents_group_nor_leave_it(backend: str) -> None:
    with groups(backend, 2) as members:
        assert each(members, lambda group: group.barrier()) == [None] * 2
        group, array = members[0], np.zeros(4)
        work = group.irecv(array, 1)
        calls: dict[str, Callable[[], Any]] = {
            "barrier": group.barrier,
            "send": lambda: group.send(array, 1),
            "all_reduce": lambda: group.all_reduce(array),
            "wait": work.wait,
            "done": work.done,
        }
        found, closed = in_child(lambda: [outcomes(calls), group.close()])
        assert set(found.values()) == {"ClosedError"}, found
        assert closed is None
        members[1].send(np.ones(4), 0)
        work.wait()
        assert (array == 1).all()
        assert each(members, lambda group: group.barrier()) == [None] * 2
