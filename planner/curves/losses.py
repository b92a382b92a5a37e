"""What a choice of checkpoints costs those who answer: the cumulative inference loss (Viper, section 4.3).

Rules
- Times in seconds, from the moment the version of iteration `start` answers. Checkpoint k, taken after iteration
  c_k, answers from A_k = (c_k - start) t + k t_p + t_c until A_(k+1) or the last inference, whichever is first.
- A curve is any callable from an iteration to a loss; only `loss_at` calls it.
- Inferences are counted in real numbers. `floor=True` counts them as Algorithm 1 does, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

Curve = Callable[[Any], Any]
"""From an iteration, an int, to a loss. One that also takes an int64 array is called once for all iterations."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class UpdateCosts:
    """The durations of a training iteration, an update and an inference, in seconds.

    Raises:
        ValueError: if a duration is negative or not finite, or if `iteration_s` or `inference_s` is zero.

    >>> UpdateCosts(iteration_s=0.1, stall_s=0.02, delivery_s=0.5, inference_s=0.005).stall_s
    0.02
    """

    iteration_s: float
    """Duration of one training iteration (`t_train` in Viper). Must be above zero."""
    stall_s: float
    """Time for which a checkpoint blocks the training (`t_p` in Viper)."""
    delivery_s: float
    """Time from the end of the stall until consumers use the new version (`t_c` in Viper)."""
    inference_s: float
    """Duration of one inference (`t_infer` in Viper). Must be above zero."""

    def __post_init__(self) -> None:
        for name in ("iteration_s", "stall_s", "delivery_s", "inference_s"):
            value = getattr(self, name)
            positive = name in ("iteration_s", "inference_s")
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                bound = "above 0" if positive else "of at least 0"
                raise ValueError(f"update costs: {name}: expected finite seconds {bound}; found {value!r}")


def cumulative_inference_loss(
    iterations: Iterable[int],
    curve: Curve,
    costs: UpdateCosts,
    start: int,
    inferences: float,
    floor: bool = False,
) -> float:
    """Predict the sum of the losses of all inferences under a schedule (Viper, equation 2 and Algorithm 1).

    Args:
        iterations: Iterations after which a checkpoint is taken, increasing and above `start`. A checkpoint that would
            arrive after the last inference has no effect.
        curve: Function from an iteration to its loss.
        costs: Durations of training, updates and inference.
        start: Iteration of the version that is in use until the first checkpoint arrives.
        inferences: Total number of consecutive inferences, including the inferences with the version of iteration
            `start`.
        floor: Whether to round down the number of inferences with each version except the last, as Algorithm 1 does.
            By default, these numbers can be fractions.

    Raises:
        ValueError: if the iterations are not increasing or not above `start`, the number of inferences is negative or
            not finite, or a loss is not finite.

    >>> costs = UpdateCosts(iteration_s=1.0, stall_s=1.0, delivery_s=2.0, inference_s=0.5)
    >>> cumulative_inference_loss([3], lambda iteration: 10.0 - iteration, costs, start=0, inferences=20)
    176.0
    """
    taken = checked_iterations(iterations, start)
    counts = inferences_per_version(taken, costs, start, inferences, floor)
    return float(loss_at(curve, np.array([index(start), *taken], dtype=np.int64)) @ counts)


def inferences_per_version(
    iterations: Iterable[int], costs: UpdateCosts, start: int, inferences: float, floor: bool = False
) -> Floats:
    """Say how many inferences each version answers: that of `start`, then one per iteration.

    Args:
        iterations: after which a checkpoint is taken; increasing, above `start`.
        costs: seconds.
        start: iteration whose version answers at first.
        inferences: how many there are.
        floor: whole inferences per version, and all that are left to the last, as Algorithm 1 counts.

    Returns:
        float64, one value more than there are iterations; their sum is `inferences`.

    Raises:
        ValueError: as `cumulative_inference_loss`.

    >>> costs = UpdateCosts(iteration_s=1.0, stall_s=0.25, delivery_s=0.5, inference_s=1.0)
    >>> inferences_per_version([2, 4], costs, start=0, inferences=10).tolist()
    [2.75, 2.25, 5.0]
    >>> inferences_per_version([2, 4], costs, start=0, inferences=10, floor=True).tolist()
    [2.0, 2.0, 6.0]
    """
    total = checked_inferences(inferences)
    ends = arrivals(iterations, costs, start) / costs.inference_s
    if floor:
        periods = np.diff(ends, prepend=0.0)
        # A quotient that misses a whole number by rounding only, as 0.3 / 0.1 does, is that number.
        ends = np.cumsum(np.floor(periods * (1 + 1e-12)))
    return np.diff(np.minimum(ends, total), prepend=0.0, append=total)


def arrivals(iterations: Iterable[int], costs: UpdateCosts, start: int) -> Floats:
    """Say when each version begins to answer, in seconds after that of `start` did.

    Args:
        iterations: after which a checkpoint is taken; increasing, above `start`.
        costs: seconds.
        start: iteration whose version answers at time 0, when training goes on from there.

    Raises:
        ValueError: the iterations are not increasing, or not above `start`.

    >>> arrivals([2, 5], UpdateCosts(1.0, 0.25, 3.0, 1.0), start=0).tolist()
    [5.25, 8.5]
    """
    taken = np.array(checked_iterations(iterations, start), dtype=np.int64)
    stalls = np.arange(1, len(taken) + 1) * costs.stall_s
    return (taken - index(start)) * costs.iteration_s + stalls + costs.delivery_s


def loss_at(curve: Curve, iterations: NDArray[np.int64]) -> Floats:
    """Ask a curve for losses: at once where it takes an array, else one by one.

    Args:
        curve: iteration -> loss.
        iterations: one dimension.

    Raises:
        ValueError: a loss is not finite.

    >>> loss_at(lambda iteration: max(0, 3 - iteration), np.array([1, 2, 5])).tolist()
    [2.0, 1.0, 0.0]
    """
    losses = _at_once(curve, iterations)
    if losses is None:
        losses = np.array([float(curve(each)) for each in iterations.tolist()], dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(losses))
    if wrong.size:
        place = wrong[0]
        raise ValueError(f"curve at iteration {iterations[place]}: expected a finite loss; found {losses[place]}")
    return losses


def _at_once(curve: Curve, iterations: NDArray[np.int64]) -> Floats | None:
    if iterations.size < 2:
        return None
    try:
        found = np.asarray(curve(iterations), dtype=np.float64)
    except (TypeError, ValueError, LookupError):  # what takes one iteration says no to an array in such ways
        return None
    return found if found.shape == iterations.shape else None


def checked_iterations(iterations: Iterable[int], start: int) -> list[int]:
    """Return the iterations as a list, where they are increasing and above `start`.

    Raises:
        ValueError: they are not.

    >>> checked_iterations((4, 9), start=3)
    [4, 9]
    """
    taken = [index(each) for each in iterations]
    before = index(start)
    for place, each in enumerate(taken):
        if each <= before:
            what = f"increasing iterations after {start}"
            raise ValueError(f"schedule: iteration number {place}: expected {what}; found {each} after {before}")
        before = each
    return taken


def checked_inferences(inferences: float) -> float:
    """Return the number of inferences as a float.

    Raises:
        ValueError: it is negative or not finite.

    >>> checked_inferences(25_000)
    25000.0
    """
    if not math.isfinite(inferences) or inferences < 0:
        raise ValueError(f"inferences: expected a finite number of at least 0; found {inferences!r}")
    return float(inferences)
