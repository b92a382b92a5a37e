"""What follows from every change of a shard's state.

Rules
- The state decides what is to be freed, compacted, deleted and told to other shards, and leaves it; here it is done.
- Other shards are told without the lock. While the successors of a shard that drains still learn who holds what,
  nothing is told: it would overtake that.
- Who changes the state settles next, and has told other shards when it returns. The sweep's thread tells only what
  nobody told for a whole period: entries that a call has just made are that call's to tell and to wait for.
- Then the version page shows the epoch, and those look again who wait for room.
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
    """Carries out what changes of one shard's state leave to be done.

    Args:
        context: the shard's.
        segment_handoff: knows the successors, if the shard drains.
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
        """What the outbox held at the last `tell_left`."""

    def also(self, tidy: Callable[[], None]) -> None:
        """Have a part carry out what the state left to it; it is called with the lock held."""
        self._tidy.append(tidy)

    async def settle(self) -> None:
        """Carry out what the state left, and wait until other shards were told."""
        with self._telling:
            with self._lock:
                outbox = self._take(self._state.outbox)
            self._settle_here()
            for shard, holder in outbox:
                await self._peers.release(holder, [shard])

    def settle_from_thread(self) -> None:
        """Carry out what concerns this shard only; `tell_left` tells the other shards."""
        self._settle_here()

    def tell_left(self) -> None:
        """Tell other shards what is left since the last call, without waiting for their answers."""
        with self._lock:
            left = self._take([entry for entry in self._state.outbox if entry in self._left])
            self._left = set(self._state.outbox)
        for shard, holder in left:
            self._peers.post(shard, ShardCalls.release(holder))

    @property
    def is_telling(self) -> bool:
        """Whether other shards are being told, or are to be. Read it with the lock held."""
        return bool(self._state.outbox) or bool(self._telling)

    def forget(self, holder: Holder) -> None:
        """Forget a holder, and with the next `settle`, if this shard drains, at those that have its segments now."""
        with self._lock:
            self._state.release(holder)
            self._state.outbox += [(successor, holder) for successor in self._segment_handoff.successors]

    async def pass_on(self, request: Request[None]) -> None:
        """Tell the shards that have this one's segments now, if it drains."""
        with self._lock:
            moved = self._segment_handoff.moved
        if moved:
            await self._segment_handoff.pass_on(request)

    def _take(self, entries: list[tuple[int, Holder]]) -> list[tuple[int, Holder]]:
        """Take entries out of the outbox: none while successors learn who holds what, which would be overtaken."""
        if self._segment_handoff.is_telling:
            return []
        taken = set(entries)
        self._state.outbox = [entry for entry in self._state.outbox if entry not in taken]
        return entries

    def _settle_here(self) -> None:
        """Do of it what concerns this shard only."""
        with self._lock:
            self._segment_memory.settle()
            for tidy in self._tidy:
                tidy()
        self._context.show()
        self._notifier.tell(Change.ROOM)
