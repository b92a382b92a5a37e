"""Admission control of a shard: room for what comes, in memory and in the queue for the disk. Who finds none waits.

Rules
- Memory is waited for only while what others hold may become free, and a moment in any case: orders that free some may
  be on their way. All who wait look again when something became free.
- A client gets memory only while its process is watched, which is looked at where the memory is taken: one that ends
  while it waits, or before its question is heard, gets none, as nobody would take it back.
- A save that ended while it waits, or before its question is heard, gets none either (`store.requests`).
- What clients have reserved for saves to come may become free, too: they ask now and then whether somebody waits here.
- While too much waits to be written to disk, no save is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ...store.errors import ShardUnavailableError
from ...store.holders import Owner
from ...store.waiting import Deadline
from ..rpc.messages import PEER_TIMEOUT_S
from .busy import Busy
from .context import Change, ShardContext
from .disk.persister import Persister
from .local_clients import LocalClients

ORDER_S = 0.5
"""How long an order of the catalog may take that follows a retirement which was answered."""
Taken = TypeVar("Taken")


class Admission:
    """Admission control in one shard.

    Args:
        context: the shard's.
        clients: those on this node.
        persister: writes to the disk, if there is one.
    """

    def __init__(self, context: ShardContext, clients: LocalClients, persister: Persister | None) -> None:
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._notifier = context.notifier
        self._clients = clients
        self._persister = persister
        self._asking = Busy()
        self._keeping = Busy()

    def is_short(self) -> bool:
        """Tell whether somebody waits for memory."""
        return bool(self._asking)

    @property
    def waiting_for_memory(self) -> int:
        """How many requests for memory wait: of saves, of loads from the path, of copies of others' segments."""
        return self._asking.count

    @property
    def waiting_for_disk(self) -> int:
        """How many saves wait until less waits to be written to disk."""
        return self._keeping.count

    def filled_by(self, client: str, sizes: Sequence[int]) -> Sequence[int]:
        """Return what a client may be granted of `sizes` to fill: nothing where its process is not watched.

        Call it with the lock held, and grant with it held still.
        """
        return sizes if self._clients.watches(client) else ()

    async def granted(
        self, owner: Owner, sizes: Sequence[int], timeout: float = PEER_TIMEOUT_S, client: str | None = None
    ) -> list[int]:
        """Grant memory for at least the first of `sizes`, waiting while what others hold may become free.

        Args:
            owner: whose it is to be.
            sizes: bytes of the blocks.
            timeout: seconds to wait.
            client: who fills it; None: this shard.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
            ShardUnavailableError: the client's process is not watched (any more).
            OperationTimeoutError: the owner is a save that has ended.
        """

        def grant() -> list[int] | None:
            if client is not None and not self._clients.watches(client):
                raise ShardUnavailableError(
                    f"save {owner}: expected its client {client} to be connected to the shard; it is not connected"
                )
            return self._segment_memory.grant(owner, sizes) or None

        return await self.taken("memory", owner, sizes[0], grant, timeout)

    async def taken(
        self, what: str, owner: Owner, nbytes: int, take: Callable[[], Taken | None], timeout: float = PEER_TIMEOUT_S
    ) -> Taken:
        """Take memory, waiting while what others hold may become free.

        Args:
            what: begins the message where there is no room.
            owner: whose it is to be.
            nbytes: how much, for that message.
            take: takes it, with the lock held; None: there is no room now.
            timeout: seconds to wait.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
        """

        def look() -> Taken | None:
            found = take()
            behind = self._persister is not None and (self._persister.behind()[0] > 0 or bool(self._state.offered()))
            hope = behind or self._segment_memory.room_may_come(owner)  # the sweep tells us, too
            if found is None and not hope:
                raise self._segment_memory.full(what, nbytes)
            return found

        deadline = Deadline.after(timeout)
        with self._asking:
            found = await self._notifier.until(Change.ROOM, take, deadline.sooner(ORDER_S))
            found = found if found is not None else await self._notifier.until(Change.ROOM, look, deadline)
        if found is None:
            raise self._segment_memory.full(what, nbytes)
        return found

    async def keep_pace(self, what: str, deadline: Deadline) -> None:
        """Wait while too much waits to be written to disk.

        Raises:
            OperationTimeoutError, StorageError: the disk is slower than the savers, or does not take anything.
        """
        persister = self._persister
        if persister is None or not persister.is_full():
            return
        with self._keeping:
            if not await self._notifier.until(Change.ROOM, lambda: not persister.is_full() or None, deadline):
                raise persister.late(what)
