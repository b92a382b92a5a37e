"""Segments: contiguous blocks of 64-byte-aligned tensors that one version wrote.

Rules
- A segment is the unit of placing, moving, freeing and persisting; its slots are its tensors, in topological
  order, so that a prefix of a model is a run of segments.
- A new segment is closed when it reaches `SEGMENT_BYTES`, or has `SEGMENT_SLOTS` tensors; only a larger tensor makes a
  larger segment.
- A slot is live until the catalog frees it. A segment without live slots goes; one that is mostly free is compacted: it
  keeps its id and its slot numbers, and gets a smaller block and new offsets.
- A segment belongs to its save until the commit, and to the catalog after that.
- A segment lies in memory, in a file, or in both. In memory it may have a part of its slots only: what a reader asked
  for of a segment that was on disk. A slot is never dropped from memory before it is in the file.
- M9. A slot that is not in a block has no offset: what stands in its place is no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from ..holders import Request

ALIGNMENT = 64
SEGMENT_BYTES = 32 << 20
SEGMENT_SLOTS = SEGMENT_BYTES // ALIGNMENT
"""Slots of a segment at most: as many as there can be of the smallest tensors; empty ones count, too."""
COMPACT_WHEN_DEAD = 0.25
"""A segment is compacted when more than this share of its bytes is dead."""
REWRITE_WHEN_DEAD = 0.5
"""The same for its file, which costs more to write."""

SegmentId = tuple[int, int]
"""(0, serial number): a random number of 60 bits. Where a segment is, the catalog knows."""


def file_name(segment: SegmentId, generation: int) -> str:
    """Return the name of a segment's file below the path.

    >>> file_name((0, 255), 3)
    'segments/ff.3.arrow'
    """
    return f"segments/{segment[1]:x}.{generation}.arrow"


SERIAL_BITS = 60
"""Random bits of a segment's serial number."""


def new_segment(drawn: int) -> SegmentId:
    """Return the id of a new segment from a random number.

    >>> new_segment((1 << 60) + 5)
    (0, 5)
    """
    return 0, drawn % (1 << SERIAL_BITS)


class NoOffset(Enum):
    """Why a slot has no place in a block: no number, so that nobody takes it for one."""

    GONE = "compacted away"
    ABSENT = "on disk only"


GONE, ABSENT = NoOffset.GONE, NoOffset.ABSENT
Offset = int | NoOffset
"""Where a slot starts in its block, in bytes; or why it is not there."""


def padded(nbytes: int) -> int:
    """Round up to the alignment.

    >>> padded(1), padded(64), padded(0)
    (64, 64, 0)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(source: np.ndarray, places: Iterable[tuple[int, int]], target: np.ndarray) -> None:
    """Copy slots into a block of their own, one after another as `layout` has it.

    Args:
        source: uint8; what has the slots.
        places: of each, where it starts there, and its bytes.
        target: uint8; the block, of which the padding is left as it is.

    >>> block = np.zeros(68, np.uint8)
    >>> pack(np.frombuffer(b"..efgh..abcd", np.uint8), [(8, 4), (2, 4)], block)
    >>> bytes(block[:4]), bytes(block[64:])
    (b'abcd', b'efgh')
    """
    end = 0
    for start, nbytes in places:
        target[end : end + nbytes] = source[start : start + nbytes]
        end += padded(nbytes)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return each slot's offset and the length of the block, in bytes.

    >>> layout([4, 100, 0])
    ([0, 64, 192], 192)
    """
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += padded(size)
    return offsets, end


