"""1 to 64 consumers of one name: delivery times, answers during updates, and what publishing costs the training.

Rules
- An update lasts from the hand-over until the last consumer answers with it. Answers per second within updates are
  compared with those of a phase without any, of equal length, which comes before or after in turn.
- Consumers are asked as fast as they can answer, which takes all cores; and again at half that rate. They are
  `Follower`s, as in a `Consumer` actor, asked by threads of their process, so that no message is part of an answer.
- More than `PROCESSES` consumers share processes: with one each, 64 would take a minute to start and 4 GiB.
- All elements of all tensors of a version are its number. An answer multiplies a batch with every tensor, so it reads
  each byte; an answer of two versions would show both numbers.
- The training is NT3 at CPU size, in PyTorch on one thread. It trains with a publisher and without, in turn, each time
  from the same state, while a consumer answers 20 times a second. Its time is that of its iterations, stalls and the
  publisher's threads included.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from .core.clusters import repository
from .core.fleet import Fleet
from .core.measure import GIB, ONE_COPY, Sample, Tensors, copy_floor, expect, progress, quiet, sample, total_bytes
from .core.report import Goal, Report

LIMIT_SHARE, LIMIT_PERCENT = 0.9, 2.0
"""Goals: share of the answers without updates; by which publishing may slow the training."""
PROCESSES, HALF, BATCH = 4, 0.5, 4
TIMEOUT_S, START_TIMEOUT_S = 60.0, 180.0
PERIOD_S, NAME = 0.05, "pace"
"""Of the training's consumer."""


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    counts: tuple[int, ...]
    side: int
    """Of the square tensors of a model."""
    tensors: int
    updates: int
    """Of one phase."""
    pause_s: float
    phases: int
    """With updates, and as many without."""
    iterations: int
    pairs: int
    """Of trainings."""


