"""Which way a transfer goes: the transfer selector, from what transfers took (Viper, section 4.4).

Rules
- A way takes latency + bytes / bandwidth. Both are learned: the line from which measurements are the least factor away
  (absolute, not squared: one transfer that was held up moves nothing; a factor, not seconds: a kilobyte counts as much
  as a gigabyte). Newer measurements weigh more.
- Transfers of one size alone do not tell latency from bandwidth: a latency of `LATENCY_S` is then supposed.
- A way that was never measured is supposed to be as slow as a slow one (`PRIOR`): it is tried when the ways that
  were measured are slower than that, and the first one offered when none was.
- A way that failed is avoided for a number of choices, each further failure doubling it; a transfer that succeeds ends
  that. Where all that are offered are to be avoided, the one that is to be avoided for the shortest is taken.
- No clock and no chance: the same calls give the same choices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

KEPT = 32
"""Newest measurements of a way that are kept."""
FADING = 0.9
"""Weight of a measurement, as a share of that of the next newer one: half after 7."""
LATENCY_S = 1e-3
"""Latency supposed of a way, until transfers of different sizes tell."""
LEAST_S = 1e-9
"""Least time that a transfer takes."""
AVOIDED = 8
"""Choices during which a way is avoided after its first failure in a row."""
LONGEST_AVOIDED = 512
"""Choices during which a way is avoided at most."""


@dataclass(frozen=True, slots=True)
class WaySpeed:
    """What a way takes: latency + bytes / bandwidth.

    >>> WaySpeed(latency_s=0.001, bytes_per_s=1e9).seconds(5_000_000)
    0.006
    """

    latency_s: float
    """Seconds that a transfer takes however small it is."""
    bytes_per_s: float
    """Bandwidth; infinite where the size made no difference."""

    def seconds(self, nbytes: int) -> float:
        """Predict what a transfer of so many bytes takes, in seconds."""
        return self.latency_s + nbytes / self.bytes_per_s


PRIOR = WaySpeed(latency_s=2e-3, bytes_per_s=0.5e9)
"""What is supposed of a way that was never measured: what Ray's object store reached between two nodes."""


@dataclass(slots=True)
class _Way:
    """What is known of one way."""

    transfers: deque[tuple[int, float]] = field(default_factory=lambda: deque[tuple[int, float]](maxlen=KEPT))
    """(bytes, seconds), oldest first."""
    speed: WaySpeed | None = PRIOR
    """None: to be learned from the transfers."""
    failures: int = 0
    """In a row."""
    avoided_until: int = 0
    """Number of the choice from which on the way may be taken again."""


class TransferSelector:
    """Chooses the way that is predicted to take the least time.

    >>> selector = TransferSelector()
    >>> selector.measured("socket", nbytes=1_000_000, seconds=0.002)
    >>> selector.choose(["socket", "files"], nbytes=1_000_000)  # faster than is supposed of what was never measured
    'socket'
    >>> selector.measured("files", nbytes=1_000_000, seconds=0.03)
    >>> selector.choose(["socket", "files"], nbytes=1_000_000), round(selector.predict("socket", 2_000_000), 4)
    ('socket', 0.003)
    >>> selector.failed("socket")
    >>> selector.choose(["socket", "files"], nbytes=1_000_000)
    'files'
    """

    def __init__(self) -> None:
        self._ways: dict[str, _Way] = {}
        self._choices = 0

    def measured(self, way: str, nbytes: int, seconds: float) -> None:
        """Learn from a transfer that succeeded.

        Args:
            way: its name.
            nbytes: bytes that it brought, from 0.
            seconds: what it took, from 0; less than a nanosecond counts as one.

        Raises:
            ValueError: bytes or seconds are negative, or the seconds not finite.
        """
        _check_size(nbytes)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds of a transfer by {way}: expected finite and from 0; found {seconds}")
        known = self._ways.setdefault(way, _Way())
        known.transfers.append((nbytes, max(seconds, LEAST_S)))
        known.speed, known.failures, known.avoided_until = None, 0, 0

    def failed(self, way: str) -> None:
        """Avoid a way for the next `AVOIDED` choices; twice as many for each failure in a row before this one."""
        known = self._ways.setdefault(way, _Way())
        known.avoided_until = self._choices + min(AVOIDED << min(known.failures, 16), LONGEST_AVOIDED)
        known.failures += 1

    def speed(self, way: str) -> WaySpeed:
        """Tell what a way is supposed to take; `PRIOR` where it was never measured."""
        known = self._ways.get(way)
        if known is None:
            return PRIOR
        if known.speed is None:
            known.speed = _learned(known.transfers)
        return known.speed

    def predict(self, way: str, nbytes: int) -> float:
        """Predict what a transfer takes, in seconds; by `PRIOR` for a way that was never measured.

        Raises:
            ValueError: negative bytes.
        """
        _check_size(nbytes)
        return self.speed(way).seconds(nbytes)

    def choose(self, ways: Sequence[str], nbytes: int) -> str:
        """Choose the way that is predicted to take the least time; of equal ones the first.

        Args:
            ways: those that could be taken, the preferred one first.
            nbytes: bytes to bring.

        Raises:
            ValueError: no way is offered, or negative bytes.
        """
        if not ways:
            raise ValueError("ways: expected at least one to choose from; found none")
        _check_size(nbytes)
        now = self._choices
        self._choices += 1
        return min(ways, key=lambda way: (self._avoided(way, now), self.predict(way, nbytes)))

    def _avoided(self, way: str, now: int) -> int:
        """For how many choices the way is still to be avoided."""
        return max(self._ways[way].avoided_until - now, 0) if way in self._ways else 0


def _check_size(nbytes: int) -> None:
    if nbytes < 0:
        raise ValueError(f"nbytes: expected from 0; found {nbytes}")


def _learned(transfers: Sequence[tuple[int, float]]) -> WaySpeed:
    """Choose, of the lines through two of the transfers, the one from which all are the least factor away.

    Lines through one transfer without a latency, or without a slope, are among them. So is an empty transfer that takes
    `LATENCY_S`, with next to no weight: it decides where the others do not.
    """
    nbytes, seconds = np.array([(0, LATENCY_S), *transfers], np.float64).T
    weights = np.array([1e-6, *FADING ** np.arange(len(transfers) - 1, -1, -1)])
    i, j = np.triu_indices(len(nbytes), 1)
    apart = np.where(nbytes[j] == nbytes[i], np.inf, nbytes[j] - nbytes[i])
    through = (seconds[j] - seconds[i]) / apart
    slopes = np.concatenate([through, seconds / np.maximum(nbytes, 1), np.zeros_like(seconds)])
    latencies = np.concatenate([seconds[i] - through * nbytes[i], np.zeros_like(seconds), seconds])
    possible = (slopes >= 0) & (latencies >= 0)
    slopes, latencies = slopes[possible], latencies[possible]
    predicted = np.maximum(latencies[:, None] + slopes[:, None] * nbytes, LEAST_S)
    best = int(np.argmin(np.abs(np.log(predicted / seconds)) @ weights))
    slope = float(slopes[best])
    return WaySpeed(float(latencies[best]), 1 / slope if slope else math.inf)