def split(sizes: Sequence[int], limit: int = SEGMENT_BYTES) -> list[range]:
    """Cut tensors of these sizes, in order, into runs that make one segment each.

    >>> split([40, 40, 200, 10], limit=128)
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    runs: list[range] = []
    start, filled = 0, 0
    for position, size in enumerate(sizes):
        if (filled and filled + padded(size) > limit) or position - start >= SEGMENT_SLOTS:
            runs.append(range(start, position))
            start, filled = position, 0
        filled += padded(size)
    if start < len(sizes):
        runs.append(range(start, len(sizes)))
    return runs


Holds = Mapping[SegmentId, Sequence[int]]
"""Segment -> the slots of it that a manifest names."""


@dataclass(frozen=True, slots=True)
class Block:
    """Where the bytes of a segment are now."""

    handle: Any
    """What the engine calls the block, or its bytes."""
    offsets: tuple[Offset, ...]
    """Where each slot starts."""
    generation: int
    """Counts the moves: compactions, and readings from disk."""
    shard: int
    """In whose memory it is."""

    def covers(self, slots: Iterable[int]) -> bool:
        """Tell whether all of `slots` are in it."""
        return all(slot < len(self.offsets) and isinstance(self.offsets[slot], int) for slot in slots)


@dataclass(frozen=True, slots=True)
class Label:
    """A tensor of a segment, as its file names it."""

    slot: int
    name: str
    layer: str | None
    dtype: str
    shape: tuple[int, ...]
    base: tuple[SegmentId, int] | None = None
    """The parent's tensor of the same name, dtype and shape, which it may be encoded against."""


@dataclass(frozen=True, slots=True)
class File:
    """A segment's complete file."""

    name: str
    generation: int
    """Of several files of a segment the highest counts; see `table.SHARD_BITS`."""
    nbytes: int
    """Length of the file."""
    slots: frozenset[int]
    """Slots that it has."""
    bases: Mapping[int, tuple[SegmentId, int]] = field(default_factory=dict[int, "tuple[SegmentId, int]"])
    """Slots that are encoded against another one -> that one."""

    def cut(self, slots: Set[int]) -> File:
        """Return the same file, as if it had these of its slots only."""
        bases = {slot: base for slot, base in self.bases.items() if slot in slots}
        return File(self.name, self.generation, self.nbytes, self.slots & slots, bases)

    def extended(self, slots: Iterable[int], bases: Mapping[int, tuple[SegmentId, int]]) -> File:
        """Return the same file, of which more slots are known."""
        return File(self.name, self.generation, self.nbytes, self.slots.union(slots), {**self.bases, **bases})


