"""The segments of one shard that lie in its memory: where to, and when they leave it.

Rules
- A segment may leave the memory (`evict`) only when all its live slots are on disk. Those that were ordered to cool
  leave at once, others when room is needed, least recently used first.
- What must happen outside is left here for the shell, which takes it after each call: blocks that became free in
  `freed`, segments that are mostly dead in memory in `compactable`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from .segment import ABSENT, Offset, Segment, SegmentId
from .totals import Totals


class Residents:
    """Segments in the memory of one shard.

    Args:
        segments: all of the shard.
        totals: of the segments.
    """

    def __init__(self, segments: Mapping[SegmentId, Segment], totals: Totals) -> None:
        self.freed: list[Any] = []
        """Handles of blocks that no segment lies in any more."""
        self.compactable: set[SegmentId] = set()
        self.moves = 0
        """Counts the segments that moved, or left."""
        self._segments = segments
        self._totals = totals
        self._cold: set[SegmentId] = set()
        """Segments that are to leave as soon as they may; reading one ends that."""
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
        self._cold.discard(segment_id)
        if segment_id in self._recent:
            self._recent.move_to_end(segment_id)

    def move(
        self, segment_id: SegmentId, generation: int, handle: object, offsets: tuple[Offset, ...], allocated: int
    ) -> bool:
        """Take a new block of a segment, made from its block of `generation`: compacted, or with more slots from disk.

        False when the segment went, or moved in another way meanwhile. A segment that lost
        more slots meanwhile is compactable again.
        """
        self.compactable.discard(segment_id)
        segment = self._segments.get(segment_id)
        if segment is None:
            return False
        stored = segment.file.slots if segment.file is not None else frozenset[int]()
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
        self._cold.discard(segment_id)
        self.compactable.discard(segment_id)
        self.moves += 1
        return True

    def cool(self, segment_id: SegmentId) -> None:
        """Let a segment leave the memory as soon as it is on disk."""
        segment = self._segments.get(segment_id)
        if segment is not None and segment.handle is not None:
            self._cold.add(segment_id)
            self.evict_if_cold(segment)

    def evict_if_cold(self, segment: Segment) -> None:
        """Let a segment leave, if it may, that was ordered to cool."""
        if segment.id in self._cold:
            self.evict(segment.id)

    def settle(self, segment: Segment) -> None:
        """See what becomes of the block of a segment that lost slots."""
        if segment.wants_compaction:
            self.compactable.add(segment.id)
        self.evict_if_cold(segment)

    def drop(self, segment: Segment) -> None:
        """Let the block of a segment go that is no more."""
        self._recent.pop(segment.id, None)
        self._cold.discard(segment.id)
        self.compactable.discard(segment.id)
        if segment.handle is not None:
            self.freed.append(segment.handle)
