"""Segments of others, brought into a shard's memory: what keeps copies of them does it, what inherits them, and what
takes a save from where no memory is shared.

Rules
- Whoever needs the bytes pulls them. Few travel inside the message that tells of them; others are read over TCP
  from where they lie into where they stay, `READ_BYTES` at a time.
- A copy is laid out anew, its slots in order: so it does not matter what its segment lost since it was made. What
  arrives is laid out so already, and what would not be is refused before a byte of it is written.
- Memory that a copy does not come to use goes back.
- What is saved from many processes is put together here, each piece of a tensor when the process that has it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import TypeVar, TypeVarTuple

import numpy as np

from ...store.archive.directory import Bytes
from ...store.errors import CorruptDataError, ShardUnavailableError
from ...store.holders import Filling, Owner
from ...store.segments.arena import Part
from ...store.segments.segment import Offset, Segment, SegmentId, layout, pack
from ...store.waiting import Deadline
from ..memory.buffers import Buffers
from ..memory.workers import Workers
from ..rpc.messages import PEER_TIMEOUT_S
from ..transport.frames import Row
from ..transport.targets import NewMemory
from ..transport.tcp import TcpClient, check_content
from .admission import Admission
from .calls.copies import Address, Original, Piece
from .context import ShardContext
from .hashing import digests_of
from .segment_memory import INLINE_BYTES, SegmentMemory

READ_BYTES = 128 << 20
"""What is fetched at once: four segments, so that two connections share them. The source keeps them until then."""
FETCHERS = 2
"""Threads that fetch from other shards."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a segment, brought here."""

    sizes: tuple[int, ...]
    """Bytes of all slots of the segment."""
    slots: tuple[int, ...]
    """Those that it has, one after another as `segment.layout` places them."""
    handle: Part | bytes
    digests: tuple[str, ...]
    """Content hashes of these slots; none where nobody asked for them."""


_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class Copying:
    """Copies segments of others into one shard's memory.

    Args:
        context: the shard's.
        admission: grants memory.
        fetchers: threads that fetch; a source that is slow occupies one.
    """

    def __init__(self, context: ShardContext, admission: Admission, fetchers: int = FETCHERS) -> None:
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._admission = admission
        self._serial = count(1)
        self._fetchers = Workers(fetchers, thread_name_prefix="tensorvine-copy")

    def owner(self, what: str) -> Filling:
        """Return an owner of memory, for copies that the shard makes for itself."""
        return Filling(what, next(self._serial))

    @contextlib.asynccontextmanager
    async def copied(
        self,
        owner: Owner,
        originals: Mapping[SegmentId, Original],
        address: Address | None,
        timeout: float,
        patience: float = PEER_TIMEOUT_S,
        hashed: bool = False,
    ) -> AsyncGenerator[dict[SegmentId, Copied]]:
        """Have copies for as long as this lasts; the caller `keeps` those that are to stay.

        Args:
            owner: who owns the granted memory meanwhile; what the caller did not keep is dropped at the end.
            originals: the segments.
            address: where the bytes are that no message brought.
            timeout: seconds for all.
            patience: seconds of these to wait for memory.
            hashed: check the bytes by the source's content hashes, which the copies then have.

        Raises:
            StoreFullError: there is no room.
            UnreachableError: there is no connection to who has them.
            ShardUnavailableError, OperationTimeoutError: who has them died or is slow, or the owner has ended.
            ModelLostError: who has them let them go meanwhile.
            CorruptDataError: they are not what was said of them.
        """
        deadline = Deadline.after(timeout)
        try:
            parts = await self._granted(owner, originals, min(patience, timeout))
            left = deadline.left()
            yield await self.run(lambda: fetched(originals, parts, owner, self._segment_memory, address, left, hashed))
        finally:
            with self._lock:
                self._segment_memory.drop_grants(owner)

    async def run(self, work: Callable[[*_Args], _T], *arguments: *_Args) -> _T:
        """Run what fetches in one of its threads."""
        return await asyncio.get_running_loop().run_in_executor(self._fetchers, work, *arguments)

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


