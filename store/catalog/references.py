"""What refers to the slots of segments, and where segments are.

Rules
- A slot is referred to by versions whose tensors are not freed, and by files with tensors that are encoded against it.
  A slot without references is free; a segment without any goes, and with it what its file refers to.
- Counts change only as records are applied. What became free is gathered in `freed`, for the shell to order away.
- `keeper` writes the segment's files and answers for it. `copies` are the shards that said they have the slots.
- A slot is available while a copy or the file has it.
- Costs of all changes are proportional to the slots that they name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CorruptDataError
from ..segments.segment import SEGMENT_SLOTS, SegmentId
from ..versions.slots import segment_bytes, segment_from
from .records import FileRecord, Placed
from .reports import Place

Holds = Mapping[SegmentId, Sequence[int]]
"""Segment -> slots of it."""


class Known:
    """A segment, as the catalog knows it."""

    __slots__ = ("copies", "counts", "file", "keeper", "place", "total", "warm")

    def __init__(self, slots: int) -> None:
        self.counts = array("I", bytes(4 * slots))
        """References of each slot."""
        self.total = 0
        """Sum of these."""
        self.keeper = -1
        """-1: nobody yet."""
        self.copies: tuple[int, ...] = ()
        self.file: FileRecord | None = None
        self.place: Place | None = None
        """Where it lay last at its keeper."""
        self.warm = 0
        """Live versions that name it and that retention keeps in memory."""

    def live(self) -> list[int]:
        """Return the slots with references."""
        return [slot for slot, count in enumerate(self.counts) if count]

    def available(self, slot: int) -> bool:
        """Tell whether a copy or the file has a slot."""
        return bool(self.copies) or (self.file is not None and self.file.has(slot))

    def missing(self) -> list[int]:
        """Return the slots with references that nothing has."""
        return [] if self.copies else [slot for slot in self.live() if self.file is None or not self.file.has(slot)]

    def is_safe(self) -> bool:
        """Tell whether the file has all slots with references."""
        return self.file is not None and all(map(self.file.has, self.live()))


@dataclass(frozen=True, slots=True)
class Freed:
    """Slots that became free, and who may have bytes of them."""

    segment: SegmentId
    slots: tuple[int, ...]
    shards: tuple[int, ...]
    file: FileRecord | None
    """The segment's; None, too, if slots of it are live."""


