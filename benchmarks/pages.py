"""Pages of a shard's memory: saves that find them made and mapped, beside saves into memory that nobody touched, and
how long it takes until what was retired is the system's again.

The peer of every row is the first save of a shard that preallocated nothing: what each such save cost before pages were
made ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from .architectures import Architecture, synthetic
from .measure import GIB, MIB, ONE_COPY, Effort, Goal, Report, Row, Sample, copy_floor, progress, wait_until
from .session import NAME, Names, repository

if TYPE_CHECKING:
    from tensorvine import Saved
    from tensorvine.actors import Repository

LAYERS = 10
ROUNDS = 5
PAUSE_S = 1.5
"""Between what happened before and the save that is timed: the client connected, or another version was saved."""
COLD = "into memory that nobody touched"
RETIRED_BYTES = 10 * GIB


def run(effort: Effort) -> Report:
    """Time saves by what became of the pages before; then save much, retire it, and watch it go."""
    sizes = (16 * MIB,) if effort is Effort.QUICK else (256 * MIB, GIB)
    stored = 64 * MIB if effort is Effort.QUICK else RETIRED_BYTES
    report = Report("pages")
    for size in sizes:
        progress(f"{size // MIB} MiB")
        with repository(store_bytes=stored + 2 * size, preallocate_bytes=0) as repo:
            for row in _Rounds(repo, size).rows(stored):
                report.add(row, headline=size == sizes[0] and "doubles" in row.case)
    return report


class _Rounds:
    """Saves of one size in one repository."""

    def __init__(self, repo: Repository, size: int) -> None:
        self._repo = repo
        self._size = size
        self._floor_s = copy_floor(size).median
        self._architecture: Architecture = synthetic(size, LAYERS)
        self._tensors = self._architecture.tensors()
        self._names = Names("pages")

    def rows(self, stored: int) -> Iterator[Row]:
        """Give the rows; `stored` bytes are saved and retired."""
        cold, first = self._timed(self._repo)
        doubled, kept = list[float](), [first]
        for _ in range(ROUNDS):
            time.sleep(PAUSE_S)
            doubled.append(self._and_keep(kept))
            self._retire(kept.pop())
        self._retire(kept.pop())
        warm = [self._after_a_pause() for _ in range(ROUNDS)]
        came = [self._from_another() for _ in range(ROUNDS)]
        base = Sample(tuple(warm)).median
        yield self._row("a warm save, after as long a pause", warm, cold)
        yield self._row("a save that doubles what is stored", doubled, cold, (base, 1.5))
        yield self._row("first save of a client that came a second ago", came, cold, (base, 1.5))
        while self._repo.stats().shards[0].bytes_resident < stored:
            self._and_keep(kept)
        full = self._repo.stats().shards[0].bytes_resident
        for saved in kept:
            self._retire(saved)
        start = time.perf_counter()
        least = min(GIB, full // 2)
        wait_until(lambda: self._repo.stats().shards[0].bytes_resident < least, f"less than {least} bytes resident")
        fell = round(time.perf_counter() - start, 1)
        left = self._settled()
        later = [self._and_retire(self._repo), *(self._after_a_pause() for _ in range(ROUNDS))]
        facts = {"MiB resident before": full // MIB, "MiB that stay": left // MIB, "seconds until it fell": fell}
        yield self._row("saves after that went", later, cold, (base, 1.3), facts)
        yield self._row("the first of them", later[:1], cold, (base, 1.3))

    def _settled(self) -> int:
        """Wait until no more goes, and give what stays."""
        found = [self._repo.stats().shards[0].bytes_resident]
        while len(found) < 2 or found[-1] != found[-2]:
            time.sleep(PAUSE_S)  # the shard looks once a second
            found.append(self._repo.stats().shards[0].bytes_resident)
        return found[-1]

    def _row(
        self,
        case: str,
        ours: list[float],
        cold: float,
        held: tuple[float, float] | None = None,
        facts: dict[str, float] | None = None,
    ) -> Row:
        """Make a row; `held` says what a warm save takes, and how many times that this should be at most."""
        sample, peer = Sample(tuple(ours)), Sample((cold,))
        goals = (Goal("times a warm save", sample.median / held[0], at_most=held[1]),) if held is not None else ()
        whole = f"{self._size // MIB} MiB: {case}"
        return Row(whole, sample, self._size, COLD, peer, ONE_COPY, self._floor_s, goals, facts or {})

    def _timed(self, repo: Repository) -> tuple[float, Saved]:
        start = time.perf_counter()
        saved = repo.save(self._names.fresh(), self._tensors, graph=self._architecture.graph, inherit=None)
        return time.perf_counter() - start, saved

    def _and_keep(self, kept: list[Saved]) -> float:
        taken, saved = self._timed(self._repo)
        kept.append(saved)
        return taken

    def _and_retire(self, repo: Repository) -> float:
        taken, saved = self._timed(repo)
        self._retire(saved)
        return taken

    def _after_a_pause(self) -> float:
        """Time a save into pages that are mapped; what slept meanwhile, here and at the shard, is as in other rows."""
        time.sleep(PAUSE_S)
        return self._and_retire(self._repo)

    def _from_another(self) -> float:
        with closing(type(self._repo).connect(NAME)) as other:
            time.sleep(PAUSE_S)
            return self._and_retire(other)

    def _retire(self, saved: Saved) -> None:
        self._repo.retire(saved.ref)
