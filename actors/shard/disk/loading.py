"""Loading what is on disk only into one shard's memory, for readers.

Rules
- A load takes the room for all that it reads at one time, and keeps nothing while it waits for room: so no two loads
  wait for each other, and what it has already is in nobody's way.
- What others read now it lets them read, and looks again: they may want less of it, or fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count

import numpy as np

from ....store.holders import Filling, Owner
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId, padded
from ...memory.workers import Workers
from ..context import ShardContext
from ..segment_memory import INLINE_BYTES, READ_ROUNDS
from .tiers import Tiers

Take = Callable[[str, Owner, int, "Callable[[], _Begun | None]"], "Awaitable[_Begun]"]
"""Takes memory, waiting for it: `Admission.taken`."""
_Plan = tuple[SegmentId, list[int], int]
"""A segment to read, the slots, and their bytes in all."""
_Begun = tuple[list[np.ndarray], "list[Future[np.ndarray | None]]", "list[Future[np.ndarray | None]]"]
"""What keeps in the memory what was there, what is read now, and what others read."""


class Loading:
    """What one shard reads into its memory.

    Args:
        context: the shard's.
        tiers: reads its segments.
        workers: threads for that.
        settle: called after the state changed, without the lock.
    """

    def __init__(self, context: ShardContext, tiers: Tiers, workers: Workers, settle: Callable[[], None]) -> None:
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._tiers = tiers
        self._workers = workers
        self._settle = settle
        self._loading: dict[SegmentId, Future[np.ndarray | None]] = {}
        """What is read into the memory now."""
        self._serial = count(1)

    async def load(self, what: str, wanted: Mapping[SegmentId, Sequence[int]], take: Take) -> list[np.ndarray]:
        """Bring segments into the memory, together; they stay there as long as what is given back lives.

        Args:
            what: names the load in errors.
            wanted: the slots, by segment.
            take: `Admission.taken`.

        Raises:
            CorruptDataError, StorageError: a file cannot be read; names it.
            StoreFullError: there is no room.
        """
        for _ in range(READ_ROUNDS):
            owner = Filling("load", next(self._serial))
            with self._lock:
                nbytes = sum(length for _, _, length in self._plans(wanted))
            kept, mine, others = await take(
                f"load of {what}", owner, nbytes, lambda owner=owner: self._begun(owner, wanted)
            )
            try:
                read = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(future)) for future in mine))
                await asyncio.gather(
                    *(asyncio.shield(asyncio.wrap_future(future)) for future in others), return_exceptions=True
                )
            except BaseException:
                kept.clear()  # whoever keeps the error keeps this frame
                raise
            finally:
                mine.clear()
            if not others:
                return [*kept, *(view for view in read if view is not None)]
            kept.clear()
            read.clear()
            others.clear()
        raise self._segment_memory.crowded(what)

    def _begun(self, owner: Owner, wanted: Mapping[SegmentId, Sequence[int]]) -> _Begun | None:
        """Take the room for what is on disk only, and begin to read it; None: there is no room now.

        What is in memory already may lie so that the rest finds no room beside it: then that leaves, too, where it
        may, and all is read again.

        Call it with the lock held.
        """
        for again in (False, True):
            if again and not self._segment_memory.let_go(wanted):
                return None
            plans = self._plans(wanted)
            kept = self._segment_memory.kept(wanted)
            lengths = [length for _, _, length in plans if length > INLINE_BYTES]
            offsets = self._segment_memory.grant(owner, lengths, len(lengths))
            if len(offsets) == len(lengths):
                break
            kept.clear()
        else:
            return None
        others = [self._loading[segment] for segment in self._state.absent(wanted) if segment in self._loading]
        mine: list[Future[np.ndarray | None]] = []
        for segment, chosen, length in plans:
            part = Part(offsets.pop(0), padded(length)) if length > INLINE_BYTES else None
            self._loading[segment] = self._workers.submit(self._read_in, segment, chosen, part, owner)
            mine.append(self._loading[segment])
        return kept, mine, others

    def _plans(self, wanted: Mapping[SegmentId, Sequence[int]]) -> list[_Plan]:
        """Say what to read of what is on disk only, unless it is read already; the longest first.

        Call it with the lock held.
        """
        absent = {s: slots for s, slots in self._state.absent(wanted).items() if s not in self._loading}
        return sorted(((s, *self._tiers.plan(s, slots)) for s, slots in absent.items()), key=lambda plan: -plan[2])

    def _read_in(self, segment: SegmentId, chosen: Sequence[int], part: Part | None, owner: Owner) -> np.ndarray | None:
        """Read slots into the memory, in a thread; give what keeps them there."""
        try:
            view = self._tiers.load(segment, chosen, part, owner)
            if view is not None:
                with self._lock:
                    self._segment_memory.hashing.later(segment)
            return view
        finally:
            with self._lock:
                del self._loading[segment]
            self._settle()

    async def digests(self, segments: Iterable[SegmentId], take: Take) -> None:
        """Learn the content hashes of segments that are on disk: from their files, or by reading them."""
        for segment_id in segments:
            with self._lock:
                segment = self._state.segment(segment_id)
                absent = segment.absent(segment.live_slots) if segment and segment.digests is None else []
            if not absent:
                continue
            known = await self._workers.run(self._tiers.digests, segment_id)
            if known is None:
                await self.load(f"segment {segment_id}", {segment_id: absent}, take)
                continue
            with self._lock:
                self._state.set_digests(segment_id, known)
