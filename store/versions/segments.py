"""The segments in one shard's care: who holds which slots, what lies in memory, what on disk. No engine, no clock.

Rules
- Who holds slots says `store.holders`. Holding or releasing twice is no change: messages may be repeated.
- A segment without holders goes, from memory and from disk. What must happen outside is left here for the shell, which
  takes it after each call: blocks that became free in `freed`, files in `dead_files`, segments that are mostly dead in
  memory in `compactable` and on disk in `rewritable`.
- What a manifest that cannot be read may name does not go, and is not called lost: it is `unread`, and so is what
  nothing else names.
- Memory is the faster place, never the only one without need: a segment may leave it (`evict`) only when all its live
  slots are on disk. Those that only versions which retention let go still hold leave at once, others when room is
  needed, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import CorruptDataError, ModelLostError, MovedError, StorageError, Unreadable
from ..holders import Drain, FileOf, FileTaking, Holder, Reason, Save
from ..refs import ModelRef
from ..segments.segment import ABSENT, GONE, Block, Holds, Offset, Segment, SegmentId, Stored, layout
from .handover import MovedSegment

MOVED_ON = 1 << 20
"""Added to the generations of a segment that another shard takes over: the one before may count on for a moment."""


class SegmentTable:
    """Segments of one shard.

    Args:
        index: the shard's number.

    >>> table = SegmentTable(0)
    >>> table.adopt(Save("client", 1), (0, 1), b"abcd", [4])
    >>> table.store((0, 1), Stored("segments/1.0.arrow", 0, 900, frozenset({0})))
    True
    >>> [table.evict(segment) for segment in list(table.evictable())], table.freed
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
        self.epoch: int = 0
        """Counts what changed since the start: an answer given at an epoch holds until the next."""
        self.generations = 0
        """Generation of a new segment: a random number in each incarnation of a shard, so that no block is taken for
        one of an earlier incarnation."""
        self.freed: list[Any] = []
        """Handles of blocks that no segment lies in any more."""
        self.outbox: list[tuple[int, Holder]] = []
        """(shard, holder): releases for other shards."""
        self.dead_files: list[str] = []
        """Files that no segment needs any more."""
        self.unread: dict[ModelRef, Unreadable] = {}
        """Versions of any home whose manifests could not be read -> why: they are damaged, or it is the disk."""
        self.compactable: set[SegmentId] = set()
        self.rewritable: set[SegmentId] = set()
        self.writes_files = True
        """False in a shard that started again while it drains: others may write the files of its segments by now."""
        self._segments: dict[SegmentId, Segment] = {}
        self._held: dict[Holder, dict[SegmentId, None]] = {}
        self._waiting: set[ModelRef] = set()
        """Versions whose manifests are not on disk, as far as this shard has heard."""
        self._leaving: set[ModelRef] = set()
        """Versions whose manifests are about to say that they are retired."""
        self._cold: set[ModelRef] = set()
        """Versions that retention let go from memory."""
        self._recent: OrderedDict[SegmentId, None] = OrderedDict()
        """Segments in memory, the least recently used first."""
        self._tensors = self._live_bytes = self._allocated = self._file_bytes = 0

    # ---- holders --------------------------------------------------------------------------------------

    def adopt(self, save: Save, segment_id: SegmentId, handle: Any, sizes: Sequence[int]) -> None:
        """Take a block of a save into care, which holds all its slots.

        Raises:
            CorruptDataError: the id is taken.
        """
        self._add(Segment(segment_id, handle, tuple(sizes), generation=self.generations))
        self._recent[segment_id] = None
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
                f"shard {self.index}: expected segments that it holds; {holder} names {missing}, which went with "
                "an earlier incarnation of this shard or with their last holder"
            )
        for segment_id, slots in holds.items():
            self._segments[segment_id].check_slots(holder, slots)
        for segment_id, slots in holds.items():
            segment = self._segments[segment_id]
            self._count(segment, -1)
            segment.hold(holder, slots)
            self._count(segment, +1)
            if holder not in self._held and isinstance(holder, ModelRef):
                self._waiting.add(holder)
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
        return segment is not None and all(0 <= s < len(segment.sizes) and segment.offsets[s] != GONE for s in slots)

    def hold_all(self, holder: Holder) -> None:
        """Hold all live slots of all segments."""
        self.hold(holder, {segment.id: segment.live_slots for segment in self._segments.values()})

    def version_holders(self) -> list[ModelRef]:
        """List the versions that hold something here."""
        return [holder for holder in self._held if isinstance(holder, ModelRef)]

    # ---- memory ---------------------------------------------------------------------------------------

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
            if segment_id in self._recent:
                self._recent.move_to_end(segment_id)
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

    def move(
        self, segment_id: SegmentId, generation: int, handle: Any, offsets: tuple[Offset, ...], allocated: int
    ) -> bool:
        """Take a new block of a segment, made from its block of `generation`: compacted, or with more slots from disk.

        False when the segment went, took new holders of slots, or moved in another way meanwhile. A segment that lost
        more holders meanwhile is compactable again.
        """
        self.compactable.discard(segment_id)
        segment = self._segments.get(segment_id)
        if segment is None:
            return False
        stored = segment.stored.slots if segment.stored is not None else frozenset[int]()
        fits = segment.generation == generation and all(
            isinstance(offsets[slot], int) or (offsets[slot] == ABSENT and slot in stored)
            for slot in segment.live_slots
        )
        if fits:
            self._count(segment, -1)
            if segment.handle is not None:
                self.freed.append(segment.handle)
            segment.move(handle, offsets, allocated)
            self._count(segment, +1)
            self._recent[segment_id] = None
            self.epoch += 1
        if segment.wants_compaction:
            self.compactable.add(segment_id)
        return fits

    def evictable(self) -> Iterator[SegmentId]:
        """Name the segments that could leave the memory, least recently used first."""
        return (s for s in list(self._recent) if s in self._segments and self._segments[s].is_safe)

    def evict(self, segment_id: SegmentId) -> bool:
        """Let a segment leave the memory; False when it is not there, or not on disk."""
        segment = self._segments.get(segment_id)
        if segment is None or segment.handle is None or not segment.is_safe:
            return False
        self._count(segment, -1)
        self.freed.append(segment.handle)
        segment.move(None, segment.arranged(())[0], 0)
        segment.digests = None  # a lossy codec gives other bytes back
        self._count(segment, +1)
        del self._recent[segment_id]
        self.compactable.discard(segment_id)
        self.epoch += 1
        return True

    def cool(self, ref: ModelRef) -> None:
        """Retention let a version go: what only such versions hold leaves the memory as soon as it is on disk."""
        if ref in self._held:
            self._cold.add(ref)
            for segment_id in list(self._held[ref]):
                self._evict_if_cold(self._segments[segment_id])

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

    # ---- disk -----------------------------------------------------------------------------------------

    def recover(self, segment_id: SegmentId, sizes: Sequence[int], stored: Stored) -> None:
        """Learn of a segment that is on disk; errors as in `adopt`. Its holders and bases come next."""
        segment = Segment(segment_id, None, tuple(sizes), generation=self.generations)
        segment.offsets = tuple(ABSENT if slot in stored.slots else GONE for slot in range(len(sizes)))
        segment.allocated = 0
        segment.stored, segment.files = stored, stored.generation + 1
        self._add(segment)

    def extend(self, segment_id: SegmentId, sizes: Mapping[int, int], bases: Mapping[int, tuple[Any, ...]]) -> None:
        """Learn of more slots that the file of a segment has. Their holders come next.

        Args:
            segment_id: a segment that has a file.
            sizes: slot -> bytes; those that are known stay as they are.
            bases: slots that are encoded against others -> these, see `Stored`.
        """
        segment = self._segments[segment_id]
        new = {slot: nbytes for slot, nbytes in sizes.items() if not self.knows_slots(segment_id, [slot])}
        if not new:
            return
        if segment.stored is None:
            raise ModelLostError(f"segment {segment_id}: expected a file that has slots {list(new)}; it has none")
        self._count(segment, -1)
        count = max(len(segment.sizes), max(sizes, default=-1) + 1)
        more = count - len(segment.sizes)
        known, offsets = [*segment.sizes, *[0] * more], [*segment.offsets, *[GONE] * more]
        for slot, nbytes in new.items():
            known[slot], offsets[slot] = nbytes, ABSENT
        segment.sizes, segment.offsets = tuple(known), tuple(offsets)
        segment.counts += [0] * more
        segment.digests = None
        slots = segment.stored.slots | new.keys()
        chains = {**segment.stored.bases, **{slot: bases[slot] for slot in new if slot in bases}}
        segment.stored = replace(segment.stored, slots=slots, bases=chains)
        self._count(segment, +1)

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
            raise MovedError(f"shard {self.index}: expected to write files of {segment_id}; another shard does", 0)

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
        nearest: dict[SegmentId, set[int]] = {}
        for (base, slot), *_ in stored.bases.values():
            if self.where(base) == self.index:  # others came with a recovery, which had their shards hold them
                nearest.setdefault(base, set()).add(slot)
        file = FileOf(segment_id[1])
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
        self.outbox += [(shard, file) for shard in self._others(segment.stored) - self._others(stored)]
        self._count(segment, -1)
        if segment.stored is not None and segment.stored.name != stored.name:
            self.dead_files.append(segment.stored.name)
        segment.stored = stored
        segment.offsets = tuple(
            GONE if offset == ABSENT and slot not in stored.slots else offset
            for slot, offset in enumerate(segment.offsets)
        )
        self._count(segment, +1)
        if segment.wants_rewriting:
            self.rewritable.add(segment_id)
        self._evict_if_cold(segment)
        return True

    # ---- replicas -------------------------------------------------------------------------------------

    def written(self, ref: ModelRef) -> None:
        """Hear that a version's manifest is on disk: a restart finds by it what the version names."""
        self._waiting.discard(ref)

    def leaves(self, ref: ModelRef) -> None:
        """Hear that a version's manifest is about to go: others must not count on it any more."""
        if ref in self._held:  # also one that is not on disk yet: it may be written before it goes
            self._leaving.add(ref)

    def awaited(self, segments: Iterable[SegmentId]) -> dict[SegmentId, list[int]]:
        """Return the slots of segments that versions hold whose manifests are not on disk."""
        found: dict[SegmentId, list[int]] = {}
        for segment in filter(None, map(self._segments.get, segments)):
            slots = set[int]().union(*(segment.holders[h] for h in segment.holders.keys() & self._waiting))
            if slots:
                found[segment.id] = sorted(slots)
        return found

    def rests(self, segment_id: SegmentId) -> bool:
        """Tell whether a restart would find all that versions hold of a segment on the disk, or it is gone.

        Its file must have it, and manifests on disk must name what the versions hold that are not on disk yet.
        """
        segment = self._segments.get(segment_id)
        if segment is None:
            return True
        if not segment.is_safe:
            return False
        needed: set[int] = set()
        for holder in segment.holders.keys() & self._waiting:
            needed |= segment.holders[holder]
        for holder, slots in segment.holders.items() if needed else ():
            if isinstance(holder, ModelRef) and holder not in self._waiting and holder not in self._leaving:
                needed -= slots
            if not needed:
                break
        return not needed

    def unsaved(self) -> set[SegmentId]:
        """Name the segments that versions hold and that do not rest on disk: what goes with this shard's memory."""
        return {
            segment_id
            for segment_id, segment in self._segments.items()
            if not self.rests(segment_id)
            and any(isinstance(holder, ModelRef) or holder is Reason.RESTORED for holder in segment.holders)
        }

    def uncovered(self) -> set[SegmentId]:
        """Name the segments that have files and do not rest on them: manifests that named them may have gone."""
        held = {segment for holder in self._waiting for segment in self._held[holder]}
        return {s for s in held if self._segments[s].stored is not None and not self.rests(s)}

    def take_back(self, segment_id: SegmentId, handle: Any, sizes: Sequence[int], slots: Sequence[int]) -> None:
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
            self._count(known, -1)
            known.counts += [0] * (len(sizes) - len(known.counts))
            known.sizes = tuple(sizes)
            known.move(handle, offsets, allocated)
            self._count(known, +1)
        self._recent[segment_id] = None
        self.hold(Reason.RESTORED, {segment_id: slots})
        self.epoch += 1

    # ---- moving to another shard ----------------------------------------------------------------------

    def segment_ids(self) -> list[SegmentId]:
        """List all segments."""
        return list(self._segments)

    def drains(self) -> list[Drain]:
        """List the drains under which copies came here."""
        return [holder for holder in self._held if isinstance(holder, Drain)]

    def resident(self) -> list[SegmentId]:
        """List those that are in memory, wholly or in part."""
        return [segment_id for segment_id, segment in self._segments.items() if segment.handle is not None]

    def moving(self, segment_id: SegmentId) -> MovedSegment:
        """Return all that is known of a segment, for another shard that takes it over."""
        s = self._segments[segment_id]
        holders = {holder: sorted(slots) for holder, slots in s.holders.items()}
        waiting = frozenset(h for h in s.holders if isinstance(h, ModelRef) and h in self._waiting)
        return MovedSegment(
            id=s.id,
            sizes=s.sizes,
            offsets=s.offsets,
            allocated=s.allocated,
            generation=s.generation,
            digests=s.digests,
            stored=s.stored,
            files=s.files,
            holders=holders,
            waiting=waiting,
        )

    def receive(self, moved: MovedSegment, handle: Any, holder: Drain | Save) -> None:
        """Take a copy of a segment into care, held by `holder` only; what is on disk of it is not in its care yet."""
        segment = Segment(moved.id, handle, moved.sizes, moved.offsets, moved.allocated)
        segment.generation = moved.generation + MOVED_ON
        self._add(segment)
        if handle is not None:
            self._recent[moved.id] = None
        self.hold(holder, {moved.id: [slot for slot, offset in enumerate(moved.offsets) if offset != GONE]})

    def inherit(self, moved: MovedSegment, drain: Drain) -> None:
        """Take a segment over, with its file and those who hold it; of what `receive` took, the memory stays."""
        if moved.id not in self._segments:
            offsets = tuple(ABSENT if offset != GONE else GONE for offset in moved.offsets)
            self.receive(replace(moved, offsets=offsets, allocated=0), None, drain)
        segment = self._segments[moved.id]
        self._count(segment, -1)
        segment.stored, segment.files = moved.stored, moved.files + MOVED_ON
        segment.digests = moved.digests
        self._count(segment, +1)
        for other, slots in moved.holders.items():
            self.hold(other, {moved.id: slots})
            if isinstance(other, ModelRef) and other not in moved.waiting:
                self.written(other)

    # ---- within ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Derive all counts anew and hold the kept ones against them.

        Raises:
            CorruptDataError: a segment's counts are not its holders', or a total is not the segments'.
        """
        for segment in self._segments.values():
            segment.check()
        kept = (self._tensors, self._live_bytes, self._allocated, self._file_bytes)
        self._tensors = self._live_bytes = self._allocated = self._file_bytes = 0
        for segment in self._segments.values():
            self._count(segment, +1)
        derived = (self._tensors, self._live_bytes, self._allocated, self._file_bytes)
        if derived != kept:
            raise CorruptDataError(f"shard {self.index}: expected totals {derived}; found {kept}")

    def _known(self, segment_id: SegmentId) -> Segment:
        segment = self._segments.get(segment_id)
        if segment is None and self.where(segment_id) != self.index:
            raise MovedError(f"shard {self.index}: segment {segment_id} is another shard's now", 0)
        if segment is None and self.unread:
            raise self._unfound(f"segment {segment_id}")
        if segment is None:
            raise ModelLostError(
                f"shard {self.index}: expected segment {segment_id}; it went with an earlier incarnation of this shard"
            )
        return segment

    def _unfound(self, what: str) -> StorageError | ModelLostError:
        """Make the error of what only a manifest that could not be read may tell of: if that is damaged, it is lost."""
        for ref, why in self.unread.items():
            if not isinstance(why, CorruptDataError):
                return StorageError(f"shard {self.index}: {what}: cannot be read now, as {ref} cannot: {why}")
        damaged = ", ".join(map(str, self.unread))
        return ModelLostError(f"shard {self.index}: expected {what}; if {damaged} told of it, they are damaged")

    def _add(self, segment: Segment) -> None:
        if segment.id in self._segments:
            raise CorruptDataError(f"shard {self.index}: expected a new segment id; {segment.id} is taken")
        self._segments[segment.id] = segment
        self._count(segment, +1)

    def _release(self, holders: list[Holder]) -> None:
        """Forget holders, and those that go with them: files, each of which may have been the last need of another."""
        while holders:
            holder = holders.pop()
            if isinstance(holder, ModelRef):
                self._cold.discard(holder)
                self._waiting.discard(holder)
                self._leaving.discard(holder)
            for segment_id in self._held.pop(holder, {}):
                segment = self._segments[segment_id]
                self._count(segment, -1)
                segment.release(holder)
                self._count(segment, +1)
                if segment.holders:
                    self._settle(segment)
                else:
                    self._drop(segment)
                    holders.append(FileOf(segment_id[1]))

    def _settle(self, segment: Segment) -> None:
        """See what becomes of a segment that lost a holder."""
        if segment.wants_compaction:
            self.compactable.add(segment.id)
        if segment.wants_rewriting and self.in_care(segment.id):
            self.rewritable.add(segment.id)
        self._evict_if_cold(segment)

    def _drop(self, segment: Segment) -> None:
        """Let a segment go that nobody holds. What its file holds is to be released next."""
        self._count(segment, -1)
        del self._segments[segment.id]
        self._recent.pop(segment.id, None)
        self.compactable.discard(segment.id)
        self.rewritable.discard(segment.id)
        if segment.handle is not None:
            self.freed.append(segment.handle)
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

    def _evict_if_cold(self, segment: Segment) -> None:
        if all(holder in self._cold or isinstance(holder, (FileOf, FileTaking)) for holder in segment.holders):
            self.evict(segment.id)

    def _count(self, segment: Segment, sign: int) -> None:
        self._tensors += sign * len(segment.live_slots)
        self._live_bytes += sign * segment.live_bytes if segment.handle is not None else 0
        self._allocated += sign * segment.allocated
        self._file_bytes += sign * (segment.stored.nbytes if segment.stored is not None else 0)


def _maker(segment_id: SegmentId) -> int:
    """Where no shard ever drained, a segment is where it was made."""
    return segment_id[0]
