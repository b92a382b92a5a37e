"""Dask as the engine, compared with Ray: saves, loads, updates, calls between nodes, a killed shard, and the start.

Rules
- Each engine has a process of its own, with a cluster of its own. The two take turns of about a second, in each turn
  the other one first; the engine without a turn is idle. Starts are measured alone.
- Times of all turns are taken together. Floors are measured in the same processes, in turn.
- Two hosts are two nodes of one machine, which call each other by TCP: two raylets, or two workers of Dask that have
  agents of their own.
- Users' calls with their default options are timed. Models are new each time, and retired untimed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .calls import connected, echo, small_saves
from .core.clusters import NAME, Names, raylets, retire
from .core.fleet import Program
from .core.measure import (
    GIB,
    MIB,
    Action,
    Sample,
    alternate,
    buffers_like,
    copying,
    equal,
    expect,
    progress,
    quiet,
    sample,
    timed,
)
from .core.models import synthetic
from .core.report import Goal, Report
from .update_latency import Mapped, updated, values_at

RAY, DASK = "ray", "dask"
SAVE, LOAD, SMALL_SAVE, UPDATE = "save", "load into buffers", "save of 1 KiB", "update"
KILLED, START = "a killed shard serves from its path", "cluster and repository started"
COPY, BYTE, IMPORT = "one warm memory copy", "one byte there and back", "a Python that imports the library"
"""The floors."""
LAYERS, EACH, TIMEOUT_S, BACK_S = 10, 3, 120.0, 5.0
Times = dict[str, list[float]]


def run(report: Report) -> None:
    """Measure both engines in turn."""
    size, turns, kills, rounds = report.pick(
        quick=(MIB, (0, 1), 1, (1, 1, 1)), normal=(64 * MIB, (3, 15), 3, (2, 1, 5))
    )
    parts: Sequence[tuple[str, Any, dict[str, str], float, tuple[Any, ...]]] = (
        (
            "within a node",
            within,
            {SAVE: COPY, LOAD: COPY, SMALL_SAVE: BYTE, UPDATE: COPY, KILLED: IMPORT},
            1.1,
            (size, *turns, kills),
        ),
        ("between nodes", between, {SMALL_SAVE: BYTE}, 1.5, turns),
        ("start", start, {START: IMPORT}, 1.0, ()),
    )
    for (name, measure, floors, bound, arguments), count in zip(parts, rounds, strict=True):
        found: dict[str, list[Times]] = {DASK: [], RAY: []}
        for number in range(count):
            progress(f"{name}, round {number + 1} of {count}")
            order = (DASK, RAY) if number % 2 else (RAY, DASK)
            for engines in [[each] for each in order] if measure is start else [list(order)]:
                _together(engines, measure, arguments, found)
        for case, floor in floors.items():
            ours, theirs = (_pooled(found[engine], case) for engine in (DASK, RAY))
            goals = [Goal("of Ray's time", ours.median / theirs.median, at_most=bound)]
            if case == KILLED:
                both = (("Dask", ours), ("Ray", theirs))
                goals = [Goal(f"seconds until it serves, on {each}", it.median, at_most=BACK_S) for each, it in both]
            report.add(
                f"{name}: {case}",
                ours,
                size if case in (SAVE, LOAD, UPDATE) else 0,
                peer=("on Ray", theirs),
                floor=(floor, _pooled([*found[DASK], *found[RAY]], floor)),
                goals=goals,
                headline=case == SAVE,
            )


def _together(engines: list[str], measure: Any, arguments: tuple[Any, ...], found: dict[str, list[Times]]) -> None:
    """Let engines take turns until they have measured everything."""
    with ExitStack() as stack:
        programs = {each: stack.enter_context(Program(measure, each, *arguments)) for each in engines}
        going = True
        while going:
            for engine in engines:
                times = programs[engine].ask()
                going = times is not None
                found[engine] += [times] if times is not None else []
            engines = engines[::-1]


def _pooled(turns: Sequence[Times], case: str) -> Sample:
    return sample([took for times in turns for took in times.get(case, ())])


# ---- in the processes: each yields the times of a turn ----------------------------------------------------


def within(engine: str, nbytes: int, warmup: int, turns: int, kills: int) -> Iterator[Times]:
    """Measure on one node."""
    import socket

    from tensorvine.actors import Consumer, Publisher, Repository

    with (
        Repository.start(NAME, engine=engine) as repo,
        Consumer.start(repo, "net", Mapped) as consumer,
        Publisher(repo, "net", 1, keep=1) as publisher,
        echo(socket.socketpair()) as byte,
    ):
        tensors, names = synthetic(nbytes, LAYERS).tensors(), Names("model")
        buffers, published = buffers_like(tensors), {name: each.copy() for name, each in tensors.items()}
        kept, small = repo.save(names.fresh(), tensors).ref, small_saves(repo)
        for turn in range(warmup + turns):
            left = repo.stats().bytes_memory
            actions: dict[str, Action] = {
                SAVE: (
                    lambda: repo.save(names.fresh(), tensors),
                    lambda saved, left=left: retire(repo, saved.ref, left),
                ),
                LOAD: lambda: repo.load(kept, into=buffers),
                COPY: copying(tensors, buffers),
            }
            found = _times(actions, EACH)
            for each in published.values():
                each += 1
            quiet(since=time.monotonic())
            handed, _, delivery = updated(publisher, consumer, published)
            found[UPDATE] = [delivery.swapped_at - handed]
            found |= _times({SMALL_SAVE: small, BYTE: byte}, 30 if turns > 1 else 2)
            yield found if turn >= warmup else {}
        repo.load(kept, into=buffers)
        expect(equal(buffers, tensors), "engines", "the saved tensors")
        answer = consumer.infer(5, TIMEOUT_S).outputs
        expect(answer == values_at(published, 5), "engines", "the published values")
        for _ in range(kills):
            yield {KILLED: [killed(engine)], IMPORT: [_import_s()]}


def between(engine: str, warmup: int, turns: int) -> Iterator[Times]:
    """Measure saves to a shard on another node."""
    from tensorvine.actors import Repository

    options: dict[str, Any] = {"shards": 2, "store_bytes": GIB // 8, "preallocate_bytes": 0}
    with (
        NODES[engine]() as running,
        Repository.start(NAME, engine=running, **options) as repo,
        echo(connected()) as byte,
    ):
        session = repo._session
        nodes = {shard: session.connection(shard).hello.node for shard in session.shards}
        expect(
            sum(node == session.node for node in nodes.values()) == 1, "engines", f"one shard on each node in {nodes}"
        )
        actions: dict[str, Action] = {SMALL_SAVE: small_saves(repo), BYTE: byte}
        for turn in range(warmup + turns):
            found = _times(actions, 30 if turns > 1 else 2)
            yield found if turn >= warmup else {}


def start(engine: str) -> Iterator[Times]:
    """Measure the start of a cluster with a repository, until a client is connected."""
    from tensorvine.actors import Repository

    floor_s, began = _import_s(), time.perf_counter()
    with Repository.start(NAME, engine=engine):
        yield {START: [time.perf_counter() - began], IMPORT: [floor_s]}


def killed(engine: str) -> float:
    """Return the seconds from a shard's death until a new client has a version from its next incarnation.

    Clients that mapped the memory of the shard before would read it on.
    """
    from tensorvine.actors import Repository

    tensors = synthetic(MIB, LAYERS).tensors()
    with tempfile.TemporaryDirectory(prefix="engines-") as folder, ExitStack() as stack:
        options: dict[str, Any] = {"path": folder, "store_bytes": GIB // 8, "preallocate_bytes": 0, "engine": engine}
        repo = stack.enter_context(Repository.start("kept", shards=1, **options))
        ref = repo.save("model", tensors, durability="disk").ref
        pid = repo._session.connection(0).hello.pid
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        reader = stack.enter_context(Repository.connect("kept", engine=engine))
        found = reader.load(ref, timeout=TIMEOUT_S)
        took = time.perf_counter() - began
        expect(equal(found, tensors), "engines", "the tensors of the path")
        expect(reader._session.connection(0).hello.pid != pid, "engines", "another process")
        return took


def _import_s() -> float:
    command = [sys.executable, "-c", "import tensorvine.actors"]
    return timed(lambda: subprocess.run(command, check=True, timeout=TIMEOUT_S))[0]  # noqa: S603


def _times(actions: dict[str, Action], count: int) -> Times:
    return {name: list(found.times) for name, found in alternate(actions, rounds=count, warmup=0).items()}


@contextmanager
def _raylets() -> Iterator[str]:
    with raylets(2, GIB // 4):
        yield RAY


@contextmanager
def _dask_nodes() -> Iterator[Any]:
    import dask.config

    from tests.support.dask_cluster import dask_processes

    with dask.config.set({"tensorvine.node": "one"}), dask_processes("one", "two") as (_, engine):
        yield engine


NODES: dict[str, Callable[[], Any]] = {RAY: _raylets, DASK: _dask_nodes}
"""Engine -> starts two nodes, with this process on one of them; yields the value of `engine=`."""
