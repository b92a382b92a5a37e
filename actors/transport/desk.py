"""Where a shard's readers meet it before they are a group: at the shard itself, so there is nobody else to fail.

Rules
- The shard's threads wait here as in any rendezvous; its readers' messages wait as coroutines.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from ..collective.rendezvous import Card, Meeting

Cards = list[dict[str, Any]]


class Desk:
    """A rendezvous (`collective.rendezvous`) for threads and coroutines of one process.

    >>> Desk().exchange("g", 0, 1, {"port": 7}, timeout=1.0)
    [{'port': 7}]
    """

    def __init__(self) -> None:
        self._meetings: dict[str, tuple[Meeting, Future[Cards]]] = {}
        self._lock = threading.Lock()

    def exchange(self, key: str, rank: int, size: int, card: Card, timeout: float) -> Cards:
        """Meet, from a thread; see `Rendezvous.exchange`."""
        deadline = time.monotonic() + timeout
        meeting, complete = self._come(key, rank, size, card)
        wait([complete], max(deadline - time.monotonic(), 0.0))
        return self._left(key, rank, size, meeting, complete, timeout)

    async def met(self, key: str, rank: int, size: int, card: Card, timeout: float) -> Cards:
        """Meet, from a coroutine; see `Rendezvous.exchange`."""
        meeting, complete = self._come(key, rank, size, card)
        await asyncio.wait([asyncio.wrap_future(complete)], timeout=max(timeout, 0.0))
        return self._left(key, rank, size, meeting, complete, timeout)

    def _come(self, key: str, rank: int, size: int, card: Card) -> tuple[Meeting, Future[Cards]]:
        with self._lock:
            meeting, complete = self._meetings.get(key) or (Meeting(key, size), Future[Cards]())
            if meeting.come(rank, size, card):
                self._meetings.pop(key, None)
                complete.set_result(meeting.cards)
            else:
                self._meetings[key] = meeting, complete
        return meeting, complete

    def _left(self, key: str, rank: int, size: int, meeting: Meeting, complete: Future[Cards], timeout: float) -> Cards:
        with self._lock:
            if complete.done():
                return complete.result()
            error = meeting.late(timeout)
            meeting.leave(rank)
            if len(meeting.missing) == size and self._meetings.get(key, (None,))[0] is meeting:
                del self._meetings[key]
        raise error


class RemoteDesk:
    """A reader's end of a shard's desk: a rendezvous.

    Args:
        ask: calls the shard's `meet`: (key, rank, size, card, seconds).
    """

    def __init__(self, ask: Callable[[str, int, int, Card, float], Cards]) -> None:
        self._ask = ask

    def exchange(self, key: str, rank: int, size: int, card: Card, timeout: float) -> Cards:
        """Meet; see `Rendezvous.exchange`."""
        return self._ask(key, rank, size, dict(card), timeout)
