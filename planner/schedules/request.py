"""What is asked of the plan for one training.

Rules
- A request is checked when it is made, wherever that is: what arrives at the planner makes sense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..curves.forms import FORMS, LossForm

METHODS = ("optimal", "closed_form", "fixed", "greedy", "epoch")
"""Ways to make a schedule."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options for planning the updates of one training run.

    Raises:
        ValueError: if a value is out of range.

    >>> PlanRequest("epoch", epoch=216).warmup
    50
    >>> PlanRequest("epoch")
    Traceback (most recent call last):
    ValueError: epoch: expected at least 1 iteration per epoch for method 'epoch'; found None
    """

    method: str = "optimal"
    """Scheduling method: "optimal", "closed_form", "fixed", "greedy" or "epoch"."""
    warmup: int = 50
    """Number of iterations of the warm-up. The first version is published at the end of the warm-up."""
    stop: int | None = None
    """Last iteration of the training run. None means that the last iteration is unknown."""
    inferences: float | None = None
    """Number of inferences with published versions, during and after the training run.

    With None, the plan considers only the inferences during the training run. Their number is predicted from the
    measured durations of an iteration and of an inference.
    """
    epoch: int | None = None
    """Number of iterations per epoch. Required for method "epoch"."""
    price: float = 0.0
    """Cost per checkpoint, which the method "optimal" adds to the predicted loss when it compares schedules."""
    slowdown: float | None = 0.02
    """Maximum share of the training time spent in checkpoint stalls, for method "optimal". None means no limit."""
    forms: tuple[str | LossForm, ...] = tuple(FORMS)
    """Forms of loss curves to fit to the observed losses: names, such as "exp3", or `LossForm` objects."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}; found {self.method!r}")
        if self.warmup < 1:
            raise ValueError(f"warmup: expected at least 1 iteration; found {self.warmup}")
        if self.stop is not None and self.stop < 0:
            raise ValueError(f"stop: expected an iteration of at least 0, or None; found {self.stop}")
        if self.inferences is not None and not (math.isfinite(self.inferences) and self.inferences >= 0):
            raise ValueError(f"inferences: expected a finite number of at least 0, or None; found {self.inferences}")
        if (self.method == "epoch" or self.epoch is not None) and (self.epoch is None or self.epoch < 1):
            found = f"for method {self.method!r}; found {self.epoch}"
            raise ValueError(f"epoch: expected at least 1 iteration per epoch {found}")
        if not (math.isfinite(self.price) and self.price >= 0):
            raise ValueError(f"price: expected finite loss units per checkpoint, at least 0; found {self.price}")
        if self.slowdown is not None and not (math.isfinite(self.slowdown) and self.slowdown > 0):
            raise ValueError(
                f"slowdown: expected a share of the training's time above 0, or None; found {self.slowdown}"
            )
        unknown = [form for form in self.forms if isinstance(form, str) and form not in FORMS]
        if unknown:
            raise ValueError(f"forms: expected LossForm objects or some of {', '.join(FORMS)}; found {unknown[0]!r}")
