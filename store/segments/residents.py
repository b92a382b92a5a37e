"""The segments of one shard that lie in its memory: where to, and when they leave it.

Rules
- Memory is the faster place, never the only one without need: a segment may leave it (`evict`) only when all its live
  slots are on disk. Those that only versions which retention let go still hold leave at once, others when room is
  needed, least recently used first.
- What must happen outside is left here for the shell, which takes it after each call: blocks that became free in
  `freed`, segments that are mostly dead in memory in `compactable`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..holders import FileOf, FileTaking, Holder
from ..refs import ModelRef
from .segment import ABSENT, Offset, Segment, SegmentId
from .totals import Totals


class Residents:
    """Segments in the memory of one shard.

    Args:
        segments: all of the shard.
        held: what each holder holds.
        totals: of the segments.
    """

    def __init__(
        self, segments: Mapping[SegmentId, Segment], held: Mapping[Holder, Iterable[SegmentId]], totals: Totals
    ) -> None:
        self.freed: list[Any] = []
        """Handles of blocks that no segment lies in any more."""
        self.compactable: set[SegmentId] = set()
        self.moves = 0
        """Counts the segments that moved, or left."""
        self._segments = segments
        self._held = held
        self._totals = totals
        self._cold: set[ModelRef] = set()
        """Versions that retention let go from memory."""
        self._recent: OrderedDict[SegmentId, None] = OrderedDict()
        """The least recently used first."""

    def ids(self) -> list[SegmentId]:
        """List those that are in memory, wholly or in part."""
        return [segment_id for segment_id, segment in self._segments.items() if segment.handle is not None]

    def enter(self, segment_id: SegmentId) -> None:
        """Take note that a segment has a block."""
        self._recent[segment_id] = None

    def use(self, segment_id: SegmentId) -> None:
        """Make a segment, if it is in memory, the last to leave."""
        if segment_id in self._recent:
            self._recent.move_to_end(segment_id)

    def move(
        self, segment_id: SegmentId, generation: int, handle: object, offsets: tuple[Offset, ...], allocated: int
    ) -> bool:
        """Take a new block of a segment, made from its block of `generation`: compacted, or with more slots from disk.

        False when the segment went, took new holders of slots, or moved in another way meanwhile. A segment that lost
        more holders meanwhile is compactable again.
        """
        self.compactable.discard(segment_id)
        segment = self._segments.get(segment_id)
        if segment is None:
            return False
        stored = segment.stored.slots if segment.stored is not None else frozenset[int]()
        fits = segment.generation == generation and all(
            isinstance(offsets[slot], int) or (offsets[slot] == ABSENT and slot in stored)
            for slot in segment.live_slots
        )
        if fits:
            self._totals.count(segment, -1)
            if segment.handle is not None:
                self.freed.append(segment.handle)
            segment.move(handle, offsets, allocated)
            self._totals.count(segment, +1)
            self.enter(segment_id)
            self.moves += 1
        if segment.wants_compaction:
            self.compactable.add(segment_id)
        return fits

    # ---- leaving --------------------------------------------------------------------------------------

    def evictable(self) -> Iterator[SegmentId]:
        """Name the segments that could leave the memory, least recently used first."""
        return (s for s in list(self._recent) if s in self._segments and self._segments[s].is_safe)

    def evict(self, segment_id: SegmentId) -> bool:
        """Let a segment leave the memory; False when it is not there, or not on disk."""
        segment = self._segments.get(segment_id)
        if segment is None or segment.handle is None or not segment.is_safe:
            return False
        self._totals.count(segment, -1)
        self.freed.append(segment.handle)
        segment.move(None, segment.arranged(())[0], 0)
        segment.digests = None  # a lossy codec gives other bytes back
        self._totals.count(segment, +1)
        del self._recent[segment_id]
        self.compactable.discard(segment_id)
        self.moves += 1
        return True

    def cool(self, ref: ModelRef) -> None:
        """Retention let a version go: what only such versions hold leaves the memory as soon as it is on disk."""
        if ref in self._held:
            self._cold.add(ref)
            for segment_id in list(self._held[ref]):
                self.evict_if_cold(self._segments[segment_id])

    def forget(self, ref: ModelRef) -> None:
        """Hear that a version ended."""
        self._cold.discard(ref)

    def evict_if_cold(self, segment: Segment) -> None:
        """Let a segment leave, if it may, that only versions which retention let go still hold."""
        if all(holder in self._cold or isinstance(holder, (FileOf, FileTaking)) for holder in segment.holders):
            self.evict(segment.id)

    def settle(self, segment: Segment) -> None:
        """See what becomes of the block of a segment that lost a holder."""
        if segment.wants_compaction:
            self.compactable.add(segment.id)
        self.evict_if_cold(segment)

    def drop(self, segment: Segment) -> None:
        """Let the block of a segment go that is no more."""
        self._recent.pop(segment.id, None)
        self.compactable.discard(segment.id)
        if segment.handle is not None:
            self.freed.append(segment.handle)
