"""Groups for tests: members that are threads of this process, and members that are processes, to be stopped or killed.

Rules
- Threads meet in a `LocalRendezvous`. A member that is a process meets the others there too: this process takes its
  endpoint there and brings it theirs.
- Processes are forked by a server that has imported what they need, so that one is there within milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import psutil
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.group import Group, Work
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.store.errors import TensorVineError

from tests.support.processes import stand_still

TIMEOUT_S = 20.0
MIB = 1 << 20
VERBS = ("p2p", "broadcast", "all_gather", "all_reduce", "barrier")

_serial = count()
_forks = multiprocessing.get_context("forkserver")


def new_name(what: str = "test") -> str:
    return f"{what}-{next(_serial)}"


def gpus() -> int:
    """Count the GPUs that CuPy finds."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # noqa: BLE001  whatever a missing driver raises
        return 0


def join(backend: str, rank: int, size: int, **options: Any) -> Group:
    """Join as a thread of this process; options as of `connect`."""
    if backend == "nccl" and gpus() > rank:
        import cupy

        cupy.cuda.Device(rank).use()
    return connect(options.pop("name"), rank, size, backend=backend, **{"timeout": TIMEOUT_S, **options})


@contextmanager
def groups(backend: str, size: int, **options: Any) -> Iterator[list[Group]]:
    """The ends of a new group, by rank, all in this process; they are closed at the end."""
    options = {"name": new_name(), "rendezvous": LocalRendezvous(), **options}
    with ThreadPoolExecutor(size) as pool:
        joining = [pool.submit(join, backend, rank, size, **options) for rank in range(size)]
    with ExitStack() as stack:
        yield [stack.enter_context(future.result()) for future in joining]


def each(members: Iterable[Group], act: Callable[[Group], Any]) -> list[Any]:
    """Let all members act at once; an error of ours is a result."""

    def run(group: Group) -> Any:
        try:
            return act(group)
        except TensorVineError as exc:
            return exc

    members = list(members)
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def held() -> tuple[int, int]:
    """Count this process's threads and files."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# ---- what members do that may be processes ------------------------------------------------------------


@lru_cache
def content(rank: int, nbytes: int, turn: int) -> np.ndarray:
    """What a rank has to give in a turn, as numbers whose sum float32 holds exactly."""
    numbers = np.arange(nbytes // 4, dtype=np.float32)
    numbers += 7 * rank + 31 * turn
    numbers.flags.writeable = False
    return numbers


class Act:
    """One operation of one member in a group of three, of which rank 2 is the one in trouble.

    Args:
        group: the member.
        verb: one of `VERBS`. "p2p": rank 2 sends to rank 0 and receives from rank 1.
        nbytes: size of the arrays.
        turn: makes their content.
    """

    def __init__(self, group: Group, verb: str, nbytes: int, turn: int, timeout: float | None = None) -> None:
        self.works: list[Work] = []
        self._expected: list[tuple[np.ndarray, np.ndarray]] = []
        self._own = content(group.rank, nbytes, turn).copy()
        all_of = [content(rank, nbytes, turn) for rank in range(3)]
        into = np.zeros_like(self._own)
        limit: dict[str, Any] = {"timeout": timeout}
        if verb == "p2p":
            if group.rank == 2:
                self.works.append(group.isend(self._own, 0, **limit))
            if group.rank == 1:
                self.works.append(group.isend(self._own, 2, **limit))
            else:
                source = {0: 2, 2: 1}[group.rank]
                self.works.append(group.irecv(into, source, **limit))
                self._expected.append((into, all_of[source]))
        elif verb == "broadcast":
            array = self._own if group.rank == 2 else into
            self.works.append(group.ibroadcast(array, 2, **limit))
            self._expected.append((array, all_of[2]))
        elif verb == "all_gather":
            whole = np.zeros(3 * self._own.size, np.float32)
            whole.reshape(3, -1)[group.rank] = self._own
            self.works.append(group.iall_gather(whole, **limit))
            self._expected.append((whole, np.concatenate(all_of)))
        elif verb == "all_reduce":
            self.works.append(group.iall_reduce(self._own, "sum", **limit))
            self._expected.append((self._own, np.sum(all_of, axis=0, dtype=np.float32)))
        else:
            self.works.append(group.ibarrier(**limit))

    def finish(self) -> None:
        """Wait for the end; what came must be right."""
        for work in self.works:
            work.wait()
        for found, expected in self._expected:
            np.testing.assert_array_equal(found, expected)


def _serve(pipe: Any) -> None:
    """What a member does that is a process: it takes one order after the other."""
    group: Group | None = None
    act: Act | None = None
    while True:
        order, *given = pipe.recv()
        try:
            if order == "join":
                backend, rank, size, options = given
                group = join(backend, rank, size, rendezvous=_Elsewhere(pipe), **options)
            elif order == "start":
                assert group is not None
                act = Act(group, *given)
            elif order == "finish":
                assert act is not None
                act.finish()
            elif order == "close":
                assert group is not None
                group.close()
            pipe.send(None)
        except (AssertionError, TensorVineError) as exc:
            pipe.send(exc)


class _Elsewhere:
    """The rendezvous of the process that started this one."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def exchange(
        self, key: str, rank: int, size: int, endpoint: Mapping[str, Any], timeout: float
    ) -> list[dict[str, Any]]:
        self._pipe.send(("exchange", key, rank, size, dict(endpoint), timeout))
        return self._pipe.recv()


class Mortal:
    """A member that is a process."""

    def __init__(self) -> None:
        _forks.set_forkserver_preload(
            [f"tensorvine.actors.collective.{module}" for module in ("connect", "shared", "gloo")] + ["torch"]
        )
        self._pipe, theirs = _forks.Pipe()
        self._process = _forks.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def join(self, rendezvous: LocalRendezvous, backend: str, rank: int, size: int, **options: Any) -> None:
        self.order("join", backend, rank, size, options)
        while isinstance(answer := self._pipe.recv(), tuple):
            self._pipe.send(rendezvous.exchange(*answer[1:]))
        self._check(answer)

    def order(self, *order: Any) -> None:
        """Tell it what to do, without waiting."""
        self._pipe.send(order)

    def answer(self, timeout: float = 10.0) -> Exception | None:
        """Wait until it has done what it was told; gives its error."""
        assert self._pipe.poll(timeout), "expected an answer of the process"
        return self._pipe.recv()

    def do(self, *order: Any) -> None:
        """Have something done."""
        self.order(*order)
        self._check(self.answer())

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Make it silent; returns when it is."""
        stand_still(psutil.Process(self._process.pid))

    def end(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()

    @staticmethod
    def _check(answer: Exception | None) -> None:
        if answer is not None:
            raise answer


@contextmanager
def mortals(backend: str, size: int, **options: Any) -> Iterator[tuple[list[Group], Mortal]]:
    """A new group whose last rank is a process; gives the others, and it."""
    rendezvous, process = LocalRendezvous(), Mortal()
    options = {"name": new_name("mortal"), **options}
    try:
        with ThreadPoolExecutor(size) as pool:
            last = pool.submit(process.join, rendezvous, backend, size - 1, size, **options)
            joining = [
                pool.submit(join, backend, rank, size, rendezvous=rendezvous, **options) for rank in range(size - 1)
            ]
            last.result()
        with ExitStack() as stack:
            yield [stack.enter_context(future.result()) for future in joining], process
    finally:
        process.end()


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make calls in a thread each, begun together; an error of ours, or of an argument, is a result."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        ready.wait()
        try:
            return call()
        except (TensorVineError, ValueError) as exc:
            return exc

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
