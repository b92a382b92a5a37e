"""What readers of tensors ask of a shard: where blocks are, or the bytes.

Rules
- All that is asked for is in memory at one time when it is answered. What was read from the disk for it stays until the
  reader has locked it, for `LOCK_S` at most.
- What is on disk only is read into the memory first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ....store.errors import ModelLostError
from ....store.metrics import SHARD_READS
from ....store.segments.arena import Part
from ....store.segments.segment import Block, Segment, SegmentId
from ....store.waiting import Deadline
from ...collective.rendezvous import Endpoint, Endpoints, LocalRendezvous
from ...rpc.calls import answers
from ...transport.frames import Slots
from ...transport.parcels import PairAnswer, PairQuestion
from ..admission import Admission
from ..calls.reads import ReadCalls
from ..context import ShardContext
from ..disk.history import History, required
from ..segment_memory import READ_ROUNDS
from ..serving.exports import Exports
from ..serving.senders import Senders

LOOK_S, LOCK_S = 0.25, 5.0
"""How often the shard looks whether a reader has locked what was read from the disk for it, and how long it waits."""
_WHAT = "blocks of a version"

_Found = tuple[dict[SegmentId, Block], dict[SegmentId, np.ndarray]]
"""Blocks, and what keeps them in place."""


class Reads:
    """What one shard does for readers of tensors.

    Args:
        context: the shard's.
        admission: has memory for what is read from the disk.
        history: the shard's disk, if there is one.
        senders: send to groups.
        rendezvous: where the members of a group meet.
        exports: blocks in the engine's object store.
    """

    def __init__(
        self,
        context: ShardContext,
        *,
        admission: Admission,
        history: History | None,
        senders: Senders,
        rendezvous: LocalRendezvous,
        exports: Exports,
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._admission = admission
        self._history = history
        self._senders = senders
        self._rendezvous = rendezvous
        self._exports = exports

    @answers(ReadCalls.blocks)
    async def blocks(self, wanted: Slots) -> dict[SegmentId, Block]:
        blocks, _ = await self._brought(wanted, local=True)
        return blocks

    @answers(ReadCalls.carried)
    async def carried(self, wanted: Slots) -> dict[SegmentId, Block]:
        blocks, views = await self._brought(wanted, local=False)
        return await self._segment_memory.workers.run(self._exports.exported, blocks, views)

    @answers(ReadCalls.digests)
    async def digests(self, segments: Sequence[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        if self._history is not None:
            await self._history.open_known(segments)
            await self._history.loading.digests(segments, self._admission.taken)
        for future in self._segment_memory.hashing.futures(segments):
            await asyncio.wrap_future(future)
        with self._lock:
            return self._state.digests(segments)

    @answers(ReadCalls.send_by)
    async def send_by(self, backend: str, member: str, question: PairQuestion) -> PairAnswer:
        with self._lock:
            sender = self._senders.by(backend)
        return await asyncio.wrap_future(sender.ask(member, question))

    @answers(ReadCalls.meet)
    async def meet(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        return await self._rendezvous.met(key, rank, size, endpoint, timeout)

    @answers(ReadCalls.check_tensors)
    async def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        with self._lock:
            gone = [s for s in names if self._state.segment(s) is None and s not in self._state.known_files]
        if gone:
            raise ModelLostError(f"shard {self._context.index}: expected {len(gone)} segments that are not here")
        problems: list[str] = []
        for segment, slots in names.items():
            problems += await self._segment_memory.workers.run(self._segment_memory.hashing.check, segment, slots)
        return problems + (await self._history.check_tensors(names) if self._history is not None else [])

    # ---- within ---------------------------------------------------------------------------------------

    async def _brought(self, wanted: Slots, local: bool) -> _Found:
        """Find blocks, and read what is on disk only until all of it is in the memory at one time.

        Args:
            wanted: segments and slots.
            local: see `_found`.
        """
        kept: list[np.ndarray] = []
        if self._history is not None:
            await self._history.open_known(wanted)
        for again in range(READ_ROUNDS):
            with self._lock:
                self._context.requests += 0 if again else 1
                self._check(wanted)
                if not self._state.absent(wanted):
                    found = self._found(wanted, local)
                    if wanted:
                        self._context.counts.add(SHARD_READS, 1.0, "path" if again else "memory")
                    if kept:
                        self._release_when_locked(kept, found[0], Deadline.after(LOCK_S))
                    return found
            kept = []  # a load that waits for room must keep nothing; it takes it up again
            loading = required(self._history, self._context.index).loading
            kept = await loading.load(_WHAT, wanted, self._admission.taken)
        raise self._segment_memory.crowded(_WHAT)

    def _check(self, wanted: Slots) -> None:
        """Refuse slots that are not here, or were freed. Call it with the lock held."""
        for segment_id, slots in wanted.items():
            segment = self._state.segment(segment_id)
            if segment is None or not all(_is_there(segment, slot) for slot in slots):
                raise ModelLostError(
                    f"shard {self._context.index}: expected slots {list(slots)[:8]} of segment {segment_id[1]:x}; they "
                    "are not here"
                )

    def _found(self, wanted: Slots, local: bool) -> _Found:
        """Return what is wanted, all of which is in memory; for others than `local` clients, kept there.

        Call it with the lock held.
        """
        blocks = self._state.blocks(wanted)
        return blocks, {} if local else self._segment_memory.views(blocks)

    def _release_when_locked(self, kept: list[np.ndarray], blocks: dict[SegmentId, Block], deadline: Deadline) -> None:
        """Drop what keeps blocks in the memory as soon as the reader has locked them, or the deadline has passed."""
        parts = [block.handle for block in blocks.values() if isinstance(block.handle, Part)]

        def look() -> None:
            if deadline.passed or all(map(self._segment_memory.memory.is_read_by_others, parts)):
                kept.clear()
            else:
                asyncio.get_running_loop().call_later(LOOK_S, look)

        asyncio.get_running_loop().call_later(LOOK_S, look)


def _is_there(segment: Segment, slot: int) -> bool:
    """Tell whether a slot can be read: in memory it can be for a while after it was freed."""
    return slot in segment.live or (0 <= slot < len(segment.sizes) and isinstance(segment.offsets[slot], int))
