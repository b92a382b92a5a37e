"""Counters and histograms of one process, and sums of those of several.

Rules
- A count is kept under the metric's stem and the values of its labels, joined by `|`. A counter is a list of one
  number. A histogram is a list of the numbers of its buckets, the last one without an upper bound, and then the sum of
  the values. So sums of counts are sums of lists, and counts are JSON as they are.
- Counting takes a few microseconds and never fails: it stands next to each save and load.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TypeAlias

from .metrics import ERRORS, SHORT_S, Metric

Counted: TypeAlias = dict[str, list[float]]
"""Stem and values of labels -> a counter, or a histogram."""
_CELLS = len(SHORT_S) + 2
"""Numbers of a histogram."""


class Counts:
    """The counts of one actor or client. All methods may be called by several threads.

    >>> from tensorvine.store.metrics import LOADED_BYTES, SAVE
    >>> counts = Counts()
    >>> counts.add(LOADED_BYTES, 100, "socket")
    >>> counts.observe(SAVE, 0.003)
    >>> counts.copy()["loaded_bytes|socket"], sum(counts.copy()["save_seconds"][:-1])
    ([100.0], 1.0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: Counted = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        """Add to a counter.

        Args:
            metric: the counter.
            amount: what to add.
            labels: the values of the metric's labels.
        """
        key = "|".join((metric.stem, *labels)) if labels else metric.stem
        with self._lock:
            known = self._counted.get(key)
            if known is None:
                self._counted[key] = [float(amount)]
            else:
                known[0] += amount

    def observe(self, metric: Metric, seconds: float) -> None:
        """Add a duration to a histogram; a negative one, of clocks that differ, counts as 0."""
        seconds = max(seconds, 0.0)
        place = bisect_left(SHORT_S, seconds)
        with self._lock:
            known = self._counted.get(metric.stem)
            if known is None:
                known = self._counted[metric.stem] = [0.0] * _CELLS
            known[place] += 1.0
            known[-1] += seconds

    def failed(self, operation: str, error: BaseException) -> None:
        """Count a failed operation by the class of its error."""
        self.add(ERRORS, 1.0, operation, type(error).__name__)

    def show(self, metric: Metric, value: Callable[[], float]) -> None:
        """Report a gauge from now on; each report calls `value`."""
        self._gauges[metric.stem] = value

    def gauges(self) -> dict[str, float]:
        """Return the present values of the gauges."""
        return {stem: float(value()) for stem, value in self._gauges.items()}

    def copy(self) -> Counted:
        """Return all counts since the start."""
        with self._lock:
            return {key: list(value) for key, value in self._counted.items()}

    def take(self) -> Counted:
        """Return the counts since the last `take`."""
        with self._lock:
            taken, self._counted = self._counted, {}
        return taken


def merge(into: Counted, more: Mapping[str, list[float]]) -> None:
    """Add counts to others.

    >>> total = {"versions_refused": [1.0]}
    >>> merge(total, {"versions_refused": [2.0], "versions_superseded": [3.0]})
    >>> total
    {'versions_refused': [3.0], 'versions_superseded': [3.0]}
    """
    for key, values in more.items():
        known = into.get(key)
        into[key] = list(values) if known is None else [a + b for a, b in zip(known, values, strict=True)]
