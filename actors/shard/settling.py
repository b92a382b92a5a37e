"""What follows from every change of a shard's state.

Rules
- The state decides what is to be freed, compacted, deleted and told to other shards, and leaves it; here it is done.
- Other shards are told without the lock. While the successors of a shard that drains still learn who holds what,
  nothing is told: it would overtake that.
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

    def also(self, tidy: Callable[[], None]) -> None:
        """Have a part carry out what the state left to it; it is called with the lock held."""
        self._tidy.append(tidy)

    async def settle(self) -> None:
        """Carry out what the state left, and wait until other shards were told."""
        with self._telling:
            for shard, holder in self._settle_here():
                await self._peers.release(holder, [shard])

    def settle_from_thread(self) -> None:
        """Do what `settle` does, without waiting for other shards."""
        for shard, holder in self._settle_here():
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

    def _settle_here(self) -> list[tuple[int, Holder]]:
        """Do of it what concerns this shard only; return what is for others."""
        with self._lock:
            outbox: list[tuple[int, Holder]] = []
            if not self._segment_handoff.is_telling:  # else it would overtake who holds what, and that would stay
                outbox, self._state.outbox = self._state.outbox, []
            self._segment_memory.settle()
            for tidy in self._tidy:
                tidy()
        self._context.show()
        self._notifier.tell(Change.ROOM)
        return outbox
