"""The transfer selector: it chooses a transport by the durations of earlier transfers (Viper, section 4.4).

Rules
- The time of a transfer is latency + bytes / bandwidth. Both are estimated per transport: the line with the smallest
  weighted error in log time. Absolute errors are used, so one delayed transfer has no effect; log time gives a kilobyte
  the same weight as a gigabyte. Newer measurements have larger weights.
- If all transfers had one size, the latency is assumed to be `LATENCY_S`.
- A transport without measurements is assumed to have the speed `PRIOR`. So it is tried if the measured ones are slower.
- A transport that failed is avoided for a number of choices, which doubles with each failure in a row. A success ends
  this. If all transports are to be avoided, the one with the fewest choices left is chosen.
- No clock and no randomness: the same calls give the same choices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

KEPT = 32
"""Measurements kept per transport."""
FADING = 0.9
"""Weight of a measurement, as a share of that of the next newer one: half after 7."""
LATENCY_S = 1e-3
"""Latency assumed until transfers of different sizes were measured."""
LEAST_S = 1e-9
"""Lower bound of a transfer's duration."""
AVOIDED = 8
"""Choices during which a transport is avoided after its first failure in a row."""
LONGEST_AVOIDED = 512
"""Choices during which a transport is avoided at most."""


@dataclass(frozen=True, slots=True)
class TransportSpeed:
    """The estimated speed of a transport: latency and bandwidth.

    >>> TransportSpeed(latency_s=0.001, bytes_per_s=1e9).seconds(5_000_000)
    0.006
    """

    latency_s: float
    """Seconds that an empty transfer takes."""
    bytes_per_s: float
    """Bandwidth. Infinite if the size made no difference."""

    def seconds(self, nbytes: int) -> float:
        """Return the predicted duration of a transfer of `nbytes` bytes, in seconds."""
        return self.latency_s + nbytes / self.bytes_per_s


PRIOR = TransportSpeed(latency_s=2e-3, bytes_per_s=0.5e9)
"""Speed assumed of a transport without measurements: that of Ray's object store between two nodes."""


@dataclass(slots=True)
class _Transport:
    """The measurements and failures of one transport."""

    transfers: deque[tuple[int, float]] = field(default_factory=lambda: deque[tuple[int, float]](maxlen=KEPT))
    """(bytes, seconds), oldest first."""
    speed: TransportSpeed | None = PRIOR
    """None means that it must be estimated from the transfers."""
    failures: int = 0
    """Failures in a row."""
    avoided_until: int = 0
    """Number of the first choice that may use the transport again."""


class TransferSelector:
    """A selector of the fastest transport, based on the durations of earlier transfers.

    >>> selector = TransferSelector()
    >>> selector.measured("socket", nbytes=1_000_000, seconds=0.002)
    >>> selector.choose(["socket", "files"], nbytes=1_000_000)  # faster than the assumed speed of "files"
    'socket'
    >>> selector.measured("files", nbytes=1_000_000, seconds=0.03)
    >>> selector.choose(["socket", "files"], nbytes=1_000_000), round(selector.predict("socket", 2_000_000), 4)
    ('socket', 0.003)
    >>> selector.failed("socket")
    >>> selector.choose(["socket", "files"], nbytes=1_000_000)
    'files'
    """

    def __init__(self) -> None:
        self._transports: dict[str, _Transport] = {}
        self._choices = 0

    def measured(self, transport: str, nbytes: int, seconds: float) -> None:
        """Record the duration of a successful transfer.

        Args:
            transport: Name of the transport.
            nbytes: Number of bytes transferred, at least 0.
            seconds: Duration in seconds, at least 0. Durations below 1 ns are recorded as 1 ns.

        Raises:
            ValueError: if the number of bytes is negative, or the duration is negative or not finite.
        """
        _check_size(nbytes)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"seconds of a transfer by {transport}: expected a finite number of at least 0; found {seconds}"
            )
        known = self._transports.setdefault(transport, _Transport())
        known.transfers.append((nbytes, max(seconds, LEAST_S)))
        known.speed, known.failures, known.avoided_until = None, 0, 0

    def failed(self, transport: str) -> None:
        """Record a failed transfer, and avoid the transport in the next 8 calls of `choose`.

        The number of calls doubles with each consecutive failure, up to 512. After a successful transfer, the
        transport is no longer avoided.

        Args:
            transport: Name of the transport.
        """
        known = self._transports.setdefault(transport, _Transport())
        known.avoided_until = self._choices + min(AVOIDED << min(known.failures, 16), LONGEST_AVOIDED)
        known.failures += 1

    def speed(self, transport: str) -> TransportSpeed:
        """Return the estimated speed of a transport, or a default speed if no transfer was measured."""
        known = self._transports.get(transport)
        if known is None:
            return PRIOR
        if known.speed is None:
            known.speed = _estimated(known.transfers)
        return known.speed

    def predict(self, transport: str, nbytes: int) -> float:
        """Return the predicted duration of a transfer, in seconds.

        Args:
            transport: Name of the transport.
            nbytes: Number of bytes to transfer.

        Raises:
            ValueError: if the number of bytes is negative.
        """
        _check_size(nbytes)
        return self.speed(transport).seconds(nbytes)

    def choose(self, transports: Sequence[str], nbytes: int) -> str:
        """Return the transport with the shortest predicted transfer time. Avoid transports that failed recently.

        If all transports are avoided, return the transport that is avoided for the fewest further calls (see `failed`).
        Of several transports with the same predicted time, return the first one in `transports`.

        Args:
            transports: Names of the available transports, in order of preference.
            nbytes: Number of bytes to transfer.

        Raises:
            ValueError: if there are no transports, or the number of bytes is negative.
        """
        if not transports:
            raise ValueError("transports: expected at least one to choose from; found none")
        _check_size(nbytes)
        now = self._choices
        self._choices += 1
        return min(transports, key=lambda transport: (self._avoided(transport, now), self.predict(transport, nbytes)))

    def _avoided(self, transport: str, now: int) -> int:
        """Return for how many more choices the transport is avoided."""
        return max(self._transports[transport].avoided_until - now, 0) if transport in self._transports else 0


def _check_size(nbytes: int) -> None:
    if nbytes < 0:
        raise ValueError(f"nbytes: expected at least 0; found {nbytes}")


def _estimated(transfers: Sequence[tuple[int, float]]) -> TransportSpeed:
    """Return the best of the lines through two of the transfers: the one with the smallest weighted error in log time.

    Lines through one transfer with no latency or no slope are candidates, too. An empty transfer that takes `LATENCY_S`
    is added with almost no weight, so that it decides only where the others do not.
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
    return TransportSpeed(float(latencies[best]), 1 / slope if slope else math.inf)
