"""What is logged once though it happens again: warnings of a process, and failures of a thread that goes on."""

from __future__ import annotations

import logging
from functools import lru_cache


@lru_cache(maxsize=256)
def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged the same before."""
    log.warning("%s", message)


class Failures:
    """The failures of a thread that outlives them: each cause is logged once, with its traceback, until a success.

    Args:
        log: takes them.
        what: names what failed, in the log.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._known: set[str] = set()

    def note(self, error: Exception) -> None:
        """Log a failure, unless the same was logged since the last success."""
        cause = repr(error)
        if cause not in self._known:
            self._known.add(cause)
            self._log.error("%s failed, retrying: %s", self._what, cause, exc_info=error)

    def over(self) -> None:
        """Note a success."""
        self._known.clear()
