"""Ranks of collective groups for tests: threads of this process, or processes of their own.

Rules
- Threads, where nobody is to die: they start in no time. `together` lets them act at once.
- Processes come from a server that has imported what they need, so that they start in no time, too. They do what they
  are told, one operation at a time, and say when it is under way and how it ended.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.group import Group, Work
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.store.arrays import dtype_of
from tensorvine.store.errors import OperationTimeoutError, TensorVineError

TIMEOUT_S = 20.0
SMALL, BIG = 1 << 10, 40 << 20
"""Bytes: of a message that is sent at once, and of one that cannot be."""
INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "int64", "uint64")
REALS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *REALS, *COMPLEX)

_serial = count()


def _missing(backend: str) -> str | None:
    """Say why a back end cannot be tested here."""
    needed = {"shared": "numpy", "gloo": "torch", "nccl": "cupy"}[backend]
    if importlib.util.find_spec(needed) is None:
        return f"{needed} is not installed"
    if backend == "nccl" and len(list(Path("/dev").glob("nvidia[0-9]*"))) < 4:
        return "NCCL needs a GPU for each of four ranks"
    return None


def backends(*names: str) -> list[Any]:
    """Parameters of a test: back ends, those that are missing to be skipped."""
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=reason)] if (reason := _missing(name)) else [])
        for name in names
    ]


BACKENDS = backends("shared", "gloo", "nccl")


def numbers(dtype: str, size: int, seed: int) -> np.ndarray[Any, Any]:
    """Make numbers whose sums, products and means are exact, or nearly so, in any dtype: ones and twos."""
    drawn = np.random.default_rng(seed).integers(1, 3, size)
    if dtype == "bool":
        return drawn == 2
    return (drawn * (1 + 1j) if dtype in COMPLEX else drawn).astype(dtype_of(dtype))


def at_once(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do jobs in a thread each; gives what they return, or raises the first error."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def join(backend: str, size: int, *, timeout: float = TIMEOUT_S) -> list[Group]:
    """Join as threads."""
    name, meeting = f"test-{next(_serial)}", LocalRendezvous()

    def come(rank: int) -> Group:
        if backend == "nccl":
            import cupy

            cupy.cuda.Device(rank).use()
        return connect(name, rank, size, backend=backend, timeout=timeout, rendezvous=meeting)

    return at_once([partial(come, rank) for rank in range(size)])


@contextmanager
def joined(backend: str, size: int, **options: Any) -> Iterator[list[Group]]:
    """Members for a test that may break them."""
    members = join(backend, size, **options)
    try:
        yield members
    finally:
        for group in members:
            group.close()


def together(members: Sequence[Group], act: Callable[[Group], Any]) -> list[Any]:
    """Let all members act at once; gives what they return, by rank, or raises the first error."""
    return at_once([partial(act, group) for group in members])


def outcomes(members: Sequence[Group], act: Callable[[Group], Any]) -> list[Any]:
    """Let all members act at once; an error of ours is a result."""

    def run(group: Group) -> Any:
        try:
            return act(group)
        except TensorVineError as exc:
            return exc

    return together(members, run)


class FileRendezvous:
    """Where processes meet that have nothing in common but a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def exchange(
        self, key: str, rank: int, size: int, endpoint: Mapping[str, Any], timeout: float
    ) -> list[dict[str, Any]]:
        """Meet; see `Rendezvous`."""
        folder = self._folder / key.encode().hex()
        folder.mkdir(exist_ok=True)
        (folder / f"{rank}.part").write_text(json.dumps(dict(endpoint)))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
        paths = [folder / f"{other}.json" for other in range(size)]
        end = time.monotonic() + timeout
        while missing := [path.stem for path in paths if not path.exists()]:
            if time.monotonic() > end:
                raise OperationTimeoutError(f"{key}: expected all ranks; {', '.join(missing)} did not come")
            time.sleep(0.002)
        return [json.loads(path.read_text()) for path in paths]


# ---- processes ----------------------------------------------------------------------------------------


def _filled(group: Group, nbytes: int) -> np.ndarray[Any, Any]:
    return np.full(nbytes, group.rank + 1, np.uint8)


