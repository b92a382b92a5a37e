"""What other homes ask of the files of a shard's segments.

Rules
- A shard that has handed its segments over has the successors write them, once they know who holds what
  (`segment_handoff`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ....store.errors import MovedError
from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId, Stored
from ...rpc.calls import answers
from ...rpc.messages import Chains, ToStore
from ..calls import ShardCalls
from ..calls.files import FileCalls
from ..context import ShardContext
from ..disk.history import History, required
from ..handoff.segment_handoff import SegmentHandoff
from ..settling import Settling


class Files:
    """The files of one shard's segments, as other homes see them.

    Args:
        context: the shard's.
        settling: carries out what follows.
        history: the shard's disk, if there is one.
        segment_handoff: the shard's segments, which may be elsewhere by now.
    """

    def __init__(
        self, context: ShardContext, settling: Settling, history: History | None, segment_handoff: SegmentHandoff
    ) -> None:
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._settling = settling
        self._history = history
        self._segment_handoff = segment_handoff

    @answers(FileCalls.store)
    async def store(self, wanted: ToStore) -> Chains:
        history = required(self._history, self._index)
        with self._lock:
            moved = self._segment_handoff.moved
        if not moved:
            try:
                return await history.store(wanted)
            except MovedError:  # handed over while they were written; else the caller is to ask again
                with self._lock:
                    if not self._segment_handoff.moved:
                        raise
        await self._segment_handoff.heard()
        return await asyncio.to_thread(history.store_elsewhere, wanted)

    @answers(FileCalls.relearn)
    async def relearn(self, ref: ModelRef, segments: Sequence[SegmentId]) -> None:
        with self._lock:
            known = not self._state.unread and all(self._state.knows_segment(segment) for segment in segments)
        if not known:
            await required(self._history, self._index).recovery.relearn(ref)
            await self._settling.settle()
        with self._lock:
            self._state.durability.written(ref)
        await self._settling.pass_on(ShardCalls.relearn(ref, segments))

    @answers(FileCalls.stored)
    async def stored(self, segment: SegmentId) -> Stored:
        return required(self._history, self._index).stored(segment)
