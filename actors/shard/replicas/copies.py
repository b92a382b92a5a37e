"""The bytes of mirrors on their way: out of a shard, over the wire, into another one's memory.

Rules
- Few bytes travel inside the messages; others are fetched from where they lie, `READ_BYTES` at a time.
- A copy is laid out anew, its slots in order: so it does not matter what its segment lost since it was made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np

from ....store.errors import ShardUnavailableError
from ....store.segments.arena import Part
from ....store.segments.segment import Segment, SegmentId, layout
from ....store.versions.mirror import Copy
from ...transport.wire import WireClient
from ..calls.replicas import Address, Original
from ..holdings import INLINE_BYTES, Holdings

READ_BYTES = 128 << 20
"""What is fetched at once: four segments, so that two connections share them."""


def length_of(original: Original) -> int:
    """Return the bytes of a copy, padding included."""
    return layout([original.sizes[slot] for slot in original.slots])[1]


def original_of(segment: Segment, holdings: Holdings) -> Original:
    """Describe what a segment has. Call it with the shard's lock held."""
    places = {s: (at, segment.sizes[s]) for s in segment.live_slots if isinstance(at := segment.offsets[s], int)}
    slots = tuple(places)
    original = Original(segment.sizes, slots, None)
    view = holdings.view(segment) if length_of(original) <= INLINE_BYTES else None
    if view is None:
        return original
    return Original(segment.sizes, slots, _laid_out(view, places, np.zeros(length_of(original), np.uint8)).tobytes())


def fetched(
    originals: Mapping[SegmentId, Original],
    parts: Mapping[SegmentId, Part],
    holdings: Holdings,
    address: Address | None,
    timeout: float,
) -> dict[SegmentId, Copy]:
    """Bring segments here. Takes long: not for a loop.

    Args:
        originals: what they are.
        parts: memory of this shard for those of more than `INLINE_BYTES`.
        holdings: of this shard.
        address: where the bytes are that no message brought.
        timeout: seconds for all.

    Raises:
        ShardUnavailableError, OperationTimeoutError: who has them died or is slow.
        ModelLostError: who has them let them go meanwhile.
    """
    deadline = time.monotonic() + timeout
    found = {s: Copy(o.sizes, o.slots, o.data) for s, o in originals.items() if o.data is not None}
    missing = {segment: original for segment, original in originals.items() if original.data is None}
    if not missing:
        return found
    if address is None:
        raise ShardUnavailableError(f"segments {list(missing)}: expected an address to fetch them from; found none")
    client = WireClient((address[0], address[1]), address[2])
    try:
        for some in batches(missing, READ_BYTES):
            slots = {segment: original.slots for segment, original in some.items()}
            arrived = client.read(slots, deadline - time.monotonic(), "a mirror")
            for segment, original in some.items():
                part, has = parts.get(segment), arrived[segment]
                places = {slot: (has.offsets[slot], original.sizes[slot]) for slot in original.slots}
                length = length_of(original)
                target = holdings.memory.part(part)[:length] if part is not None else np.zeros(length, np.uint8)
                _laid_out(has.block, places, target)
                handle = part if part is not None else target.tobytes()
                found[segment] = Copy(original.sizes, original.slots, handle)
    finally:
        client.close()
    return found


def _laid_out(block: np.ndarray, places: Mapping[int, tuple[int, int]], target: np.ndarray) -> np.ndarray:
    starts, _ = layout([size for _, size in places.values()])
    for (offset, size), start in zip(places.values(), starts, strict=True):
        target[start : start + size] = block[offset : offset + size]
    return target


def batches(originals: Mapping[SegmentId, Original], most: int) -> Iterator[dict[SegmentId, Original]]:
    """Cut into parts of at most so many bytes, or of one segment."""
    batch: dict[SegmentId, Original] = {}
    filled = 0
    for segment, original in originals.items():
        if batch and filled + length_of(original) > most:
            yield batch
            batch, filled = {}, 0
        batch[segment] = original
        filled += length_of(original)
    if batch:
        yield batch
