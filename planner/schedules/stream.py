"""A stream: what is known of one training, and its plan.

Rules
- Pure: losses, times and the iteration come in; a schedule goes out. The caller that drives it asks `wants_plan` after
  each batch, and then `plan`.
- Iterations count up, and may be left out: a training may report every nth. A loss that was told before is not counted
  again, so that a batch may be sent twice.
- `plan` only names iterations after `now`. What it named up to `now` is taken as published.
- It is time to plan: after the warm-up; once what a checkpoint costs is known; when the losses since the window began
  have doubled in number; when the plan's last iteration has passed; when a cost left the plan's by a factor of
  `CHANGED`; when the losses drift off the prediction; when they stop, or begin again, to be finite. But, the first
  version's plan apart, not within `SPACING` iterations of the plan before.
- Drift (see `drift`): the median of the recent losses is off the curve's by more than a fifth of it, by more than five
  standard errors, and by more than a hundredth of what the loss has fallen since the window began. If the loss has also
  jumped up there, the window begins anew at the jump: what came before says nothing of what follows. If a curve fitted
  to all of the window is off the recent losses as well, the newest `2 * RECENT` alone are kept: a plateau is over, or
  the rate of learning was changed. Single losses far off those around them are left out of every fit.
- The first version after the warm-up is always published, at once: who answers needs one, and its stall is what the
  first full plan is made with. After that a curve that does not fall (constant, or rising) gets no updates until the
  prediction changes. Nor do losses that are no longer finite.
- After a drift, while no falling curve is found in the noise, an update is planned every `SPACING` iterations: the
  version that answers knows nothing of what the training learns now. Not by method "epoch", which has the ends of
  epochs and nothing else.
- With no end known, a plan reaches as far ahead as the window reaches back; and never further than `FURTHEST`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..curves.curve import LossCurve, fit_loss_curve
from ..curves.drift import RECENT, drift, jump, spikes
from ..curves.losses import UpdateCosts
from .optimal import optimal_schedule
from .request import PlanRequest
from .schedule import (
    Schedule,
    closed_form_schedule,
    epoch_schedule,
    fixed_schedule,
    greedy_schedule,
    greedy_threshold,
)
from .transfer import TransferSelector

Array = NDArray[np.float64]

KEPT = 16
"""Measurements of a cost, the newest, of which it is the median."""
SPACING = 20
"""Iterations from one plan to the next, at least."""
SPACING_SHARE = 50
"""And at least one in so many of the losses in the window."""
CHANGED = 1.5
"""Factor by which a cost has changed, up or down, when it is time to plan again."""
MATTERS = 0.01
"""A stall or a delivery that changed by less than this share of an iteration has not changed."""
FURTHEST = 10_000
"""Iterations ahead of now that a plan reaches, at most."""
MOST_LOSSES = 1 << 17
"""Losses that are kept, at most; beyond that the older half is let go."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the plan in force was made with."""

    now: int
    until: int
    """Last iteration that it could name."""
    count: int
    """Losses since the window began."""
    costs: UpdateCosts | None
    finite: bool


@dataclass(frozen=True, slots=True)
class _Served:
    """The curve, but at one iteration the loss of the version that answers then."""

    curve: LossCurve
    iteration: int
    loss: float

    def __call__(self, iteration: ArrayLike) -> Array:
        losses = self.curve(np.asarray(iteration, np.float64))
        return np.where(np.asarray(iteration) == self.iteration, self.loss, losses)


