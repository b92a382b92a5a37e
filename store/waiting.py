"""Limits of time, and pauses between tries.

Rules
- Who is asked for something within so many seconds makes one `Deadline` of them and hands that on: so all steps
  together keep to it, however many they are.
- A deadline is a moment of the monotonic clock of this process. Between processes seconds travel: `left()`.
- A step that may take only so long takes `deadline.left(most)`, or hands on `deadline.sooner(most)`.
- What is tried again pauses by a `Backoff`, and never beyond its deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from threading import Event
from typing import Any, cast

from .errors import OperationTimeoutError, OptionError

LONGEST_S = 365.0 * 86_400
"""The longest timeout in seconds: what operating systems and libraries take for one ends somewhere behind."""


def seconds_of(timeout: object) -> float:
    """Return a timeout that a caller gave, at most `LONGEST_S`.

    Raises:
        OptionError: it is no number.

    >>> seconds_of(3), seconds_of(math.inf) == LONGEST_S
    (3.0, True)
    """
    try:
        found = float(cast(Any, timeout)) if not isinstance(timeout, str) else math.nan
    except OverflowError:  # an integer
        found = LONGEST_S if cast(Any, timeout) > 0 else 0.0
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise OptionError(f"timeout: expected a number of seconds; found {timeout!r:.100}")
    return min(found, LONGEST_S)


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
        """Return the deadline `seconds` from now; see `seconds_of`."""
        return cls(time.monotonic() + seconds_of(seconds))

    def left(self, most: float = math.inf) -> float:
        """Return the seconds until then, at least 0 and at most `most`."""
        left = self.at - time.monotonic()
        if left <= 0.0:
            return 0.0
        return left if left < most else most

    def left_for(self, what: str) -> float:
        """Return the seconds until then, for a step that needs some.

        Raises:
            OperationTimeoutError: there are none; names `what`.
        """
        left = self.at - time.monotonic()
        if left <= 0.0:
            raise OperationTimeoutError(f"{what}: expected to finish within its timeout; it did not")
        return left

    @property
    def passed(self) -> bool:
        """Whether the moment is over."""
        return time.monotonic() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """Return the deadline of a step: this one, or `seconds` from now where that is before."""
        return Deadline(min(self.at, time.monotonic() + seconds))


NEVER = Deadline(math.inf)
"""Of what goes on until it succeeds, or until whoever does it is closed."""


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
    closing: Event | None = None
    """Ends each pause when it is set: that of the thread that tries."""
    _pause: float = field(init=False)

    def __post_init__(self) -> None:
        self._pause = self.first

    def next(self) -> float:
        """Return the seconds to pause now; the next pause is longer."""
        pause, self._pause = self._pause, min(2 * self._pause, self.most)
        return pause

    def reset(self) -> None:
        """Begin again with the first pause: the last try got something done."""
        self._pause = self.first

    def wait(self, deadline: Deadline = NEVER) -> bool:
        """Pause. Return False, at once, when the pause would end behind `deadline`, which is that of all tries, and
        when `closing` is set."""
        pause = self.next()
        if pause > deadline.left():
            return False
        if self.closing is not None:
            return not self.closing.wait(pause)
        time.sleep(pause)
        return True

    async def wait_async(self, deadline: Deadline = NEVER) -> bool:
        """As `wait`, in an event loop, which has no `closing`."""
        pause = self.next()
        if pause > deadline.left():
            return False
        await asyncio.sleep(pause)
        return True
