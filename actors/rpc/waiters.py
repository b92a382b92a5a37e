"""Those who wait for something to change: the long polls of an asynchronous actor.

Rules
- Concurrency groups have a loop each: a waiter is woken in its own.
- A waiter joins under the lock under which the change is made, after it has looked: so no change is missed.
"""

from __future__ import annotations

import asyncio
import threading
import time

Waiter = asyncio.Event


class Busy:
    """How many do something now: `with busy:` around it.

    >>> busy = Busy()
    >>> with busy:
    ...     bool(busy)
    True
    >>> bool(busy)
    False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1

    def __bool__(self) -> bool:
        return self._count > 0


class Waiters:
    """Waiters by topic.

    Args:
        lock: guards what the topics are about.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, Waiter]]] = {}

    def join(self, topic: str) -> Waiter:
        """Join those who are woken when `topic` changes. Call it with the lock held."""
        waiter = asyncio.Event()
        self._waiting.setdefault(topic, []).append((asyncio.get_running_loop(), waiter))
        return waiter

    async def woken(self, topic: str, waiter: Waiter, deadline: float) -> bool:
        """Wait to be woken; False when `deadline`, on the monotonic clock, came first."""
        try:
            await asyncio.wait_for(waiter.wait(), max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            return False
        finally:
            with self._lock:
                left = [other for other in self._waiting.pop(topic, []) if other[1] is not waiter]
                if left:
                    self._waiting[topic] = left
        return True

    def wake_all(self) -> None:
        """Let all look again."""
        with self._lock:
            topics = list(self._waiting)
        for topic in topics:
            self.wake(topic)

    def wake(self, topic: str) -> None:
        """Let those who wait look again."""
        with self._lock:
            waiting = self._waiting.pop(topic, [])
        for loop, waiter in waiting:
            loop.call_soon_threadsafe(waiter.set)
