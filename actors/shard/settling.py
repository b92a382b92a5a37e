"""Carry out the consequences of a change of a shard's state.

Rules
- The state decides what to free, compact, delete and send to other shards, and lists it; `Settling` carries it out.
- Other shards are notified without the lock. While the successors of a draining shard still learn which versions hold
  which tensors, nothing is sent: it would overtake that.
- A call settles after it has changed the state, and returns when the other shards have answered. The sweep's thread
  sends only entries that are older than a period: newer ones belong to a call that waits for them.
- Last, the version page shows the new epoch, and callers that wait for room check again.
"""

from __future__ import annotations

from collections.abc import Callable

from ...store.holders import Holder
from ..rpc.calls import Request
from .busy import Busy
from .calls import ShardCalls
from .context import Change, ShardContext
from .handoff.segment_handoff import SegmentHandoff


class Settling:
    """Carries out the consequences of changes of one shard's state.

    Args:
        context: the shard's.
        segment_handoff: names the successors of a draining shard.
    """

    def __init__(self, context: ShardContext, segment_handoff: SegmentHandoff) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._notifier = context.notifier
        self._segment_handoff = segment_handoff
        self._tidy: list[Callable[[], None]] = []
        self._telling = Busy()
        self._left: set[tuple[int, Holder]] = set()
        """Entries of the outbox at the last `tell_left`."""

    def also(self, tidy: Callable[[], None]) -> None:
        """Add a function that each `settle` calls with the lock held."""
        self._tidy.append(tidy)

    async def settle(self) -> None:
        """Carry out the consequences of the last changes, and wait until the other shards have answered."""
        with self._telling:
            with self._lock:
                outbox = self._take(self._state.outbox)
            self._settle_here()
            for shard, holder in outbox:
                await self._peers.release(holder, [shard])

    def settle_from_thread(self) -> None:
        """Carry out what concerns this shard only; `tell_left` notifies the other shards."""
        self._settle_here()

    def tell_left(self) -> None:
        """Send other shards the entries that are older than the last call, without waiting for answers."""
        with self._lock:
            left = self._take([entry for entry in self._state.outbox if entry in self._left])
            self._left = set(self._state.outbox)
        for shard, holder in left:
            self._peers.post(shard, ShardCalls.release(holder))

    @property
    def is_telling(self) -> bool:
        """Whether notifications to other shards are pending. Read it with the lock held."""
        return bool(self._state.outbox) or bool(self._telling)

    def forget(self, holder: Holder) -> None:
        """Remove a holder; if this shard drains, the next `settle` removes it at the successors, too."""
        with self._lock:
            self._state.release(holder)
            self._state.outbox += [(successor, holder) for successor in self._segment_handoff.successors]

    async def pass_on(self, request: Request[None]) -> None:
        """Send a request to the successors, if this shard drains."""
        with self._lock:
            moved = self._segment_handoff.moved
        if moved:
            await self._segment_handoff.pass_on(request)

    def _take(self, entries: list[tuple[int, Holder]]) -> list[tuple[int, Holder]]:
        """Remove entries from the outbox and return them. Returns [] while successors learn the holders."""
        if self._segment_handoff.is_telling:
            return []
        taken = set(entries)
        self._state.outbox = [entry for entry in self._state.outbox if entry not in taken]
        return entries

    def _settle_here(self) -> None:
        """Carry out what concerns this shard only."""
        with self._lock:
            self._segment_memory.settle()
            for tidy in self._tidy:
                tidy()
        self._context.show()
        self._notifier.tell(Change.ROOM)
