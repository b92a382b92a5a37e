"""Segments: contiguous blocks of 64-byte-aligned tensors that one version wrote.

Rules
- A segment is the unit of placing, moving, freeing and persisting; its slots are its tensors, in topological
  order, so that a prefix of a model is a run of segments.
- A new segment is closed when it reaches `SEGMENT_BYTES`, or has `SEGMENT_SLOTS` tensors; only a larger tensor makes a
  larger segment.
- A slot is freed when no holder names it. A segment whose slots are all free goes; one that is mostly free is
  compacted: it keeps its id and its slot numbers, and gets a smaller block and new offsets.
- Counts are derived from the holders at any time (`Segment.check`).
- A segment lies in memory, in a file, or in both. In memory it may have a part of its slots only: what a reader asked
  for of a segment that was on disk. A slot is never dropped from memory before it is in the file.
- M9. A slot that is not in a block has no offset: what stands in its place is no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from ..errors import CorruptDataError, ModelLostError
from ..holders import FileOf, FileTaking, Holder

ALIGNMENT = 64
SEGMENT_BYTES = 32 << 20
SEGMENT_SLOTS = SEGMENT_BYTES // ALIGNMENT
"""Slots of a segment at most: as many as there can be of the smallest tensors; empty ones count, too."""
COMPACT_WHEN_DEAD = 0.25
"""A segment is compacted when more than this share of its bytes is dead."""
REWRITE_WHEN_DEAD = 0.5
"""The same for its file, which costs more to write."""

SegmentId = tuple[int, int]
"""(index of the shard that owns it, serial number there)."""


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
class Stored:
    """A segment's file."""

    name: str
    generation: int
    """Counts the files that this segment had before."""
    nbytes: int
    """Length of the file."""
    slots: frozenset[int]
    """Slots that it has."""
    bases: Mapping[int, tuple[tuple[SegmentId, int], ...]] = field(default_factory=dict[int, Any])
    """Slots that are encoded against others -> these, the nearest first, up to one that stands alone."""


