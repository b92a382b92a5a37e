"""Limits of time, and pauses between tries.

Rules
- Who is asked for something within so many seconds makes one `Deadline` of them and hands that on: so all steps
  together keep to it, however many they are.
- A deadline is a moment of the monotonic clock of this process. Between processes seconds travel: `left()`.
- What is tried again pauses by a `Backoff`, and never beyond its deadline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment until which something may take.

    >>> Deadline.after(60.0).left() <= 60.0
    True
    >>> Deadline.after(-5.0).left()
    0.0
    """

    at: float
    """Seconds, of `time.monotonic`."""

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Return the seconds until then, at least 0."""
        return max(self.at - time.monotonic(), 0.0)


@dataclass(slots=True)
class Backoff:
    """Pauses between tries of one thing, each twice as long as the one before.

    >>> pauses = Backoff(first=0.1, most=0.3)
    >>> [pauses.next() for _ in range(4)]
    [0.1, 0.2, 0.3, 0.3]
    """

    first: float
    """Seconds of the first pause."""
    most: float
    """Seconds of the longest pause."""
    _pause: float = field(init=False)

    def __post_init__(self) -> None:
        self._pause = self.first

    def next(self) -> float:
        """Return the seconds to pause now; the next pause is longer."""
        pause, self._pause = self._pause, min(2 * self._pause, self.most)
        return pause

    def wait(self, deadline: Deadline) -> bool:
        """Pause. Return False at once when the pause would end behind `deadline`, which is that of all tries."""
        pause = self.next()
        if pause > deadline.left():
            return False
        time.sleep(pause)
        return True
