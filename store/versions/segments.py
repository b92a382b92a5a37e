"""The segments in one shard's care: who holds which slots, and which files they have. No engine, no clock.

Rules
- Who holds slots says `store.holders`. Holding or releasing twice is no change: messages may be repeated.
- A segment without holders goes, from memory and from disk. What must happen outside is left here for the shell, which
  takes it after each call: files in `dead_files`, segments that are mostly dead on disk in `rewritable`, and what
  `residents` leaves.
- What a manifest that cannot be read may name does not go, and is not called lost: it is `unread`, and so is what
  nothing else names.
- What lies in memory is `residents`' matter, what a restart would find on disk that of `durability`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import astuple

from ..errors import CorruptDataError, ModelLostError, MovedError, StorageError, Unreadable
from ..holders import Drain, FileOf, FileTaking, Holder, Reason, Save
from ..refs import ModelRef
from ..segments.residents import Residents
from ..segments.segment import ABSENT, GONE, Block, Holds, Segment, SegmentId, Stored, layout
from ..segments.totals import Totals
from .durability import Durability
from .handover import MOVED_ON, MovedSegment


class SegmentTable:
    """Segments of one shard.

    Args:
        index: the shard's number.

    >>> table = SegmentTable(0)
    >>> table.adopt(Save("client", 1), (0, 1), b"abcd", [4])
    >>> table.store((0, 1), Stored("segments/1.0.arrow", 0, 900, frozenset({0})))
    True
    >>> [table.residents.evict(segment) for segment in table.residents.evictable()], table.residents.freed
    ([True], [b'abcd'])
    >>> table.absent({(0, 1): [0]})
    {(0, 1): [0]}
    >>> table.release(Save("client", 1))
    >>> table.dead_files
    ['segments/1.0.arrow']
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.where: Callable[[SegmentId], int] = _maker
        """Segment -> the shard that holds it."""
        self.changes: int = 0
        """Counts what changed since the start, but for what `residents` count."""
        self.generations = 0
        """Generation of a new segment: a random number in each incarnation of a shard, so that no block is taken for
        one of an earlier incarnation."""
        self.outbox: list[tuple[int, Holder]] = []
        """(shard, holder): releases for other shards."""
        self.dead_files: list[str] = []
        """Files that no segment needs any more."""
        self.unread: dict[ModelRef, Unreadable] = {}
        """Versions of any home whose manifests could not be read -> why: they are damaged, or it is the disk."""
        self.rewritable: set[SegmentId] = set()
        self.writes_files = True
        """False in a shard that started again while it drains: others may write the files of its segments by now."""
        self._segments: dict[SegmentId, Segment] = {}
        self._held: dict[Holder, dict[SegmentId, None]] = {}
        self.totals = Totals()
        self.residents = Residents(self._segments, self._held, self.totals)
        self.durability = Durability(self._segments, self._held)

    @property
    def epoch(self) -> int:
        """Counts what changed since the start: an answer given at an epoch holds until the next."""
        return self.changes + self.residents.moves

    # ---- holders --------------------------------------------------------------------------------------

    def adopt(self, save: Save, segment_id: SegmentId, handle: object, sizes: Sequence[int]) -> None:
        """Take a block of a save into care, which holds all its slots.

        Raises:
            CorruptDataError: the id is taken.
        """
        self._add(Segment(segment_id, handle, tuple(sizes), generation=self.generations))
        self.residents.enter(segment_id)
        self.hold(save, {segment_id: range(len(sizes))})

    def hold(self, holder: Holder, holds: Holds) -> None:
        """Count `holder` on slots of segments.

        Raises:
            ModelLostError: a segment is not here (any more); nothing changes.
            CorruptDataError: a slot does not exist or is gone; nothing changes.
            StorageError: a manifest that may tell of it could not be read yet; nothing changes.
        """
        if self.unread and not all(self.knows_slots(segment, slots) for segment, slots in holds.items()):
            raise self._unfound(f"some slots of {list(holds)}, which {holder} names")
        missing = [segment for segment in holds if segment not in self._segments]
        if missing:
            raise ModelLostError(
                f"shard {self.index}: expected segments of this shard; {holder} names {missing}, which were lost with "
                "an earlier incarnation of this shard or freed after their last holder"
            )
        for segment_id, slots in holds.items():
            self._segments[segment_id].check_slots(holder, slots)
        for segment_id, slots in holds.items():
            segment = self._segments[segment_id]
            self.totals.count(segment, -1)
            segment.hold(holder, slots)
            self.totals.count(segment, +1)
            if holder not in self._held and isinstance(holder, ModelRef):
                self.durability.enter(holder)
            self._held.setdefault(holder, {})[segment_id] = None

    def release(self, holder: Holder) -> None:
        """Forget a holder, and free what only it held."""
        self._release([holder])

    def held(self, ref: ModelRef) -> dict[SegmentId, list[int]]:
        """Return the slots that a version names here."""
        return {segment: sorted(self._segments[segment].holders[ref]) for segment in self._held.get(ref, ())}

    def knows_segment(self, segment: SegmentId) -> bool:
        """Tell whether a segment is here."""
        return segment in self._segments

    def is_holder(self, holder: Holder) -> bool:
        """Tell whether a holder holds something here."""
        return holder in self._held

    def knows_slots(self, segment_id: SegmentId, slots: Iterable[int]) -> bool:
        """Tell whether a segment is here with these slots, in memory or on disk."""
        segment = self._segments.get(segment_id)
        return segment is not None and segment.has(slots)

    def hold_all(self, holder: Holder) -> None:
        """Hold all live slots of all segments."""
        self.hold(holder, {segment.id: segment.live_slots for segment in self._segments.values()})

    def version_holders(self) -> list[ModelRef]:
        """List the versions that hold something here."""
        return [holder for holder in self._held if isinstance(holder, ModelRef)]

    # ---- what there is ----------------------------------------------------------------------------------

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
        if self.unread and not all(self.knows_slots(segment_id, slots) for segment_id, slots in wanted.items()):
            raise self._unfound(f"some slots of {list(wanted)}")
        missing = {segment_id: self._known(segment_id).absent(slots) for segment_id, slots in wanted.items()}
        return {segment_id: slots for segment_id, slots in missing.items() if slots}

    def segment(self, segment_id: SegmentId) -> Segment | None:
        """Look a segment up."""
        return self._segments.get(segment_id)

    def set_digests(self, segment_id: SegmentId, digests: Sequence[str]) -> None:
        """Take a segment's content hashes; it may have gone meanwhile."""
        segment = self._segments.get(segment_id)
        if segment is not None:
            segment.digests = tuple(digests)

    def digests(self, segments: Iterable[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        """Return the content hashes of those of `segments` that are here and hashed."""
        found = {
            segment_id: self._segments[segment_id].digests for segment_id in segments if segment_id in self._segments
        }
        return {segment_id: digests for segment_id, digests in found.items() if digests is not None}

    def places_of(self, digests: Set[str]) -> dict[str, tuple[SegmentId, int]]:
        """Find slots by content: hash -> (segment, slot), of those that are hashed."""
        return {
            digest: (segment.id, slot)
            for segment in self._segments.values()
            for slot, digest in enumerate(segment.digests or ())
            if digest in digests and segment.has([slot])
        }

    # ---- disk -----------------------------------------------------------------------------------------

    def recover(self, segment_id: SegmentId, sizes: Sequence[int], stored: Stored) -> None:
        """Learn of a segment that is on disk; errors as in `adopt`. Its holders and bases come next."""
        self._add(Segment.on_disk(segment_id, sizes, stored, self.generations))

    def extend(
        self, segment_id: SegmentId, sizes: Mapping[int, int], bases: Mapping[int, tuple[tuple[SegmentId, int], ...]]
    ) -> None:
        """Learn of more slots that the file of a segment has. Their holders come next.

        Args:
            segment_id: a segment that has a file.
            sizes: slot -> bytes; those that are known stay as they are.
            bases: slots that are encoded against others -> these, see `Stored`.
        """
        segment = self._segments[segment_id]
        self.totals.count(segment, -1)
        try:
            segment.file_has(sizes, bases)
        finally:
            self.totals.count(segment, +1)

    def drop_unheld(self) -> set[SegmentId]:
        """End a recovery: drop the segments that got no holder, bases of tensors that are not there."""
        before = set(self._segments)
        for segment in [segment for segment in self._segments.values() if not segment.holders]:
            self._drop(segment)
            self._release([FileOf(segment.id[1])])
        return before - set(self._segments)

    def in_care(self, segment_id: SegmentId) -> bool:
        """Tell whether this shard is the one that writes, replaces and deletes the file of a segment.

        It is the one that holds the segment by the topology. One that drains hands its segments over in one step, and
        its successors are it when they go by the new topology: in between nobody is.
        """
        return self.writes_files and self.where(segment_id) == self.index

    def check_care(self, segment_id: SegmentId) -> None:
        """See that a file of a segment may be written here.

        Raises:
            MovedError: another shard does that, now or soon.
        """
        if not self.in_care(segment_id):
            raise MovedError(f"shard {self.index}: expected to write files of {segment_id}; another shard does so", 0)

    def store(self, segment_id: SegmentId, stored: Stored) -> bool:
        """Take note of a segment's new file; False when it came too late, and is dead.

        Too late: the segment went, or slots that the file lacks are on disk only or other files' bases by now.

        The slots that its tensors are encoded against are held, and kept on disk, for as long as the file is the
        segment's.

        Raises:
            ModelLostError, CorruptDataError: such a slot went, or left the disk, meanwhile; nothing changes but that
                the file is dead.
            MovedError: the segment was handed over meanwhile; likewise. Its successor knows the file before, and only
                that.
        """
        segment = self._segments.get(segment_id)
        self.rewritable.discard(segment_id)
        if not self.in_care(segment_id):
            self.dead_files.append(stored.name)
            self.check_care(segment_id)
        if segment is None or not stored.slots.issuperset(segment.needed_on_disk):
            self.dead_files.append(stored.name)
            if segment is not None and segment.wants_rewriting:
                self.rewritable.add(segment_id)
            return False
        self._hold_bases(FileOf(segment_id[1]), stored)
        self.outbox += [(shard, FileOf(segment_id[1])) for shard in self._others(segment.stored) - self._others(stored)]
        self.totals.count(segment, -1)
        if segment.stored is not None and segment.stored.name != stored.name:
            self.dead_files.append(segment.stored.name)
        segment.file_is(stored)
        self.totals.count(segment, +1)
        if segment.wants_rewriting:
            self.rewritable.add(segment_id)
        self.residents.evict_if_cold(segment)
        return True

    def _hold_bases(self, file: FileOf, stored: Stored) -> None:
        """Have a file that takes the place of one before hold what it is encoded against; else it is dead."""
        nearest: dict[SegmentId, set[int]] = {}
        for (base, slot), *_ in stored.bases.values():
            if self.where(base) == self.index:  # others came with a recovery, which had their shards hold them
                nearest.setdefault(base, set()).add(slot)
        taking = FileTaking(file)
        holds = {base: sorted(slots) for base, slots in nearest.items()}
        try:
            self._check_stored(file, holds)
            self.hold(taking, holds)
        except (ModelLostError, CorruptDataError):
            self.dead_files.append(stored.name)
            raise
        self.release(file)  # the one before
        self.hold(file, holds)
        self.release(taking)

    def take_back(self, segment_id: SegmentId, handle: object, sizes: Sequence[int], slots: Sequence[int]) -> None:
        """Take into care a block that a replica kept, held as `RESTORED` until it is known who holds it.

        What is on disk of the segment stays there as well.

        Args:
            segment_id: the segment.
            handle: its block, laid out as `layout` does it.
            sizes: bytes of all its slots.
            slots: those that the block has.
        """
        known = self._segments.get(segment_id)
        stored = known.stored if known is not None else None
        on_disk = stored.slots if stored is not None else frozenset[int]()
        places, allocated = layout([sizes[slot] for slot in slots])
        starts = dict(zip(slots, places, strict=True))
        offsets = tuple(starts.get(slot, ABSENT if slot in on_disk else GONE) for slot in range(len(sizes)))
        if known is None:
            self._add(Segment(segment_id, handle, tuple(sizes), offsets, allocated, self.generations))
        else:
            self.totals.count(known, -1)
            known.counts += [0] * (len(sizes) - len(known.counts))
            known.sizes = tuple(sizes)
            known.move(handle, offsets, allocated)
            self.totals.count(known, +1)
        self.residents.enter(segment_id)
        self.hold(Reason.RESTORED, {segment_id: slots})
        self.changes += 1

    # ---- from and to other shards ---------------------------------------------------------------------

    def segment_ids(self) -> list[SegmentId]:
        """List all segments."""
        return list(self._segments)

    def drains(self) -> list[Drain]:
        """List the drains under which copies came here."""
        return [holder for holder in self._held if isinstance(holder, Drain)]

    def saves(self) -> list[Save]:
        """List the saves that hold something here: they brought it, and were neither committed nor aborted."""
        return [holder for holder in self._held if isinstance(holder, Save)]

    def moving(self, segment_id: SegmentId) -> MovedSegment:
        """Return all that is known of a segment, for another shard that takes it over."""
        segment = self._segments[segment_id]
        return MovedSegment.of(segment, self.durability.waiting(segment))

    def receive(self, moved: MovedSegment, handle: object, holder: Drain | Save) -> None:
        """Take a copy of a segment into care, held by `holder` only; what is on disk of it is not in its care yet."""
        self._add(moved.copied(handle))
        if handle is not None:
            self.residents.enter(moved.id)
        self.hold(holder, {moved.id: [slot for slot, offset in enumerate(moved.offsets) if offset != GONE]})

    def inherit(self, moved: MovedSegment, drain: Drain) -> None:
        """Take a segment over, with its file and those who hold it; of what `receive` took, the memory stays."""
        if moved.id not in self._segments:
            self.receive(moved.without_block, None, drain)
        segment = self._segments[moved.id]
        self.totals.count(segment, -1)
        segment.stored, segment.files = moved.stored, moved.files + MOVED_ON
        segment.digests = moved.digests
        self.totals.count(segment, +1)
        for other, slots in moved.holders.items():
            self.hold(other, {moved.id: slots})
            if isinstance(other, ModelRef) and other not in moved.waiting:
                self.durability.written(other)

    # ---- within ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Derive all counts anew and hold the kept ones against them.

        Raises:
            CorruptDataError: a segment's counts are not its holders', or a total is not the segments'.
        """
        for segment in self._segments.values():
            segment.check()
        derived = Totals.of(self._segments.values())
        if derived != self.totals:
            raise CorruptDataError(
                f"shard {self.index}: expected totals {astuple(derived)}; found {astuple(self.totals)}"
            )

    def _known(self, segment_id: SegmentId) -> Segment:
        segment = self._segments.get(segment_id)
        if segment is None and self.where(segment_id) != self.index:
            raise MovedError(f"shard {self.index}: segment {segment_id} belongs to another shard now", 0)
        if segment is None and self.unread:
            raise self._unfound(f"segment {segment_id}")
        if segment is None:
            raise ModelLostError(
                f"shard {self.index}: expected segment {segment_id}; it was lost with an earlier incarnation of this "
                "shard"
            )
        return segment

    def _unfound(self, what: str) -> StorageError | ModelLostError:
        """Make the error of what only a manifest that could not be read may tell of: if that is damaged, it is lost."""
        for ref, why in self.unread.items():
            if not isinstance(why, CorruptDataError):
                return StorageError(f"shard {self.index}: {what}: cannot be read now, because {ref} cannot: {why}")
        damaged = ", ".join(map(str, self.unread))
        return ModelLostError(f"shard {self.index}: expected {what}; found no manifest except damaged ones: {damaged}")

    def _add(self, segment: Segment) -> None:
        if segment.id in self._segments:
            raise CorruptDataError(f"shard {self.index}: expected a new segment id; {segment.id} is in use")
        self._segments[segment.id] = segment
        self.totals.count(segment, +1)

    def _release(self, holders: list[Holder]) -> None:
        """Forget holders, and those that go with them: files, each of which may have been the last need of another."""
        while holders:
            holder = holders.pop()
            if isinstance(holder, ModelRef):
                self.residents.forget(holder)
                self.durability.forget(holder)
            for segment_id in self._held.pop(holder, {}):
                segment = self._segments[segment_id]
                self.totals.count(segment, -1)
                segment.release(holder)
                self.totals.count(segment, +1)
                if segment.holders:
                    self.residents.settle(segment)
                    if segment.wants_rewriting and self.in_care(segment_id):
                        self.rewritable.add(segment_id)
                else:
                    self._drop(segment)
                    holders.append(FileOf(segment_id[1]))

    def _drop(self, segment: Segment) -> None:
        """Let a segment go that nobody holds. What its file holds is to be released next."""
        self.totals.count(segment, -1)
        del self._segments[segment.id]
        self.residents.drop(segment)
        self.rewritable.discard(segment.id)
        if segment.stored is not None:
            if self.in_care(segment.id):
                self.dead_files.append(segment.stored.name)
            self.outbox += [(shard, FileOf(segment.id[1])) for shard in self._others(segment.stored)]

    def _check_stored(self, file: FileOf, holds: Holds) -> None:
        """See that bases are on disk: another file of their segment may have come without them, which nobody held."""
        for base, slots in holds.items():
            stored = self._known(base).stored
            if stored is None or not stored.slots.issuperset(slots):
                raise ModelLostError(f"shard {self.index}: {file}: expected slots {slots} of {base} to be on disk")

    def _others(self, stored: Stored | None) -> set[int]:
        """Name the other shards that have slots which a file's tensors are encoded against."""
        bases = stored.bases.values() if stored is not None else ()
        return {self.where(chain[0][0]) for chain in bases} - {self.index}


def _maker(segment_id: SegmentId) -> int:
    """Where no shard ever drained, a segment is where it was made."""
    return segment_id[0]
