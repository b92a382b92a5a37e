"""Limits of time, and pauses between tries.

Rules
- Who is asked for something within so many seconds makes one `Deadline` of them and hands that on: so all steps
  together keep to it, however many they are.
- A deadline is a moment of the monotonic clock of this process. Between processes seconds travel: `left()`.
- What is tried again pauses by a `Backoff`, and never longer than its deadline or its owner's life.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """The moment until which something may take. Those that end earlier are less.

    >>> Deadline.after(60.0).left() <= 60.0
    True
    >>> Deadline.after(0.0).passed
    True
    >>> min(Deadline.after(1.0), NEVER) < NEVER
    True
    """

    at: float
    """Seconds, of `time.monotonic`; infinite for no limit."""

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """Return the deadline `seconds` from now; None is no limit."""
        return cls(time.monotonic() + seconds) if seconds is not None else NEVER

    def left(self, most: float = math.inf) -> float:
        """Return the seconds until then, at least 0 and at most `most`."""
        return max(min(self.at - time.monotonic(), most), 0.0)

    def timeout(self) -> float | None:
        """Return the seconds until then as `threading` and `concurrent.futures` want them: None for no limit.

        >>> NEVER.timeout() is None
        True
        """
        return self.left() if self.at != math.inf else None

    @property
    def passed(self) -> bool:
        """Whether the moment has come."""
        return time.monotonic() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """Return this deadline, or the one `seconds` from now if that is earlier."""
        return min(self, Deadline.after(seconds))


NEVER = Deadline(math.inf)
"""No limit. Only for what cannot be given up halfway, and for threads that their owner wakes."""


@dataclass(slots=True)
class Backoff:
    """Pauses between tries of one thing, each longer than the one before.

    >>> pauses = Backoff(first=0.1, most=0.3)
    >>> [round(pauses.next(), 3) for _ in range(4)]
    [0.1, 0.2, 0.3, 0.3]
    >>> pauses.reset()
    >>> pauses.next()
    0.1
    """

    first: float
    """Seconds of the first pause."""
    most: float = math.inf
    """Seconds of the longest pause."""
    factor: float = 2.0
    """How many times as long each pause is as the one before; 1.0 for even pauses."""
    _pause: float = field(init=False)

    def __post_init__(self) -> None:
        self._pause = self.first

    def next(self) -> float:
        """Return the seconds to pause now; the next pause is longer."""
        pause, self._pause = self._pause, min(self._pause * self.factor, self.most)
        return pause

    def reset(self) -> None:
        """Begin with the first pause again: the thing worked."""
        self._pause = self.first

    def wait(self, deadline: Deadline, closing: threading.Event | None = None) -> bool:
        """Pause. Return False at once when the pause would end behind `deadline`, or as soon as `closing` is set.

        Args:
            deadline: of the tries together.
            closing: set by the owner of what is tried when it ends.
        """
        pause = self.next()
        if pause > deadline.left():
            return False
        if closing is not None:
            return not closing.wait(pause)
        time.sleep(pause)
        return True

    async def wait_async(self, deadline: Deadline) -> bool:
        """Pause as `wait` does, in a coroutine."""
        pause = self.next()
        if pause > deadline.left():
            return False
        await asyncio.sleep(pause)
        return True
