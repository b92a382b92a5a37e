"""Groups over Gloo whose members are silent, leave or die: all others name who it is, and nothing stays behind.

Rules
- Members are threads, as Gloo does not mind; one that dies is a process.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.gloo.backend import GlooBackend, GlooGroup
from tensorvine.store.errors import OperationTimeoutError, PeerLostError

from tests.support.gloo_groups import HOST, each, groups
from tests.support.waiting import PATIENCE_S, eventually

_serial = count()


# ---- what fails ---------------------------------------------------------------------------------------


def test_who_is_silent_is_named_and_the_first_reason_stays() -> None:
    with groups(3) as members:
        late = each(members, lambda group: None if group.rank == 1 else group.barrier(timeout=1.0))
        assert [type(error) for error in late] == [OperationTimeoutError, type(None), OperationTimeoutError]
        assert all("barrier: expected rank 1 to take part" in str(late[rank]) for rank in (0, 2))
        for rank in (0, 2):
            with pytest.raises(OperationTimeoutError, match="barrier: expected rank 1"):
                members[rank].isend(np.zeros(1), 1)
        with pytest.raises(OperationTimeoutError, match="barrier: expected rank 1"):
            members[1].barrier(timeout=5)


def test_a_wait_that_is_shorter_than_the_operation_s_time_breaks_the_group_too() -> None:
    with groups(2) as members:
        work = members[0].irecv(np.zeros(4), 1)
        with pytest.raises(OperationTimeoutError, match="recv of 32 bytes: expected rank 1"):
            work.wait(timeout=0.05)
        with pytest.raises(OperationTimeoutError, match="recv of 32 bytes"):
            work.wait()
        assert work.done()
        with pytest.raises(OperationTimeoutError, match="reported by rank 0"):
            members[1].send(np.zeros(4), 0, timeout=5)


def test_who_left_is_named_and_what_goes_on_without_it_does() -> None:
    with groups(3) as members:
        members[2].close()
        members[2].close()

        def act(group: GlooGroup) -> list[float]:
            array = np.full(2, float(group.rank))
            if group.rank == 0:
                group.send(array, 1)
            else:
                group.recv(array, 0)
            return array.tolist()

        assert each(members[:2], act) == [[0, 0], [0, 0]]
        lost = each(members[:2], lambda group: group.all_reduce(np.ones(3), timeout=5))
        assert [type(error) for error in lost] == [PeerLostError] * 2
        assert all("rank 2 left" in str(error) for error in lost)
        with pytest.raises(PeerLostError, match="this member has left"):
            members[2].barrier()


def test_closing_ends_the_waits_of_other_threads() -> None:
    with groups(2) as members:
        begun = time.monotonic()
        works = [members[0].irecv(np.zeros(4), 1), members[0].ibarrier()]
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(work.wait) for work in works]
            members[0].close()
            for wait in waits:
                with pytest.raises(PeerLostError, match="this member has left"):
                    wait.result()
        assert time.monotonic() - begun < 15
        with pytest.raises(PeerLostError, match="rank 0 left"):
            members[1].recv(np.zeros(4), 0)


def test_closed_groups_leave_nothing_behind() -> None:
    with groups(2):
        pass
    gc.collect()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    before = held()
    for _ in range(3):
        with groups(3, timeout=2 * PATIENCE_S) as members:
            each(members, lambda group: group.barrier())
        del members
    gc.collect()
    eventually(lambda: held() <= before, f"{before} threads and files; found {held()}", pause=0.002)


# ---- members that die ---------------------------------------------------------------------------------


class Process:
    """A member in a process of its own."""

    def __init__(self) -> None:
        script = str(Path(__file__).parents[2] / "support/gloo_member.py")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, script], text=True, stderr=subprocess.DEVNULL, **pipes)

    def endpoint(self) -> dict[str, Any]:
        return json.loads(self._out.readline())

    def tell(self, line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def done(self) -> None:
        assert self._out.readline() == "{}\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def _out(self) -> Any:
        return self.process.stdout


@pytest.fixture
def mortal() -> Iterator[Callable[..., tuple[list[GlooGroup], Process]]]:
    """Makes groups whose highest rank is a process."""
    processes: list[Process] = []
    joined: list[GlooGroup] = []

    def make(size: int) -> tuple[list[GlooGroup], Process]:
        process = Process()
        processes.append(process)
        backend, name = GlooBackend(HOST), f"mortal-{next(_serial)}"
        offers = [backend.offer() for _ in range(size - 1)]
        endpoints = [offer.endpoint for offer in offers] + [process.endpoint()]
        process.tell({"name": name, "epoch": 3, "rank": size - 1, "endpoints": endpoints, "timeout": 20.0})
        with ThreadPoolExecutor(size) as pool:
            joining = [
                pool.submit(backend.join, offer, name, epoch=3, rank=rank, size=size, endpoints=endpoints, timeout=20.0)
                for rank, offer in enumerate(offers)
            ]
        joined.extend(future.result() for future in joining)
        process.done()
        return joined, process

    yield make
    for group in joined:
        group.close()
    for process in processes:
        process.kill()
        for pipe in (process.process.stdin, process.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


MIB = 1 << 20
PHASES: dict[str, tuple[list[Any] | None, Callable[[GlooGroup], Any]]] = {
    "before it is sent anything": (None, lambda group: group.isend(np.zeros(MIB, np.uint8), 2)),
    "before it sends": (None, lambda group: group.irecv(np.zeros(MIB, np.uint8), 2)),
    "before a collective": (None, lambda group: group.iall_reduce(np.zeros(MIB, np.float32))),
    "in a send": (["send", 64 * MIB, 0], lambda group: group.ibarrier()),
    "in a collective": (["broadcast", 64 * MIB], lambda group: _broadcast(group) if group.rank else _asleep(group)),
}
"""When rank 2 dies: what it is told to do before, and what the others do."""


def _asleep(group: GlooGroup) -> Any:
    """Be late for a collective, in which another one waits for this rank as well as for the dead one."""
    eventually(lambda: group.standing.lacks([2]), "the death to be known", pause=0.002)
    return _broadcast(group)


def _broadcast(group: GlooGroup) -> Any:
    return group.ibroadcast(np.zeros(64 * MIB, np.uint8))


@pytest.mark.parametrize("phase", PHASES)
def test_who_died_is_named_by_all_at_once(mortal: Callable[..., tuple[list[GlooGroup], Process]], phase: str) -> None:
    told, start = PHASES[phase]
    members, process = mortal(3)
    if told is not None:
        process.tell(told)
    begun = time.monotonic()

    def act(group: GlooGroup) -> None:
        if group.rank == 0:
            process.kill()
        start(group).wait()

    found = each(members, act)
    assert [type(error) for error in found] == [PeerLostError] * 2, found
    assert all("epoch 3" in str(error) and "rank 2 died" in str(error) for error in found), found
    assert time.monotonic() - begun < 10
    for group in members:
        with pytest.raises(PeerLostError, match="rank 2 died"):
            group.barrier()


def test_a_death_reaches_those_who_wait_for_others(mortal: Callable[..., tuple[list[GlooGroup], Process]]) -> None:
    members, process = mortal(4)
    waiting = members[1].irecv(np.zeros(4), 0)  # rank 0 will never send this, and rank 3 has no part in it
    process.kill()
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 3 died"):
        members[0].recv(np.zeros(4), 3)
    with pytest.raises(PeerLostError, match=r"rank 3 died \(reported by rank 0\)"):
        waiting.wait()
    assert time.monotonic() - begun < 10
