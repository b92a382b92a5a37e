"""Hears of new versions of one name, through Redis.

Rules
- A message is a hint, the number in Redis is the truth: it is compared on every subscription, on every message, and
  every few seconds. So a message that was missed costs time and nothing else.
- While Redis is away, what was heard last holds, and one thread goes on trying. The log has one line when it goes and
  one when it is back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from ...store.errors import CorruptDataError, RepositoryNotFoundError, StorageError
from ...store.waiting import Backoff, Deadline
from ..engine.warned import Failures
from .reader import Newest, RedisReader

log = logging.getLogger(__name__)

COMPARE_S = 2.0
"""How long a missed message may stay unnoticed."""
HEAR_S = 0.25
"""How long the thread listens before it looks whether it is to end."""
RETRY_S = (0.05, 2.0)
"""Shortest and longest pause between two tries to reach Redis."""


class Listener:
    """Knows the newest version of `name`.

    Args:
        reader: of the repository.
        name: the model's.
    """

    def __init__(self, reader: RedisReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._newest: Newest | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tensorvine-listen", daemon=True)
        self._thread.start()

    def wait(self, wanted: Callable[[Newest], bool], timeout: float) -> Newest | None:
        """Wait for a newest version that is `wanted`; None when none came, or the listener was closed."""

        def found() -> bool:
            return self._closing.is_set() or (self._newest is not None and wanted(self._newest))

        with self._changed:
            return self._newest if self._changed.wait_for(found, timeout) and not self._closing.is_set() else None

    def close(self) -> None:
        """End the thread, and all waits."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(30.0)

    def _work(self) -> None:
        pauses = Backoff(*RETRY_S, closing=self._closing)
        away, failures = False, Failures(log, f"updates of {self._name!r}")
        while not self._closing.is_set():
            try:
                with contextlib.closing(self._reader.updates(self._name)) as updates:
                    if away:
                        log.warning("updates of %r: Redis answers again", self._name)
                    pauses.reset()
                    away, due = False, Deadline.after(0.0)
                    failures.over()
                    while not self._closing.is_set():
                        if updates.heard(HEAR_S) or due.passed:
                            self._compare()
                            due = Deadline.after(COMPARE_S)
            except (CorruptDataError, StorageError) as exc:
                if not away:
                    log.warning("updates of %r: %s; using the last known version", self._name, exc)
                away = True
            except Exception as exc:  # noqa: BLE001  logged
                failures.note(exc)
            pauses.wait()

    def _compare(self) -> None:
        try:
            newest = self._reader.newest(self._name)
        except RepositoryNotFoundError:
            return  # it has not started yet, or Redis lost its data: the shards will post it again
        with self._changed:
            if newest != self._newest:
                self._newest = newest
                self._changed.notify_all()
