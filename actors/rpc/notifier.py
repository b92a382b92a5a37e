"""Waits of an asynchronous actor for something to change, as in long polls.

Rules
- Who waits looks under the lock under which the change is made, and is entered with it held still: no change is missed.
- Concurrency groups have a loop each: who waits is woken in its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ...store.waiting import Deadline

TopicT = TypeVar("TopicT", bound=Hashable)
_Found = TypeVar("_Found")


class Notifier(Generic[TopicT]):
    """Lets those who wait look again when what they wait for may have changed.

    Args:
        lock: guards what the topics are about.

    >>> lock, finished = threading.RLock(), [3]
    >>> notifier = Notifier[str](lock)
    >>> asyncio.run(notifier.until("work", lambda: finished.pop() if finished else None, Deadline.after(5.0)))
    3
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: dict[TopicT, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    async def until(self, topic: TopicT, look: Callable[[], _Found | None], deadline: Deadline) -> _Found | None:
        """Wait until `look` finds something, and return that; None when the deadline came first.

        Args:
            topic: what is told of when another look is worth it.
            look: called with the lock held; None is nothing. What it raises ends the wait.
            deadline: until when to wait; the first look comes in any case.
        """
        while True:
            with self._lock:
                found = look()
                if found is not None:
                    return found
                changed = self._enter(topic)
            try:
                async with asyncio.timeout(deadline.left()):  # `wait_for` loses a cancellation that comes with the news
                    await changed.wait()
            except TimeoutError:
                return None
            finally:
                self._leave(topic, changed)

    def tell(self, topic: TopicT) -> None:
        """Let those who wait for a topic look again."""
        with self._lock:
            waiting = self._waiting.pop(topic, [])
        for loop, changed in waiting:
            loop.call_soon_threadsafe(changed.set)

    def tell_all(self) -> None:
        """Let all who wait look again."""
        with self._lock:
            topics = list(self._waiting)
        for topic in topics:
            self.tell(topic)

    def _enter(self, topic: TopicT) -> asyncio.Event:
        changed = asyncio.Event()
        self._waiting.setdefault(topic, []).append((asyncio.get_running_loop(), changed))
        return changed

    def _leave(self, topic: TopicT, changed: asyncio.Event) -> None:
        with self._lock:
            left = [entry for entry in self._waiting.pop(topic, []) if entry[1] is not changed]
            if left:
                self._waiting[topic] = left