@dataclass(slots=True)
class Segment:
    """A block of bytes, and which of its slots are needed.

    >>> segment = Segment((0, 1), b"abcd", (4,))
    >>> segment.free([0])
    >>> segment.live
    set()
    """

    id: SegmentId
    handle: Any
    """Its part of the shard's memory, or the bytes themselves where they are few. None: the segment is on disk only."""
    sizes: tuple[int, ...]
    """Bytes of each slot, without padding."""
    offsets: tuple[Offset, ...] = ()
    """Where each slot starts in the block; GONE after it was compacted away, ABSENT when it is on disk only."""
    allocated: int = 0
    """Length of the block in bytes, dead slots and padding included."""
    generation: int = 0
    """Counts the moves: a block of an older generation has other offsets."""
    digests: tuple[str, ...] | None = None
    """Content hash of each slot; None until the shard has computed them, in the background."""
    live: set[int] = field(default_factory=set[int])
    """Slots that are needed."""
    save: Request | None = None
    """The save that brings it; None: it is committed."""
    keeper: bool = False
    """This shard writes, replaces and deletes its files."""
    labels: tuple[Label, ...] = ()
    """For its first file; empty when it has one, or the repository has no path."""
    file: File | None = None
    """Its file, which the catalog knows; None: it is in memory only."""
    files: int = 0
    """The generation of its next file. None is used twice: a file that had it may be about to be deleted."""

    def __post_init__(self) -> None:
        if not self.offsets:
            offsets, self.allocated = layout(self.sizes)
            self.offsets = tuple(offsets)
            self.live = set(range(len(self.sizes)))

    @classmethod
    def on_disk(cls, segment_id: SegmentId, sizes: Sequence[int], file: File, generation: int) -> Segment:
        """Return a segment that has a file and no block."""
        offsets = tuple(ABSENT if slot in file.slots else GONE for slot in range(len(sizes)))
        segment = cls(segment_id, None, tuple(sizes), offsets, generation=generation, live=set(file.slots))
        segment.file = file
        return segment

    def free(self, slots: Iterable[int]) -> None:
        """End slots; those that ended before are no error, as an order may come twice."""
        self.live.difference_update(slots)

    def has(self, slots: Iterable[int]) -> bool:
        """Tell whether there are these slots, in memory or on disk."""
        return all(0 <= slot < len(self.sizes) and self.offsets[slot] != GONE for slot in slots)

    @property
    def live_slots(self) -> list[int]:
        """Slots that are needed, ascending."""
        return sorted(self.live)

    def resident_bytes(self, slots: Iterable[int]) -> int:
        """Return the bytes, without padding, of those of `slots` that are in memory."""
        return sum(self.sizes[slot] for slot in slots if isinstance(self.offsets[slot], int))

    @property
    def is_safe(self) -> bool:
        """True when all live slots are on disk."""
        return self.file is not None and self.file.slots.issuperset(self.live)

    def absent(self, slots: Iterable[int]) -> list[int]:
        """Return those of `slots` that are on disk only."""
        return [slot for slot in slots if self.offsets[slot] == ABSENT]

    @property
    def wants_compaction(self) -> bool:
        """True when enough of the block is dead that a copy of the rest pays."""
        live = sum(padded(self.sizes[slot]) for slot in self.live if isinstance(self.offsets[slot], int))
        return bool(self.live) and self.allocated - live > COMPACT_WHEN_DEAD * self.allocated

    @property
    def wants_rewriting(self) -> bool:
        """True when most of the file's tensors, by their bytes, are dead, and this shard may replace it."""
        if self.file is None or not self.live or not self.keeper:
            return False
        dead = sum(self.sizes[slot] for slot in self.file.slots - self.live)
        return dead > REWRITE_WHEN_DEAD * sum(self.sizes[slot] for slot in self.file.slots)

    def move(self, handle: object, offsets: tuple[Offset, ...], allocated: int) -> None:
        """Take the new block that a compaction or a load made."""
        self.handle, self.offsets, self.allocated = handle, offsets, allocated
        self.generation += 1

    def has_more(self, file: File) -> None:
        """Take note that its file has more slots than was known; those that were not needed are now."""
        if self.file is None:
            return
        new = {slot for slot in file.slots - self.file.slots if slot < len(self.sizes)}
        self.file = self.file.extended(new, file.cut(new).bases)
        self.live |= new
        self.offsets = tuple(
            ABSENT if slot in new and offset == GONE else offset for slot, offset in enumerate(self.offsets)
        )

    def file_is(self, file: File) -> None:
        """Take a new file; slots that were on disk only, and that it lacks, are gone."""
        self.file, self.labels = file, ()
        self.offsets = tuple(
            GONE if offset == ABSENT and slot not in file.slots else offset for slot, offset in enumerate(self.offsets)
        )

    def compacted(self) -> tuple[tuple[Offset, ...], int]:
        """Offsets and length of a block that holds the live slots only, of those that are in memory."""
        return self.arranged(slot for slot in self.live if isinstance(self.offsets[slot], int))

    def arranged(self, slots: Iterable[int]) -> tuple[tuple[Offset, ...], int]:
        """Offsets and length of a block that holds these live slots, the other live ones being on disk."""
        chosen = sorted(slots)
        new, length = layout([self.sizes[slot] for slot in chosen])
        offsets: list[Offset] = [ABSENT if slot in self.live else GONE for slot in range(len(self.sizes))]
        for slot, offset in zip(chosen, new, strict=True):
            offsets[slot] = offset
        return tuple(offsets), length
