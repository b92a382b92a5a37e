"""Room for what comes to a shard: memory, and a place in the queue for the disk. Who finds none waits here.

Rules
- Memory is waited for only while what others hold may become free; all who wait look again when something did.
- While too much waits to be written to disk, no save begins and none is committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .holdings import Holdings
from .messages import PEER_TIMEOUT_S
from .persister import Persister
from .waiters import Waiters

ROOM = "/"  # no model's name starts with a slash
"""The topic of those who wait."""


class Room:
    """Room in one shard.

    Args:
        lock: guards the holdings.
        holdings: the shard's memory.
        waiters: where to wait.
        persister: writes to the disk, if there is one.
    """

    def __init__(
        self, lock: threading.RLock, holdings: Holdings, waiters: Waiters, persister: Persister | None
    ) -> None:
        self._lock = lock
        self._holdings = holdings
        self._waiters = waiters
        self._persister = persister

    async def granted(self, owner: str, sizes: Sequence[int], timeout: float = PEER_TIMEOUT_S) -> list[int]:
        """Grant memory for at least the first of `sizes`, waiting while what others hold may become free.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                offsets = self._holdings.grant(owner, sizes)
                behind = self._persister is not None and self._persister.behind()[0] > 0
                hope = not offsets and (behind or self._holdings.room_may_come(owner))  # the sweep wakes us, too
                waiter = self._waiters.join(ROOM) if hope else None
            if offsets:
                return offsets
            if waiter is None or not await self._waiters.woken(ROOM, waiter, deadline):
                raise self._holdings.full(owner, sizes[0])

    async def keep_pace(self, what: str, deadline: float) -> None:
        """Wait while too much waits to be written to disk.

        Raises:
            OperationTimeoutError, StorageError: the disk is slower than the savers, or does not take anything.
        """
        while self._persister is not None and self._persister.is_full():
            with self._lock:
                waiter = self._waiters.join(ROOM)
            if self._persister.is_full() and not await self._waiters.woken(ROOM, waiter, deadline):
                raise self._persister.late(what)
