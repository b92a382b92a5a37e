"""What one run left behind: what the training published, what the consumers took, and how good the answers were.

Rules
- All times are seconds since the epoch by one machine's clock; `Run.opened_at` is where pictures begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tensorvine.actors import ConsumerStatus, Fitted, PublishReport
from tensorvine.planner import UpdateCosts, cumulative_inference_loss

Floats = NDArray[np.float64]


SMOOTH = 15
"""Losses that are averaged, since those of single batches differ much."""


def smooth(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Average `SMOOTH` neighbours of a line, or all where there are fewer.

    >>> [line.tolist() for line in smooth(range(17), range(0, 34, 2))]
    [[7.0, 8.0, 9.0], [14.0, 16.0, 18.0]]
    """
    wide = min(SMOOTH, np.size(y))
    each = np.full(wide, 1 / wide)
    return np.convolve(x, each, "valid").round(9), np.convolve(y, each, "valid").round(9)


@dataclass(frozen=True, slots=True)
class Answer:
    """One inference: a batch that a consumer was asked about."""

    number: int
    """It was the `number`-th question, from 0."""
    at: float
    version: int
    """The version that answered."""
    loss: float
    """Against the truth."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen of the training at one moment."""

    at: float
    iteration: int
    """Of the last loss."""
    curve: Fitted | None
    """The newest fit."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training and its consumers under one schedule."""

    schedule: str
    """How it is called: "planned", "epoch"."""
    warmup: int
    """Iterations before the first version."""
    opened_at: float
    """When the first question was due."""
    period_s: float
    """From one question to the next, all consumers together."""
    training_s: float
    """What training and publishing took after the warm-up, without waiting for data."""
    report: PublishReport
    consumers: tuple[ConsumerStatus, ...]
    answers: tuple[Answer, ...]
    """In the order of their numbers."""
    sightings: tuple[Sighting, ...]

    @property
    def losses(self) -> tuple[NDArray[np.int64], Floats]:
        """Return iterations and losses of the training."""
        iterations, losses = zip(*self.report.losses, strict=True)
        return np.array(iterations), np.array(losses)

    @property
    def stalls_s(self) -> tuple[float, ...]:
        """Return how long each update held the training up."""
        return tuple(update.stall_s for update in self.report.updates)

    @property
    def latency_s(self) -> float:
        """Return the median, over consumers and updates, from the end of the stall until the version answered.

        Each machine measures its own part of it: the producer until the commit, a consumer from when it is told.
        """
        commits = {update.ref: update.commit_s for update in self.report.updates}
        taken = [delivery for consumer in self.consumers for delivery in consumer.deliveries if delivery.ref in commits]
        return median(commits[delivery.ref] + delivery.fetch_s + delivery.swap_s for delivery in taken)

    @property
    def measured_loss(self) -> float:
        """Return the cumulative inference loss: the sum over all answers."""
        return float(sum(answer.loss for answer in self.answers))

    @property
    def predicted_loss(self) -> float:
        """Return the same as the planner's arithmetic has it, from the losses of the training and the measured costs.

        It takes the loss of a version for the one it had in the training: so it knows nothing of data that changed
        since, nor of data that are harder than the training's.
        """
        costs = UpdateCosts(self._iteration_s(), median(self.stalls_s), self.latency_s, self.period_s)
        later = [update.iteration for update in self.report.updates if update.iteration > self.warmup]
        return cumulative_inference_loss(later, self._smooth_loss, costs, self.warmup, len(self.answers))

    def iteration_at(self, at: ArrayLike) -> Floats:
        """Return how far the training was at some moments, by interpolation of what was seen."""
        seen = {(sighting.at, sighting.iteration) for sighting in self.sightings}
        seen |= {(update.at, update.iteration) for update in self.report.updates}
        times, iterations = zip(*sorted(seen), strict=True)
        return np.interp(at, times, np.maximum.accumulate(iterations))

    def heard(self) -> tuple[Floats, Floats]:
        """Return the answers in the order in which they came: seconds since `opened_at`, and their losses."""
        answers = sorted(self.answers, key=lambda answer: answer.at)
        seconds = np.array([answer.at for answer in answers]) - self.opened_at
        return seconds, np.array([answer.loss for answer in answers])

    def lag(self) -> tuple[Floats, Floats]:
        """Return how many iterations the version of each answer was behind, beside the seconds of `heard`."""
        made = {update.ref.version: update.iteration for update in self.report.updates}
        answers = sorted(self.answers, key=lambda answer: answer.at)
        times = np.array([answer.at for answer in answers])
        behind = self.iteration_at(times) - [made[answer.version] for answer in answers]
        return times - self.opened_at, np.maximum(behind, 0.0)

    def _smooth_loss(self, iteration: ArrayLike) -> Floats:
        """Return the training's loss around an iteration."""
        return np.interp(iteration, *smooth(*self.losses))

    def _iteration_s(self) -> float:
        """Return the seconds of an iteration once the questions began, waiting for data included."""
        online = [sighting for sighting in self.sightings if sighting.at >= self.opened_at]
        last = next(sighting for sighting in online if sighting.iteration == online[-1].iteration)
        return (last.at - online[0].at) / max(last.iteration - online[0].iteration, 1)