def _to(rank: int, nbytes: int) -> Callable[[Group], list[Work]]:
    return lambda group: [group.isend(_filled(group, nbytes), rank)]


def _from(rank: int, nbytes: int) -> Callable[[Group], list[Work]]:
    return lambda group: [group.irecv(np.zeros(nbytes, np.uint8), rank)]


def _leave(group: Group) -> list[Work]:
    group.close()
    return []


def _fork(group: Group) -> list[Work]:
    """Have a child that holds all that this process has open, and sleeps."""
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    return []


OPERATIONS: dict[str, Callable[[Group], list[Work]]] = {
    "barrier": lambda group: [group.ibarrier()],
    "all_reduce": lambda group: [group.iall_reduce(np.ones(1 << 20, np.float32))],
    "all_gather": lambda group: [group.iall_gather(np.zeros(3 << 20, np.uint8))],
    "broadcast of 2": lambda group: [group.ibroadcast(_filled(group, BIG), 2)],
    "leave": _leave,
    "fork a child": _fork,
    **{f"send to {rank}": _to(rank, BIG) for rank in range(3)},
    **{f"recv from {rank}": _from(rank, BIG) for rank in range(3)},
    **{f"send a little to {rank}": _to(rank, SMALL) for rank in range(3)},
    **{f"recv a little from {rank}": _from(rank, SMALL) for rank in range(3)},
}
"""What processes can be told to start."""

Outcome = tuple[str, str, float]
""""done" or an error's name; its text; and the seconds that it took."""


def _serve(folder: Path, backend: str, rank: int, size: int, joining: float, timeout: float, line: Connection) -> None:
    """Be a rank."""
    try:
        group = connect("test", rank, size, backend=backend, timeout=joining, rendezvous=FileRendezvous(folder))
    except TensorVineError as exc:
        line.send((type(exc).__name__, str(exc), 0.0))
        return
    group.timeout = timeout
    line.send(("joined", "", 0.0))
    with group:
        while True:
            order, began = line.recv(), time.monotonic()
            try:
                works = OPERATIONS[order](group)
                line.send(("under way", "", 0.0))
                for work in works:
                    work.wait()
                line.send(("done", "", time.monotonic() - began))
            except TensorVineError as exc:
                line.send((type(exc).__name__, str(exc), time.monotonic() - began))


class Rank:
    """A rank that is a process."""

    def __init__(self, folder: Path, backend: str, rank: int, size: int, joining: float, timeout: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["tests.support.ranks", "tensorvine.actors.collective.shared.backend", "torch.distributed"]
        )
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(folder, backend, rank, size, joining, timeout, theirs))
        self._process.start()
        self._state: Outcome = ("", "", 0.0)
        theirs.close()

    def joins(self) -> Outcome:
        """Wait until it has joined, or failed to."""
        return self._told()

    def start(self, operation: str) -> None:
        """Have it start an operation; returns when it is under way, or has failed."""
        self._line.send(operation)
        self._state = self._told()

    def outcome(self) -> Outcome:
        """Wait for the end of the operation."""
        return self._told() if self._state[0] == "under way" else self._state

    def does(self, operation: str) -> Outcome:
        """Have it do an operation."""
        self.start(operation)
        return self.outcome()

    def kill(self) -> None:
        """End it at once; returns when it is gone."""
        self._process.kill()
        self._process.join(10)

    def stop(self) -> None:
        """Have it stand still."""
        os.kill(self._process.pid or 0, signal.SIGSTOP)

    def end(self) -> None:
        """End it, whatever it does."""
        self.kill()
        self._process.close()
        self._line.close()

    def _told(self) -> Outcome:
        assert self._line.poll(30), "expected the rank to answer"
        return self._line.recv()


@contextmanager
def processes(
    folder: Path,
    backend: str,
    size: int,
    *,
    joining: float = TIMEOUT_S,
    timeout: float = TIMEOUT_S,
    absent: int = 0,
) -> Iterator[tuple[list[Rank], list[Outcome]]]:
    """Ranks that are processes, and how they joined; the last `absent` ones never come."""
    ranks = [Rank(folder, backend, rank, size, joining, timeout) for rank in range(size - absent)]
    try:
        yield ranks, [rank.joins() for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
