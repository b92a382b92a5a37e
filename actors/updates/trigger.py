"""Whether an update is due: a plan, a fixed interval or given iterations.

Rules
- Values: whatever changes one gives another. Who replaces it by what it was turned into holds a lock meanwhile.
- Where it is planned, the first version is due when the warm-up ends: who answers needs one, and its stall is what
  the plan is made with.
- A plan comes a little after the iteration for which it was made: what it names before is due at once.
"""

from __future__ import annotations

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
    chosen: frozenset[int] = frozenset()
    """Iterations."""
    schedule: Schedule | None = None
    """The plan, or the schedule that was given."""

    def at(self, iteration: int) -> bool:
        """Tell whether an update is due after an iteration."""
        if self.every is not None:
            return iteration % self.every == 0
        is_first = self.request is not None and iteration == self.request.warmup
        return is_first or iteration in self.chosen

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
        return replace(self, chosen=frozenset(schedule.iterations), schedule=schedule)


def trigger_of(schedule: ScheduleLike, where: str, warmup: int | None = None) -> Trigger:
    """Read what a user said.

    Args:
        schedule: what was said.
        where: begins messages.
        warmup: replaces that of what is planned.

    Raises:
        ValueError: it is nothing of what is possible.

    >>> trigger_of(10, "doc").at(20), trigger_of([3, 5], "doc").at(4), trigger_of("greedy", "doc").request.method
    (True, False, 'greedy')
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
        return Trigger(chosen=frozenset(schedule.iterations), schedule=schedule)
    if isinstance(schedule, int) and not isinstance(schedule, bool) and schedule >= 1:
        return Trigger(every=schedule)
    if isinstance(schedule, Iterable) and not isinstance(schedule, str):
        chosen = list(schedule)
        if chosen and all(isinstance(i, int) and i >= 1 for i in chosen):
            return Trigger(chosen=frozenset(chosen), schedule=Schedule(tuple(sorted(set(chosen))), None, float("nan")))
    raise ValueError(
        f"{where}: schedule: expected None, one of {', '.join(METHODS)}, a PlanRequest, an interval of at least 1 "
        f"iteration, a Schedule or iterations from 1; found {schedule!r}"
    )