def original_of(segment: Segment, segment_memory: SegmentMemory, slots: Sequence[int] | None = None) -> Original:
    """Describe live slots of a segment (None: all), with their bytes where they are few and in memory.

    Call it with the shard's lock held.
    """
    chosen = tuple(segment.live_slots if slots is None else sorted(slots))
    original = Original(segment.sizes, chosen, None, segment.labels)
    inline = length_of(original) <= INLINE_BYTES and not segment.absent(chosen)
    view = segment_memory.view(segment) if inline else None
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
    return replace(original, data=packed.tobytes())


def fetched(
    originals: Mapping[SegmentId, Original],
    parts: Mapping[SegmentId, Part],
    owner: Owner,
    segment_memory: SegmentMemory,
    address: Address | None,
    timeout: float,
    hashed: bool = False,
) -> dict[SegmentId, Copied]:
    """Bring segments here. Takes long: not for a loop.

    Args:
        originals: what they are.
        parts: memory of this shard for those that are `large`.
        owner: who was granted it.
        segment_memory: of this shard.
        address: where the bytes are that no message brought.
        timeout: seconds for all.
        hashed: check the bytes by the source's content hashes, which the copies then have.

    Raises:
        ShardUnavailableError, OperationTimeoutError: the source died or is slow.
        ModelLostError: the source freed them meanwhile.
        CorruptDataError: what arrived is not what the source describes.
    """
    deadline = Deadline.after(timeout)
    missing = {segment: original for segment, original in originals.items() if original.data is None}
    if missing and address is None:
        raise ShardUnavailableError(f"segments {list(missing)}: expected an address to fetch them from; found none")
    with segment_memory.filling(parts.values(), owner):
        found = {
            s: _brought(o, o.data, parts.get(s), segment_memory, hashed)
            for s, o in originals.items()
            if o.data is not None
        }
        if missing and address is not None:
            found |= _read(missing, parts, segment_memory, address, deadline, hashed)
    return found


def _brought(original: Original, data: bytes, part: Part | None, segment_memory: SegmentMemory, hashed: bool) -> Copied:
    """Make a copy of what a message brought: it is laid out already."""
    sizes = [original.sizes[slot] for slot in original.slots]
    digests = digests_of(np.frombuffer(data, np.uint8), layout(sizes)[0], sizes) if hashed else ()
    if part is not None:
        segment_memory.memory.part(part)[: len(data)] = np.frombuffer(data, np.uint8)
    return Copied(original.sizes, original.slots, data if part is None else part, tuple(digests))


def _read(
    originals: Mapping[SegmentId, Original],
    parts: Mapping[SegmentId, Part],
    segment_memory: SegmentMemory,
    address: Address,
    deadline: Deadline,
    hashed: bool,
) -> dict[SegmentId, Copied]:
    """Read segments over TCP."""
    found: dict[SegmentId, Copied] = {}
    client = TcpClient((address[0], address[1]), address[2], target=_Granted(originals, parts, segment_memory))
    try:
        for some in batches(originals, READ_BYTES):
            places = {segment: original.slots for segment, original in some.items()}
            arrived = client.read(places, deadline.left(), "a copy", hashed)
            if hashed:
                slots = [(f"slot {n} of {s}", s, n, o.sizes[n]) for s, o in some.items() for n in o.slots]
                check_content(slots, arrived, f"TCP from {address[0]}:{address[1]}")
            for segment, original in some.items():
                part = parts.get(segment)
                handle = part if part is not None else arrived[segment].block.tobytes()
                digests = arrived[segment].digests or {}
                known = tuple(digests[slot] for slot in original.slots) if hashed else ()
                found[segment] = Copied(original.sizes, original.slots, handle, known)
    finally:
        client.close()
    return found


