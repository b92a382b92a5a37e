"""Where bytes are: what shards report, what they are ordered to keep, copy and free, and what is lost.

Rules (docs/design/catalog.md)
- *report first*, *compare*: a shard's first report is held against what is placed there (`store.catalog.comparing`).
- *free*: what became free is ordered away at once, but nothing before *grace* is over, nothing by comparison before all
  shards of the topology have reported, and nothing at all while a manifest is unread.
- *bringing*: what is missing may lie in a file that was never reported: the folder of segments is looked at first.
- Orders are queued with the lock held, in the section that decides why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...store.catalog.comparing import Compared, Spot, compared
from ...store.catalog.orders import Backups, Copy, Discard, Free, Inspect, Slots, Take, Yield
from ...store.catalog.placing import backups_of, keeper_of
from ...store.catalog.records import FileRecord, Lost, Placed, Record
from ...store.catalog.references import Freed, Known
from ...store.catalog.reports import Answered, Report, Staged, Whole
from ...store.errors import ShardUnavailableError
from ...store.holders import Request
from ...store.segments.segment import File, SegmentId
from ...store.versions.slots import segment_bytes
from ...store.waiting import Deadline
from .context import CatalogContext, Change
from .durable import DurableSaves
from .lines import Line, Lines

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""How long a new term waits for clients to renew before it frees anything."""
COPY_AGAIN_S = 15.0
"""When a copy that was ordered and not reported is ordered again."""
MOVED_BYTES = 16 << 20
"""Bytes that move at a time to balance memory; a shard with less gives nothing."""
RECORD_AT_ONCE = 1024
"""Segments in one record."""

_Change = tuple[int, tuple[int, ...], FileRecord | None]
"""Keeper, copies and file of a segment."""


