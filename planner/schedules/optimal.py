"""The exact schedule: of all sets of iterations, the one with the least predicted loss.

Rules
- Exact for any curve, up to a share of 1e-11 of what an immediate update to the lowest loss would gain.
- Only improvements are looked at (`window`), so losses fall strictly from node to node here.
- Units inside: losses from 0 (the lowest) to 1 (at `start`); times as shares of the time from the first possible
  delivery to the last inference; prices in their product.
- A checkpoint must gain at least `TIE`: that makes fewer checkpoints win among equals.

The proofs and the recurrences are in docs/design/schedules.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..curves.losses import Curve, Floats, UpdateCosts
from ..curves.window import Schedule, Window

TIE = 1e-12
CLOSE = 1e-11
"""Differences below this are rounding."""
HALVINGS = 16
"""Steps of the search for a price; the last ones change it by less than a thousandth."""
CHEAPEST = 1e-12
"""The lowest price that the search tries, as a share of the price at which no checkpoint is chosen."""


def optimal_schedule(
    curve: Curve,
    costs: UpdateCosts,
    start: int,
    stop: int,
    inferences: float,
    *,
    price: float = 0.0,
    most: int | None = None,
) -> Schedule:
    """Return the schedule with the lowest predicted sum of the losses of all inferences.

    Args:
        curve: Function from an iteration to its loss. The loss can rise and fall.
        costs: Durations of training, updates and inference.
        start: Iteration of the version that is in use at the beginning.
        stop: Last iteration after which a checkpoint can be taken.
        inferences: Total number of inferences, including the inferences with the version of `start`.
        price: Cost per checkpoint, in the unit of the predicted loss. The cost is added to the sum that is minimized.
            The price need not cover stalls: the effect of stalls on the losses is already part of the sum.
        most: Maximum number of checkpoints. None means no limit. If the best schedule has more than `most` checkpoints,
            the function raises the price until the best schedule has at most `most` checkpoints. Therefore, the result
            can have fewer than `most` checkpoints.

    Returns:
        The schedule. Its `predicted_loss` does not include the price of the checkpoints.

    Raises:
        ValueError: if the price is negative or not finite, `most` is negative, `stop` is not after `start`,
            `inferences` is negative or not finite, or a loss is not finite.

    >>> costs = UpdateCosts(iteration_s=1.0, stall_s=2.0, delivery_s=1.0, inference_s=1.0)
    >>> optimal_schedule(lambda i: 0.8**i, costs, start=0, stop=20, inferences=60).iterations
    (4, 8, 12, 15, 18, 20)
    >>> optimal_schedule(lambda i: 0.8**i, costs, start=0, stop=20, inferences=60, price=2.0).iterations
    (6, 16)
    """
    if not math.isfinite(price) or price < 0:
        raise ValueError(f"optimal schedule: expected a finite price of at least 0; found {price!r}")
    if most is not None and most < 0:
        raise ValueError(f"optimal schedule: most: expected a number of checkpoints of at least 0; found {most!r}")
    window = Window.of(curve, costs, start, stop, inferences)
    best = _best(window, price)
    return best if most is None or len(best.iterations) <= most else _fewer(window, price, most)


def _dearest(window: Window) -> float:
    """Return the price at which no checkpoint is worth it."""
    places, costs = window.improvements(), window.costs
    left = window.horizon_s - places * costs.iteration_s - costs.stall_s - costs.delivery_s
    return float(((window.losses[0] - window.losses[places]) * left).max()) / costs.inference_s


def _fewer(window: Window, price: float, most: int) -> Schedule:
    """Find the lowest price, from `price` on, at which the best schedule has at most so many checkpoints."""
    dear = _dearest(window)
    cheap = max(price, dear * CHEAPEST)
    best = window.schedule([])
    for _ in range(HALVINGS):
        middle = math.sqrt(cheap * dear)
        schedule = _best(window, middle)
        if len(schedule.iterations) <= most:
            best, dear = schedule, middle
        else:
            cheap = middle
        if len(best.iterations) == most:
            break
    return best


def _best(window: Window, price: float) -> Schedule:
    places = window.improvements()
    if not len(places):
        return window.schedule([])
    losses = window.losses[np.concatenate([[0], places])]
    fall = float(losses[0] - losses[-1])
    # Scaled, losses that differ may be equal: of those the first is kept.
    scaled, kept = np.unique((losses[-1] - losses) / fall, return_index=True)
    places = np.concatenate([[0], places])[kept]
    span_s = window.horizon_s - window.costs.delivery_s
    nodes = _Nodes(
        times=places * (window.costs.iteration_s / span_s),
        losses=-scaled,
        stall=window.costs.stall_s / span_s,
        price=TIE + price * window.costs.inference_s / (fall * span_s),
    )
    return window.schedule(places[_least_path(nodes)])


@dataclass(frozen=True)
class _Nodes:
    """What may be published: node 0 answers already."""

    times: Floats
    """When each is trained, if nothing stalls; increasing, from 0."""
    losses: Floats
    """From 1 to 0, strictly falling."""
    stall: float
    price: float
    """Of one checkpoint."""


@dataclass(frozen=True)
class _Paths:
    """The best ways to each node, where those who are served by a loss of `level` count nothing."""

    level: float
    costs: Floats
    """Until each node answers, less `level` for that time."""
    counts: NDArray[np.int64]
    """Checkpoints on the way."""
    before: list[int]
    """The node before each."""

    def totals(self, nodes: _Nodes) -> Floats:
        """Return for each node what its path costs in all, if it is the last one and answers until the end."""
        arrival = nodes.times[: len(self.costs)] + self.counts * nodes.stall
        return self.costs + self.level * arrival + nodes.losses[: len(self.costs)] * (1 - arrival)

    def to(self, node: int) -> list[int]:
        """Return the nodes of the best path to a node, without node 0."""
        path: list[int] = []
        while node:
            path.append(node)
            node = self.before[node]
        return path[::-1]


def _least_path(nodes: _Nodes) -> list[int]:
    """Find the path of least total cost, over all last nodes.

    If the last node were known to be f, paths at the level of its loss would answer at once. For every other f
    they give an upper bound, and two levels around f's loss a lower one. So levels are tried, between those around
    the lowest bound, until no bound is below what was found.
    """
    last = len(nodes.losses) - 1
    known: dict[int, _Paths] = {}
    bounds = np.full(last + 1, math.inf)
    best, path = 1.0, list[int]()  # nothing is taken: the loss stays 1 until the end
    wanted = [0, last]
    while wanted:
        place = wanted.pop()
        low = max((each for each in known if each < place), default=place)
        high = min((each for each in known if each > place), default=place)
        found = known[place] = _paths(nodes, float(nodes.losses[place]), high)
        totals = found.totals(nodes)
        node = int(np.argmin(totals))
        if totals[node] < best:
            best, path = float(totals[node]), found.to(node)
        bounds[place] = math.inf
        for left, right in ((low, place), (place, high)):
            bounds[left + 1 : right] = _bounds(nodes, known[left], known[right], slice(left + 1, right))
        lowest = int(np.argmin(bounds))
        if not wanted and bounds[lowest] < best - CLOSE:
            left = max(each for each in known if each < lowest)
            right = min(each for each in known if each > lowest)
            unknown = np.flatnonzero(bounds[left:right] < best - CLOSE)
            wanted = [left + int(unknown[len(unknown) // 2])]
    return path


def _bounds(nodes: _Nodes, above: _Paths, below: _Paths, between: slice) -> Floats:
    """Bound the totals that are not known yet of the nodes between two, from paths at the losses of those two.

    What the best path to a node costs is concave in the level, so it lies on or above the chord. As the level rises
    it falls by the node's arrival, which is before the last inference if the node is the best last one; and the
    number of checkpoints grows. Where it can grow by one at most, there is no path but the two that are known.
    """
    losses, times = nodes.losses[between], nodes.times[between]
    if not len(losses):
        return losses
    costs, fewest, most = below.costs[between], below.counts[between], above.counts[between]
    in_time = np.floor((1 - times) / nodes.stall) if nodes.stall > TIE else most
    share = (losses - below.level) / (above.level - below.level)
    chord = share * above.costs[between] + (1 - share) * costs
    steepest = costs - (losses - below.level) * (times + np.minimum(most, in_time) * nodes.stall)
    known = (most - fewest <= 1) | (in_time <= fewest)
    return np.where(known, math.inf, np.maximum(chord, steepest) + losses)


def _paths(nodes: _Nodes, level: float, last: int) -> _Paths:
    """Find the best paths to all nodes up to `last`, in linear time.

    What a path costs until node j answers, if node i is the one before, is a line in the time of j. Its slope is
    the loss of i, which falls from node to node: so the lines that are lowest somewhere form a hull, of which each
    new line ends only a tail, and the place where j reads it only moves on.
    """
    times: list[float] = nodes.times.tolist()
    losses: list[float] = nodes.losses.tolist()
    stall, price = nodes.stall, nodes.price
    costs, counts, before = [0.0], [0], [0]
    hull, begins, heights = [0], [-math.inf], [(losses[0] - level) * stall + price]
    reading = 0
    for node in range(1, last + 1):
        time, loss = times[node], losses[node]
        while reading + 1 < len(hull) and begins[reading + 1] <= time:
            reading += 1
        source = hull[reading]
        cost = costs[source] + (losses[source] - level) * (time - times[source] + stall) + price
        costs.append(cost)
        counts.append(counts[source] + 1)
        before.append(source)
        height = cost - (loss - level) * (time - stall) + price  # of the new line, at time 0
        begin = (height - heights[-1]) / (losses[hull[-1]] - loss)
        while len(hull) > reading + 1 and begin <= begins[-1]:
            hull.pop()
            begins.pop()
            heights.pop()
            begin = (height - heights[-1]) / (losses[hull[-1]] - loss)
        hull.append(node)
        begins.append(begin)
        heights.append(height)
    return _Paths(level, np.array(costs), np.array(counts), before)
