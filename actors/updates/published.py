"""What a training published, and what the planner was told of it.

Rules
- Reports are immutable values.
- The planner is sent only what it does not know. A planner that restarted knows nothing: it is sent all that is kept.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...planner.curves.losses import UpdateCosts
from ...planner.schedules.schedule import Schedule
from ...store.refs import ModelRef
from ..planner.streams import Fitted, Observed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """An update that a publisher has made: the published version, and the measured costs."""

    iteration: int
    """Number of the iteration after which the version was published."""
    ref: ModelRef
    """The version that was published."""
    loss: float | None
    """Training loss of the iteration. None if `Publisher.publish` was called without a loss."""
    stall_s: float
    """Seconds for which the update blocked the training."""
    slowed_s: float
    """Total time, in seconds, by which the update slowed down the training steps during the commit. Each step is
    compared with the median duration of steps without an update in progress. A single value is noisy and can be
    negative: compare means over many updates."""
    commit_s: float
    """Seconds from the end of the stall until the version was committed."""
    bytes_written: int
    """Number of bytes written. Tensors shared with the parent version are not written."""
    at: float
    """Unix time of the commit in seconds, by the clock of the publisher's machine."""


@dataclass(frozen=True, slots=True, repr=False)
class PublishReport:
    """The updates that a publisher has made so far, and the plan for further updates."""

    updates: tuple[Update, ...]
    """The latest updates, at most 4,096, oldest first."""
    failed: int
    """Number of failed updates. The log contains the reasons."""
    losses: tuple[tuple[int, float], ...]
    """The latest losses, at most 65,536, as pairs `(iteration, loss)`, oldest first."""
    schedule: Schedule | None
    """The current plan. If the publisher was created with a `Schedule` or a collection of iterations, the plan consists
    of these iterations. None before the first plan, or if the publisher was created with an int or "epoch"."""
    curve: Fitted | None
    """The latest loss curve that was fitted for a plan. None if no curve has been fitted."""
    costs: UpdateCosts | None
    """Durations of iterations, updates and inferences: medians of the latest measurements. None until an iteration and
    an update have been measured."""

    def __repr__(self) -> str:
        last = f", the last {self.updates[-1].ref}" if self.updates else ""
        return f"PublishReport({len(self.updates)} updates{last}, {self.failed} failed, {len(self.losses)} losses)"


class Told:
    """How much of a publisher's records the planner was sent."""

    def __init__(self) -> None:
        self.losses = 0
        """Losses up to the last one sent, counted from the publisher's first."""
        self.place = 0
        """Losses that the planner knows. One that restarted has not those that were dropped before it was sent all."""
        self.updates = 0
        self._quiet = False

    def heard(self, known: int, told: Observed) -> None:
        """Record the planner's answer: it knows `known` losses. After a restart that is 0, and all is sent again."""
        took_it = known == told.place + len(told.losses)
        self.losses = max(self.losses + known - self.place, 0)
        self.place = known
        self.updates = self.updates + len(told.updates) if took_it else 0
        self._quiet = False

    def silent(self, name: str, exc: BaseException) -> None:
        """Log, once, that the planner does not answer."""
        if not self._quiet:
            self._quiet = True
            log.warning("the planner of %r does not answer; its last plan is used: %s", name, exc)