class Placement:
    """Places segments of one term.

    Args:
        context: the catalog's.
        lines: to the shards.
        durable: saves that wait for files; reports of their files go there.
        posted: given the TCP address of a shard that reports, and None of one that has left.
        calm: this is the first term of a start, so no client has pins of earlier terms.
    """

    def __init__(
        self,
        context: CatalogContext,
        lines: Lines,
        durable: DurableSaves,
        posted: Callable[[int, tuple[str, int, str] | None], None],
        calm: bool,
    ) -> None:
        self._context = context
        self._state = context.state
        self._references = context.state.references
        self._lock = context.lock
        self._lines = lines
        self._durable = durable
        self._posted = posted
        self.bringing: set[SegmentId] = set()
        """Segments that a shard may still find on the path."""
        self._missing: set[SegmentId] = set()
        """Segments of which slots may be nowhere, and of which it was not decided yet what is lost."""
        self._unlooked: set[SegmentId] = set()
        """Those for which the path was not looked at yet."""
        self._withheld: list[Freed] = []
        """What became free, and is not ordered away yet."""
        self._grace = Deadline.after(GRACE_S)
        self._awaited: set[str] | None = None
        """Clients that shards know and that have not renewed in this term; None: not all shards have reported."""
        self._renewed: set[str] = set()
        """Clients whose pins are known."""
        self._calm = calm
        """*grace* is over."""
        self._suspects: set[str] = set()
        """Files that nothing needed at the last look."""
        self._copying: dict[tuple[int, SegmentId], float] = {}
        """(shard, segment) of copies that were ordered -> when to order them again."""
        self._moving: dict[SegmentId, tuple[int, int]] = {}
        """Segments that move to balance memory: from where, and to where."""
        self._moves_end = Deadline.after(0.0)
        """When moves that are not done are given up."""
        self.orphans = 0
        """Files that nothing needs, at the last look."""
        context.on_freed = self._freed

    # ---- reports --------------------------------------------------------------------------------------

    def report(self, report: Report) -> Answered:
        """Take a report.

        Raises:
            ShardUnavailableError: it is of another term or of an earlier incarnation, or the shard has left.
        """
        with self._lock:
            self._check_term(report.term)
            if report.shard not in self._context.topology.shards:
                raise ShardUnavailableError(f"shard {report.shard}: expected a shard of the repository; it has left")
            line = self._lines.get(report.shard)
            if line is not None and report.incarnation < line.incarnation:
                raise ShardUnavailableError(
                    f"shard {report.shard}: expected incarnation {line.incarnation}; found {report.incarnation}"
                )
            if line is None or report.incarnation > line.incarnation:
                if report.whole is None:
                    raise ShardUnavailableError(f"shard {report.shard}: expected its whole report first")
                line = self._take_whole(report, report.whole)
            elif not line.report_is_new(report):
                return self._answer(report, ())
            line.failing = report.failing
            line.allocated = report.allocated if report.allocated is not None else line.allocated
            refused = self._take_news(report)
            line.reported = report.serial
            answer = self._answer(report, refused)
        self._context.notifier.tell(Change.FILES)
        self._context.notifier.tell(Change.SHARDS)
        self._context.notifier.tell(Change.COPIES)
        return answer

    def _check_term(self, term: int) -> None:
        self._context.lease.check()
        if term != self._context.lease.number:
            raise ShardUnavailableError(f"catalog: expected term {self._context.lease.number}; found {term}")

    def _take_whole(self, report: Report, whole: Whole) -> Line:
        line = self._lines.open(report, whole)
        try:
            self._compare(report, whole, line)
        except BaseException:
            self._lines.close(report.shard)  # it reports again
            raise
        log.info(
            "catalog: shard %d, incarnation %d, has %d segments", report.shard, report.incarnation, len(whole.segments)
        )
        return line

    def _compare(self, report: Report, whole: Whole, line: Line) -> None:
        held = {**whole.sent, **whole.segments}
        found = compared(self._references, report.shard, held, self._keepers())
        self._decide_spots(found.spots)
        for segment, place in found.places.items():
            known = self._references.get(segment)
            if known is not None:
                known.place = place
        for shard, files in found.takes.items():
            self._lines.order(shard, Take(files))
        if found.yields:
            self._lines.order(report.shard, Yield(tuple(found.yields)))
        if found.inspects:
            self.bringing.update(found.inspects)
            self._lines.order(report.shard, Inspect(found.inspects))
        line.strangers = {s: slots for s, slots in found.strangers.items() if s not in whole.sent}
        self._note_missing(found)
        self._posted(report.shard, whole.address)
        self._reported()

    def _keepers(self) -> tuple[int, ...]:
        """Return the shards that may keep segments: those that stay, or all where none does."""
        topology = self._context.topology
        return topology.staying or topology.shards

    def _reported(self) -> None:
        """See what is possible when one more shard has reported."""
        if self._awaited is None and all(shard in self._lines for shard in self._context.topology.shards):
            known = {client for line in self._lines.all() for client in line.clients}
            self._awaited = known - self._renewed
        self._order_backups()
        self.settle()

    def _take_news(self, report: Report) -> Sequence[SegmentId]:
        refused: list[SegmentId] = []
        changes: dict[SegmentId, _Change] = {}
        for segment, file in report.stored.items():
            self.bringing.discard(segment)
            known = self._references.get(segment)
            if known is None:
                if not self._durable.stored(segment, file):
                    refused.append(segment)
                continue
            if known.keeper != report.shard or not self._bases_are_here(file):
                refused.append(segment)
                continue
            if known.file is None or file.generation >= known.file.generation:
                changes[segment] = known.keeper, known.copies, FileRecord.of(file)
        for segment, slots in report.copied.items():
            known = self._references.get(segment)
            if known is not None and report.shard not in known.copies and set(slots).issuperset(known.live()):
                _, copies, file = changes.get(segment, (known.keeper, known.copies, known.file))
                changes[segment] = known.keeper, (*copies, report.shard), file
        for segment, slots in report.lost.items():
            self.bringing.discard(segment)
            known = self._references.get(segment)
            if known is not None and known.keeper == report.shard and known.file is not None:
                file = known.file.file(segment)
                left = File(file.name, file.generation, file.nbytes, file.slots - set(slots), file.bases)
                changes[segment] = known.keeper, known.copies, FileRecord.of(left)
                self._missing.add(segment)
        for segment in report.failing:
            if segment in self.bringing and segment not in self._unlooked:
                self.bringing.discard(segment)
        self._decide(changes)
        self._after_files(report.stored)
        self._name_lost()
        for segment in report.copied:
            if segment not in self._references:
                self._lines.order(report.shard, Free({segment: tuple(report.copied[segment])}))
        return refused

    def _bases_are_here(self, file: File) -> bool:
        wanted: dict[SegmentId, list[int]] = {}
        for base, slot in file.bases.values():
            wanted.setdefault(base, []).append(slot)
        return all(self._references.has(base, slots) for base, slots in wanted.items())

    def _answer(self, report: Report, refused: Sequence[SegmentId]) -> Answered:
        settled: dict[Request, tuple[SegmentId, ...]] = {}
        for save, segments in report.kept.items():
            needed = tuple(segment for segment in segments if segment in self._references)
            if needed or self._state.answer(save) is not None or self._state.requests.is_over(save):
                settled[save] = needed
        return Answered(tuple(refused), settled)

    # ---- what is lost ---------------------------------------------------------------------------------

    def _note_missing(self, found: Compared) -> None:
        missing = [segment for segment in found.missing if segment not in found.inspects]
        if missing and self._context.archive is not None:
            self.bringing.update(missing)
            self._unlooked.update(missing)
        self._missing.update(found.missing)
        self._name_lost()

    def look_for_missing(self) -> None:
        """Look on the path for files of segments that are missing, and order those that are there to be inspected.

        Call it without the lock.

        Raises:
            StorageError: the path cannot be listed; this is to be done again.
        """
        archive = self._context.archive
        with self._lock:
            unlooked = set(self._unlooked)
        if not unlooked or archive is None:
            return
        files = archive.segments()
        if not unlooked <= files.keys():
            archive.check_there()
            files = archive.segments()
        with self._lock:
            orders: dict[int, dict[SegmentId, str]] = {}
            for segment in unlooked:
                self._unlooked.discard(segment)
                known = self._references.get(segment)
                if segment not in files or known is None:
                    self.bringing.discard(segment)
                    continue
                orders.setdefault(known.keeper, {})[segment] = files[segment][0].name
            for shard, names in orders.items():
                if not self._lines.order(shard, Inspect(names)):
                    self._unlooked.update(names)  # when it has reported
            self._name_lost()
        self._context.notifier.tell(Change.FILES)

    def _name_lost(self) -> None:
        missing = self._missing - self.bringing
        self._missing &= self.bringing
        if not missing:
            return
        for record in self._context.decide(lambda: self._state.decide_lost(missing)):
            refs = [f"{name}@{version}" for name, version in record.refs] if isinstance(record, Lost) else []
            log.warning(
                "catalog: %d versions are lost: %s%s; save them again",
                len(refs),
                ", ".join(refs[:10]),
                ", ..." * (len(refs) > 10),
            )

    # ---- freeing --------------------------------------------------------------------------------------

    def renewed(self, client: str) -> None:
        """Note that all pins of a client are known in this term, or that it has ended. Call it with the lock held."""
        if not self._calm:
            self._renewed.add(client)
        if self._awaited is not None and client in self._awaited:
            self._awaited.discard(client)
            self.settle()

    @property
    def may_free(self) -> bool:
        """Whether versions' tensors may be freed now: the pins of all clients are known."""
        if not self._calm and (self._awaited == set() or self._grace.passed):
            self._calm = True
        return self._calm

    def settle(self) -> None:
        """Free what may be freed now."""
        with self._lock:
            if not self.may_free or not self._context.lease.holds:
                return
            self._context.decide(self._state.decide_free)
            if self._context.archive is not None and self._state.is_blind:
                return
            withheld, self._withheld = self._withheld, []
            self._order_free(withheld)
            if self._awaited is not None:
                for line in self._lines.all():
                    self._free_strangers(line)

    def _freed(self, freed: list[Freed]) -> None:
        if self.may_free and not (self._context.archive is not None and self._state.is_blind):
            self._order_free(freed)
        else:
            self._withheld += freed

    def _order_free(self, freed: Iterable[Freed]) -> None:
        orders: dict[int, dict[SegmentId, tuple[int, ...]]] = {}
        for one in freed:
            known = self._references.get(one.segment)
            slots = tuple(slot for slot in one.slots if known is None or not _is_used(known, slot))
            for shard in one.shards if slots else ():
                orders.setdefault(shard, {})[one.segment] = slots
        for shard, slots_of in orders.items():
            self._lines.order(shard, Free(slots_of))

    def _free_strangers(self, line: Line) -> None:
        strangers, line.strangers = line.strangers, {}
        unused: dict[SegmentId, tuple[int, ...]] = {}
        for segment, slots in strangers.items():
            known = self._references.get(segment)
            left = tuple(slot for slot in slots if known is None or not _is_used(known, slot))
            if left:
                unused[segment] = left
        if unused:
            log.info("catalog: shard %d has %d segments that nothing refers to", line.shard, len(unused))
            self._lines.order(line.shard, Free(unused))

    def brought_again(self, shard: int, staged: Mapping[SegmentId, Staged]) -> None:
        """Free what a shard has for a commit that is repeated, unless it is placed there: an earlier process had it.

        Call it with the lock held.
        """
        slots: dict[SegmentId, tuple[int, ...]] = {}
        for segment, one in staged.items():
            known = self._references.get(segment)
            if known is None or shard not in (known.keeper, *known.copies):
                slots[segment] = tuple(range(one.slots))
        if slots:
            self._lines.order(shard, Yield(tuple(slots)), Free(slots))

    # ---- copies ---------------------------------------------------------------------------------------

    def _order_backups(self) -> None:
        replicas = self._context.topology.replicas
        nodes = {shard: node for shard, node in self._lines.nodes.items() if shard in self._context.topology.staying}
        for line in self._lines.all() if replicas > 1 else ():
            self._lines.order(line.shard, Backups(backups_of(line.shard, nodes, replicas - 1)))
        if replicas > 1:
            self._copy_more(self._references.items())

    def _copy_more(self, segments: Iterable[tuple[SegmentId, Known]]) -> list[SegmentId]:
        """Have copies made of segments that have too few, and return these.

        There are to be `replicas` copies on as many nodes; where there are fewer nodes, some share one.
        """
        replicas = self._context.topology.replicas
        staying = {s: node for s, node in self._lines.nodes.items() if s in self._context.topology.staying}
        wanted: dict[tuple[int, int], dict[SegmentId, tuple[int, ...]]] = {}
        lacking: list[SegmentId] = []
        for segment, known in segments:
            sources = [shard for shard in known.copies if shard in self._lines]
            if not sources or known.is_safe():
                continue
            nodes = {self._lines.nodes[shard] for shard in sources}
            more = max(
                min(replicas, len({*staying.values(), *nodes})) - len(nodes),
                min(replicas, len({*staying, *sources})) - len(sources),
            )
            if more <= 0:
                continue
            lacking.append(segment)
            targets = sorted(
                (s for s in staying if s not in sources), key=lambda s: (staying[s] in nodes, s < sources[0], s)
            )
            for target in targets[:more]:
                wanted.setdefault((target, sources[0]), {})[segment] = tuple(known.live())
        for (target, source), slots in wanted.items():
            self._order_copies(target, source, slots)
        return lacking

    def lacking(self, segments: Iterable[SegmentId]) -> list[SegmentId]:
        """Return those of some segments that have too few copies; more are ordered. Call it with the lock held."""
        if self._context.topology.replicas == 1:
            return []
        found = ((segment, self._references.get(segment)) for segment in segments)
        return self._copy_more([(segment, known) for segment, known in found if known is not None])

    def silent(self, segments: Iterable[SegmentId]) -> list[int]:
        """Return the silent shards that alone have some of these segments. Call it with the lock held."""
        found = (self._references.get(segment) for segment in segments)
        places = [known.copies for known in found if known is not None and known.file is None]
        return sorted({shard for shards in places if self._lines.all_silent(shards) for shard in shards})

    def _after_files(self, stored: Mapping[SegmentId, File]) -> None:
        """Free copies of what is in files now."""
        changes: dict[SegmentId, _Change] = {}
        orders: dict[int, dict[SegmentId, tuple[int, ...]]] = {}
        for segment in stored:
            known = self._references.get(segment)
            if known is None or len(known.copies) < 2 or not known.is_safe():
                continue
            for shard in known.copies:
                if shard != known.keeper:
                    orders.setdefault(shard, {})[segment] = tuple(range(len(known.counts)))
            changes[segment] = known.keeper, tuple(s for s in known.copies if s == known.keeper), known.file
        self._decide(changes)
        for shard, slots in orders.items():
            self._lines.order(shard, Free(slots))

    def give_files(self) -> None:
        """Have keepers know of files that they do not know of: those of manifests that were read late."""
        with self._lock:
            takes: dict[int, dict[SegmentId, File | None]] = {}
            for segment, known in self._references.items():
                if known.file is not None and not known.copies:
                    takes.setdefault(known.keeper, {})[segment] = known.file.file(segment).cut(set(known.live()))
            for shard, files in takes.items():
                self._lines.order(shard, Take(files))

    def missing_copies(self) -> int:
        """Count the segments that have too few copies. Call it with the lock held."""
        return len(self._copy_more(self._references.items())) if self._context.topology.replicas > 1 else 0

    # ---- drains ---------------------------------------------------------------------------------------

    def drain(self, shard: int) -> int:
        """Have others take what a shard has; return how many segments are placed there still.

        Call it with the lock held, again and again until that is 0.
        """
        others = [other for other in self._context.topology.staying if other in self._lines and other != shard]
        changes: dict[SegmentId, _Change] = {}
        takes: dict[int, dict[SegmentId, File | None]] = {}
        copies: dict[int, dict[SegmentId, tuple[int, ...]]] = {}
        left: dict[SegmentId, tuple[int, ...]] = {}
        count = 0
        for segment, known in self._references.items():
            if known.keeper != shard and shard not in known.copies:
                continue
            count += 1
            elsewhere = tuple(other for other in known.copies if other != shard and other in others)
            if not elsewhere and not known.is_safe():
                target = keeper_of(segment, others) if others else shard
                if target != shard and shard in known.copies:
                    copies.setdefault(target, {})[segment] = tuple(known.live())
                    continue
                if shard in known.copies:
                    continue
            keeper = (
                known.keeper if known.keeper != shard else (elsewhere[0] if elsewhere else keeper_of(segment, others))
            )
            changes[segment] = keeper, tuple(other for other in known.copies if other != shard), known.file
            if keeper != known.keeper:
                file = known.file.file(segment) if known.file is not None else None
                takes.setdefault(keeper, {})[segment] = file
            left[segment] = tuple(range(len(known.counts)))
        self._decide(changes)
        if left:
            self._lines.order(shard, Yield(tuple(left)), Free(left))
        for other, files in takes.items():
            self._lines.order(other, Take(files))
        for target, slots in copies.items():
            self._order_copies(target, shard, slots)
        return count - len(changes)

    def _order_copies(self, target: int, source: int, slots: Slots) -> None:
        """Order copies that are not ordered already."""
        line = self._lines.get(target)
        ordered = {
            s for order in (line.orders if line is not None else ()) if isinstance(order, Copy) for s in order.slots
        }
        now = time.monotonic()
        new = {s: one for s, one in slots.items() if s not in ordered and self._copying.get((target, s), 0.0) < now}
        if new:
            self._copying.update(dict.fromkeys(((target, s) for s in new), now + COPY_AGAIN_S))
            self._lines.order(target, Copy(source, new))

    def balance(self) -> None:
        """Move segments to a shard that has less than half of the mean in memory, from the one that has most.

        A few at a time: the next look goes on. Segments of which there is more than one copy stay, and so do those in
        files, which leave the memory by themselves. Call it without the lock.
        """
        with self._lock:
            self._finish_moves()
            lines = [line for line in self._lines.all() if line.shard in self._context.topology.staying]
            if self._moving or len(lines) < 2 or not self.may_free or not self._context.lease.holds:
                return
            least, most = min(lines, key=_allocated), max(lines, key=_allocated)
            mean = sum(map(_allocated, lines)) / len(lines)
            if least.allocated >= mean / 2 or most.allocated < MOVED_BYTES:
                return
            there = [
                (segment, known)
                for segment, known in self._references.items()
                if known.copies == (most.shard,) and known.keeper == most.shard and known.file is None
            ]
            if not there:
                return
            wanted = min((most.allocated - least.allocated) // 2, MOVED_BYTES)
            count = max(1, wanted * len(there) // max(most.allocated, 1))
            self._moving = {segment: (most.shard, least.shard) for segment, _ in there[:count]}
            slots = {segment: tuple(known.live()) for segment, known in there[:count]}
            self._order_copies(least.shard, most.shard, slots)
            self._moves_end = Deadline.after(COPY_AGAIN_S)

    def _finish_moves(self) -> None:
        """Let the targets of moves keep what they have by now, and free it where it was."""
        changes: dict[SegmentId, _Change] = {}
        takes: dict[int, dict[SegmentId, File | None]] = {}
        frees: dict[int, dict[SegmentId, tuple[int, ...]]] = {}
        for segment, (source, target) in list(self._moving.items()):
            known = self._references.get(segment)
            if known is None or known.keeper != source or self._moves_end.passed:
                del self._moving[segment]
            elif target in known.copies:
                del self._moving[segment]
                file = known.file.file(segment) if known.file is not None else None
                changes[segment] = target, tuple(shard for shard in known.copies if shard != source), known.file
                takes.setdefault(target, {})[segment] = file
                frees.setdefault(source, {})[segment] = tuple(range(len(known.counts)))
        self._decide(changes)
        for source, slots in frees.items():
            self._lines.order(source, Yield(tuple(slots)), Free(slots))
        for target, files in takes.items():
            self._lines.order(target, Take(files))

    def gone(self, shard: int) -> None:
        """Note that a shard is no more: what was only there is missing. Call it with the lock held."""
        self._lines.close(shard)
        self._posted(shard, None)
        found = compared(self._references, shard, {}, self._keepers())
        self._decide_spots(found.spots)
        for other, files in found.takes.items():
            self._lines.order(other, Take(files))
        self._note_missing(found)
        self._reported()

    # ---- files that nothing needs ---------------------------------------------------------------------

    def look_for_orphans(self) -> None:
        """Find files that nothing needs, and order those away that were so at the last look. Without the lock.

        Raises:
            StorageError: the path cannot be listed.
        """
        archive = self._context.archive
        if archive is None or self._awaited is None or not self.may_free:
            return
        files = archive.segments()
        with self._lock:
            if self._state.is_blind or self.bringing:
                self._suspects = set()
                return
            found: dict[str, int] = {}
            for segment, listed in files.items():
                known = self._references.get(segment)
                for file in listed:
                    current = known is not None and known.file is not None and known.file.generation <= file.generation
                    new = known is not None and known.file is None
                    if not current and not new and not self._durable.needs(segment):
                        found[file.name] = file.generation
            again = [name for name in found if name in self._suspects]
            self._suspects, self.orphans = set(found), len(found)
            orders: dict[int, list[str]] = {}
            alive = [line.shard for line in self._lines.all()]
            for name in again:
                writer = found[name] & 0xFFFF
                orders.setdefault(writer if writer in alive else alive[0], []).append(name)
            for shard, names in orders.items():
                self._lines.order(shard, Discard(tuple(names)))
                log.warning("catalog: %d unused files are deleted: %s", len(names), sorted(names)[:10])

    # ---- within ---------------------------------------------------------------------------------------

    def _decide_spots(self, spots: Mapping[SegmentId, Spot]) -> None:
        changes: dict[SegmentId, _Change] = {}
        for segment, (keeper, copies) in spots.items():
            known = self._references.get(segment)
            if known is not None:
                changes[segment] = keeper, copies, known.file
        self._decide(changes)

    def _decide(self, changes: Mapping[SegmentId, _Change]) -> None:
        """Decide on where segments are."""
        rows = [(segment, change) for segment, change in changes.items() if segment in self._references]
        for start in range(0, len(rows), RECORD_AT_ONCE):
            some = rows[start : start + RECORD_AT_ONCE]
            self._context.decide(lambda some=some: [self._placed(some)])

    def _placed(self, rows: Sequence[tuple[SegmentId, _Change]]) -> Record:
        found: list[tuple[bytes, int, int, tuple[int, ...], FileRecord | None]] = []
        for segment, (keeper, copies, file) in rows:
            known = self._references.get(segment)
            slots = len(known.counts) if known is not None else 0
            found.append((segment_bytes(segment), slots, keeper, copies, file))
        return Placed(tuple(found))


def _allocated(line: Line) -> int:
    return line.allocated


def _is_used(known: Known, slot: int) -> bool:
    return slot < len(known.counts) and known.counts[slot] > 0
