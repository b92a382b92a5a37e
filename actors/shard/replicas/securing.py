"""Copies on other nodes before something happens: before a version exists, and before its manifest goes.

Rules
- Whose copies are wanted may be any shard's: each has its own backups, and is asked.
- A shard without a lease has no copies made for another shard: its next incarnation is to have them.
- With `replicas=1` there is nothing to be done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import Header
from ....store.versions.replica import Kept
from ....store.versions.version import Draft
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.messages import PEER_TIMEOUT_S
from ..admission import Admission
from ..calls import ShardCalls
from ..calls.replicas import ReplicaCalls
from ..context import ShardContext
from ..disk.history import History
from ..tenure import LapsedError
from .replication import Replication


class Securing:
    """Has copies made of what one shard's versions need.

    Args:
        context: the shard's.
        replication: the shard's own copies elsewhere; None: it has none.
        history: reads what is on disk only, if there is a disk.
        room: has memory for that.
    """

    def __init__(
        self, context: ShardContext, replication: Replication | None, history: History | None, admission: Admission
    ) -> None:
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._tenure = context.tenure
        self._replication = replication
        self._history = history
        self._admission = admission

    @property
    def wanted(self) -> bool:
        """Whether there are to be any copies."""
        return self._replication is not None

    def have(self, ref: ModelRef) -> bool:
        """Tell whether all copies of a version are there, as far as there are to be any.

        Call it with the lock held, in the step in which the version comes to exist.
        """
        return self._replication is None or self._replication.have(ref)

    def news(self) -> None:
        """Something went or came other than by a commit."""
        if self._replication is not None:
            self._replication.news()

    @property
    def behind(self) -> int:
        """How many copies of this shard are missing, or not complete yet. Read it with the lock held."""
        return self._replication.behind if self._replication is not None else 0

    async def version(self, draft: Draft, header: Header, deadline: Deadline) -> None:
        """Have copies of a version before it exists: of its record, and of its bytes wherever they are."""
        if self._replication is None:
            return
        with self._lock:
            kept = Kept(header, draft.body, self._state.graphs.packed(draft.graph_key))
        by_shard = self._by_shard(draft.holds)
        own = by_shard.pop(self._index, [])
        left = deadline.left()
        await asyncio.gather(
            self._replication.secure(own, {header.ref: kept}, deadline),
            *(
                self._peers.repeat(shard, ShardCalls.secure(part, left), deadline, LapsedError)
                for shard, part in by_shard.items()
            ),
        )

    async def records(self, records: Mapping[ModelRef, Kept], timeout: float = PEER_TIMEOUT_S / 2) -> None:
        """Have copies of versions' records."""
        if self._replication is not None:
            await self._replication.secure((), records, Deadline.after(timeout))

    @answers(ReplicaCalls.secure)
    async def secure(self, segments: Sequence[SegmentId], timeout: float) -> None:
        with self._lock:
            self._state.blocks(segments)
        await self._tenure.during(self.segments(segments, timeout))

    async def segments(self, segments: Sequence[SegmentId], timeout: float = PEER_TIMEOUT_S / 2) -> None:
        """Have copies of segments of this shard."""
        if self._replication is not None:
            await self._replication.secure(segments, {}, Deadline.after(timeout))

    async def before_it_leaves(self, ref: ModelRef) -> None:
        """Have copies of what versions that are not on disk yet have on disk by this version's manifest only."""
        if self._replication is None:
            return
        with self._lock:
            record = self._state.known(ref)
            by_shard = self._by_shard(record.segments if record is not None else ())
        own, timeout = by_shard.pop(self._index, []), PEER_TIMEOUT_S / 2
        await asyncio.gather(
            self.leaves(ref, own, timeout),
            *(self._peers.ask(shard, ShardCalls.leaves(ref, part, timeout)) for shard, part in by_shard.items()),
        )

    @answers(ReplicaCalls.leaves)
    async def leaves(self, ref: ModelRef, segments: Sequence[SegmentId], timeout: float) -> None:
        if self._replication is None:
            return
        with self._lock:
            self._state.durability.leaves(ref)
            needed = [segment for segment in segments if not self._state.durability.rests(segment)]
            awaited = self._state.durability.awaited(needed)
        if not needed:
            return
        deadline = Deadline.after(timeout)
        # what of it is on disk only is read: after a restart the file would be nobody's
        loading = self._history.loading if awaited and self._history else None
        views = await loading.load(str(ref), awaited, self._admission.taken) if loading else []
        try:
            await self._replication.secure(needed, {}, deadline)
        finally:
            views.clear()

    async def away_from_leaving(self) -> None:
        """Wait until no shard that is about to drain keeps the copies."""
        if self._replication is not None:
            await self._replication.leave(Deadline.after(PEER_TIMEOUT_S / 2))

    def _by_shard(self, segments: Iterable[SegmentId]) -> dict[int, list[SegmentId]]:
        by_shard: dict[int, list[SegmentId]] = {}
        for segment in segments:
            by_shard.setdefault(self._state.where(segment), []).append(segment)
        return by_shard