class References:
    """All segments that something refers to.

    >>> references = References()
    >>> references.place((0, 1), 2, keeper=0, copies=(0,), file=None)
    >>> references.add({(0, 1): [0]})
    >>> references.drop({(0, 1): [0]})
    >>> [(freed.slots, freed.shards) for freed in references.freed], (0, 1) in references
    ([((0, 1), (0,))], False)
    """

    def __init__(self) -> None:
        self._known: dict[SegmentId, Known] = {}
        self.freed: list[Freed] = []
        """What became free, in order; the shell takes it."""

    def __contains__(self, segment: SegmentId) -> bool:
        return segment in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, segment: SegmentId) -> Known | None:
        """Look a segment up."""
        return self._known.get(segment)

    def items(self) -> Iterator[tuple[SegmentId, Known]]:
        """Iterate over all segments."""
        return iter(self._known.items())

    # ---- counts ---------------------------------------------------------------------------------------

    def has(self, segment: SegmentId, slots: Iterable[int]) -> bool:
        """Tell whether all of these slots have references and are available."""
        known = self._known.get(segment)
        if known is None:
            return False
        counts, length = known.counts, len(known.counts)
        return all(0 <= slot < length and counts[slot] and known.available(slot) for slot in slots)

    def add(self, holds: Holds) -> None:
        """Count a reference to slots. Segments that are not known are entered without a place."""
        for segment, slots in holds.items():
            known = self._entered(segment, max(slots, default=-1) + 1)
            for slot in slots:
                known.counts[slot] += 1
            known.total += len(slots)

    def drop(self, holds: Holds) -> None:
        """Count a reference to slots less."""
        waiting = [(segment, tuple(slots)) for segment, slots in holds.items()]
        while waiting:
            segment, slots = waiting.pop()
            known = self._known.get(segment)
            if known is None:
                raise CorruptDataError(f"segment {segment[1]:x}: expected references; found none")
            free = [slot for slot in slots if known.counts[slot] == 1]
            for slot in slots:
                known.counts[slot] -= 1
            known.total -= len(slots)
            if not known.total:
                waiting += self._removed(segment, known)
            elif free:
                self.freed.append(Freed(segment, tuple(free), self._shards(known), None))

    def warm(self, holds: Iterable[SegmentId], change: int) -> list[SegmentId]:
        """Count versions that keep segments in memory, one more or less; return those that none keeps any more."""
        cold: list[SegmentId] = []
        for segment in holds:
            known = self._known.get(segment)
            if known is not None:
                known.warm += change
                if not known.warm:
                    cold.append(segment)
        return cold

    # ---- places ---------------------------------------------------------------------------------------

    def place(
        self, segment: SegmentId, slots: int, *, keeper: int, copies: tuple[int, ...], file: FileRecord | None
    ) -> None:
        """Say where a segment is; what was said before does not count any more."""
        known = self._entered(segment, slots)
        before, known.file = known.file, file
        known.keeper, known.copies = keeper, copies
        if known.place is not None and known.place.shard != keeper:
            known.place = None
        if before != file:
            self._refer(file)
            self.drop(_bases(before))

    def placed(self, record: Placed, every: bool) -> None:
        """Apply a record.

        Args:
            record: where segments are.
            every: also of those that nothing refers to yet, as in a snapshot.
        """
        for serial, slots, keeper, copies, file in record.segments:
            segment = segment_from(serial)
            if every or segment in self._known:
                self.place(segment, slots, keeper=keeper, copies=copies, file=file)

    def record_of(self, segment: SegmentId, known: Known) -> tuple[bytes, int, int, tuple[int, ...], FileRecord | None]:
        """Return where a segment is, as `Placed` has it."""
        return segment_bytes(segment), len(known.counts), known.keeper, known.copies, known.file

    def chain(self, segment: SegmentId, slot: int, most: int) -> tuple[tuple[SegmentId, int], ...]:
        """Return what a slot's tensor is encoded against, the nearest first, up to one that stands alone.

        Args:
            segment: its segment.
            slot: the slot.
            most: links at most: files may say that two are encoded against each other.
        """
        found: list[tuple[SegmentId, int]] = []
        at = (segment, slot)
        while len(found) < most:
            known = self._known.get(at[0])
            bases = known.file.bases if known is not None and known.file is not None else ()
            base = next(((segment_from(serial), other) for own, serial, other in bases if own == at[1]), None)
            if base is None:
                break
            found.append(base)
            at = base
        return tuple(found)

    # ---- within ---------------------------------------------------------------------------------------

    def check(self, holds: Iterable[Holds]) -> None:
        """Derive all counts anew and compare.

        Args:
            holds: of all versions whose tensors are not freed.

        Raises:
            CorruptDataError: they differ.
        """
        derived = References()
        for one in holds:
            derived.add(one)
        for _, known in self.items():
            derived._refer(known.file)
        mine = {segment: list(filter(None, known.counts)) for segment, known in self.items()}
        other = {segment: list(filter(None, known.counts)) for segment, known in derived.items()}
        if mine != other:
            wrong = [f"{s[1]:x}" for s in mine.keys() | other.keys() if mine.get(s) != other.get(s)]
            raise CorruptDataError(
                f"references: expected those of the versions; found others for segments {wrong[:10]}"
            )

    def _entered(self, segment: SegmentId, slots: int) -> Known:
        if slots > SEGMENT_SLOTS:
            raise CorruptDataError(f"segment {segment[1]:x}: expected at most {SEGMENT_SLOTS} slots; found {slots}")
        known = self._known.get(segment)
        if known is None:
            known = self._known[segment] = Known(slots)
        elif slots > len(known.counts):
            known.counts.extend([0] * (slots - len(known.counts)))
        return known

    def _refer(self, file: FileRecord | None) -> None:
        self.add(_bases(file))

    def _removed(self, segment: SegmentId, known: Known) -> Iterator[tuple[SegmentId, tuple[int, ...]]]:
        """Remove a segment without references; give the references of its file."""
        del self._known[segment]
        self.freed.append(Freed(segment, tuple(range(len(known.counts))), self._shards(known), known.file))
        return ((base, tuple(slots)) for base, slots in _bases(known.file).items())

    def _shards(self, known: Known) -> tuple[int, ...]:
        return tuple(dict.fromkeys((known.keeper, *known.copies))) if known.keeper >= 0 else known.copies


def _bases(file: FileRecord | None) -> dict[SegmentId, list[int]]:
    """Return what a file refers to."""
    found: dict[SegmentId, list[int]] = {}
    for segment, slot in sorted(file.base_slots()) if file is not None else ():
        found.setdefault(segment, []).append(slot)
    return found
