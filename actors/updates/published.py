"""What a training published, and what the planner was told of it.

Rules
- What was published is told as values that do not change.
- The planner is told only what it does not know. One that started again knows less than it was told: it is told all.
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
    """One version that was published."""

    iteration: int
    ref: ModelRef
    loss: float | None
    """Of the training, at that iteration."""
    stall_s: float
    """For which it held training up."""
    slowed_s: float
    """By which the steps beside its commit were slower than others: it takes time of the same cores. Where steps vary
    it may be negative; only many of them tell."""
    commit_s: float
    """From the end of the stall until the version existed."""
    bytes_written: int
    """Bytes of the tensors that had changed."""
    at: float
    """When it existed, in seconds since the epoch by this machine's clock."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a training published, and why then."""

    updates: tuple[Update, ...]
    failed: int
    """Updates that failed; the log says why."""
    losses: tuple[tuple[int, float], ...]
    """(iteration, loss) of each step."""
    schedule: Schedule | None
    """The newest plan; None where nothing is planned."""
    curve: Fitted | None
    """The loss curve that it rests on."""
    costs: UpdateCosts | None
    """What was measured."""


class Told:
    """What the planner was told."""

    def __init__(self) -> None:
        self.losses = 0
        self.updates = 0
        self._quiet = False

    def heard(self, known: int, told: Observed) -> None:
        """Count what was taken; `known` may be less after the planner started again."""
        took_it = known == told.place + len(told.losses)
        self.losses = known
        self.updates = self.updates + len(told.updates) if took_it else 0
        self._quiet = False

    def silent(self, name: str, exc: BaseException) -> None:
        """Log, once, that the planner does not answer."""
        if not self._quiet:
            self._quiet = True
            log.warning("the planner of %r does not answer, its last plan stands: %s", name, exc)
