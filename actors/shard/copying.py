"""Segments of other shards, copied into this one's memory: what keeps copies of them does it, and what inherits them.

Rules
- Whoever needs the bytes pulls them. Few travel inside the message that tells of them; others are read over the wire
  from where they lie, `READ_BYTES` at a time.
- A copy is laid out anew, its slots in order: so it does not matter what its segment lost since it was made.
- Memory that a copy does not come to use goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import count

import numpy as np

from ...store.errors import ShardUnavailableError
from ...store.segments.arena import Part
from ...store.segments.segment import Segment, SegmentId, layout, pack
from ...store.versions.mirror import Copy
from ..memory.workers import Workers
from ..rpc.messages import PEER_TIMEOUT_S
from ..transport.wire import WireClient
from .calls.copies import Address, Original
from .context import ShardContext
from .holdings import INLINE_BYTES, Holdings
from .room import Room

READ_BYTES = 128 << 20
"""What is fetched at once: four segments, so that two connections share them."""
FETCHERS = 2
"""Threads that fetch."""


class Copying:
    """Copies segments of other shards into one shard's memory.

    Args:
        context: the shard's.
        room: grants memory.
    """

    def __init__(self, context: ShardContext, room: Room) -> None:
        self._lock = context.lock
        self._holdings = context.holdings
        self._room = room
        self._serial = count(1)
        self._fetchers = Workers(FETCHERS, thread_name_prefix="tensorvine-copy")

    @contextlib.asynccontextmanager
    async def copied(
        self,
        what: str,
        originals: Mapping[SegmentId, Original],
        address: Address | None,
        timeout: float,
        patience: float = PEER_TIMEOUT_S,
    ) -> AsyncGenerator[dict[SegmentId, Copy]]:
        """Have copies for as long as this lasts; the caller `keeps` those that are to stay.

        Args:
            what: names who owns the memory meanwhile.
            originals: the segments.
            address: where the bytes are that no message brought.
            timeout: seconds for all.
            patience: seconds of these to wait for memory.

        Raises:
            StoreFullError: there is no room.
            ShardUnavailableError, OperationTimeoutError: who has them died or is slow.
            ModelLostError: who has them let them go meanwhile.
        """
        owner, deadline = f"{what}.{next(self._serial)}", time.monotonic() + timeout
        try:
            parts = await self._granted(owner, originals, min(patience, timeout))
            loop, left = asyncio.get_running_loop(), deadline - time.monotonic()
            arguments = (originals, parts, self._holdings, address, left)
            yield await loop.run_in_executor(self._fetchers, fetched, *arguments)
        finally:
            with self._lock:
                self._holdings.drop_save(owner)

    async def _granted(
        self, owner: str, originals: Mapping[SegmentId, Original], timeout: float
    ) -> dict[SegmentId, Part]:
        """Have memory granted for all that is not to stay in the heap."""
        lengths = large(originals)
        parts: dict[SegmentId, Part] = {}
        deadline = time.monotonic() + timeout
        while left := [segment for segment in lengths if segment not in parts]:
            offsets = await self._room.granted(owner, [lengths[s] for s in left], deadline - time.monotonic())
            parts |= {s: Part(offset, lengths[s]) for s, offset in zip(left, offsets, strict=False)}
        return parts


def large(originals: Mapping[SegmentId, Original]) -> dict[SegmentId, int]:
    """Return the bytes of those copies that do not stay in the heap, padding included."""
    lengths = {segment: length_of(original) for segment, original in originals.items()}
    return {segment: length for segment, length in lengths.items() if length > INLINE_BYTES}


def length_of(original: Original) -> int:
    """Return the bytes of a copy, padding included."""
    return layout([original.sizes[slot] for slot in original.slots])[1]


def original_of(segment: Segment, holdings: Holdings, served: bool) -> Original:
    """Describe what a segment has. Call it with the shard's lock held.

    Args:
        segment: of this shard, in memory.
        holdings: the shard's memory.
        served: the shard has an end of the wire; else all bytes come with the description.
    """
    places = {s: (at, segment.sizes[s]) for s in segment.live_slots if isinstance(at := segment.offsets[s], int)}
    original = Original(segment.sizes, tuple(places), None)
    length = length_of(original)
    view = holdings.view(segment) if length <= INLINE_BYTES or not served else None
    if view is None:
        return original
    block = np.zeros(length, np.uint8)
    pack(view, places.values(), block)
    return Original(original.sizes, original.slots, block.tobytes())


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
        parts: memory of this shard for those that are `large`.
        holdings: of this shard.
        address: where the bytes are that no message brought.
        timeout: seconds for all.

    Raises:
        ShardUnavailableError, OperationTimeoutError: who has them died or is slow.
        ModelLostError: who has them let them go meanwhile.
    """
    deadline = time.monotonic() + timeout
    found: dict[SegmentId, Copy] = {}

    def put(segment: SegmentId, block: np.ndarray, places: list[tuple[int, int]]) -> None:
        original, part = originals[segment], parts.get(segment)
        length = length_of(original)
        target = holdings.memory.part(part)[:length] if part is not None else np.zeros(length, np.uint8)
        pack(block, places, target)
        found[segment] = Copy(original.sizes, original.slots, part if part is not None else target.tobytes())

    for segment, original in originals.items():
        if original.data is not None:
            sizes = [original.sizes[slot] for slot in original.slots]
            put(segment, np.frombuffer(original.data, np.uint8), list(zip(layout(sizes)[0], sizes, strict=True)))
    missing = {segment: original for segment, original in originals.items() if original.data is None}
    if not missing:
        return found
    if address is None:
        raise ShardUnavailableError(f"segments {list(missing)}: expected an address to fetch them from; found none")
    client = WireClient((address[0], address[1]), address[2])
    try:
        for some in batches(missing, READ_BYTES):
            slots = {segment: original.slots for segment, original in some.items()}
            arrived = client.read(slots, deadline - time.monotonic(), "a copy")
            for segment, original in some.items():
                has = arrived[segment]
                put(segment, has.block, [(has.offsets[slot], original.sizes[slot]) for slot in original.slots])
    finally:
        client.close()
    return found


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