class _Granted:
    """Where copies are received: in the parts that were granted for them; the heap has those without one.

    Args:
        originals: what may come, each slot of it.
        parts: of this shard's memory, locked while they are filled.
        segment_memory: of this shard.
    """

    def __init__(
        self, originals: Mapping[SegmentId, Original], parts: Mapping[SegmentId, Part], segment_memory: SegmentMemory
    ) -> None:
        self._originals = originals
        self._parts = parts
        self._segment_memory = segment_memory

    def runs(self, rows: Sequence[Row]) -> Iterator[tuple[Sequence[Row], memoryview]]:
        """Give each segment its own memory."""
        for row in rows:
            self._check(row)
        for row in rows:
            part, length = self._parts.get(row.segment), length_of(self._originals[row.segment])
            block = self._segment_memory.memory.part(part)[:length] if part is not None else np.empty(length, np.uint8)
            yield [row], block.data

    def block(self, memory: memoryview) -> Bytes:
        """Make an array on what was filled, which keeps nothing in place."""
        return np.frombuffer(memory.toreadonly(), np.uint8)

    def _check(self, row: Row) -> None:
        original = self._originals[row.segment]
        expected = [(slot, original.sizes[slot]) for slot in original.slots]
        found = list(zip(row.slots, row.sizes, strict=True))
        wrong = [pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]]
        if wrong:
            raise CorruptDataError(f"segment {row.segment}: expected (slot, bytes) {wrong[0][0]}; found {wrong[0][1]}")


def put_together(
    part: Part,
    pieces: Sequence[Piece],
    owner: Owner,
    segment_memory: SegmentMemory,
    address: Address | None,
    timeout: float,
) -> None:
    """Bring pieces of a tensor to where they belong. Takes long: not for a loop.

    A piece that was brought before is not written again.

    Args:
        part: of this shard's memory, which `owner` was granted.
        pieces: what to bring.
        owner: who was granted the part.
        segment_memory: of this shard.
        address: where those are that no message brought, the n-th of them as slot n of segment (0, 0).
        timeout: seconds for all.

    Raises:
        ShardUnavailableError, OperationTimeoutError: who has them died or is slow, or the part is the owner's no more.
        CorruptDataError: they are not pieces of a tensor in that part; nothing of those was written.
    """
    deadline, slots = Deadline.after(timeout), count()
    client = TcpClient(address[:2], address[2], target=NewMemory(Buffers())) if address is not None else None
    try:
        with segment_memory.filling([part], owner):
            block = segment_memory.memory.part(part)
            for piece in pieces:
                place = _place(block, piece)
                if piece.data is not None:
                    found = np.frombuffer(piece.data, np.uint8)
                elif client is not None:
                    slot = next(slots)
                    came = client.read({(0, 0): {slot: place.nbytes}}, deadline.left(), "a piece")[0, 0]
                    found = came.block[came.offsets[slot] :][: place.nbytes]
                else:
                    raise ShardUnavailableError("a piece: expected an address to fetch it from; found none")
                if found.nbytes != place.nbytes:
                    raise CorruptDataError(
                        f"a piece at {piece.start}: expected {place.nbytes} bytes; found {found.nbytes}"
                    )
                box = tuple(zip(piece.start, piece.stop, strict=True))
                if place.nbytes and segment_memory.takes_piece(part, piece.offset, piece.shape, box):
                    np.copyto(place, found.reshape(place.shape))
    finally:
        if client is not None:
            client.close()


def _place(block: np.ndarray, piece: Piece) -> np.ndarray:
    """Return the bytes of a part that a piece belongs to."""
    axes = list(zip(piece.start, piece.stop, piece.shape, strict=False))
    inside = 0 <= piece.offset <= block.nbytes - prod(piece.shape) and all(0 <= a <= b <= n for a, b, n in axes)
    if not inside or not len(piece.start) == len(piece.stop) == len(piece.shape):
        raise CorruptDataError(
            f"a piece: expected a slice of a tensor within {block.nbytes} bytes; found {piece.start} to {piece.stop} "
            f"of {piece.shape} at {piece.offset}"
        )
    tensor = block[piece.offset : piece.offset + prod(piece.shape)].reshape(piece.shape)
    return tensor[tuple(slice(a, b) for a, b, _ in axes)]


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
