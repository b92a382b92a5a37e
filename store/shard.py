"""A shard's rules as a pure state machine: segments, requests, orders, reports. No engine, no clock.

Rules
- Who refers to a segment is the catalog's affair. A shard keeps committed slots until an order frees them.
- Orders of a term are applied in sequence, once each (`ordered`). What an order leaves to be done outside is put into
  `to_copy`, `to_inspect`, `to_discard`; the shell takes it after each call, as it takes what `SegmentTable` leaves.
- What the catalog must hear of is gathered until the next report (`report`), and is dropped when that was answered.
- What a save staged is dropped with it, except while its proposal is on its way (`sent`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from .catalog.orders import (
    Backups,
    Cool,
    Copy,
    Discard,
    Drain,
    Ended,
    Free,
    Inspect,
    Leave,
    Order,
    Slots,
    Take,
    Yield,
)
from .catalog.reports import Answered, Held, Place, Report, Whole
from .counting import Counted
from .errors import ShardUnavailableError
from .holders import Request
from .requests import Requests
from .segments.arena import Part
from .segments.segment import File, Holds, Segment, SegmentId
from .segments.table import SegmentTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """Statistics of one shard: memory, disk use and load. `RepositoryStats.shards` has one such object per shard."""

    shard: int
    """Number of the shard, as in `Repository.shards`."""
    tensors: int
    """Number of tensors stored by this shard, in memory or on disk. A tensor shared by several versions counts once."""
    bytes_memory: int
    """Size of the tensors in memory, in bytes, without padding."""
    bytes_allocated: int
    """Memory allocated for tensors, in bytes, including padding and deleted tensors whose memory is not freed yet."""
    bytes_disk: int
    """Size of this shard's segment files on the repository's path, in bytes."""
    bytes_staged: int = 0
    """Memory allocated for operations in progress, in bytes: saves, loads from the path, copies between shards, and
    compactions. Includes the memory reserved by clients for their next saves."""
    bytes_resident: int = 0
    """Size of the part of the shard's shared memory that is in physical memory (resident pages), in bytes."""
    bytes_unwritten: int = 0
    """Size of the tensors that the background writer has not written yet, in bytes."""
    capacity: int = 0
    """Maximum memory for tensors, in bytes. Set by the argument `store_bytes` of `Repository.start`."""
    requests: int = 0
    """Number of requests received since the shard started: saves, loads and prefix queries."""
    bytes_saved: int = 0
    """Bytes of tensors saved into this shard since the shard started."""
    bytes_sent: int = 0
    """Bytes of tensors sent to readers and other shards since the shard started. Tensors that readers map from the
    shard's memory do not count. A copy in the engine's object store counts once, however many readers it has."""
    patches_made: int = 0
    """Number of patches computed since the shard started. Several readers with the same base share a patch."""
    bytes_patches: int = 0
    """Size of the patches that the shard keeps for further readers, in bytes."""
    bytes_replicated: int = 0
    """Memory used by replicas of other shards' tensors, in bytes, including padding."""
    waiting_for_memory: int = 0
    """Number of requests waiting for memory: saves, loads from the path, and replicas of other shards."""
    waiting_for_disk: int = 0
    """Number of saves waiting because the background writer's queue is full. The queue is full if it contains 1,024
    versions, or if its size exceeds `lag_bytes` (see `Repository.start`)."""
    counted: Counted = field(default_factory=dict[str, list[float]], repr=False)
    """Counters and histograms since the shard started, as `tensorvine metrics` exports them."""


@dataclass(slots=True)
class _News:
    """What the catalog has not heard of yet."""

    stored: dict[SegmentId, File] = field(default_factory=dict[SegmentId, File])
    copied: dict[SegmentId, tuple[int, ...]] = field(default_factory=dict[SegmentId, "tuple[int, ...]"])
    lost: dict[SegmentId, tuple[int, ...]] = field(default_factory=dict[SegmentId, "tuple[int, ...]"])
    kept: dict[Request, tuple[SegmentId, ...]] = field(default_factory=dict[Request, "tuple[SegmentId, ...]"])
    failing: bool = False
    """`failing` has changed."""


