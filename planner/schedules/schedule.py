"""Checkpoint schedules by rules: the paper's two, epoch boundaries, and a closed form. The exact one: `optimal`.

Rules
- All take (curve, costs, start, stop, inferences) and choose from the iterations after `start`, up to and with
  `stop`; all predict by the same model (`losses`).
- Where two are predicted to be equal, the one with fewer checkpoints wins.
- Where the paper's printed algorithms slip, docs/design/schedules.md says what was corrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index

import numpy as np

from ..curves.losses import Curve, UpdateCosts
from ..curves.window import Schedule, Window

__all__ = [
    "Schedule",
    "closed_form_schedule",
    "epoch_schedule",
    "fixed_schedule",
    "greedy_schedule",
    "greedy_threshold",
]

NO_STALL = 1e-12
"""Iterations. The closed form takes a shorter stall for none, and every improvement."""


def fixed_schedule(curve: Curve, costs: UpdateCosts, start: int, stop: int, inferences: float) -> Schedule:
    """Return the fixed-interval schedule with the lowest predicted loss (Viper, Algorithm 2).

    Unlike in Viper, the predicted number of inferences with a version can be a fraction.

    Args:
        curve: Function from an iteration to its loss.
        costs: Durations of training, updates and inference.
        start: Iteration of the version that is in use until the first checkpoint arrives.
        stop: Last iteration after which a checkpoint can be taken.
        inferences: Total number of inferences, including the inferences with the version of `start`.

    Returns:
        The schedule, without checkpoints if no interval lowers the predicted loss.

    Raises:
        ValueError: if `stop` is not after `start`, `inferences` is negative or not finite, or a loss is not finite.

    >>> costs = UpdateCosts(iteration_s=1.0, stall_s=2.0, delivery_s=1.0, inference_s=1.0)
    >>> fixed_schedule(lambda i: 0.8**i, costs, start=0, stop=20, inferences=60).iterations
    (4, 8, 12, 16, 20)
    """
    window = Window.of(curve, costs, start, stop, inferences)
    length = len(window.losses) - 1
    # One row per interval and checkpoint: in all length * ln(length), so that one pass of NumPy does.
    intervals = np.arange(1, length + 1)
    counts = length // intervals
    first = np.cumsum(counts) - counts
    interval = np.repeat(intervals, counts)
    number = np.arange(len(interval)) - np.repeat(first, counts) + 1
    places = number * interval
    left = window.horizon_s - places * costs.iteration_s - number * costs.stall_s - costs.delivery_s
    gains = (window.losses[places - interval] - window.losses[places]) * np.maximum(left, 0.0)
    gain = np.add.reduceat(gains, first)
    best = length - int(np.argmax(gain[::-1]))  # of equal ones the longest
    if gain[best - 1] <= 0:
        return window.schedule([])
    return window.schedule(range(best, length + 1, best), best)


def greedy_schedule(
    curve: Curve, costs: UpdateCosts, start: int, stop: int, inferences: float, threshold: float
) -> Schedule:
    """Return a schedule with a checkpoint each time the loss falls by more than a threshold (Viper, Algorithm 3).

    Args:
        curve: Function from an iteration to its loss.
        costs: Durations of training, updates and inference. Used to predict the loss, and to omit checkpoints that
            would arrive after the last inference.
        start: Iteration of the version that is in use until the first checkpoint arrives.
        stop: Last iteration after which a checkpoint can be taken.
        inferences: Total number of inferences, including the inferences with the version of `start`.
        threshold: A checkpoint is taken when the loss has fallen by more than this value since the last checkpoint, or
            since `start` if there is no checkpoint yet. `greedy_threshold` returns the threshold that Viper uses.

    Raises:
        ValueError: if `threshold` or `inferences` is negative or not finite, `stop` is not after `start`, or a loss is
            not finite.

    >>> costs = UpdateCosts(iteration_s=1.0, stall_s=0.1, delivery_s=1.0, inference_s=1.0)
    >>> greedy_schedule(lambda i: 0.8**i, costs, 0, 20, 60, threshold=0.2).iterations
    (2, 4, 8)
    """
    if not math.isfinite(threshold) or threshold < 0:
        raise ValueError(f"greedy schedule: expected a finite threshold of at least 0; found {threshold!r}")
    window = Window.of(curve, costs, start, stop, inferences)
    losses = window.losses.tolist()
    taken: list[int] = []
    reached = losses[0]
    for place, loss in enumerate(losses):
        if reached - loss > threshold:
            taken.append(place)
            reached = loss
    return window.schedule(taken)


def greedy_threshold(losses: Sequence[float]) -> float:
    """Return the threshold for `greedy_schedule` that Viper uses.

    The threshold is the mean plus the standard deviation of the absolute differences between consecutive losses.

    Args:
        losses: At least two losses, from consecutive iterations. Viper uses the losses of the warm-up.

    Raises:
        ValueError: if there are fewer than two losses, or a loss is not finite.

    >>> greedy_threshold([5.0, 4.0, 1.0])
    3.0
    """
    values = np.asarray(losses, dtype=np.float64)
    if values.ndim != 1 or values.size < 2:
        raise ValueError(f"greedy threshold: expected at least two losses; found shape {values.shape}")
    if not np.isfinite(values).all():
        found = values[~np.isfinite(values)][0]
        raise ValueError(f"greedy threshold: expected finite losses; found {found}")
    steps = np.abs(np.diff(values))
    return float(steps.mean() + steps.std())


def epoch_schedule(curve: Curve, costs: UpdateCosts, start: int, stop: int, inferences: float, epoch: int) -> Schedule:
    """Return a schedule with a checkpoint at the end of every epoch (the baseline in Viper).

    Args:
        curve: Function from an iteration to its loss.
        costs: Durations of training, updates and inference. Used to predict the loss, and to omit checkpoints that
            would arrive after the last inference.
        start: Iteration of the version that is in use until the first checkpoint arrives.
        stop: Last iteration after which a checkpoint can be taken.
        inferences: Total number of inferences, including the inferences with the version of `start`.
        epoch: Number of iterations per epoch. An epoch ends after each iteration whose number is a multiple of `epoch`.

    Raises:
        ValueError: if `epoch` is less than 1, `stop` is not after `start`, `inferences` is negative or not finite, or a
            loss is not finite.

    >>> costs = UpdateCosts(iteration_s=1.0, stall_s=0.1, delivery_s=1.0, inference_s=1.0)
    >>> epoch_schedule(lambda i: 0.8**i, costs, start=10, stop=30, inferences=60, epoch=8).iterations
    (16, 24)
    """
    if index(epoch) < 1:
        raise ValueError(f"epoch schedule: expected an epoch of at least one iteration; found {epoch}")
    window = Window.of(curve, costs, start, stop, inferences)
    return window.schedule(range(epoch - window.start % epoch, len(window.losses), epoch), epoch)


def closed_form_schedule(curve: Curve, costs: UpdateCosts, start: int, stop: int, inferences: float) -> Schedule:
    """Return a nearly optimal schedule for a smooth loss curve, computed with a fast closed-form formula.

    Near iteration x, the checkpoint interval is `sqrt(2 t_p (l(x) - l(e)) / (|l'(x)| t))` iterations. In this formula,
    `l` is the loss curve, `t` is the duration of an iteration, `t_p` is the duration of a stall, and `e` is the last
    iteration whose checkpoint can arrive before the last inference. Like Young and Daly's formula for checkpoint
    intervals, this formula balances two costs: a long interval keeps old versions in use for longer, and each stall
    delays all later versions.

    At each iteration, the function adds the reciprocal of the interval to a sum. The schedule has a checkpoint each
    time the sum has grown by one. `optimal_schedule` returns the exact optimum for any curve.

    Args:
        curve: Function from an iteration to its loss. A checkpoint is taken only after an iteration whose loss is lower
            than the losses of all earlier iterations.
        costs: Durations of training, updates and inference.
        start: Iteration of the version that is in use until the first checkpoint arrives.
        stop: Last iteration after which a checkpoint can be taken.
        inferences: Total number of inferences, including the inferences with the version of `start`.

    Raises:
        ValueError: if `stop` is not after `start`, `inferences` is negative or not finite, or a loss is not finite.

    >>> costs = UpdateCosts(iteration_s=1.0, stall_s=2.0, delivery_s=1.0, inference_s=1.0)
    >>> closed_form_schedule(lambda i: 0.8**i, costs, start=0, stop=20, inferences=60).iterations
    (5, 9, 13, 17, 20)
    """
    window = Window.of(curve, costs, start, stop, inferences)
    places = window.improvements()
    if not len(places) or costs.stall_s < NO_STALL * costs.iteration_s:
        return window.schedule(places)
    losses = window.losses[np.concatenate([[0], places])]
    falls = -np.diff(losses) / (losses[:-1] - losses[-1])
    lengths = np.diff(places, prepend=0) * (costs.iteration_s / (2 * costs.stall_s))
    due = np.floor(np.cumsum(np.minimum(np.sqrt(falls * lengths), 1.0)))
    due[-1] += 1  # the last one ends what the formula counts on
    return window.schedule(places[np.diff(due, prepend=0) > 0])
