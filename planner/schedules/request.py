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
    """What is asked of the plan for one training.

    Raises:
        ValueError: a value that makes no sense.

    >>> PlanRequest("epoch", epoch=216).warmup
    50
    >>> PlanRequest("epoch")
    Traceback (most recent call last):
    ValueError: epoch: expected iterations per epoch, from 1, for method 'epoch'; found None
    """

    method: str = "optimal"
    """One of `METHODS`."""
    warmup: int = 50
    """Iterations before the first version is published."""
    stop: int | None = None
    """Last iteration of the training; None: not known."""
    inferences: float | None = None
    """Inferences from the first version on, in all; None: as many as are answered while training goes on."""
    epoch: int | None = None
    """Iterations per epoch, for method "epoch"."""
    price: float = 0.0
    """Loss units per checkpoint beside its stall, for method "optimal"."""
    slowdown: float | None = 0.02
    """Largest share of the training's time that checkpoints may cost it, for method "optimal"; None: what pays."""
    forms: tuple[str | LossForm, ...] = tuple(FORMS)
    """Forms of loss curves to choose from."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}; found {self.method!r}")
        if self.warmup < 1:
            raise ValueError(f"warmup: expected iterations, from 1; found {self.warmup}")
        if self.stop is not None and self.stop < 0:
            raise ValueError(f"stop: expected an iteration, from 0, or None; found {self.stop}")
        if self.inferences is not None and not (math.isfinite(self.inferences) and self.inferences >= 0):
            raise ValueError(f"inferences: expected a number from 0, or None; found {self.inferences}")
        if (self.method == "epoch" or self.epoch is not None) and (self.epoch is None or self.epoch < 1):
            found = f"for method {self.method!r}; found {self.epoch}"
            raise ValueError(f"epoch: expected iterations per epoch, from 1, {found}")
        if not (math.isfinite(self.price) and self.price >= 0):
            raise ValueError(f"price: expected loss units per checkpoint, from 0; found {self.price}")
        if self.slowdown is not None and not (math.isfinite(self.slowdown) and self.slowdown > 0):
            raise ValueError(
                f"slowdown: expected a share of the training's time above 0, or None; found {self.slowdown}"
            )
        unknown = [form for form in self.forms if isinstance(form, str) and form not in FORMS]
        if unknown:
            raise ValueError(f"forms: expected LossForms or some of {', '.join(FORMS)}; found {unknown[0]!r}")
