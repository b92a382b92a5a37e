"""What a population's training left behind, whoever trained it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """A member has trained an interval."""

    at: float
    """Seconds since the first member began."""
    member: int
    step: int
    """It has come to, those of its ancestors included."""
    steps: int
    """Of the interval: fewer where a copy began within it."""
    rate: float
    """The learning rate that it had."""
    accuracy: float


@dataclass(frozen=True, slots=True)
class Exploit:
    """A member was replaced by a copy of another one."""

    at: float
    """When it stopped; seconds since the first member began."""
    member: int
    winner: int
    """Who was copied."""
    step: int
    """At which the copy begins."""
    source: float
    """The winner's learning rate then."""
    rate: float
    """The copy's."""
    away_s: float
    """From the last step of the member to the first one of the copy."""
    moved_s: float
    """Of that, moving the state."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A member was put aside, and went on from its own state."""

    at: float
    """When it stopped; seconds since the first member began."""
    member: int
    away_s: float
    """From its last step before to its first one after."""


@dataclass(frozen=True, slots=True)
class PopulationRun:
    """How a population was trained."""

    name: str
    rates: Sequence[float]
    """The members' learning rates at the beginning."""
    seconds: float
    """From when the first member began to the end."""
    intervals: Sequence[Interval]
    """In the order of time."""
    exploits: Sequence[Exploit]
    pauses: Sequence[Pause]
    held_s: Sequence[float]
    """For how long a member stood still each time that its state was taken."""
    processes: int
    """That were started for members."""

    @property
    def accuracy(self) -> float:
        """The best member's at its end."""
        return max(self.last(member).accuracy for member in range(len(self.rates)))

    def last(self, member: int) -> Interval:
        """Return a member's last interval."""
        return [interval for interval in self.intervals if interval.member == member][-1]

    def best(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the best accuracy so far, over seconds."""
        found = [interval.accuracy for interval in self.intervals]
        return np.array([interval.at for interval in self.intervals]), np.maximum.accumulate(found)

    def stretches(self, member: int) -> list[tuple[tuple[float, float], float]]:
        """Return when a member had which learning rate: (from, to) in seconds, and the rate."""
        since, rate, found = 0.0, self.rates[member], []
        for exploit in self.exploits:
            if exploit.member == member:
                found.append(((since, exploit.at), rate))
                since, rate = exploit.at + exploit.away_s, exploit.rate
        return [*found, ((since, max(self.last(member).at, since)), rate)]
