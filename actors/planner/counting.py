"""The sums of the counts that the clients of a repository report to the planner.

Rules
- A report has the counts since the last answered report, and a number that rises with each answer. A report that
  arrives again, because its answer was lost, counts once.
- Counts of clients that have ended stay in the total. A planner that restarts begins at zero, which Prometheus takes
  for a reset of the counters: nothing counts twice.
- Gauges belong to clients that reported within `LIVE_S`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...store.counting import Counted, merge
from ...store.metrics import METRICS

LIVE_S = 60.0
"""Seconds without a report after which a client has ended."""
MOST_CLIENTS = 1 << 16
"""Clients whose last report is kept."""
_GREATEST = frozenset(metric.stem for metric in METRICS if metric.greatest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStats:
    """Statistics of the planner, for `tensorvine metrics`."""

    shards: int
    """Number of shards, including those that drain."""
    draining: int
    """Number of shards that drain."""
    trainings: int
    """Number of training runs that publish."""
    clients: int
    """Number of clients that reported within the last minute."""
    restarts: int
    """Restarts of the planner."""
    shard_restarts: Mapping[int, int]
    """Shard -> its restarts."""
    counted: Counted
    """Counts of all clients since the planner started."""
    gauges: Mapping[str, float]
    """Gauges of the clients that run: their sums, or greatest values."""


@dataclass(frozen=True, slots=True)
class _Client:
    serial: int
    """Number of its last report."""
    reported_at: float
    gauges: Mapping[str, float]


class ClientCounts:
    """The counts of all clients. All calls come from one thread at a time.

    Args:
        clock: returns seconds; monotonic.

    >>> counts = ClientCounts()
    >>> for _ in range(2):
    ...     counts.report("client", 1, {"versions_refused": [1.0]}, {"consumers": 1.0})
    >>> counts.total, counts.gauges(), counts.live()
    ({'versions_refused': [1.0]}, {'consumers': 1.0}, 1)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total: Counted = {}
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        """In the order of their last reports."""

    def report(self, client: str, serial: int, counted: Counted, gauges: Mapping[str, float] | None) -> None:
        """Take a client's report.

        Args:
            client: the client's id.
            serial: number of the report.
            counted: the counts since the last answered report.
            gauges: stem -> value. None in the last report of a client.
        """
        known = self._clients.pop(client, None)
        if known is None or known.serial < serial:
            merge(self.total, counted)
        at = self._clock() if gauges is not None else -math.inf
        self._clients[client] = _Client(serial, at, gauges or {})
        if len(self._clients) > MOST_CLIENTS:
            del self._clients[next(iter(self._clients))]

    def live(self) -> int:
        """Return how many clients run."""
        return len(self._live())

    def gauges(self) -> dict[str, float]:
        """Return the gauges of all clients that run."""
        found: dict[str, float] = {}
        for client in self._live():
            for stem, value in client.gauges.items():
                known = found.get(stem, 0.0)
                found[stem] = max(known, value) if stem in _GREATEST else known + value
        return found

    def _live(self) -> list[_Client]:
        since = self._clock() - LIVE_S
        return [client for client in self._clients.values() if client.reported_at >= since]
