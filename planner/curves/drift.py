"""Drift: whether losses left the prediction, where they jumped, and which of them are mere spikes.

Rules
- Medians and median absolute deviations throughout: a few wild losses are no drift.
- Five standard errors and a fifth of the loss: noise alone, and what would change no schedule, are no drift either.
- Only upward jumps are looked for: a new kind of data, not a training that learns faster than was thought.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RECENT = 24
"""Losses on either side of a jump that are compared; and the newest ones, with the prediction."""
FEWEST = 8
"""Losses without which nothing is said."""
SHARE = 0.2
"""Share of the loss that a drift exceeds."""
ERRORS = 5.0
"""Standard errors that a drift exceeds."""
SPIKE = 10.0
"""Median absolute deviations that a spike is off."""
FALLEN = 0.01
"""Share of all that the loss has fallen that a drift exceeds."""


def drift(losses: Array, predicted: Array, fallen: float) -> float:
    """Tell how far losses are above their prediction (below: negative); 0 where that is not beyond doubt.

    Args:
        losses: float64, one dimension, finite.
        predicted: as many.
        fallen: by how much the loss has fallen since the training began.

    >>> losses = np.full(24, 2.0)
    >>> drift(losses, losses / 2, fallen=1.0), drift(losses, losses - 0.1, fallen=1.0)
    (1.0, 0.0)
    """
    if len(losses) < FEWEST:
        return 0.0
    off = losses - predicted
    least = max(SHARE * abs(float(np.median(predicted))), ERRORS * _error(off), FALLEN * fallen)
    found = float(np.median(off))
    return found if abs(found) > least else 0.0


def jump(losses: Array) -> int:
    """Find where losses jumped up: the place of the first one after the jump; 0 where there was none.

    It is where the means of what is before and after are the most standard errors apart.

    Args:
        losses: float64, one dimension, finite.

    >>> jump(np.array([1.0] * 30 + [2.0] * 10)), jump(np.array([2.0] * 30 + [1.0] * 10))
    (30, 0)
    """
    if len(losses) < 2 * FEWEST:
        return 0
    middle = float(np.median(losses))
    width = SPIKE * float(np.median(np.abs(losses - middle))) + SHARE * abs(middle)
    clipped = np.clip(losses, middle - width, middle + width)
    places = np.arange(FEWEST, len(losses) - FEWEST + 1)
    below = -np.cumsum(clipped - clipped.mean())[places - 1]
    at = int(places[np.argmax(below / np.sqrt(places * (len(losses) - places)))])
    before, after = losses[max(at - RECENT, 0) : at], losses[at : at + RECENT]
    least = max(SHARE * abs(float(np.median(before))), ERRORS * math.hypot(_error(before), _error(after)))
    return at if np.median(after) - np.median(before) > least else 0


def spikes(losses: Array) -> NDArray[np.bool_]:
    """Mark the losses that are far off those around them, `RECENT` and one in all.

    Args:
        losses: float64, one dimension, finite.

    >>> spikes(np.array([1.0, 1.1] * 10 + [50.0] + [0.9, 1.0] * 10)).nonzero()
    (array([20]),)
    """
    if len(losses) <= RECENT:
        return np.zeros(len(losses), np.bool_)
    around = np.lib.stride_tricks.sliding_window_view(losses, RECENT + 1)
    middle = np.median(around, axis=1)
    apart = np.median(np.abs(around - middle[:, None]), axis=1)
    windows = np.clip(np.arange(len(losses)) - RECENT // 2, 0, len(around) - 1)
    return np.abs(losses - middle[windows]) > SPIKE * apart[windows] + SHARE * np.abs(middle[windows])


def _error(values: Array) -> float:
    """Standard error of a median, from the median absolute deviation."""
    return 1.25 * 1.48 * float(np.median(np.abs(values - np.median(values)))) / math.sqrt(len(values))
