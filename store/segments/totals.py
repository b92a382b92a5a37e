"""What the segments of one shard come to, kept while they change.

Rules
- Whoever changes a segment takes it out of the totals before, and puts it back after (`count`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .segment import Segment


@dataclass(slots=True)
class Totals:
    """Sums over segments."""

    tensors: int = 0
    """Live slots of segments that this shard keeps."""
    live_bytes: int = 0
    """Bytes of those that are in memory."""
    allocated: int = 0
    """Bytes of all blocks."""
    copies: int = 0
    """Bytes of the blocks of segments that other shards keep."""
    file_bytes: int = 0
    """Bytes of the files."""

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Totals:
        """Sum segments up anew."""
        totals = cls()
        for segment in segments:
            totals.count(segment, +1)
        return totals

    def count(self, segment: Segment, sign: int) -> None:
        """Put a segment in (+1), or take it out (-1)."""
        live = segment.live_slots if segment.keeper else ()
        self.tensors += sign * len(live)
        self.live_bytes += sign * segment.resident_bytes(live) if segment.handle is not None else 0
        self.allocated += sign * segment.allocated
        self.copies += 0 if segment.keeper else sign * segment.allocated
        self.file_bytes += sign * (segment.file.nbytes if segment.file is not None else 0)
