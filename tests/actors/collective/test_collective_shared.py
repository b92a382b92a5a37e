"""Groups on one machine: what is their own. What all groups do is in test_groups*.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.group import Group
from tensorvine.actors.collective.shared import crossmemory
from tensorvine.actors.collective.shared import member as shared
from tensorvine.actors.collective.shared.crossmemory import Memory, Seal, UnreadableError, trouble
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError

from tests.support.ranks import joined, outcomes, processes, together
from tests.support.waiting import eventually

# ---- memory -------------------------------------------------------------------------------------------


def test_a_read_brings_the_bytes_of_another_process() -> None:
    program = (
        "import numpy as np, json, sys; from tensorvine.actors.collective.shared.crossmemory import Seal\n"
        "seal, array = Seal(), np.arange(100_000)\n"
        "print(json.dumps([seal.endpoint, array.ctypes.data]), flush=True); sys.stdin.read(1)\n"
        "seal.break_(); print('broken', flush=True); sys.stdin.read(1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        endpoint, address = json.loads(process.stdout.readline())
        memory, found = Memory(endpoint), np.zeros(100_000, int)
        memory.read(address, found)
        assert found.tolist() == list(range(100_000))
        process.stdin.write("x")
        process.stdin.flush()
        assert process.stdout.readline() == "broken\n"
        with pytest.raises(UnreadableError, match="it no longer allows it"):
            memory.read(address, found)
        process.stdin.write("x")
        process.stdin.flush()
        process.wait(20)
        with pytest.raises(UnreadableError, match="No such process"):
            memory.read(address, found)


def test_memory_that_is_gone_is_an_error() -> None:
    seal = Seal()
    with pytest.raises(UnreadableError, match="Bad address"):
        Memory(seal.endpoint).read(4096, np.zeros(100, np.uint8))


def test_what_cannot_be_read_is_told() -> None:
    seals = [Seal(), Seal()]
    own = seals[0].endpoint
    assert trouble("g", own, [seal.endpoint for seal in seals]) is None
    assert "rank 1 is on another machine" in str(trouble("g", own, [own, own | {"machine": "elsewhere"}]))
    unmapped = trouble("g", own, [own, own | {"seal_at": 4096}])
    assert unmapped == f"the memory of rank 1 cannot be read: process {os.getpid()}: Bad address"
    other = trouble("g", own, [own, own | {"seal": "00" * crossmemory.SEAL_BYTES}])
    assert "belongs to another process" in str(other)


class Meeting:
    """Where rank 0 meets a rank that has died by the time it is looked at."""

    def __init__(self) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            self._died = process.pid

    def exchange(self, key: str, rank: int, size: int, endpoint: dict[str, Any], timeout: float) -> list[Any]:
        return [endpoint, endpoint | {"endpoint": endpoint["endpoint"] | {"process": self._died}}]


@pytest.mark.parametrize("backend", ["auto", "shared"])
def test_who_died_before_the_group_was_whole_is_named_at_once(backend: str) -> None:
    with pytest.raises(
        PeerLostError, match=r"group 'g', epoch 0: expected rank 1 to join; it died: process \d+: No such"
    ):
        connect("g", 0, 2, backend=backend, rendezvous=Meeting())


# ---- groups -------------------------------------------------------------------------------------------


def test_small_messages_do_not_wait_and_many_do() -> None:
    with joined("shared", 2) as groups:
        works = [groups[0].isend(np.full(10, k), 1) for k in range(3 * shared.UNREAD)]
        assert [work.done() for work in works] == [True] * shared.UNREAD + [False] * 2 * shared.UNREAD
        for k in range(3 * shared.UNREAD):
            got = np.zeros(10, int)
            groups[1].recv(got, 0)
            assert (got == k).all()
        for work in works:
            work.wait()
        eventually(lambda: groups[0]._peers[1].unread == 0, "room for small messages", pause=0.002)  # type: ignore[attr-defined]
        assert groups[0].isend(np.zeros(1), 1).done()


def test_thousands_of_messages_may_be_under_way() -> None:
    def act(group: Group) -> None:
        arrays = [np.full(10_000, k % 250, np.uint8) for k in range(2000)]
        into = [np.zeros(10_000, np.uint8) for _ in arrays]
        works = [group.isend(array, 1 - group.rank) for array in arrays]
        works += [group.irecv(array, 1 - group.rank) for array in into]
        for work in works:
            work.wait()
        assert all((got == array).all() for got, array in zip(into, arrays, strict=True))

    with joined("shared", 2) as groups:
        together(groups, act)


@pytest.mark.parametrize(("sent", "expected"), [(50_000, 60_000), (60_000, 50_000), (10, 9), (0, 1), (3 << 20, 10)])
def test_a_message_of_another_size_is_told_to_both_ends(sent: int, expected: int) -> None:
    def act(group: Group) -> Any:
        if group.rank == 1:
            return group.recv(np.zeros(expected, np.uint8), 0)
        group.send(np.zeros(sent, np.uint8), 1)
        return group.recv(np.zeros(1), 1)  # small messages are sent before anybody looks at them

    with joined("shared", 2) as groups:
        for error in outcomes(groups, act):
            assert isinstance(error, TensorMismatchError)
            assert str(sent) in str(error)
            assert str(expected) in str(error)


def test_collectives_that_differ_are_told_to_all() -> None:
    def sizes(group: Group) -> None:
        group.all_reduce(np.zeros(10 + group.rank))

    def operations(group: Group) -> None:
        group.barrier() if group.rank else group.all_reduce(np.zeros(1))

    def dtypes(group: Group) -> None:
        group.all_reduce(np.zeros(2, np.float32 if group.rank else np.int32))

    for act in (sizes, operations, dtypes):
        with joined("shared", 2) as groups:
            errors = outcomes(groups, act)
            assert [type(error) for error in errors] == [TensorMismatchError] * 2, errors


def test_what_a_sender_gave_up_is_not_received() -> None:
    """The message was announced; then the sender's time was over, and its memory is its own again."""
    with joined("shared", 2) as groups:
        array = np.ones(1 << 20)
        with pytest.raises(OperationTimeoutError):
            groups[0].send(array, 1, timeout=0.05)
        array[:] = 2
        with pytest.raises(OperationTimeoutError, match="reported by rank 0"):
            groups[1].recv(np.zeros(1 << 20), 0)


