"""What a restart of one shard would find on disk of what its versions hold.

Rules
- A segment rests on disk when its file has all that versions hold of it, and manifests that are on disk name that.
- A manifest is on disk from when this shard hears so (`written`). Nobody counts on one that is about to go (`leaves`).
- What does not rest goes with the shard's memory: replicas are to have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..holders import Holder, Reason
from ..refs import ModelRef
from ..segments.segment import Segment, SegmentId


class Durability:
    """What is on disk of the versions that hold something on one shard.

    Args:
        segments: all of the shard.
        held: what each holder holds.
    """

    def __init__(self, segments: Mapping[SegmentId, Segment], held: Mapping[Holder, Iterable[SegmentId]]) -> None:
        self._segments = segments
        self._held = held
        self._waiting: set[ModelRef] = set()
        """Versions whose manifests are not on disk, as far as this shard has heard."""
        self._leaving: set[ModelRef] = set()
        """Versions whose manifests are about to say that they are retired."""

    def enter(self, ref: ModelRef) -> None:
        """Take note of a version that begins to hold something."""
        self._waiting.add(ref)

    def forget(self, ref: ModelRef) -> None:
        """Hear that a version ended."""
        self._waiting.discard(ref)
        self._leaving.discard(ref)

    def written(self, ref: ModelRef) -> None:
        """Hear that a version's manifest is on disk: a restart finds by it what the version names."""
        self._waiting.discard(ref)

    def leaves(self, ref: ModelRef) -> None:
        """Hear that a version's manifest is about to go: others must not count on it any more."""
        if ref in self._held:  # also one that is not on disk yet: it may be written before it goes
            self._leaving.add(ref)

    def waiting(self, segment: Segment) -> frozenset[ModelRef]:
        """Return the versions that hold some of a segment, and whose manifests are not on disk."""
        return frozenset(h for h in segment.holders if isinstance(h, ModelRef) and h in self._waiting)

    def awaited(self, segments: Iterable[SegmentId]) -> dict[SegmentId, list[int]]:
        """Return the slots of segments that versions hold whose manifests are not on disk."""
        found: dict[SegmentId, list[int]] = {}
        for segment in filter(None, map(self._segments.get, segments)):
            slots = set[int]().union(*(segment.holders[h] for h in segment.holders.keys() & self._waiting))
            if slots:
                found[segment.id] = sorted(slots)
        return found

    def rests(self, segment_id: SegmentId) -> bool:
        """Tell whether a restart would find all that versions hold of a segment on the disk, or it is gone."""
        segment = self._segments.get(segment_id)
        if segment is None:
            return True
        if not segment.is_safe:
            return False
        needed: set[int] = set()
        for holder in segment.holders.keys() & self._waiting:
            needed |= segment.holders[holder]
        for holder, slots in segment.holders.items() if needed else ():
            if isinstance(holder, ModelRef) and holder not in self._waiting and holder not in self._leaving:
                needed -= slots
            if not needed:
                break
        return not needed

    def unsaved(self) -> set[SegmentId]:
        """Name the segments that versions hold and that do not rest on disk: what goes with this shard's memory."""
        return {
            segment_id
            for segment_id, segment in self._segments.items()
            if not self.rests(segment_id)
            and any(isinstance(holder, ModelRef) or holder is Reason.RESTORED for holder in segment.holders)
        }

    def uncovered(self) -> set[SegmentId]:
        """Name the segments that have files and do not rest on them: manifests that named them may have gone."""
        held = {segment for holder in self._waiting for segment in self._held[holder]}
        return {s for s in held if self._segments[s].stored is not None and not self.rests(s)}