class ShardState(SegmentTable):
    """All that one shard knows.

    Args:
        index: this shard's number.
        incarnation: counts the processes of the shard, from 1.
        session_s: seconds that a client's session lasts without being renewed.

    >>> state = ShardState(0, 1)
    >>> save, segment = Request("client", 1), (0, 1)
    >>> state.stage(save, segment, b"abcd", [4])
    >>> state.commit(save, {segment: [0]})
    >>> state.begin_term(7, b"token")
    >>> state.ordered(1, [Free({segment: (0,)})])
    1
    >>> state.segment(segment) is None
    True
    """

    def __init__(self, index: int, incarnation: int, session_s: float = 60.0) -> None:
        super().__init__(index, incarnation)
        self.requests = Requests(session_s)
        self.term = 0
        """Of the catalog that orders."""
        self.token = b""
        self.backups: tuple[int, ...] = ()
        """Shards that get copies of each save first."""
        self.draining = False
        self.left = False
        """It was ordered to leave."""
        self.sent: set[Request] = set()
        """Saves whose proposals are on their way: what they staged stays, whatever becomes of their clients."""
        self.failing: dict[SegmentId, str] = {}
        """Segments whose files cannot be written or read just now -> why."""
        self.to_copy: list[Copy] = []
        self.to_inspect: dict[SegmentId, str] = {}
        self.to_discard: list[str] = []
        self.clients_ended: list[str] = []
        """Clients that the catalog says have ended."""
        self.known_files: dict[SegmentId, File] = {}
        """Files that this shard is to keep and has not opened yet: their rows say how long their tensors are."""
        self._applied = 0
        """Serial number of the last order of this term."""
        self._reported = 0
        """Serial number of the last report that was answered."""
        self._news = _News()
        self._reporting: _News | None = None
        """What the report on its way says."""
        self._given: dict[SegmentId, File] = {}
        """Files in that report of segments that another shard keeps since: the catalog may have taken them."""
        self._copies: dict[Request, dict[SegmentId, None]] = {}
        """Copies that other shards sent for saves whose commits were not heard of."""

    # ---- terms and orders -----------------------------------------------------------------------------

    def begin_term(self, term: int, token: bytes) -> None:
        """Go by a new term of the catalog, or go on by the present one.

        Raises:
            ShardUnavailableError: the term is over, or another token has it; nothing changes.
        """
        if (term, token) == (self.term, self.token):
            return
        if term <= self.term:
            raise ShardUnavailableError(
                f"shard {self.index}: expected a catalog of term {self.term}, or a later one; found another of {term}"
            )
        self.term, self.token = term, token
        self._applied = self._reported = 0
        unheard, self._reporting = self._reporting, None
        self._given.clear()  # if no journal has them, they are found as files without a segment
        for segment_id, slots in unheard.lost.items() if unheard is not None else ():
            self.note_lost(segment_id, slots)  # all else the first report says again

    def ordered(self, first: int, orders: Sequence[Order]) -> int:
        """Apply orders of the present term, those that were not applied yet; return the number of the last one."""
        for serial, order in enumerate(orders, first):
            if serial == self._applied + 1:
                self._apply(order)
                self._applied = serial
        return self._applied

    def _apply(self, order: Order) -> None:
        match order:
            case Free(slots):
                self._end(slots)
            case Cool(segments):
                for segment in segments:
                    self.residents.cool(segment)
            case Take(files):
                for segment, file in files.items():
                    self._take(segment, file)
            case Yield(segments):
                for segment in segments:
                    self._yield(segment)
            case Inspect(files):
                self.to_inspect |= files
            case Copy():
                self.to_copy.append(order)
            case Discard(files):
                writing = {file.name for file in self.offered().values()} | {
                    segment.file.name for segment in self.segments() if segment.file is not None and segment.keeper
                }
                self.to_discard += [name for name in files if name not in writing]
            case Backups(shards):
                self.backups = shards
            case Drain():
                self.draining = True
            case Leave():
                self.left = True
            case Ended(clients):
                self.clients_ended += clients

    def _end(self, slots: Slots) -> None:
        self.free(slots)
        for segment in slots:
            file = self.known_files.get(segment)
            if file is None:
                continue
            left = file.slots - set(slots[segment])
            if left:
                self.known_files[segment] = file.cut(left)
            else:
                self.dead_files.append(self.known_files.pop(segment).name)

    def _take(self, segment_id: SegmentId, file: File | None) -> None:
        segment = self.segment(segment_id)
        if segment is None:
            if file is not None:
                self.known_files[segment_id] = file
            return
        self.totals.count(segment, -1)
        segment.keeper = True
        if file is not None and segment.file is None:
            segment.file, segment.labels = file, ()
            segment.files = max(segment.files, self._generation_after(file.generation))
        elif file is not None and segment.file is not None and segment.file.name == file.name:
            segment.has_more(file)
            self._note_lacking(segment_id, file.slots - segment.file.slots)
        self.totals.count(segment, +1)
        self._note_writable(segment)
        self.residents.evict_if_cold(segment)

    def _yield(self, segment_id: SegmentId) -> None:
        self.known_files.pop(segment_id, None)
        reported = self._reporting.stored.get(segment_id) if self._reporting is not None else None
        if reported is not None and self._offered.get(segment_id) == reported:
            self._given[segment_id] = self._offered.pop(segment_id)
        else:
            self.refuse(segment_id)
        segment = self.segment(segment_id)
        if segment is None:
            return
        self.totals.count(segment, -1)
        segment.keeper, gone = False, segment.absent(segment.live)
        segment.file = None
        self.totals.count(segment, +1)
        if gone:  # they are in the file, which is another shard's now
            self.free({segment_id: gone})

    def found(self, segment_id: SegmentId, sizes: Sequence[int], file: File) -> None:
        """Take a file that an order had inspected, and have the next report say so.

        Args:
            segment_id: whose file it is.
            sizes: bytes of all slots; 0 of those that the file lacks.
            file: what is in it.
        """
        if self.segment(segment_id) is None:
            self.recover(segment_id, sizes, file)
        self._news.stored[segment_id] = file

    def open_known(self, segment_id: SegmentId, sizes: Sequence[int], rows: Set[int]) -> None:
        """Make a segment of a file that the catalog gave, now that its rows were read. What it lacks is reported lost.

        Args:
            segment_id: in `known_files`; else nothing happens.
            sizes: bytes of all slots; 0 of those that the file lacks.
            rows: slots that the file has.
        """
        file = self.known_files.pop(segment_id, None)
        if file is None or self.segment(segment_id) is not None:
            return
        self._note_lacking(segment_id, file.slots - rows)
        if file.slots & rows:
            self.recover(segment_id, sizes, file.cut(rows))

    # ---- saves ----------------------------------------------------------------------------------------

    def commit(self, save: Request, live: Holds) -> None:
        """Make a save's segments committed; see `SegmentTable.commit`."""
        super().commit(save, live)
        self.sent.discard(save)

    def end(self, save: Request) -> bool:
        """End a save: what it staged goes; False: its proposal is on its way, and it goes when that is answered."""
        self.requests.end(save)
        if save in self.sent:
            return False
        self.drop(save)
        return True

    def sweep_saves(self) -> None:
        """Drop what saves that are over have staged."""
        for save in self.requests.over(self.saves()):
            if save not in self.sent:
                self.drop(save)

    # ---- copies ---------------------------------------------------------------------------------------

    def kept_for(self, save: Request, segment_id: SegmentId) -> None:
        """Note that a copy belongs to a save whose commit was not heard of."""
        self._copies.setdefault(save, {})[segment_id] = None

    def unconfirmed(self) -> dict[Request, tuple[SegmentId, ...]]:
        """Return the copies whose saves the catalog has not said anything about."""
        return {save: tuple(segments) for save, segments in self._copies.items()}

    def drop_copies(self, save: Request, needed: Iterable[SegmentId] = ()) -> None:
        """Drop the copies that came for a save, but for those that its version needs."""
        copies = self._copies.pop(save, {})
        for segment_id in copies.keys() - set(needed):
            segment = self.segment(segment_id)
            if segment is not None:
                self.free({segment_id: list(segment.live)})
        kept = {segment_id: None for segment_id in needed if segment_id in copies}
        if kept:
            self._copies[save] = kept

    # ---- reports --------------------------------------------------------------------------------------

    def offer(self, segment_id: SegmentId, file: File) -> bool:
        """Note a new file that is to be reported; see `SegmentTable.offer`."""
        offered = super().offer(segment_id, file)
        if offered:
            self._news.stored[segment_id] = file
            self.failing.pop(segment_id, None)
        return offered

    def note_copied(self, segment_id: SegmentId, slots: Iterable[int]) -> None:
        """Have the next report say that slots are here, as an order had them copied."""
        self._news.copied[segment_id] = tuple(sorted(slots))

    def note_lost(self, segment_id: SegmentId, slots: Iterable[int]) -> None:
        """Have the next report say that slots cannot be read and never will be; none: of a file that was inspected."""
        self._news.lost[segment_id] = tuple(sorted({*self._news.lost.get(segment_id, ()), *slots}))

    def _note_lacking(self, segment_id: SegmentId, slots: Set[int]) -> None:
        if slots:
            self.note_lost(segment_id, slots)

    def note_failing(self, segment_id: SegmentId, why: str | None) -> None:
        """Have the next report say why a file cannot be written or read just now; None: it can be."""
        if self.failing.get(segment_id) != why:
            self._news.failing = True
            if why is None:
                self.failing.pop(segment_id, None)
            else:
                self.failing[segment_id] = why

    def ask_about_copies(self) -> None:
        """Have the next report ask what became of the saves that copies came for."""
        self._news.kept = self.unconfirmed()

    @property
    def has_news(self) -> bool:
        """Whether a report is due: the first one of a term, one that was not answered, or one with news."""
        news = self._news
        return bool(
            (self.term and not self._reported)
            or self._reporting
            or news.stored
            or news.copied
            or news.lost
            or news.kept
            or news.failing
        )

    @property
    def has_reported(self) -> bool:
        """Whether the whole was reported to the present term, and answered: only then may it be sent proposals."""
        return self._reported > 0

    def report(self, node: str, address: tuple[str, int, str] | None, capacity: int) -> Report:
        """Make the next report. One that was not answered is made again: what came meanwhile goes with the one after.

        The first of a term is the whole: it says again what an earlier term may not have heard.
        """
        serial = self._reported + 1
        if self._reporting is None:
            self._reporting, self._news = self._news, _News()
            if serial == 1:
                self._reporting.stored = self.offered()
                self._reporting.kept = self.unconfirmed()
        news = self._reporting
        return Report(
            shard=self.index,
            incarnation=self.incarnation,
            term=self.term,
            serial=serial,
            whole=self._whole(node, address, capacity) if serial == 1 else None,
            stored=dict(news.stored),
            copied=dict(news.copied),
            lost=dict(news.lost),
            failing=dict(self.failing),
            kept=dict(news.kept),
            allocated=self.totals.allocated,
        )

    def answered(self, report: Report, answer: Answered) -> None:
        """Take the answer to a report; one of an earlier term, or that was answered before, says nothing."""
        if report.term != self.term or report.serial != self._reported + 1:
            return
        self._reported += 1
        self._reporting = None
        offered = self.offered()
        for segment_id, file in report.stored.items():
            if self._given.get(segment_id) == file:
                del self._given[segment_id]
                self.dead_files += [file.name] if segment_id in answer.refused else []
                continue
            if offered.get(segment_id) != file:  # it was inspected, or another one was written since
                segment = self.segment(segment_id)
                if segment_id in answer.refused and segment is not None and segment.file == file:
                    self.free({segment_id: list(segment.live)})
                continue
            if segment_id in answer.refused:
                self.refuse(segment_id)
            else:
                self.accept(segment_id)
        for save, needed in answer.settled.items():
            self.drop_copies(save, needed)
            self._copies.pop(save, None)

    def _whole(self, node: str, address: tuple[str, int, str] | None, capacity: int) -> Whole:
        held = {segment.id: _held(segment, self.index) for segment in self.segments() if segment.save is None}
        sent = {s: _held(segment, self.index) for save in self.sent for s, segment in self.staged(save).items()}
        for segment, file in self.known_files.items():
            held.setdefault(segment, Held(tuple(sorted(file.slots)), False, generation=file.generation))
        return Whole(
            node=node,
            address=address,
            capacity=capacity,
            allocated=self.totals.allocated,
            segments=held,
            sent=sent,
            clients=tuple(self.requests.clients()),
            draining=self.draining,
        )


def _held(segment: Segment, shard: int) -> Held:
    in_memory = segment.handle is not None and not segment.absent(segment.live)
    generation = segment.file.generation if segment.file is not None else None
    return Held(tuple(segment.live_slots), in_memory, place_of(segment, shard), segment.keeper, generation)


def place_of(segment: Segment, shard: int) -> Place | None:
    """Return where a segment lies in shared memory; None: not there.

    A segment of few bytes has its place in the heap: readers ask for it.
    """
    part = segment.handle
    if not isinstance(part, Part):
        return None
    offsets = tuple(offset if isinstance(offset, int) else -1 for offset in segment.offsets)
    return Place(shard, part.offset, part.length, segment.generation, offsets)
