"""1 to 64 consumers of one name: when the last one has a version, and what updates cost answers and the training.

Rules
- An update lasts from the hand-over until the last consumer answers with it. Answers per second within updates stand
  beside those of a phase without any, of equal length, which comes before or after in turn.
- Consumers are asked as fast as they can answer, which takes all cores; and again at half that rate.
- More than `PROCESSES` consumers share processes: with one each, 64 would take a minute to start on two cores and
  4 GiB. A note says what a process takes.
- What publishing costs the training is `pace`'s part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from .crowd import Crowd, tagged
from .measure import GIB, MIB, ONE_COPY, Effort, Goal, Report, Row, Sample, copy_floor, progress, seconds, total_bytes
from .pace import pace
from .quiet import quiet
from .session import NAME

if TYPE_CHECKING:
    from tensorvine.actors import Publisher, Repository

LIMIT_SHARE = 0.9
"""Of the answers per second without updates, what there should be during one."""
PROCESSES = 4
"""Consumers are shared out among so many."""
HALF = 0.5
"""Of the rate at which they can answer, the lower rate at which consumers are asked."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    counts: tuple[int, ...]
    """Of consumers."""
    side: int
    """Of the square tensors that a model is made of."""
    tensors: int
    updates: int
    """Of one phase."""
    pause_s: float
    """Between two updates."""
    phases: int
    """With updates, and as many without."""
    iterations: int
    """Of one training."""
    pairs: int
    """Of trainings."""


PLANS = {
    Effort.QUICK: Plan((1, 6), 512, 4, 4, 0.1, 1, 150, 1),
    Effort.NORMAL: Plan((1, 4, 16, 64), 1024, 16, 12, 0.3, 2, 800, 7),
    Effort.FULL: Plan((1, 4, 16, 64), 1024, 16, 40, 0.3, 4, 2000, 15),
}