def test_nothing_writes_to_an_array_after_its_receive_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    real = Memory.read

    def slow(memory: Memory, address: int, target: Any) -> None:
        reached.set()
        assert go_on.wait(10)
        real(memory, address, target)

    with joined("shared", 2) as groups:
        monkeypatch.setattr(Memory, "read", slow)
        sending = groups[0].isend(np.ones(crossmemory.CHUNK * 2, np.uint8), 1)
        work = groups[1].irecv(into := np.zeros(crossmemory.CHUNK * 2, np.uint8), 0)
        assert reached.wait(10)
        waiting = threading.Thread(target=lambda: outcomes([groups[1]], lambda _: work.wait(0.01)))
        waiting.start()
        eventually(lambda: groups[1].standing.reason is not None, "the group to be broken", pause=0.002)  # type: ignore[attr-defined]
        assert waiting.is_alive()  # a copy is under way
        go_on.set()
        waiting.join(10)
        assert not into[crossmemory.CHUNK :].any()
        with pytest.raises(OperationTimeoutError):
            work.wait()
        with pytest.raises(OperationTimeoutError, match="reported by rank 1"):
            sending.wait()


def test_a_child_that_holds_the_sockets_does_not_hide_a_death(tmp_path: Path) -> None:
    with processes(tmp_path, "shared", 2) as (ranks, _):
        assert ranks[1].does("fork a child")[0] == "done"
        ranks[0].start("recv from 1")
        ranks[1].kill()
        kind, text, seconds = ranks[0].outcome()
        assert (kind, "rank 1 died" in text) == ("PeerLostError", True)
        assert seconds < 8
