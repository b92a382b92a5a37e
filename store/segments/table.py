"""The segments of one shard: which slots are live, whose they are, and which files they have. No engine, no clock.

Rules
- Segments of a save are dropped with it; committed ones lose slots by `free` only. A segment without live slots goes,
  from memory and, where this shard is the keeper, from disk.
- What must happen outside is left here for the shell, which takes it after each change: files in `dead_files`, segments
  that are to be written in `writable`, those that are mostly dead on disk in `rewritable`, and what `residents` leaves.
- A new file becomes the segment's when the catalog has answered its report (`accept`). Until then it is `offered`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import astuple

from ..errors import CorruptDataError, ModelLostError
from ..holders import Request
from .residents import Residents
from .segment import Block, File, Holds, Label, Segment, SegmentId
from .totals import Totals

SHARD_BITS = 16
"""The lowest bits of a file's generation are the shard's that wrote it: no two shards write the same file."""
INCARNATION_BITS = 20 + SHARD_BITS
"""The bits above these are the writer's incarnation, those between count the files that it wrote of a segment."""


class SegmentTable:
    """Segments of one shard.

    Args:
        index: the shard's number.
        incarnation: counts the processes of the shard, from 1.

    >>> table = SegmentTable(0, 1)
    >>> save, segment = Request("client", 1), (0, 1)
    >>> table.stage(save, segment, b"abcd", [4])
    >>> table.commit(save, {segment: [0]})
    >>> table.offer(segment, File("segments/1.0.arrow", 0, 900, frozenset({0})))
    True
    >>> table.accept(segment)
    >>> table.residents.evict(segment), table.residents.freed
    (True, [b'abcd'])
    >>> table.free({segment: [0]})
    >>> table.dead_files
    ['segments/1.0.arrow']
    """

    def __init__(self, index: int, incarnation: int) -> None:
        self.index = index
        self.incarnation = incarnation
        self.changes: int = 0
        """Counts what changed since the start, but for what `residents` count."""
        self.generations = 0
        """Generation of a new segment: a random number in each incarnation of a shard, so that no block is taken for
        one of an earlier incarnation."""
        self.dead_files: list[str] = []
        """Files that no segment needs any more."""
        self.rewritable: set[SegmentId] = set()
        self.writable: dict[SegmentId, None] = {}
        """Segments whose files this shard is to write, in the order in which they came; some of them may have gone."""
        self._segments: dict[SegmentId, Segment] = {}
        self._staged: dict[Request, dict[SegmentId, None]] = {}
        self._offered: dict[SegmentId, File] = {}
        """Files that the catalog has not answered for."""
        self.totals = Totals()
        self.residents = Residents(self._segments, self.totals)

    @property
    def epoch(self) -> int:
        """Counts what changed since the start."""
        return self.changes + self.residents.moves

    # ---- segments of saves ----------------------------------------------------------------------------

    def stage(
        self, save: Request, segment_id: SegmentId, handle: object, sizes: Sequence[int], labels: Sequence[Label] = ()
    ) -> None:
        """Take a block that a save brings.

        Raises:
            CorruptDataError: the id is taken.
        """
        self._add(
            Segment(
                segment_id,
                handle,
                tuple(sizes),
                generation=self.generations,
                save=save,
                keeper=True,
                labels=tuple(labels),
                files=self._generation_after(0),
            )
        )
        self.residents.enter(segment_id)
        self._staged.setdefault(save, {})[segment_id] = None

    def saves(self) -> list[Request]:
        """List the saves that have segments here which are not committed."""
        return list(self._staged)

    def staged(self, save: Request) -> dict[SegmentId, Segment]:
        """Return the segments of a save."""
        return {segment_id: self._segments[segment_id] for segment_id in self._staged.get(save, ())}

    def commit(self, save: Request, live: Holds) -> None:
        """Make a save's segments committed: the slots that its version names stay, the others go."""
        for segment_id in self._staged.pop(save, {}):
            segment = self._segments[segment_id]
            segment.save = None
            self._free(segment, set(segment.live).difference(live.get(segment_id, ())))
            self._note_writable(segment)
        self.changes += 1

    def drop(self, save: Request) -> None:
        """Drop the segments of a save that came to nothing."""
        for segment_id in self._staged.pop(save, {}):
            segment = self._segments[segment_id]
            self._free(segment, set(segment.live))

    # ---- committed segments ---------------------------------------------------------------------------

    def take_copy(
        self,
        segment_id: SegmentId,
        handle: object,
        sizes: Sequence[int],
        slots: Iterable[int],
        digests: Sequence[str] | None,
        labels: Sequence[Label],
    ) -> bool:
        """Take a copy of another shard's segment, whose block has `slots` one after another as `layout` places them.

        Args:
            segment_id: which.
            handle: its block.
            sizes: bytes of all slots.
            slots: those that the block has.
            digests: content hashes by slot, of all slots; empty texts for those that it lacks.
            labels: for its file.

        Returns:
            False: the segment is here already; the caller frees the block.
        """
        if segment_id in self._segments:
            return False
        segment = Segment(
            segment_id,
            handle,
            tuple(sizes),
            generation=self.generations,
            digests=tuple(digests) if digests is not None else None,
            labels=tuple(labels),
            files=self._generation_after(0),
        )
        segment.live = set(slots)
        segment.offsets, segment.allocated = segment.arranged(segment.live)
        self._add(segment)
        self.residents.enter(segment_id)
        return True

    def recover(self, segment_id: SegmentId, sizes: Sequence[int], file: File) -> None:
        """Take a segment that is on disk only, as its keeper.

        Raises:
            CorruptDataError: the id is taken.
        """
        segment = Segment.on_disk(segment_id, sizes, file, self.generations)
        segment.keeper, segment.files = True, self._generation_after(file.generation)
        self._add(segment)

    def free(self, slots: Mapping[SegmentId, Iterable[int]]) -> None:
        """End slots of committed segments; those that are not here are no error."""
        for segment_id, ended in slots.items():
            segment = self._segments.get(segment_id)
            if segment is not None:
                self._free(segment, ended)
        self.changes += 1

    # ---- what there is ----------------------------------------------------------------------------------

    def segment(self, segment_id: SegmentId) -> Segment | None:
        """Look a segment up."""
        return self._segments.get(segment_id)

    def segments(self) -> Iterable[Segment]:
        """Iterate over all segments."""
        return self._segments.values()

    def has(self, segment_id: SegmentId, slots: Iterable[int]) -> bool:
        """Tell whether a segment is here with these slots, in memory or on disk."""
        segment = self._segments.get(segment_id)
        return segment is not None and segment.has(slots)

    def blocks(self, wanted: Iterable[SegmentId]) -> dict[SegmentId, Block]:
        """Return the blocks of segments, of those that are in memory.

        Raises:
            ModelLostError: one is not here.
        """
        found: dict[SegmentId, Block] = {}
        for segment_id in wanted:
            segment = self._known(segment_id)
            if segment.handle is not None:
                found[segment_id] = Block(segment.handle, segment.offsets, segment.generation, self.index)
            self.residents.use(segment_id)
        return found

    def absent(self, wanted: Mapping[SegmentId, Iterable[int]]) -> dict[SegmentId, list[int]]:
        """Return the slots among these that are on disk only; errors as in `blocks`."""
        missing = {segment_id: self._known(segment_id).absent(slots) for segment_id, slots in wanted.items()}
        return {segment_id: slots for segment_id, slots in missing.items() if slots}

    def set_digests(self, segment_id: SegmentId, digests: Sequence[str]) -> None:
        """Take a segment's content hashes; it may have gone meanwhile."""
        segment = self._segments.get(segment_id)
        if segment is not None:
            segment.digests = tuple(digests)

    def digests(self, segments: Iterable[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        """Return the content hashes of those of `segments` that are here and hashed."""
        found = {s: self._segments[s].digests for s in segments if s in self._segments}
        return {segment_id: digests for segment_id, digests in found.items() if digests is not None}

    def places_of(self, digests: Set[str]) -> dict[str, tuple[SegmentId, int]]:
        """Find slots by content: hash -> (segment, slot), of those that are hashed."""
        return {
            digest: (segment.id, slot)
            for segment in self._segments.values()
            for slot, digest in enumerate(segment.digests or ())
            if digest in digests and segment.has([slot])
        }

    # ---- files ----------------------------------------------------------------------------------------

    def unwritten(self) -> list[SegmentId]:
        """List the committed segments whose files this shard is to write: the live slots are in none."""
        return [s.id for s in self._segments.values() if s.keeper and s.save is None and not s.is_safe]

    def next_generation(self, segment: Segment) -> int:
        """Return the generation of a file that is about to be written; no other file gets it."""
        generation = segment.files
        segment.files = self._generation_after(generation)
        return generation

    def _generation_after(self, generation: int) -> int:
        """Return the lowest generation of a file above another one that this incarnation of this shard may write."""
        least = max(generation + 1, self.incarnation << INCARNATION_BITS)
        shards = 1 << SHARD_BITS
        return least + (self.index - least) % shards

    def _note_writable(self, segment: Segment) -> None:
        if segment.keeper and segment.save is None and segment.live and not segment.is_safe:
            self.writable[segment.id] = None

    def offer(self, segment_id: SegmentId, file: File) -> bool:
        """Note a new file that is to be reported; False: it came too late, and is dead.

        Too late: the segment went, another shard is its keeper, or the file lacks slots that are on disk only.
        """
        segment = self._segments.get(segment_id)
        self.rewritable.discard(segment_id)
        if segment is None or not segment.keeper or not file.slots.issuperset(segment.absent(segment.live)):
            self.dead_files.append(file.name)
            return False
        before = self._offered.pop(segment_id, None)
        if before is not None:
            self.dead_files.append(before.name)
        self._offered[segment_id] = file
        return True

    def offered(self) -> dict[SegmentId, File]:
        """Return the files that the catalog has not answered for."""
        return dict(self._offered)

    def is_offered(self, segment_id: SegmentId) -> bool:
        """Tell whether a file of a segment is to be answered for."""
        return segment_id in self._offered

    def accept(self, segment_id: SegmentId) -> None:
        """Make the file that was offered the segment's: the catalog knows it."""
        file, segment = self._offered.pop(segment_id, None), self._segments.get(segment_id)
        if file is None or segment is None:
            return
        self.totals.count(segment, -1)
        if segment.file is not None and segment.file.name != file.name:
            self.dead_files.append(segment.file.name)
        segment.file_is(file)
        self.totals.count(segment, +1)
        if segment.wants_rewriting:
            self.rewritable.add(segment_id)
        self._note_writable(segment)
        self.residents.evict_if_cold(segment)

    def refuse(self, segment_id: SegmentId) -> None:
        """Drop the file that was offered: the catalog does not take it."""
        file = self._offered.pop(segment_id, None)
        if file is not None:
            self.dead_files.append(file.name)
            if (segment := self._segments.get(segment_id)) is not None:
                self._note_writable(segment)

    # ---- within ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Derive the totals anew and compare.

        Raises:
            CorruptDataError: they differ.
        """
        derived = Totals.of(self._segments.values())
        if derived != self.totals:
            raise CorruptDataError(
                f"shard {self.index}: expected totals {astuple(derived)}; found {astuple(self.totals)}"
            )

    def _known(self, segment_id: SegmentId) -> Segment:
        segment = self._segments.get(segment_id)
        if segment is None:
            raise ModelLostError(f"shard {self.index}: expected segment {segment_id[1]:x}; it is not here")
        return segment

    def _add(self, segment: Segment) -> None:
        if segment.id in self._segments:
            raise CorruptDataError(f"shard {self.index}: expected a new segment id; {segment.id[1]:x} is in use")
        self._segments[segment.id] = segment
        self.totals.count(segment, +1)

    def _free(self, segment: Segment, slots: Iterable[int]) -> None:
        self.totals.count(segment, -1)
        segment.free(slots)
        if not segment.live:
            self._drop(segment)
            return
        self.totals.count(segment, +1)
        self.residents.settle(segment)
        if segment.wants_rewriting:
            self.rewritable.add(segment.id)

    def _drop(self, segment: Segment) -> None:
        """Remove a segment that was taken out of the totals."""
        del self._segments[segment.id]
        if segment.save is not None:  # an order may end what a save brings before its commit was answered
            self._staged.get(segment.save, {}).pop(segment.id, None)
        self.residents.drop(segment)
        self.rewritable.discard(segment.id)
        offered = self._offered.pop(segment.id, None)
        if offered is not None:
            self.dead_files.append(offered.name)
        if segment.file is not None and segment.keeper:
            self.dead_files.append(segment.file.name)
