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


@dataclass(frozen=True, slots=True, repr=False)
class PublishReport:
    """What a training published, and why then."""

    updates: tuple[Update, ...]
    """The newest 4,096."""
    failed: int
    """Updates that failed; the log says why."""
    losses: tuple[tuple[int, float], ...]
    """(iteration, loss) of each step, of the newest 65,536."""
    schedule: Schedule | None
    """The newest plan; None where nothing is planned."""
    curve: Fitted | None
    """The loss curve that it rests on."""
    costs: UpdateCosts | None
    """What was measured."""

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
            log.warning("the planner of %r does not answer, its last plan stands: %s", name, exc)
