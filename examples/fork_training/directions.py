"""Which ways there are to go on from the fork, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tensorvine.store import ModelRef


@dataclass(frozen=True, slots=True)
class Direction:
    """A training: the original, or one way to go on from the fork."""

    name: str
    """Of the run, and of the model that it is saved as."""
    text: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What is changed."""
    ranks: int = 1


ORIGINAL = Direction("original", "original", ranks=2)
DIRECTIONS = (
    Direction("control", "nothing changed", ranks=ORIGINAL.ranks),
    Direction("rate-up", "learning rate × 4", {"learning_rate": 4e-3}),  # noqa: RUF001  the sign is meant
    Direction("labels", "30% of the labels drawn anew", {"wrong_labels": 0.3}),
    Direction("without-8", "no image of an 8", {"without": 8}),
    Direction("rate-down", "learning rate ÷ 10", {"learning_rate": 1e-4}),
    Direction("pixels", "noise on the pixels", {"pixel_noise": 0.5}),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A training that has come to its end."""

    direction: Direction
    losses: Sequence[Sequence[float]]
    """On the test samples after each of its last steps, by rank; all ranks have the same weights."""
    steps: int
    """Its last step, those before the fork included."""
    seconds: float
    """Of these steps."""
    ref: ModelRef
    """What it was saved as at its end."""
    parent: ModelRef | None
    tensors: Mapping[str, np.ndarray]
    """Its whole state at the end."""
    accuracy: float
    """On the test samples."""

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return steps, and the loss after each."""
        losses = np.array(self.losses[0])
        return np.arange(self.steps - len(losses) + 1, self.steps + 1), losses

    def loss(self, step: int) -> float | None:
        """Return the loss after a step; None: it was not trained here."""
        place = step - self.curve()[0][0]
        return self.losses[0][place] if place >= 0 else None

    def same(self, other: Outcome) -> bool:
        """Tell whether the training that this was forked from gave the same losses and state, bit for bit."""
        alike = all(mine == theirs[-len(mine) :] for mine, theirs in zip(self.losses, other.losses, strict=True))
        return alike and all(array.tobytes() == other.tensors[name].tobytes() for name, array in self.tensors.items())