@dataclass
class ConsumersReport(Report):
    """Also notes."""

    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report and its notes."""
        return super().as_dict() | {"notes": self.notes}

    def print(self, console: Console) -> None:
        """Print the rows, then the notes."""
        super().print(console)
        for note in self.notes:
            console.print(note, highlight=False)


@dataclass
class Phases:
    """What was measured while consumers were asked at one rate."""

    deliveries_s: list[float] = field(default_factory=list)
    """From each hand-over until the last consumer answered with the version."""
    during: list[float] = field(default_factory=list)
    """Answers per second within updates, in each phase that has some."""
    beside: list[float] = field(default_factory=list)
    """In all of these phases, pauses between updates included."""
    without: list[float] = field(default_factory=list)
    """In each phase without."""
    mixed: int = 0
    """Answers of more than one version."""
    answers: int = 0


def run(effort: Effort) -> Report:
    """Measure crowds of consumers, then the training."""
    plan = PLANS[effort]
    report = ConsumersReport("consumers")
    tensors = {f"square{place:02}": np.zeros((plan.side, plan.side), np.float32) for place in range(plan.tensors)}
    size = total_bytes(tensors)
    copy_s = copy_floor(size).median
    with _repository(8 * size + GIB // 4) as repo:
        for consumers in plan.counts:
            progress(f"{consumers} consumers")
            rows = _Crowded(repo, consumers, tensors, plan, report).rows(copy_s)
            for row in rows:
                report.add(row, headline=row is rows[0] and consumers == plan.counts[-1])
        progress("a training, with and without")
        report.add(pace(repo, plan.iterations, plan.pairs))
    return report


@contextmanager
def _repository(store_bytes: int) -> Iterator[Repository]:
    from tensorvine.actors import Repository
    from tensorvine.clusters.local import LocalCluster

    with (
        LocalCluster(object_store_bytes=GIB // 8),
        Repository.start(NAME, shards=1, store_bytes=store_bytes) as repo,
    ):
        yield repo


# ---- crowds ---------------------------------------------------------------------------------------------


class _Crowded:
    """The measurements with one number of consumers."""

    def __init__(self, repo: Repository, consumers: int, tensors: Any, plan: Plan, report: ConsumersReport) -> None:
        self._repo = repo
        self._consumers = consumers
        self._tensors = tensors
        self._plan = plan
        self._report = report
        self._versions = count(1)

    def rows(self, copy_s: float) -> list[Row]:
        """Measure at both rates.

        Args:
            copy_s: what one copy of the model takes.
        """
        from tensorvine.actors import Publisher

        name = f"crowd/{self._consumers}"
        start = time.perf_counter()
        processes = min(self._consumers, PROCESSES)
        with (
            closing(Crowd(self._repo.name, name, self._consumers, processes)) as crowd,
            Publisher(self._repo, name, schedule=1, keep=2) as publisher,
        ):
            self._publish(publisher)
            crowd.wait_for(1)
            self._report.notes.append(
                f"consumers: {self._consumers}, in processes: {processes}; all answered after "
                f"{seconds(time.perf_counter() - start)}; one process has {crowd.own_bytes() / MIB:.0f} MiB to itself"
            )
            fastest = self._measured(crowd, publisher, 0.0)
            slower = self._measured(crowd, publisher, self._consumers / (HALF * median(fastest.without)))
        return [self._row("as fast as they can", fastest, copy_s), self._row("at half that rate", slower, copy_s)]

    def _measured(self, crowd: Crowd, publisher: Publisher, period_s: float) -> Phases:
        """Ask at one rate, with and without updates in turn."""
        found = Phases()
        crowd.begin(period_s)  # a first phase, which warms up
        self._updates(publisher)
        crowd.end()
        for turn in range(self._plan.phases):
            for updating in (turn % 2 == 0, turn % 2 == 1):
                quiet()
                crowd.begin(period_s)
                begun = time.time()
                handed = self._updates(publisher) if updating else {}
                if not updating:
                    time.sleep((self._plan.updates + 1) * self._plan.pause_s)
                ended = time.time()
                if updating:
                    crowd.wait_for(max(handed))
                asked = crowd.end()
                spans = list(zip(handed.values(), crowd.answered_from(list(handed)), strict=True))
                found.deliveries_s += [end - start for start, end in spans]
                found.mixed += asked.mixed
                found.answers += len(asked.at)
                if updating:
                    found.during.append(asked.rate(_joined(spans)))
                (found.beside if updating else found.without).append(asked.rate([(begun, ended)]))
        return found

    def _updates(self, publisher: Publisher) -> dict[int, float]:
        """Publish versions; gives when each was handed over, in seconds since the epoch."""
        handed: dict[int, float] = {}
        for _ in range(self._plan.updates):
            time.sleep(self._plan.pause_s)
            version, at = self._publish(publisher)
            handed[version] = at
        time.sleep(self._plan.pause_s)
        return handed

    def _publish(self, publisher: Publisher) -> tuple[int, float]:
        version = next(self._versions)
        tagged(self._tensors, version)
        at = time.time()
        found = publisher.publish(self._tensors).committed(TIMEOUT_S).ref.version
        if found != version:
            raise RuntimeError(f"crowd: expected version {version} to be committed; found {found}")
        return version, at

    def _row(self, how: str, found: Phases, copy_s: float) -> Row:
        without = median(found.without)
        share, beside = median(found.during) / without, median(found.beside) / without
        goals = (
            Goal("of the answers per second without updates, within them", share, at_least=LIMIT_SHARE),
            Goal("and with the pauses between them", beside, at_least=LIMIT_SHARE),
            Goal("answers of more than one version", found.mixed, at_most=0),
        )
        facts = {
            "consumers": self._consumers,
            "answers_per_s": without,
            "answers_per_s_in_updates": median(found.during),
            "answers_per_s_beside_updates": median(found.beside),
            "share": share,
            "share_beside": beside,
            "answers": found.answers,
            "versions": len(found.deliveries_s),
        }
        case = f"{self._consumers} asked {how}: the last one has it"
        size, last = total_bytes(self._tensors), Sample(tuple(found.deliveries_s))
        return Row(case, last, size, limit=ONE_COPY, limit_s=copy_s, goals=goals, facts=facts)


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans of time that overlap; they are sorted by their beginnings.

    >>> _joined([(0, 2), (1, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    joined: list[tuple[float, float]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
