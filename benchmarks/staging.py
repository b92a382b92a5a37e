"""Cold against preallocated shared memory: DStore-OnDemand beside DStore-Opt (section 6.5).

Each cluster is started in a process of its own: the memory of the first would still be warm for the second.
Run as a module, this file is that process: it prints what it measured as one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from .architectures import synthetic
from .measure import GIB, MIB, ONE_COPY, Effort, Report, Row, Sample, copy_floor, progress
from .session import Names, repository, retire

LAYERS = 10
ROUNDS = 5
PREALLOCATED, ON_DEMAND = "preallocated", "on demand"


@dataclass(frozen=True)
class Measured:
    """What one process found; seconds."""

    startup_s: float
    """Cluster and repository."""
    first_staged_s: float
    first_committed_s: float
    staged_s: tuple[float, ...]
    """Each later save."""
    committed_s: tuple[float, ...]


def run(effort: Effort) -> Report:
    """Start clusters with and without preallocation and compare their saves."""
    sizes = (64 * MIB,) if effort is Effort.QUICK else (256 * MIB, GIB)
    report = Report("staging")
    for size in sizes:
        copy_s = copy_floor(size).median
        found = {way: _in_process(size, way == PREALLOCATED) for way in (PREALLOCATED, ON_DEMAND)}
        for case, pick in (
            ("first save, staged", lambda m: (m.first_staged_s,)),
            ("first save, committed", lambda m: (m.first_committed_s,)),
            ("later saves, staged", lambda m: m.staged_s),
            ("later saves, committed", lambda m: m.committed_s),
        ):
            row = _row(f"{size // MIB} MiB: {case}", size, found, pick, copy_s)
            report.add(row, headline=size == sizes[-1] and case == "first save, staged")
        report.add(_row(f"{size // MIB} MiB: start of cluster and repository", size, found, lambda m: (m.startup_s,)))
    return report


def _row(case: str, size: int, found: dict[str, Measured], pick: Any, copy_s: float | None = None) -> Row:
    ours, peer = (Sample(tuple(pick(found[way]))) for way in (PREALLOCATED, ON_DEMAND))
    limit = None if copy_s is None else ONE_COPY
    return Row(case, ours, size, ON_DEMAND, peer, limit, copy_s)


def _in_process(size: int, preallocate: bool) -> Measured:
    way = PREALLOCATED if preallocate else ON_DEMAND
    progress(f"{size // MIB} MiB, {way}")
    command = [sys.executable, "-m", __spec__.name, str(size), way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)  # noqa: S603 - our own module
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure(size: int, preallocate: bool) -> Measured:
    """Start a cluster and time the first and some later saves."""
    architecture = synthetic(size, LAYERS)
    tensors = architecture.tensors()
    names = Names("staging")
    staged: list[float] = []
    committed: list[float] = []
    start = time.perf_counter()
    with repository(max(4 * size, GIB), preallocate_bytes=size if preallocate else 0) as repo:
        startup_s = time.perf_counter() - start
        for _ in range(1 + ROUNDS):
            start = time.perf_counter()
            pending = repo.save_async(names.fresh(), tensors, graph=architecture.graph)
            pending.staged(60)
            staged.append(time.perf_counter() - start)
            saved = pending.committed(60)
            committed.append(time.perf_counter() - start)
            retire(repo, saved.ref)
    return Measured(startup_s, staged[0], committed[0], tuple(staged[1:]), tuple(committed[1:]))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1]), sys.argv[2] == PREALLOCATED))))
