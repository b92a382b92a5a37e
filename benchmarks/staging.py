"""Saves into preallocated shared memory, compared with memory taken on demand (DStore, section 6.5).

Each cluster is started in a process of its own: the memory of the first would still be warm for the second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .core.clusters import Names, repository, retire
from .core.fleet import Program
from .core.measure import GIB, MIB, ONE_COPY, copy_floor, progress, sample
from .core.models import synthetic
from .core.report import Report

LAYERS = 10
PREALLOCATED, ON_DEMAND = "preallocated", "on demand"


def run(report: Report) -> None:
    """Start clusters with and without preallocation and compare their saves."""
    sizes = report.pick(quick=(4 * MIB,), normal=(256 * MIB, GIB))
    rounds = report.pick(quick=1, normal=5)
    for size in sizes:
        found: dict[str, dict[str, list[float]]] = {}
        copied = copy_floor(size)
        for way in (PREALLOCATED, ON_DEMAND):
            progress(f"{size // MIB} MiB, {way}")
            with Program(measure, size, way == PREALLOCATED, rounds) as program:
                found[way] = program.ask()
        for case in found[PREALLOCATED]:
            ours, theirs = (sample(found[way][case]) for way in (PREALLOCATED, ON_DEMAND))
            report.add(
                f"{size // MIB} MiB: {case}",
                ours,
                size,
                peer=(ON_DEMAND, theirs),
                floor=None if "start" in case else (ONE_COPY, copied),
                headline=size == sizes[-1] and case == "first save, staged",
            )


def measure(size: int, preallocate: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """Start a cluster and time the first and some later saves; yields case -> seconds."""
    model, names = synthetic(size, LAYERS), Names("staging")
    tensors = model.tensors()
    staged: list[float] = []
    committed: list[float] = []
    start = time.perf_counter()
    with repository(max(4 * size, GIB), preallocate_bytes=size if preallocate else 0) as repo:
        startup_s = time.perf_counter() - start
        for _ in range(1 + rounds):
            start = time.perf_counter()
            pending = repo.save_async(names.fresh(), tensors, graph=model.graph)
            pending.staged(60)
            staged.append(time.perf_counter() - start)
            saved = pending.committed(60)
            committed.append(time.perf_counter() - start)
            retire(repo, saved.ref)
    yield {
        "first save, staged": staged[:1],
        "first save, committed": committed[:1],
        "later saves, staged": staged[1:],
        "later saves, committed": committed[1:],
        "start of cluster and repository": [startup_s],
    }