def run(report: Report) -> None:
    """Measure crowds of consumers, then the training."""
    plan = report.pick(
        quick=Plan((1, 3), 64, 2, 2, 0.05, 1, 60, 1), normal=Plan((1, 4, 16, 64), 1024, 16, 12, 0.3, 2, 800, 7)
    )
    tensors = {f"square{place:02}": np.zeros((plan.side, plan.side), np.float32) for place in range(plan.tensors)}
    size = total_bytes(tensors)
    floor = copy_floor(size)
    with repository(GIB // 8, shards=1, store_bytes=8 * size + GIB // 4) as repo:
        for number in plan.counts:
            progress(f"{number} consumers")
            _crowd(report, repo, number, tensors, plan, floor)
        progress("a training, with and without")
        _pace(report, repo, plan.iterations, plan.pairs)


# ---- crowds -----------------------------------------------------------------------------------------------


class Tagged:
    """A model all of whose numbers are the version's.

    >>> model = Tagged()
    >>> model.assign({"a": np.full((4, 2), 7, np.float32)})
    >>> model(None)
    (7.0, 7.0)
    """

    def __init__(self) -> None:
        self._tensors: Mapping[str, Any] = {}

    def assign(self, tensors: Mapping[str, Any]) -> None:
        """Take a version."""
        self._tensors = tensors

    def __call__(self, batch: object) -> tuple[float, float]:
        """Return the least and the greatest number in the model. Tensors have 2**N rows, so that means are exact."""
        least, most = np.inf, -np.inf
        for tensor in self._tensors.values():
            rows = len(tensor)
            answer = np.full((BATCH, rows), 1 / rows, np.float32) @ tensor
            least, most = min(least, float(answer.min())), max(most, float(answer.max()))
        return least, most


class Followers:
    """A process with some consumers."""

    def __init__(self, repository: str, name: str, number: int) -> None:
        from tensorvine.actors import Repository
        from tensorvine.actors.updates.follower import Follower

        self._followers = [Follower(Repository.connect(repository), name, Tagged) for _ in range(number)]
        self._threads: list[threading.Thread] = []
        self._asking = threading.Event()
        self._at: list[float] = []
        self._mixed = 0
        self._errors: list[Exception] = []

    def wait_for(self, version: int) -> None:
        """Wait until all answer with a version."""
        for follower in self._followers:
            follower.wait_for(version, TIMEOUT_S)

    def begin(self, period_s: float) -> None:
        """Ask each consumer once in a period, or all the time if that is 0."""
        self._asking.set()
        self._threads = [threading.Thread(target=self._ask, args=(each, period_s)) for each in self._followers]
        for thread in self._threads:
            thread.start()

    def end(self) -> tuple[list[float], int]:
        """Stop asking; return the times of the answers, and the number of answers from more than one version."""
        self._asking.clear()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        if self._errors:
            raise self._errors[0]
        at, mixed, self._at, self._mixed = self._at, self._mixed, [], 0
        return at, mixed

    def swapped(self) -> list[list[tuple[int, float]]]:
        """Return (version, time of its first answer) of each consumer's deliveries."""
        found = [follower.status().deliveries for follower in self._followers]
        return [[(each.ref.version, each.swapped_at) for each in deliveries] for deliveries in found]

    def close(self) -> None:
        """Disconnect."""
        for follower in self._followers:
            follower.close()

    def _ask(self, follower: Any, period_s: float) -> None:
        due = time.monotonic()
        try:
            while self._asking.is_set():
                answer = follower.infer(None)
                self._at.append(time.time())
                self._mixed += answer.outputs != (answer.ref.version, answer.ref.version)
                due = max(due + period_s, time.monotonic() - period_s)
                if period_s:
                    time.sleep(max(due - time.monotonic(), 0.0))
        except Exception as exc:  # noqa: BLE001  raised again by `end`
            self._errors.append(exc)


@dataclass
class _Phases:
    """Figures of one rate: deliveries in seconds; answers per second during, beside and without updates."""

    deliveries_s: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    mixed: int = 0


def _crowd(report: Report, repo: Any, number: int, tensors: Tensors, plan: Plan, floor: Sample) -> None:
    """Measure one number of consumers, as fast as they can and at half that rate."""
    from tensorvine.actors import Publisher

    name, versions, processes = f"crowd/{number}", count(1), min(number, PROCESSES)
    shares = [number // processes + (place < number % processes) for place in range(processes)]

    def publish() -> tuple[int, float]:
        version = next(versions)
        for tensor in tensors.values():
            tensor.fill(version)
        at = time.time()
        found = publisher.publish(tensors).committed(TIMEOUT_S).ref.version
        expect(found == version, "consumers", f"version {version}")
        return version, at

    def updates() -> dict[int, float]:
        """Publish versions; return when each was handed over, in seconds since the epoch."""
        handed: dict[int, float] = {}
        for _ in range(plan.updates):
            time.sleep(plan.pause_s)
            version, at = publish()
            handed[version] = at
        time.sleep(plan.pause_s)
        return handed

    def measured(period_s: float) -> _Phases:
        """Ask at one rate, with and without updates in turn."""
        found = _Phases()
        crowd.all("begin", period_s)  # a first phase, which warms up
        updates()
        crowd.all("end")
        for turn in range(plan.phases):
            for updating in (turn % 2 == 0, turn % 2 == 1):
                quiet()
                crowd.all("begin", period_s)
                begun = time.time()
                handed = updates() if updating else {}
                if not updating:
                    time.sleep((plan.updates + 1) * plan.pause_s)
                ended = time.time()
                if updating:
                    crowd.all("wait_for", max(handed))
                asked = crowd.all("end")
                at = np.sort(np.concatenate([np.array(times) for times, _ in asked]))
                found.mixed += sum(mixed for _, mixed in asked)
                each = [delivered for part in crowd.all("swapped") for delivered in part]
                last = [max(min(at for had, at in one if had >= version) for one in each) for version in handed]
                spans = list(zip(handed.values(), last, strict=True))
                found.deliveries_s += [end - start for start, end in spans]
                if updating:
                    found.during.append(rate(at, joined(spans)))
                (found.beside if updating else found.without).append(rate(at, [(begun, ended)]))
        return found

    with (
        Fleet(Followers, [(repo.name, name, share) for share in shares]) as crowd,
        Publisher(repo, name, schedule=1, keep=2) as publisher,
    ):
        publish()
        crowd.all("wait_for", 1, timeout=START_TIMEOUT_S)
        fastest = measured(0.0)
        slower = measured(number / (HALF * median(fastest.without)))
    for how, found in (("as fast as they can", fastest), ("at half that rate", slower)):
        without = median(found.without)
        share, beside = median(found.during) / without, median(found.beside) / without
        report.add(
            f"{number} asked {how}: the last one has it",
            sample(found.deliveries_s),
            total_bytes(tensors),
            floor=(ONE_COPY, floor),
            goals=[
                Goal("of the answers per second without updates, within them", share, at_least=LIMIT_SHARE),
                Goal("and with the pauses between them", beside, at_least=LIMIT_SHARE),
                Goal("answers of more than one version", found.mixed, at_most=0),
            ],
            headline=found is fastest and number == plan.counts[-1],
            consumers=number,
            answers_per_s=without,
            share=share,
            share_beside=beside,
        )


def rate(at: Any, spans: Sequence[tuple[float, float]]) -> float:
    """Return the answers per second within spans of time; `at` are the sorted times of the answers.

    >>> rate(np.array([0.5, 1.5, 1.6, 9.0]), [(1.0, 2.0), (8.0, 11.0)])
    0.75
    """
    edges = np.searchsorted(at, np.array(spans))
    return float((edges[:, 1] - edges[:, 0]).sum() / sum(end - start for start, end in spans))


def joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans of time that overlap; they are sorted by their beginnings.

    >>> joined([(0, 2), (1, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


# ---- the training -----------------------------------------------------------------------------------------


def _pace(report: Report, repo: Any, iterations: int, pairs: int) -> None:
    """Train with and without publishing, in turn; a first pair does not count."""
    import torch
    from tensorvine.actors import Consumer

    from .core.trainings import learner

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: list[tuple[float, float, Any]] = []
    try:
        run = learner("nt3")
        repo.save_model(NAME, run.model)
        with Consumer.start(repo, NAME, _net) as consumer, _asked(consumer):
            start = run.state()
            for turn in range(1 + pairs):
                took: dict[bool, tuple[float, Any]] = {}
                for publishing in (turn % 2 == 0, turn % 2 == 1):
                    run.restore(start)
                    gc.collect()
                    quiet()
                    took[publishing] = _train(run, repo if publishing else None, iterations)
                found.append((took[True][0], took[False][0], took[True][1]))
    finally:
        torch.set_num_threads(threads)
    found = found[1:]
    slower = 100 * (median(mine / alone for mine, alone, _ in found) - 1)
    stalled = [100 * sum(each.stall_s for each in made.updates) / alone for _, alone, made in found]
    report.add(
        "a training that publishes",
        sample([mine for mine, _, _ in found]),
        found[0][2].updates[0].bytes_written,
        peer=("one that does not", sample([alone for _, alone, _ in found])),
        goals=[Goal("percent by which publishing slows the training", slower, at_most=LIMIT_PERCENT)],
        slower_percent=slower,
        stalled_percent=median(stalled),
        updates=median(len(made.updates) for _, _, made in found),
    )


def _net() -> Any:
    from .core.trainings import learner

    return learner("nt3").model


@contextmanager
def _asked(consumer: Any) -> Iterator[None]:
    """Ask a consumer while the block runs."""
    ending, batch = threading.Event(), np.zeros((1, 1, 600), np.float32)

    def ask() -> None:
        while not ending.wait(PERIOD_S):
            consumer.infer(batch)

    thread = threading.Thread(target=ask, name="ask", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _train(run: Any, repo: Any, iterations: int) -> tuple[float, Any]:
    """Train, with a publisher if there is a repository; return the seconds and the publisher's report."""
    from tensorvine.actors import Publisher
    from tensorvine.planner import PlanRequest

    start = time.perf_counter()
    if repo is None:
        for iteration in range(iterations):
            run.step(iteration)
        return time.perf_counter() - start, None
    with Publisher(repo, NAME, PlanRequest(stop=iterations)) as publisher:
        start = time.perf_counter()
        for iteration in range(iterations):
            publisher.step(run.step(iteration), run.model)
        took = time.perf_counter() - start
        publisher.finish()
        return took, publisher.report()
