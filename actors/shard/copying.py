"""Segments of other shards, copied into this one's memory: what keeps copies of them does it, and what inherits them.

Rules
- Whoever needs the bytes pulls them. Few travel inside the message that tells of them; others are read over TCP
  from where they lie, `READ_BYTES` at a time.
- A copy is laid out anew, its slots in order: so it does not matter what its segment lost since it was made.
- Memory that a copy does not come to use goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import count

import numpy as np

from ...store.errors import ShardUnavailableError
from ...store.holders import Filling, Owner
from ...store.segments.arena import Part
from ...store.segments.segment import Offset, Segment, SegmentId, layout, pack
from ...store.versions.replica import Copy
from ...store.waiting import Deadline
from ..memory.workers import Workers
from ..rpc.messages import PEER_TIMEOUT_S
from ..transport.tcp import TcpClient
from .admission import Admission
from .calls.copies import Address, Original
from .context import ShardContext
from .segment_memory import INLINE_BYTES, SegmentMemory

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

    def __init__(self, context: ShardContext, admission: Admission) -> None:
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._admission = admission
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
            what: what they are for, as it names who owns the memory meanwhile.
            originals: the segments.
            address: where the bytes are that no message brought.
            timeout: seconds for all.
            patience: seconds of these to wait for memory.

        Raises:
            StoreFullError: there is no room.
            ShardUnavailableError, OperationTimeoutError: who has them died or is slow.
            ModelLostError: who has them let them go meanwhile.
        """
        owner, deadline = Filling(what, next(self._serial)), Deadline.after(timeout)
        try:
            parts = await self._granted(owner, originals, min(patience, timeout))
            loop, left = asyncio.get_running_loop(), deadline.left()
            arguments = (originals, parts, owner, self._segment_memory, address, left)
            yield await loop.run_in_executor(self._fetchers, fetched, *arguments)
        finally:
            with self._lock:
                self._segment_memory.drop_grants(owner)

    async def _granted(
        self, owner: Owner, originals: Mapping[SegmentId, Original], timeout: float
    ) -> dict[SegmentId, Part]:
        """Have memory granted for all that is not to stay in the heap."""
        lengths = large(originals)
        parts: dict[SegmentId, Part] = {}
        deadline = Deadline.after(timeout)
        while left := [segment for segment in lengths if segment not in parts]:
            offsets = await self._admission.granted(owner, [lengths[s] for s in left], deadline.left())
            parts |= {s: Part(offset, lengths[s]) for s, offset in zip(left, offsets, strict=False)}
        return parts


def large(originals: Mapping[SegmentId, Original]) -> dict[SegmentId, int]:
    """Return the bytes of those copies that do not stay in the heap, padding included."""
    lengths = {segment: length_of(original) for segment, original in originals.items()}
    return {segment: length for segment, length in lengths.items() if length > INLINE_BYTES}


def length_of(original: Original) -> int:
    """Return the bytes of a copy, padding included."""
    return layout([original.sizes[slot] for slot in original.slots])[1]


def original_of(segment: Segment, segment_memory: SegmentMemory) -> Original:
    """Describe what a segment has, with its bytes where they are few. Call it with the shard's lock held."""
    slots = tuple(s for s in segment.live_slots if isinstance(segment.offsets[s], int))
    original = Original(segment.sizes, slots, None)
    view = segment_memory.view(segment) if length_of(original) <= INLINE_BYTES else None
    return with_bytes(original, view, segment.offsets) if view is not None else original


def with_bytes(original: Original, block: np.ndarray, offsets: Sequence[Offset]) -> Original:
    """Put the bytes of a segment into its description. Takes long where they are many: not for a loop.

    Args:
        original: what the segment has.
        block: its block.
        offsets: where its slots start there.
    """
    places = [(at, original.sizes[slot]) for slot in original.slots if isinstance(at := offsets[slot], int)]
    packed = np.zeros(length_of(original), np.uint8)
    pack(block, places, packed)
    return Original(original.sizes, original.slots, packed.tobytes())


def fetched(
    originals: Mapping[SegmentId, Original],
    parts: Mapping[SegmentId, Part],
    owner: Owner,
    segment_memory: SegmentMemory,
    address: Address | None,
    timeout: float,
) -> dict[SegmentId, Copy]:
    """Bring segments here. Takes long: not for a loop.

    Args:
        originals: what they are.
        parts: memory of this shard for those that are `large`.
        owner: who was granted it.
        segment_memory: of this shard.
        address: where the bytes are that no message brought.
        timeout: seconds for all.

    Raises:
        ShardUnavailableError, OperationTimeoutError: who has them died or is slow.
        ModelLostError: who has them let them go meanwhile.
    """
    deadline = Deadline.after(timeout)
    missing = {segment: original for segment, original in originals.items() if original.data is None}
    if missing and address is None:
        raise ShardUnavailableError(f"segments {list(missing)}: expected an address to fetch them from; found none")
    with segment_memory.filling(parts.values(), owner):
        found = {
            s: _brought(o, o.data, parts.get(s), segment_memory) for s, o in originals.items() if o.data is not None
        }
        if missing and address is not None:
            client = TcpClient((address[0], address[1]), address[2])
            try:
                for some in batches(missing, READ_BYTES):
                    found |= _read(client, some, parts, segment_memory, deadline.left())
            finally:
                client.close()
    return found


def _brought(original: Original, data: bytes, part: Part | None, segment_memory: SegmentMemory) -> Copy:
    """Make a copy of what a message brought: it is laid out already."""
    if part is None:
        return Copy(original.sizes, original.slots, data)
    segment_memory.memory.part(part)[: len(data)] = np.frombuffer(data, np.uint8)
    return Copy(original.sizes, original.slots, part)


def _read(
    client: TcpClient,
    originals: Mapping[SegmentId, Original],
    parts: Mapping[SegmentId, Part],
    segment_memory: SegmentMemory,
    timeout: float,
) -> dict[SegmentId, Copy]:
    """Read segments over TCP."""
    arrived = client.read({segment: original.slots for segment, original in originals.items()}, timeout, "a copy")
    found: dict[SegmentId, Copy] = {}
    for segment, original in originals.items():
        part, has, length = parts.get(segment), arrived[segment], length_of(original)
        target = segment_memory.memory.part(part)[:length] if part is not None else np.zeros(length, np.uint8)
        pack(has.block, [(has.offsets[slot], original.sizes[slot]) for slot in original.slots], target)
        found[segment] = Copy(original.sizes, original.slots, part if part is not None else target.tobytes())
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
