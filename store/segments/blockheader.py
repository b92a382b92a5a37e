"""What stands in front of a block in a shard's memory: which segment it is, and which move of it.

Rules
- The shard writes it when a segment comes to lie there, and clears it before the memory can be used again.
- Who was told of a block compares the header with what it was told, after it has locked the block
  (`actors.memory.memory`). Where they differ, the block is another one's by now, or nobody's.
"""

from __future__ import annotations

import struct

from .segment import ALIGNMENT, SegmentId

HEADER_BYTES = ALIGNMENT
_FORMAT = struct.Struct("<8sQQQQ24x")
_MAGIC = b"TVBLOCK1"
_HALF = (1 << 64) - 1
CLEARED = bytes(HEADER_BYTES)


def header_of(segment: SegmentId, generation: int) -> bytes:
    """Return the header of a block.

    Args:
        segment: its segment.
        generation: counts the moves of the segment, from a random number in each incarnation of a shard.

    >>> header_of((1, 1 << 90), 7) == header_of((1, 1 << 90), 7), len(header_of((1, 5), 7))
    (True, 64)
    >>> header_of((1, 5), 7) in (header_of((1, 5), 8), header_of((0, 5), 7), header_of((1, 5 | 1 << 64), 7), CLEARED)
    False
    """
    shard, serial = segment
    return _FORMAT.pack(_MAGIC, shard, serial & _HALF, serial >> 64, generation & _HALF)


def generation_in(header: bytes, segment: SegmentId) -> int | None:
    """Return the generation that a header of a segment names; None: it is another one's, or nobody's.

    >>> generation_in(header_of((0, 5), 7), (0, 5)), generation_in(header_of((0, 6), 7), (0, 5))
    (7, None)
    """
    generation = _FORMAT.unpack(header)[4]
    return generation if header == header_of(segment, generation) else None
