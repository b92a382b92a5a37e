"""Shards that join and drain (2 -> 4 -> 3) during reads and saves, compared with copying everything.

The models are candidates of a search: each inherits half of its tensors from its parent. One process reads models at
random, one saves new ones, before, during and after each change. The peer is the way without elastic shards: a second
repository with the new number of shards, and everything copied into it by one client. The floor is one memory copy of
the tensors that had to move; a change that moves none has no floor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tensorvine.store import Layer, ModelGraph, ModelRef

from .core.clusters import NAME, repository
from .core.fleet import Fleet
from .core.measure import GIB, MIB, copy_floor, expect, progress, sample, timed, wait_until
from .core.report import Effort, Goal, Report

PEER, FLOOR = "a new repository, all copied", "one warm memory copy of what moved"
READ_GOAL_S = 1.0
STEADY_S, STEADY_REQUESTS = 2.0, 50
"""Time of traffic before a change, and requests of each process in it at least."""
SCALE_TIMEOUT_S, REQUEST_S, LAYERS, SAVED_BYTES = 300.0, 60.0, 8, 4096


def run(report: Report) -> None:
    """Measure both changes on one repository."""
    models, layer_bytes = report.pick(quick=(24, 4096), normal=(4_000, MIB // 16))
    room = max(models * LAYERS * layer_bytes, 64 * MIB)
    with repository(GIB, shards=2, store_bytes=room) as repo:
        progress(f"{models} models")
        refs = _fill(repo, models, layer_bytes)
        for shards in (4, 3):
            progress(f"copying all into a new repository of {shards} shards")
            theirs_s, _ = timed(lambda shards=shards: _copy_all(repo, refs, shards, room))
            progress(f"scaling to {shards} shards")
            _change(report, repo, refs, shards, theirs_s)


def _fill(repo: Any, models: int, layer_bytes: int) -> list[ModelRef]:
    """Save candidates; each inherits the first half of its layers from an earlier one."""
    rng, names = np.random.default_rng(0), [f"layer{place}" for place in range(LAYERS)]
    refs: list[ModelRef] = []
    for count in range(models):
        layers = [
            Layer(name, {"class": "Dense", "drawn": count if place >= LAYERS // 2 else 0}, (), (f"{name}/w",))
            for place, name in enumerate(names)
        ]
        written = names if not refs else names[LAYERS // 2 :]
        tensors = {f"{name}/w": rng.integers(0, 255, layer_bytes, np.uint8) for name in written}
        parent = refs[rng.integers(len(refs))] if refs else None
        inherit = {name: name for name in names if name not in written}
        refs.append(repo.save(f"search/{count}", tensors, graph=ModelGraph(layers), parent=parent, inherit=inherit).ref)
    return refs


def _copy_all(repo: Any, refs: list[ModelRef], shards: int, room: int) -> None:
    from tensorvine.actors import Repository

    with Repository.start(f"{NAME}-anew", shards=shards, store_bytes=2 * room, preallocate_bytes=0) as anew:
        for ref in refs:
            anew.save(ref.name, repo.load(ref), graph=repo.graph(ref))


def _change(report: Report, repo: Any, refs: list[ModelRef], shards: int, theirs_s: float) -> None:
    steady_s, requests = (0.1, 3) if report.effort is Effort.QUICK else (STEADY_S, STEADY_REQUESTS)
    with Fleet(Traffic, [(NAME, refs, shards), (NAME, [], shards)], threads=2) as traffic:
        traffic.all("wait_for", 1)
        start = time.monotonic()
        time.sleep(steady_s)
        traffic.all("wait_for", requests)
        begin = time.monotonic()
        moved = repo.scale(shards, timeout=SCALE_TIMEOUT_S)
        end = time.monotonic()
        time.sleep(steady_s)
        served = dict(zip(("reads", "saves"), traffic.all("end"), strict=True))
    failed = [each for _, said in served.values() for each in said]
    expect(not failed, "elastic", f"no failed request, not {failed[:3]}")
    facts: dict[str, float] = {}
    for what, (requested, _) in served.items():
        during = _under_way(requested, begin, end)
        facts[f"{what}_per_s_before"] = len(_under_way(requested, start, begin)) / (begin - start)
        facts[f"{what}_per_s_during"] = len(during) / (end - begin)
        facts[f"longest_{what[:-1]}_during_s"] = max(during, default=0.0)
    tensor_bytes = moved.tensor_bytes_moved
    goals = [Goal("longest read during it, s", facts["longest_read_during_s"], at_most=READ_GOAL_S)]
    if shards == 4:
        goals.append(Goal("bytes of tensors moved", tensor_bytes, at_most=0))
    report.add(
        f"{moved.shards_before} -> {moved.shards_after} shards",
        sample(end - begin),
        repo.stats().bytes_memory,
        peer=(PEER, sample(theirs_s)),
        floor=(FLOOR, copy_floor(tensor_bytes)) if tensor_bytes else None,
        goals=goals,
        headline=shards == 4,
        tensor_bytes_moved=tensor_bytes,
        **facts,
    )


def _under_way(requested: Sequence[tuple[float, float]], begin: float, end: float) -> list[float]:
    """Return the times of the requests that were under way at any time of a span.

    >>> _under_way([(0.0, 0.5), (1.0, 1.5), (2.0, 0.1), (3.0, 1.0)], 2.2, 3.5)
    [1.5, 1.0]
    """
    return [took for began, took in requested if began < end and began + took > begin]


class Traffic:
    """A process that reads models at random, or saves new ones if it has none to read."""

    def __init__(self, name: str, refs: list[ModelRef], run: int) -> None:
        from tensorvine.actors import Repository

        self._repo, self._refs, self._run = Repository.connect(name), refs, run
        self._rng = np.random.default_rng(run)
        self._requested: list[tuple[float, float]] = []
        self._failed: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def wait_for(self, requests: int) -> None:
        """Wait for a number of requests."""
        wait_until(lambda: len(self._requested) >= requests, f"{requests} requests")

    def end(self) -> tuple[list[tuple[float, float]], list[str]]:
        """Stop; return when each request began and how long it took, and the errors."""
        self._ended.set()
        self._thread.join(REQUEST_S)
        return self._requested, self._failed

    def close(self) -> None:
        """Disconnect."""
        self._repo.close()

    def _go_on(self) -> None:
        while not self._ended.is_set():
            start = time.monotonic()
            try:
                if self._refs:
                    self._repo.load(self._refs[self._rng.integers(len(self._refs))], timeout=REQUEST_S)
                else:
                    tensors = {"w": self._rng.integers(0, 255, SAVED_BYTES, dtype=np.uint8)}
                    self._repo.save(f"traffic/{self._run}-{len(self._requested)}", tensors, timeout=REQUEST_S)
            except Exception as exc:  # noqa: BLE001  part of the result
                self._failed.append(f"{type(exc).__name__}: {exc}")
            self._requested.append((start, time.monotonic() - start))
