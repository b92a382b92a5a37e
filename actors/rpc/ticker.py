"""What a shard or the planner does again and again, as long as its process lives: each in a thread of its own.

Rules
- One thread each, because each waits for something else: questions for other shards, care for the disk, copies for
  other nodes. The sweep, which ends sessions of clients that died, waits for none of these.
- A step that fails is logged once per cause, and the next one comes after the usual pause.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..engine.warned import Failures

log = logging.getLogger(__name__)

FAILED_S = 1.0
"""The pause after a failure before the first step."""


class Ticker:
    """Takes a step every so many seconds, and when it is told to.

    Args:
        what: names the thread, and the step in the log.
        whose: "shard 3", for the log.
        pause: returns the seconds until the next step.
        step: the step.

    >>> done = threading.Event()
    >>> Ticker("example", "shard 0", lambda: 3600.0, done.set).soon()
    >>> done.wait(60)
    True
    """

    def __init__(self, what: str, whose: str, pause: Callable[[], float], step: Callable[[], None]) -> None:
        self._what = what
        self._whose = whose
        self._pause = pause
        self._step = step
        self._now = threading.Event()
        self._ended = False
        threading.Thread(target=self._run, name=f"tensorvine-{what}", daemon=True).start()

    def soon(self) -> None:
        """Take a step now, or another one if one is being taken."""
        self._now.set()

    def end(self) -> None:
        """Take no further step; the thread ends soon."""
        self._ended = True
        self._now.set()

    def _run(self) -> None:
        failed, failures = threading.Event(), Failures(log, f"{self._whose}: {self._what}")
        pause = FAILED_S
        while not self._ended:
            try:
                pause = self._pause()
                self._now.wait(pause)
                self._now.clear()
                if self._ended:
                    return
                self._step()
                failures.over()
            except Exception as exc:  # noqa: BLE001  logged
                failures.note(exc)
                failed.wait(pause)
