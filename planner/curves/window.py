"""The iterations that a schedule may choose from, with the loss predicted for each.

Rules
- Iterations are counted from `start` here: place 0 is the version in use, place 1 the first that may be taken.
- A schedule holds no checkpoint that would arrive after the last inference: it would stall training for nothing.
- Only improvements can be worth a checkpoint: places whose loss is below that of every place before
  (docs/design/schedules.md has the proof). A curve that never falls has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray

from ...store import html
from .losses import Curve, Floats, UpdateCosts, arrivals, checked_inferences, inferences_per_version, loss_at


@dataclass(frozen=True)
class Schedule:
    """A schedule of checkpoints: the iterations after which a checkpoint is taken.

    >>> Schedule((60, 70, 80), interval=10, predicted_loss=512.0).iterations
    (60, 70, 80)
    """

    iterations: tuple[int, ...]
    """Iterations after which a checkpoint is taken, in increasing order."""
    interval: int | None
    """Number of iterations between checkpoints. None if the schedule has no fixed interval."""
    predicted_loss: float
    """Predicted sum of the losses of all inferences, in the unit of the loss curve. NaN if there is no prediction."""

    def _repr_html_(self) -> str:
        chosen = self.iterations
        values = {
            "checkpoints": f"{len(chosen):,}",
            "first": chosen[0] if chosen else None,
            "last": chosen[-1] if chosen else None,
            "interval": self.interval,
            "predicted loss": f"{self.predicted_loss:.6g}",
        }
        return html.facts("Schedule", values.items())


@dataclass(frozen=True, eq=False)
class Window:
    """Iterations `start` to `stop`, what is predicted for them, and how long the inferences go on.

    >>> window = Window.of(lambda i: 8.0 - i, UpdateCosts(1.0, 0.0, 0.0, 1.0), start=0, stop=4, inferences=3)
    >>> window.losses.tolist(), window.horizon_s, window.schedule([1, 3, 4]).iterations
    ([8.0, 7.0, 6.0, 5.0, 4.0], 3.0, (1,))
    """

    costs: UpdateCosts
    """Seconds."""
    start: int
    """Iteration whose version answers at first."""
    losses: Floats
    """Of `start` and every iteration after it, up to and with the last that may be taken."""
    inferences: float
    """How many there are, in real numbers."""

    @classmethod
    def of(cls, curve: Curve, costs: UpdateCosts, start: int, stop: int, inferences: float) -> Window:
        """Ask the curve for all losses, once.

        Raises:
            ValueError: `stop` is not after `start`, the number of inferences is negative or not finite, or a
                loss is not finite.
        """
        first, last = index(start), index(stop)
        if last <= first:
            raise ValueError(f"schedule: expected stop to be after start={first}; found {last}")
        total = checked_inferences(inferences)
        return cls(costs, first, loss_at(curve, np.arange(first, last + 1, dtype=np.int64)), total)

    @property
    def horizon_s(self) -> float:
        """When the last inference ends."""
        return self.inferences * self.costs.inference_s

    def improvements(self) -> NDArray[np.intp]:
        """Return the places that may be worth a checkpoint: improvements that arrive in time if taken alone."""
        best = np.minimum.accumulate(self.losses)
        places = np.flatnonzero(self.losses[1:] < best[:-1]) + 1
        times = places * self.costs.iteration_s + self.costs.stall_s + self.costs.delivery_s
        return places[times < self.horizon_s]

    def schedule(self, places: Sequence[int] | NDArray[np.intp], interval: int | None = None) -> Schedule:
        """Make a schedule of those places, increasing, that arrive before the last inference ends."""
        taken = [self.start + int(place) for place in places]
        taken = taken[: int(np.searchsorted(arrivals(taken, self.costs, self.start), self.horizon_s))]
        counts = inferences_per_version(taken, self.costs, self.start, self.inferences)
        losses = self.losses[np.array([self.start, *taken]) - self.start]
        return Schedule(tuple(taken), interval, float(losses @ counts))
