"""Shards join and drain while models are read and saved: 2 -> 4 -> 3.

The models are candidates of a search: each inherits half of its tensors from its parent. One process reads models at
random, one saves new ones, before, during and after each change. The peer is what one does where the number of shards
is fixed: a second repository with the new number of shards, and everything copied into it, by one client. The floor
is one memory copy of the tensors that had to move; a change that moves none has no floor.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tensorvine.store import Layer, ModelGraph, ModelRef

from .measure import GIB, MIB, Effort, Goal, Report, Row, Sample, copy_floor, progress
from .session import NAME, repository
from .traffic import Served, Traffic

if TYPE_CHECKING:
    from tensorvine.actors import Repository

PEER = "a new repository, all copied"
FLOOR = "one warm memory copy of what moved"
MOVED_GOAL = 0.6
READ_GOAL_S = 1.0
STEADY_S = 2.0
STEADY_REQUESTS = 50
"""That each process has had served before a change begins, however busy the machine is."""
SCALE_TIMEOUT_S = 300.0
LAYERS = 8


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    models: int
    layer_bytes: int

    @property
    def stored_bytes(self) -> int:
        """About what is stored: a candidate writes half of its layers."""
        return self.models * LAYERS // 2 * self.layer_bytes


SIZES = {
    Effort.QUICK: Sizes(200, MIB // 64),
    Effort.NORMAL: Sizes(4_000, MIB // 16),
    Effort.FULL: Sizes(4_000, MIB // 16),
}


def run(effort: Effort) -> Report:
    """Measure both changes on one repository."""
    sizes = SIZES[effort]
    report = Report("elastic")
    room = max(2 * sizes.stored_bytes, 64 * MIB)
    with repository(GIB, shards=2, store_bytes=room) as repo:
        progress(f"{sizes.models} models")
        refs = _fill(repo, sizes)
        for shards in (4, 3):
            progress(f"copying all into a new repository of {shards} shards")
            theirs_s = _copy_all(repo, refs, shards, room)
            progress(f"scaling to {shards} shards")
            report.add(_change(repo, refs, shards, theirs_s), headline=shards == 4)
    return report


def _fill(repo: Repository, sizes: Sizes) -> list[ModelRef]:
    """Save candidates; each takes the first half of its layers over from one before."""
    rng = np.random.default_rng(0)
    names = [f"layer{place}" for place in range(LAYERS)]
    refs: list[ModelRef] = []
    for count in range(sizes.models):
        layers = [
            Layer(name, {"class": "Dense", "drawn": count if place >= LAYERS // 2 else 0}, (), (f"{name}/w",))
            for place, name in enumerate(names)
        ]
        written = names if not refs else names[LAYERS // 2 :]
        tensors = {f"{name}/w": rng.integers(0, 255, sizes.layer_bytes, np.uint8) for name in written}
        parent = refs[rng.integers(len(refs))] if refs else None
        inherit = {name: name for name in names if name not in written}
        refs.append(repo.save(f"search/{count}", tensors, graph=ModelGraph(layers), parent=parent, inherit=inherit).ref)
    return refs


def _copy_all(repo: Repository, refs: list[ModelRef], shards: int, room: int) -> float:
    from tensorvine.actors import Repository

    began = time.perf_counter()
    with Repository.start(f"{NAME}-anew", shards=shards, store_bytes=2 * room, preallocate_bytes=0) as anew:
        for ref in refs:
            anew.save(ref.name, repo.load(ref), graph=repo.graph(ref))
        return time.perf_counter() - began


def _change(repo: Repository, refs: list[ModelRef], shards: int, theirs_s: float) -> Row:
    traffic = Traffic(NAME, refs, readers=1, savers=1)
    steady = threading.Event()
    start = time.monotonic()
    steady.wait(STEADY_S)
    traffic.wait_for(STEADY_REQUESTS)
    begin = time.monotonic()
    moved = repo.scale(shards, timeout=SCALE_TIMEOUT_S)
    end = time.monotonic()
    steady.wait(STEADY_S)
    reads, saves = traffic.stop()
    if reads.failed or saves.failed:
        raise RuntimeError(f"elastic: expected every request to succeed; found {[*reads.failed, *saves.failed][:3]}")
    share = moved.metadata_bytes_moved / max(moved.metadata_bytes_total, 1)
    during = reads.between(begin, end)
    return Row(
        f"{moved.shards_before} -> {moved.shards_after} shards",
        Sample((end - begin,)),
        repo.stats().bytes_memory,
        PEER,
        Sample((theirs_s,)),
        FLOOR if moved.tensor_bytes_moved else None,
        copy_floor(moved.tensor_bytes_moved).median if moved.tensor_bytes_moved else None,
        goals=(
            Goal("part of the metadata that moved", share, at_most=MOVED_GOAL),
            Goal("longest read during it, s", during.longest_s, at_most=READ_GOAL_S),
            *([Goal("bytes of tensors moved", moved.tensor_bytes_moved, at_most=0)] if shards == 4 else []),
        ),
        facts={
            "names_moved": moved.names_moved,
            "metadata_bytes_moved": moved.metadata_bytes_moved,
            "metadata_bytes_total": moved.metadata_bytes_total,
            "tensor_bytes_moved": moved.tensor_bytes_moved,
            **_rates("reads", reads, start, begin, end),
            **_rates("saves", saves, start, begin, end),
        },
    )


def _rates(what: str, served: Served, start: float, begin: float, end: float) -> dict[str, float]:
    """Return requests a second before and during a change."""
    before, during = served.between(start, begin), served.between(begin, end)
    return {
        f"{what}_per_s_before": len(before.took_s) / (begin - start),
        f"{what}_per_s_during": len(during.took_s) / (end - begin),
        f"longest_{what[:-1]}_during_s": during.longest_s,
    }