@dataclass(slots=True)
class Segment:
    """A block of bytes and who needs which part of it."""

    id: SegmentId
    handle: Any
    """What the engine calls the block: an object reference, or the bytes themselves where they are few. None: the
    segment is on disk only."""
    sizes: tuple[int, ...]
    """Bytes of each slot, without padding."""
    offsets: tuple[Offset, ...] = ()
    """Where each slot starts in the block; GONE after it was compacted away, ABSENT when it is on disk only."""
    allocated: int = 0
    """Length of the block in bytes, dead slots and padding included."""
    generation: int = 0
    """Counts the compactions: a block of an older generation has other offsets."""
    digests: tuple[str, ...] | None = None
    """Content hash of each slot; None until the shard, which hashes off everybody's way, has computed them."""
    counts: list[int] = field(default_factory=list[int])
    """How many holders name each slot."""
    holders: dict[Holder, frozenset[int]] = field(default_factory=dict[Holder, frozenset[int]])
    """Holder -> the slots that it names."""
    stored: Stored | None = None
    """Its file; None: it is in memory only."""
    files: int = 0
    """How many files were begun for it: the generation of the next. None is used twice, for the file that had it may
    be about to be deleted."""

    def __post_init__(self) -> None:
        if not self.offsets:
            offsets, self.allocated = layout(self.sizes)
            self.offsets = tuple(offsets)
        self.counts = [0] * len(self.sizes)

    @classmethod
    def on_disk(cls, segment_id: SegmentId, sizes: Sequence[int], stored: Stored, generation: int) -> Segment:
        """Return a segment that has a file and no block."""
        offsets = tuple(ABSENT if slot in stored.slots else GONE for slot in range(len(sizes)))
        segment = cls(segment_id, None, tuple(sizes), offsets, generation=generation)
        segment.stored, segment.files = stored, stored.generation + 1
        return segment

    def hold(self, holder: Holder, slots: Iterable[int]) -> None:
        """Count `holder` on `slots`. Holding again is no change: a message may come twice.

        Raises:
            CorruptDataError: a slot does not exist or is gone; nothing changes.
        """
        wanted = self.check_slots(holder, slots)
        for slot in wanted:
            self.counts[slot] += 1
        self.holders[holder] = self.holders.get(holder, frozenset()) | wanted

    def check_slots(self, holder: Holder, slots: Iterable[int]) -> frozenset[int]:
        """Return those of `slots` that `holder` does not hold yet; errors as in `hold`."""
        wanted = frozenset(slots) - self.holders.get(holder, frozenset())
        for slot in wanted:
            if not 0 <= slot < len(self.sizes) or self.offsets[slot] == GONE:
                raise CorruptDataError(f"segment {self.id}: expected a live slot; {holder} names slot {slot}")
        return wanted

    def release(self, holder: Holder) -> None:
        """Forget a holder; unknown ones are no error, for the same reason."""
        for slot in self.holders.pop(holder, frozenset()):
            self.counts[slot] -= 1

    def has(self, slots: Iterable[int]) -> bool:
        """Tell whether there are these slots, in memory or on disk."""
        return all(0 <= slot < len(self.sizes) and self.offsets[slot] != GONE for slot in slots)

    @property
    def live_slots(self) -> list[int]:
        """Slots that somebody holds."""
        return [slot for slot, count in enumerate(self.counts) if count]

    def resident_bytes(self, slots: Iterable[int]) -> int:
        """Return the bytes, without padding, of those of `slots` that are in memory."""
        return sum(self.sizes[slot] for slot in slots if isinstance(self.offsets[slot], int))

    @property
    def is_safe(self) -> bool:
        """True when all live slots are on disk."""
        return self.stored is not None and self.stored.slots.issuperset(self.live_slots)

    @property
    def needed_on_disk(self) -> list[int]:
        """Slots that a new file must have: live ones that are on disk only, and bases of other files."""
        bases = (slots for holder, slots in self.holders.items() if isinstance(holder, (FileOf, FileTaking)))
        return [*self.absent(self.live_slots), *frozenset[int]().union(*bases)]

    def absent(self, slots: Iterable[int]) -> list[int]:
        """Return those of `slots` that are on disk only."""
        return [slot for slot in slots if self.offsets[slot] == ABSENT]

    @property
    def wants_compaction(self) -> bool:
        """True when enough of the block is dead that a copy of the rest pays."""
        live = sum(padded(self.sizes[slot]) for slot in self.live_slots if isinstance(self.offsets[slot], int))
        return bool(self.holders) and self.allocated - live > COMPACT_WHEN_DEAD * self.allocated

    @property
    def wants_rewriting(self) -> bool:
        """True when most of the file's tensors, by their bytes, are dead."""
        if self.stored is None or not self.holders:
            return False
        live = set(self.live_slots)
        dead = sum(self.sizes[slot] for slot in self.stored.slots - live)
        return dead > REWRITE_WHEN_DEAD * sum(self.sizes[slot] for slot in self.stored.slots)

    def move(self, handle: object, offsets: tuple[Offset, ...], allocated: int) -> None:
        """Take the new block that a compaction made."""
        self.handle, self.offsets, self.allocated = handle, offsets, allocated
        self.generation += 1

    def file_is(self, stored: Stored) -> None:
        """Take a new file; slots that were on disk only, and that it lacks, are gone."""
        self.stored = stored
        self.offsets = tuple(
            GONE if offset == ABSENT and slot not in stored.slots else offset
            for slot, offset in enumerate(self.offsets)
        )

    def file_has(self, sizes: Mapping[int, int], bases: Mapping[int, tuple[tuple[SegmentId, int], ...]]) -> None:
        """Learn of more slots that the file has.

        Args:
            sizes: slot -> bytes; those that are known stay as they are.
            bases: slots that are encoded against others -> these, see `Stored`.

        Raises:
            ModelLostError: there is no file.
        """
        new = {slot: nbytes for slot, nbytes in sizes.items() if not self.has([slot])}
        if not new:
            return
        if self.stored is None:
            raise ModelLostError(f"segment {self.id}: expected a file with slots {list(new)}; found no file")
        more = max(0, max(sizes) + 1 - len(self.sizes))
        known, offsets = [*self.sizes, *[0] * more], [*self.offsets, *[GONE] * more]
        for slot, nbytes in new.items():
            known[slot], offsets[slot] = nbytes, ABSENT
        self.sizes, self.offsets = tuple(known), tuple(offsets)
        self.counts += [0] * more
        self.digests = None
        slots = self.stored.slots | new.keys()
        chains = {**self.stored.bases, **{slot: bases[slot] for slot in new if slot in bases}}
        self.stored = replace(self.stored, slots=slots, bases=chains)

    def compacted(self) -> tuple[tuple[Offset, ...], int]:
        """Offsets and length of a block that holds the live slots only, of those that are in memory."""
        return self.arranged(slot for slot in self.live_slots if isinstance(self.offsets[slot], int))

    def arranged(self, slots: Iterable[int]) -> tuple[tuple[Offset, ...], int]:
        """Offsets and length of a block that holds these live slots, the other live ones being on disk."""
        chosen = sorted(slots)
        new, length = layout([self.sizes[slot] for slot in chosen])
        offsets: list[Offset] = [ABSENT if count else GONE for count in self.counts]
        for slot, offset in zip(chosen, new, strict=True):
            offsets[slot] = offset
        return tuple(offsets), length

    def check(self) -> None:
        """Hold the counts against the holders that they derive from.

        Raises:
            CorruptDataError: they differ.
        """
        derived = [sum(slot in slots for slots in self.holders.values()) for slot in range(len(self.sizes))]
        if derived != self.counts:
            raise CorruptDataError(f"segment {self.id}: expected counts {derived}; found {self.counts}")
