"""What the planner actor knows of the trainings that publish and of those who take what they publish.

Rules
- One stream per model name; a training that starts anew (another `run`) replaces the one before.
- A training reports several times per second until it ends. Without a report for `IDLE_S`, its stream is dropped.
- Plain bookkeeping around `planner.schedules.stream`: the actor calls it from one thread, for a plan may take a second.
- A planner that does not know a stream, after a restart or a drop, answers so and is sent all of it again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from cachetools import LRUCache

from ...planner.curves.losses import UpdateCosts
from ...planner.schedules.schedule import Schedule
from ...planner.schedules.stream import PlanRequest, Stream
from ...planner.schedules.transfer import TransferSelector

log = logging.getLogger(__name__)

RECENT = 16
"""Commits of which the median counts."""
SHOWN = 256
"""Losses and updates in a `TrainingStatus`, at most."""
IDLE_S = 600.0
"""Seconds without a report after which a training has ended."""
MOST_NAMES = 1 << 12
"""Models whose last time of an inference is kept."""
LEAST_S = 1e-9
"""What was too short to be measured counts as this."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted loss curve: the name and parameters of a formula for the loss, and the error of the fit."""

    form: str
    """Name of the formula, such as "exp3"."""
    params: dict[str, float]
    """Mapping of the names of the formula's parameters to the fitted values."""
    origin: int
    """Iteration at which the variable x of the formula is 0."""
    mse: float
    """Mean squared error of the curve over the losses that were used for the fit."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a training tells of its last steps."""

    run: str
    """Names this training: another one of the same model starts anew."""
    request: PlanRequest | None
    """What to plan; None: the training publishes by a schedule of its own."""
    place: int
    """How many losses were told before these."""
    losses: tuple[tuple[int, float], ...]
    """(iteration, loss)."""
    iterations_s: tuple[float, ...]
    """Seconds of one iteration, stalls left out: one figure for each batch of steps."""
    updates: tuple[tuple[int, float, float], ...]
    """What was published: (iteration, seconds that it cost the training, seconds from staged to committed)."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The planner's answer to a training."""

    known: int
    """How many losses of this run it knows."""
    schedule: Schedule | None = None
    """The newest plan."""
    curve: Fitted | None = None
    """The curve that it rests on."""
    costs: UpdateCosts | None = None
    why: str = ""
    """Why the plan has no update after the first version; empty if it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """The status of a training run that publishes versions, returned by `Repository.trainings`."""

    iteration: int
    """Number of the last iteration that the training run reported."""
    losses: tuple[tuple[int, float], ...]
    """At most 256 of the reported losses, as pairs (iteration, loss), evenly spaced, up to the last one."""
    updates: tuple[int, ...]
    """The last iterations, at most 256, after which versions were published."""
    schedule: Schedule | None
    """The current plan. None before the first plan, or if the publisher has a schedule of its own."""
    curve: Fitted | None
    """The fitted loss curve of the plan. None before the first plan."""
    costs: UpdateCosts | None
    """Medians of the latest measured durations. None until an iteration and an update have been measured."""
    why: str
    """The reason why the plan has no updates. Empty if it has updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What a consumer tells of an update."""

    ref: str
    seconds: float
    """From when it was told of the version until that answered."""
    fetch_s: float
    """The part of it that brought the bytes."""
    nbytes: int
    """Bytes that travelled, or were mapped."""
    way: str
    ways: tuple[str, ...]
    """Ways that it could have taken."""
    inference_s: float | None
    """What an answer took lately; None before the first."""
    node: str
    """Where it runs."""


@dataclass(slots=True)
class _Kept:
    """One stream."""

    run: str
    request: PlanRequest | None
    """None: no plan was asked for."""
    stream: Stream
    known: int = 0
    """How many of its losses were told."""
    now: int = 0
    """The last iteration that was told of."""
    updated: int = 0
    """The iteration of the last update that was counted."""
    updates: deque[int] = field(default_factory=lambda: deque[int](maxlen=SHOWN))
    """The iterations of the last updates."""
    commits_s: list[float] = field(default_factory=list[float])
    reported_at: float = 0.0
    """When the training reported last, by the clock of `Streams`."""


class Streams:
    """All streams of one planner. All calls come from one thread at a time.

    Args:
        clock: returns seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streams: dict[str, _Kept] = {}
        self._selectors: dict[str, TransferSelector] = {}
        self._inference_s: LRUCache[str, float] = LRUCache(MOST_NAMES)

    def observed(self, name: str, told: Observed) -> Advice:
        """Take what a training observed, plan if it is time, and give the newest plan."""
        kept = self._streams.get(name)
        if kept is None or (kept.run, kept.request) != (told.run, told.request):
            kept = _Kept(told.run, told.request, Stream(told.request or PlanRequest()))
            self._streams[name] = kept
            if name in self._inference_s:
                kept.stream.answered(self._inference_s[name])
        kept.reported_at = self._clock()
        self._drop_ended()
        if told.place != kept.known:
            return _advice(kept)
        for first, losses in _runs(told.losses):
            kept.stream.observe(first, losses)
        kept.known += len(told.losses)
        for seconds in told.iterations_s:
            kept.stream.iteration_took(max(seconds, LEAST_S))
        for iteration, stall_s, commit_s in told.updates:
            if iteration <= kept.updated:
                continue  # it was sent before: its answer was lost
            kept.updated = iteration
            kept.updates.append(iteration)
            kept.stream.published(iteration)
            kept.stream.stalled(stall_s)
            kept.commits_s = [*kept.commits_s[1 - RECENT :], commit_s]
        kept.now = told.losses[-1][0] if told.losses else kept.now
        if kept.known and told.request is not None and kept.stream.wants_plan(kept.now):
            self._plan(name, kept, kept.now)
        return _advice(kept)

    def delivered(self, name: str, told: Delivered) -> str:
        """Take what a consumer measured; give the way that the next version should take to its node."""
        selector = self._selectors.setdefault(told.node, TransferSelector())
        selector.measured(told.way, told.nbytes, told.fetch_s)
        if told.inference_s is not None:
            self._inference_s[name] = told.inference_s
        kept = self._streams.get(name)
        if kept is not None:
            commit_s = median(kept.commits_s) if kept.commits_s else 0.0
            kept.stream.delivered(commit_s + told.seconds, told.nbytes, told.way)
            if told.inference_s is not None:
                kept.stream.answered(max(told.inference_s, LEAST_S))
        return selector.choose(told.ways, told.nbytes)

    def statuses(self) -> dict[str, TrainingStatus]:
        """Return the status of each stream."""
        self._drop_ended()
        return {name: _status(kept) for name, kept in self._streams.items()}

    def running(self) -> int:
        """Return how many trainings report. May be called by any thread."""
        ended = self._clock() - IDLE_S
        return sum(kept.reported_at > ended for kept in list(self._streams.values()))

    def _drop_ended(self) -> None:
        ended = self._clock() - IDLE_S
        self._streams = {name: kept for name, kept in self._streams.items() if kept.reported_at > ended}

    def _plan(self, name: str, kept: _Kept, now: int) -> None:
        try:
            kept.stream.plan(now)
        except (ArithmeticError, ValueError) as exc:
            log.warning("stream %r: planning at iteration %d failed, keeping the previous plan: %s", name, now, exc)


def _advice(kept: _Kept) -> Advice:
    curve = kept.stream.curve
    fitted = Fitted(curve.form, dict(curve.params), curve.origin, curve.mse) if curve is not None else None
    schedule = kept.stream.schedule if kept.request is not None else None
    return Advice(kept.known, schedule, fitted, kept.stream.costs, kept.stream.why)


def _status(kept: _Kept) -> TrainingStatus:
    known = _advice(kept)
    return TrainingStatus(
        iteration=kept.now,
        losses=tuple(kept.stream.sampled(SHOWN)),
        updates=tuple(kept.updates),
        schedule=known.schedule,
        curve=known.curve,
        costs=known.costs,
        why=known.why,
    )


def _runs(losses: Sequence[tuple[int, float]]) -> list[tuple[int, list[float]]]:
    """Cut losses into runs of consecutive iterations: (the first, their losses)."""
    runs: list[tuple[int, list[float]]] = []
    for iteration, loss in losses:
        if runs and iteration == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(loss)
        else:
            runs.append((iteration, [loss]))
    return runs
