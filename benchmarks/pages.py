"""Saves into pages that the shard made ahead, compared with untouched memory; and how retired memory is freed.

The peer of every row is the first save of a shard that preallocated nothing: the cost of each such save before shards
made pages ahead.
"""

from __future__ import annotations

import time
from typing import Any

from .core.clusters import NAME, Names, repository
from .core.measure import GIB, MIB, ONE_COPY, copy_floor, progress, sample, timed, wait_until
from .core.models import synthetic
from .core.report import Goal, Report

LAYERS = 10
PAUSE_S = 1.5
"""Between the previous step and the timed save: the client connected, or another version was saved."""
COLD = "into memory that nobody touched"


def run(report: Report) -> None:
    """Time saves by the state of the pages before; then save much, retire it, and watch the memory."""
    sizes = report.pick(quick=(4 * MIB,), normal=(256 * MIB, GIB))
    stored = report.pick(quick=16 * MIB, normal=10 * GIB)
    for size in sizes:
        progress(f"{size // MIB} MiB")
        with repository(store_bytes=stored + 2 * size, preallocate_bytes=0) as repo:
            _Rounds(report, repo, size, report.pick(quick=1, normal=5)).measure(stored, size == sizes[0])


class _Rounds:
    """Saves of one size in one repository."""

    def __init__(self, report: Report, repo: Any, size: int, rounds: int) -> None:
        self._report, self._repo, self._size, self._rounds = report, repo, size, rounds
        self._floor = ONE_COPY, copy_floor(size)
        self._model, self._names = synthetic(size, LAYERS), Names("pages")
        self._tensors = self._model.tensors()

    def measure(self, stored: int, headline: bool) -> None:
        """Add the rows; `stored` bytes are saved and retired."""
        cold, first = self._timed(self._repo)
        doubled, kept = list[float](), [first]
        for _ in range(self._rounds):
            time.sleep(PAUSE_S)
            took, saved = self._timed(self._repo)
            doubled.append(took)
            self._repo.retire(saved.ref)
        self._repo.retire(kept.pop().ref)
        warm = [self._after_a_pause() for _ in range(self._rounds)]
        came = [self._from_another() for _ in range(self._rounds)]
        base = sample(warm).median
        self._row("a warm save, after as long a pause", warm, cold)
        self._row("a save that doubles what is stored", doubled, cold, base, 1.5, headline=headline)
        self._row("first save of a client that came a second ago", came, cold, base, 1.5)
        while self._resident() < stored:
            kept.append(self._timed(self._repo)[1])
        full = self._resident()
        for saved in kept:
            self._repo.retire(saved.ref)
        least = min(GIB, full // 2)
        fell, _ = timed(lambda: wait_until(lambda: self._resident() < least, f"less than {least} bytes resident"))
        left = self._settled()
        later = [self._and_retire(self._repo), *(self._after_a_pause() for _ in range(self._rounds))]
        facts = {"MiB resident before": full // MIB, "MiB that stay": left // MIB, "seconds until it fell": fell}
        self._row("saves after that went", later, cold, base, 1.3, **facts)
        self._row("the first of them", later[:1], cold, base, 1.3)

    def _row(
        self,
        case: str,
        ours: list[float],
        cold: float,
        warm: float = 0.0,
        most: float = 0.0,
        *,
        headline: bool = False,
        **facts: float,
    ) -> None:
        """Add a row; with `warm`, the seconds of a warm save, the goal is at most `most` times as long."""
        found = sample(ours)
        self._report.add(
            f"{self._size // MIB} MiB: {case}",
            found,
            self._size,
            peer=(COLD, sample(cold)),
            floor=self._floor,
            goals=[Goal("times a warm save", found.median / warm, at_most=most)] if warm else [],
            headline=headline,
            **facts,
        )

    def _resident(self) -> int:
        return self._repo.stats().shards[0].bytes_resident

    def _settled(self) -> int:
        """Wait until no more memory is freed; return the rest."""
        found = [self._resident()]
        while len(found) < 2 or found[-1] != found[-2]:
            time.sleep(PAUSE_S)  # the shard looks once a second
            found.append(self._resident())
        return found[-1]

    def _timed(self, repo: Any) -> tuple[float, Any]:
        return timed(lambda: repo.save(self._names.fresh(), self._tensors, graph=self._model.graph, inherit=None))

    def _and_retire(self, repo: Any) -> float:
        took, saved = self._timed(repo)
        self._repo.retire(saved.ref)
        return took

    def _after_a_pause(self) -> float:
        """Time a save into mapped pages, with caches as cold as in other rows."""
        time.sleep(PAUSE_S)
        return self._and_retire(self._repo)

    def _from_another(self) -> float:
        with type(self._repo).connect(NAME) as other:
            time.sleep(PAUSE_S)
            return self._and_retire(other)
