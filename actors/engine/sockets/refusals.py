"""What a listener does with peers that it refuses: few lines in the log, and a pause before their connection ends.

Rules
- At most `LINES` lines in `WINDOW_S` seconds. The others are counted, and the next line says how many they were.
- The pauses grow from one refusal to the next, and begin anew after `WINDOW_S` seconds without any. A pause is for the
  refused connection alone: whoever keeps it must go on with others meanwhile, and bound how many are kept.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from ....store.waiting import Backoff

log = logging.getLogger(__name__)

LINES = 5
WINDOW_S = 60.0
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 2.0


class Refusals:
    """Those of one listener; for threads and event loops.

    Args:
        who: names the listener in the log.
        clock: the time, in seconds.

    >>> refusals = Refusals("a listener")
    >>> refusals.note("expected a token of 32 bytes; found another one")
    0.02
    >>> refusals.note("expected a token of 32 bytes; none came within 5.0 s")
    0.04
    """

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._who = who
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._last = -math.inf
        """When there was one."""
        self._window = -math.inf
        """When the lines that count began."""
        self._lines = 0
        self._untold = 0

    def note(self, reason: str) -> float:
        """Count a refusal, and log it if a line is due. Does not wait.

        Args:
            reason: what was expected, and what was found.

        Returns:
            The seconds to pause before the refused connection is closed.
        """
        with self._lock:
            now = self._clock()
            if now - self._last >= WINDOW_S:
                self._pauses.reset()
            self._last = now
            pause = self._pauses.next()
            told = self._told(reason, now)
        if told is not None:
            log.warning("%s: refused: %s", self._who, told)
        return pause

    def _told(self, reason: str, now: float) -> str | None:
        if now - self._window >= WINDOW_S:
            self._window, self._lines = now, 0
        if self._lines == LINES:
            self._untold += 1
            return None
        self._lines += 1
        more, self._untold = self._untold, 0
        if more:
            reason += f" (and {more:,} more since the previous line)"
        if self._lines == LINES:
            reason += f" (further ones are only counted for {self._window + WINDOW_S - now:.0f} s)"
        return reason