class Stream:
    """The recorded losses and durations of a training run, from which `plan` computes update plans.

    In the example, the first plan contains only the first version, because no durations have been recorded yet.

    >>> stream = Stream(PlanRequest(warmup=20, stop=200))
    >>> stream.observe(0, [2 * 0.97**i + 0.1 for i in range(20)])
    >>> stream.wants_plan(19), stream.plan(19).iterations  # the first version
    (True, (20,))
    >>> stream.iteration_took(0.1); stream.stalled(0.05)
    >>> stream.wants_plan(20), stream.plan(20).iterations[:4], stream.curve.form
    (True, (31, 44, 59, 77), 'exp3')
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.transports = TransferSelector()
        """The speed of each transport, measured from the deliveries."""
        self.curve: LossCurve | None = None
        """The loss curve of the current plan. None before the first plan."""
        self.schedule: Schedule | None = None
        """The current plan. None before the first plan."""
        self.why = ""
        """The reason why the current plan has no updates. Empty if it has updates."""
        self._iterations = array("q")
        self._losses = array("d")
        self._count = 0
        self._first: int | None = None
        self._took = {name: deque[float](maxlen=KEPT) for name in ("iteration", "stall", "delivery", "inference")}
        self._planned: _Planned | None = None
        self._drifted = False
        self._spent_s = 0.0
        self._began: int | None = None
        self._served: int | None = None

    def observe(self, first_iteration: int, losses: Sequence[float]) -> None:
        """Record the losses of consecutive iterations. Losses up to the last recorded iteration are ignored.

        Args:
            first_iteration: Iteration of the first loss, at least 0.
            losses: Losses in any unit. NaN and infinity are allowed.

        Raises:
            ValueError: if `first_iteration` is negative.
        """
        if first_iteration < 0:
            raise ValueError(f"first_iteration: expected at least 0; found {first_iteration}")
        known = self._iterations[-1] - first_iteration + 1 if self._iterations else 0
        new = [float(loss) for loss in losses[max(known, 0) :]]
        begin = first_iteration + max(known, 0)
        self._iterations.extend(range(begin, begin + len(new)))
        self._losses.extend(new)
        self._count += len(new)
        if self._first is None and new:
            self._first = begin
        if len(self._losses) > MOST_LOSSES:
            self._forget(len(self._losses) - MOST_LOSSES // 2)

    def published(self, iteration: int) -> None:
        """Record the publication of the version that was saved after `iteration`.

        The plan need not contain `iteration`.
        """
        self._served = iteration

    def iteration_took(self, seconds: float) -> None:
        """Record the duration of a training iteration, excluding checkpoint stalls. `seconds` must be above 0."""
        self._note("iteration", seconds)

    def stalled(self, seconds: float) -> None:
        """Record the duration of a training stall caused by a checkpoint. `seconds` must be at least 0."""
        self._note("stall", seconds)
        self._spent_s += seconds

    def delivered(self, seconds: float, nbytes: int, transport: str) -> None:
        """Record the duration of a delivery: the time from the end of the stall until consumers use the new version.

        Args:
            seconds: Duration in seconds, at least 0.
            nbytes: Number of bytes transferred, at least 0.
            transport: Name of the transport.
        """
        self.transports.measured(transport, nbytes, seconds)
        self._note("delivery", seconds)

    def answered(self, seconds_per_inference: float) -> None:
        """Record the duration of an inference. `seconds_per_inference` must be above 0."""
        self._note("inference", seconds_per_inference)

    def sampled(self, most: int) -> list[tuple[int, float]]:
        """Return at most `most` of the recorded losses as pairs (iteration, loss): evenly spaced, up to the last one.

        >>> stream = Stream(PlanRequest())
        >>> stream.observe(1, [5.0, 4.0, 3.0, 2.0, 1.0])
        >>> stream.sampled(3)
        [(1, 5.0), (3, 3.0), (5, 1.0)]
        """
        step = max(-(-len(self._losses) // most), 1)
        first = (len(self._losses) - 1) % step
        return list(zip(self._iterations[first::step], self._losses[first::step], strict=True))

    @property
    def costs(self) -> UpdateCosts | None:
        """The measured durations of training, updates and inference.

        Each duration is the median of its last 16 measurements. `costs` is None until an iteration and a stall have
        been measured. Until a delivery has been measured, the delivery duration is set to the stall duration. Until an
        inference has been measured, the inference duration is set to the iteration duration.
        """
        took = {name: median(seconds) for name, seconds in self._took.items() if seconds}
        if "iteration" not in took or "stall" not in took:
            return None
        iteration, stall = took["iteration"], took["stall"]
        return UpdateCosts(iteration, stall, took.get("delivery", stall), took.get("inference", iteration))

    def wants_plan(self, now: int) -> bool:
        """Return whether the caller should call `plan` to make a new plan.

        A new plan is needed after the warm-up, when `costs` is first available, when the number of losses has doubled
        since the current plan was made, at the end of the current plan, and when durations or losses no longer match
        the current plan.

        Args:
            now: The last finished iteration.
        """
        if self._first is None or now - self._first + 1 < self.request.warmup:
            return False
        if self.request.stop is not None and now >= self.request.stop:
            return False
        planned, costs = self._planned, self.costs
        if planned is None:
            return True
        if planned.costs is None and costs is not None:
            return True
        if now - planned.now < max(SPACING, self._count // SPACING_SHARE):
            return False
        return (
            now >= planned.until
            or self._count >= 2 * planned.count
            or self._is_finite() != planned.finite
            or _changed(planned.costs, costs)
            or self._drift() != 0
        )

    def plan(self, now: int) -> Schedule:
        """Fit the loss curve to the recorded losses, and return a schedule for the iterations after `now`.

        While `costs` is None, the predicted loss is NaN, and the schedule contains at most one checkpoint, for the
        first version.

        Args:
            now: The last finished iteration.

        Raises:
            ValueError: if no losses were recorded.
        """
        if not self._losses:
            raise ValueError(f"plan at iteration {now}: expected observed losses; found none")
        if self.schedule is not None:
            self._served = max((i for i in self.schedule.iterations if i <= now), default=self._served)
        if self._began is None:
            self._began = now
        if self._drift() > 0:
            self._restart()
        finite, costs, until = self._is_finite(), self.costs, self._until(now)
        if finite:
            self._fit()
        self.schedule = self._scheduled(now, until, costs) if finite else Schedule((), None, math.nan)
        self._planned = _Planned(now, until, self._count, costs, finite)
        self.why = "" if self.schedule.iterations else self._why_none(now, until, costs, finite)
        return self.schedule

    def _note(self, what: str, seconds: float) -> None:
        least = "of at least 0" if what in ("stall", "delivery") else "above 0"
        if not (math.isfinite(seconds) and (seconds > 0 or (seconds == 0 and least == "of at least 0"))):
            raise ValueError(f"seconds of {what}: expected a finite number {least}; found {seconds}")
        self._took[what].append(seconds)

    def _forget(self, oldest: int) -> None:
        """Let go of the oldest losses."""
        del self._iterations[:oldest], self._losses[:oldest]

    def _fit(self) -> None:
        self.curve = fit_loss_curve(self._window(), self.request.forms)
        if self._drift() != 0 and len(self._losses) > 2 * RECENT:
            self._forget(len(self._losses) - 2 * RECENT)
            self._count = len(self._losses)
            self._drifted = True
            self.curve = fit_loss_curve(self._window(), self.request.forms)

    def _window(self) -> Array:
        """Pairs (iteration, loss), without losses that are not finite and spikes."""
        pairs = np.column_stack([np.array(self._iterations, np.float64), np.array(self._losses)])
        pairs = pairs[np.isfinite(pairs[:, 1])]
        return pairs[~spikes(pairs[:, 1])]

    def _is_finite(self) -> bool:
        """Say whether at least half of the recent losses are finite."""
        return bool(np.isfinite(self._losses[-RECENT:]).mean() >= 0.5)

    def _until(self, now: int) -> int:
        """The last iteration that a plan made now may name."""
        reach = self._iterations[-1] - self._iterations[0] + 1
        ahead = FURTHEST if self.request.stop is not None else min(max(reach, SPACING), FURTHEST)
        return now + ahead if self.request.stop is None else max(min(self.request.stop, now + ahead), now)

    def _scheduled(self, now: int, until: int, costs: UpdateCosts | None) -> Schedule:
        curve = self.curve
        first = (now + 1,) if self._served is None and until > now else ()
        if curve is None or costs is None:
            return Schedule(first, None, math.nan)
        start = now + len(first)
        inferences = self._inferences(start, until, costs)
        if until <= start:
            return Schedule(first, None, inferences * curve(start if self._served is None else self._served))
        # A version from before the window answers with what the window began with: the curve is flat before it.
        served = _Served(curve, start, curve(start if self._served is None else self._served))
        schedule = self._made(served, costs, start, until, inferences)
        if self._drifted and not schedule.iterations and self.request.method != "epoch":
            most = self._most(costs, until)
            every = max(SPACING, -(-(until - start) // (until if most is None else max(most, 1))))
            schedule = Schedule(tuple(range(start + every, until + 1, every)), every, schedule.predicted_loss)
        return Schedule((*first, *schedule.iterations), schedule.interval, schedule.predicted_loss)

    def _inferences(self, start: int, until: int, costs: UpdateCosts) -> float:
        """How many inferences the plan is for."""
        per_iteration = costs.iteration_s / costs.inference_s
        meanwhile = (until - start) * per_iteration
        if self.request.inferences is None or self._began is None:
            return meanwhile
        left = max(self.request.inferences - (start - self._began) * per_iteration, 0.0)
        return left if until == self.request.stop else min(left, meanwhile)

    def _made(self, curve: _Served, costs: UpdateCosts, start: int, stop: int, inferences: float) -> Schedule:
        match self.request.method:
            case "fixed":
                return fixed_schedule(curve, costs, start, stop, inferences)
            case "closed_form":
                return closed_form_schedule(curve, costs, start, stop, inferences)
            case "epoch":
                return epoch_schedule(curve, costs, start, stop, inferences, self.request.epoch or 1)
            case "greedy":
                warmup: list[float] = self._window()[: self.request.warmup, 1].tolist()
                threshold = greedy_threshold(warmup) if len(warmup) > 1 else 0.0
                return greedy_schedule(curve, costs, start, stop, inferences, threshold)
            case _:
                most = self._most(costs, stop)
                return optimal_schedule(curve, costs, start, stop, inferences, price=self.request.price, most=most)

    def _most(self, costs: UpdateCosts, until: int) -> int | None:
        """Return how many more checkpoints may be taken until an iteration, after what those before have cost."""
        if self.request.slowdown is None or not costs.stall_s:
            return None
        began = until if self._began is None else self._began
        allowed_s = self.request.slowdown * (until - began) * costs.iteration_s - self._spent_s
        return max(int(allowed_s / costs.stall_s), 0)

    def _why_none(self, now: int, until: int, costs: UpdateCosts | None, finite: bool) -> str:
        if not finite:
            return "more than half of the recent losses are not finite"
        if until <= now:
            return "the training ends"
        if costs is None or self.curve is None:
            return "the costs of an update are not measured yet"
        if self.request.method == "optimal" and self._most(costs, until) == 0:
            return (
                f"updates may use at most {self.request.slowdown:.3g} of the training's time; one update stalls it for "
                f"{costs.stall_s:.3g} s, and an iteration takes {costs.iteration_s:.3g} s"
            )
        if self.curve(until) >= self.curve(now):
            return "the predicted loss does not fall"
        return "no update would gain more than it costs"

    def _drift(self) -> float:
        """How far the recent losses are above the prediction (below it: negative); 0 while that says nothing."""
        losses = np.array(self._losses[-RECENT:])
        finite = np.isfinite(losses)
        if self.curve is None or not finite.any():
            return 0.0
        predicted = self.curve(np.array(self._iterations[-RECENT:])[finite])
        return drift(losses[finite], predicted, abs(self.curve(0) - float(predicted[-1])))

    def _restart(self) -> None:
        """Begin the window anew where the losses jumped up since the plan before, if they did."""
        since = bisect_left(self._iterations, self._planned.now) if self._planned else 0
        begin = max(since - RECENT, 0)
        losses = np.array(self._losses[begin:])
        finite = np.flatnonzero(np.isfinite(losses))
        at = jump(losses[finite])
        if at:
            self._forget(begin + int(finite[at]))
            self._count = len(self._losses)
            self._drifted = True


def _changed(then: UpdateCosts | None, now: UpdateCosts | None) -> bool:
    if then is None or now is None:
        return then is not now
    least = MATTERS * now.iteration_s
    pairs = [
        (then.iteration_s, now.iteration_s, 0.0),
        (then.inference_s, now.inference_s, 0.0),
        (then.stall_s, now.stall_s, least),
        (then.delivery_s, now.delivery_s, least),
    ]
    return any(max(a, b) > CHANGED * min(a, b) and abs(a - b) > matters for a, b, matters in pairs)
