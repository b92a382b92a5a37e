"""Whether an update is due: a plan, a fixed interval or given iterations.

Rules
- Values: whatever changes one gives another. Who replaces it by what it was turned into holds a lock meanwhile.
- Where it is planned, the first version is due when the warm-up ends: consumers need one, and its stall is an input
  of the plan.
- A step may advance by several iterations. It is due if one of them is.
- A plan arrives some iterations after the one it was made for. Planned iterations that have passed are due at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...planner.schedules.request import METHODS, PlanRequest
from ...planner.schedules.schedule import Schedule

ScheduleLike = None | str | int | PlanRequest | Schedule | Iterable[int]
"""What users may say of when to publish; see `Publisher`."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """When updates are due."""

    request: PlanRequest | None = None
    """What is to be planned; None: nothing is."""
    every: int | None = None
    """An interval in iterations."""
    each_epoch: bool = False
    """At each epoch's end, once it is known how long an epoch is."""
    chosen: tuple[int, ...] = ()
    """Iterations, ascending."""
    schedule: Schedule | None = None
    """The plan, or the schedule that was given."""

    def due(self, last: int, now: int) -> bool:
        """Return whether an update is due at an iteration after `last`, up to and including `now`."""
        if self.every is not None:
            return now // self.every > last // self.every
        is_first = self.request is not None and last < self.request.warmup <= now
        return is_first or bisect_right(self.chosen, now) > bisect_right(self.chosen, last)

    def told(self, stop: int | None, epoch: int | None) -> Trigger:
        """Fill in what was left open."""
        if self.each_epoch and epoch is not None:
            return replace(self, every=epoch, each_epoch=False)
        if self.request is None:
            return self
        request = self.request
        if request.stop is None and stop is not None:
            request = replace(request, stop=stop)
        return replace(self, request=request)

    def planned(self, schedule: Schedule) -> Trigger:
        """Take a plan."""
        if self.request is None or schedule == self.schedule:
            return self
        return replace(self, chosen=schedule.iterations, schedule=schedule)


def trigger_of(schedule: ScheduleLike, where: str, warmup: int | None = None) -> Trigger:
    """Read what a user said.

    Args:
        schedule: what was said.
        where: begins messages.
        warmup: replaces that of what is planned.

    Raises:
        ValueError: it is nothing of what is possible.

    >>> trigger_of(10, "doc").due(18, 22), trigger_of([3, 5], "doc").due(3, 4)
    (True, False)
    """
    if schedule is None:
        schedule = PlanRequest()
    if isinstance(schedule, str) and schedule == "epoch":
        return Trigger(each_epoch=True)
    if isinstance(schedule, str) and schedule in METHODS:
        schedule = PlanRequest(method=schedule)
    if isinstance(schedule, PlanRequest):
        return Trigger(schedule if warmup is None else replace(schedule, warmup=warmup))
    if isinstance(schedule, Schedule):
        return Trigger(chosen=tuple(sorted(schedule.iterations)), schedule=schedule)
    if isinstance(schedule, int) and not isinstance(schedule, bool) and schedule >= 1:
        return Trigger(every=schedule)
    if isinstance(schedule, Iterable) and not isinstance(schedule, str):
        chosen = list(schedule)
        if chosen and all(isinstance(i, int) and i >= 1 for i in chosen):
            iterations = tuple(sorted(set(chosen)))
            return Trigger(chosen=iterations, schedule=Schedule(iterations, None, float("nan")))
    raise ValueError(
        f"{where}: schedule: expected None, one of {', '.join(METHODS)}, a PlanRequest, an interval of at least 1 "
        f"iteration, a Schedule or iterations from 1; found {schedule!r}"
    )
