"""Keeping a shard's memory on other nodes as well: what `replicas=2` means.

Rules
- Each shard has `replicas - 1` buddies (`planner.buddies`), which keep a mirror of it on their shelves: the segments
  that its memory alone has, and the records of the versions whose home it is. With a path that is what a restart would
  not find there: a segment is let go when its file has it and manifests name all that versions need of it.
- A commit waits until the buddies of every shard concerned have it. What goes is told behind, and asked for nowhere.
- A buddy that fell behind, because it died or did not answer, is told everything again; commits wait meanwhile, reads
  do not. So is a new one: one that came to be on this shard's node is changed for one that is not, if there is one.
- One thread tells the buddies; only commits' own copies go past it, and only to buddies that are not behind.
- The ledger says what was retired last: a mirror that has not heard of it does not bring it back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Set
from typing import TypeVar

from ....store.errors import ModelLostError, OperationTimeoutError, ShardUnavailableError, TensorVineError
from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.versions.mirror import Kept
from ....store.waiting import Deadline
from ...rpc.calls import Request
from ..calls import ShardCalls
from ..calls.copies import Original
from ..calls.replicas import Opened, ReplicaOf
from ..context import Change, ShardContext
from ..copying import batches, original_of
from ..disk.history import History
from ..ticker import Ticker
from .buddies import Buddies, Link
from .restore import Restored

log = logging.getLogger(__name__)

TICK_S = 0.5
MARK_S = 1.0
"""How often a buddy is asked whether it is still there."""
CALL_S = 10.0
PUT_S = 120.0
PUT_BYTES = 256 << 20
"""What the thread tells a buddy in one message, at most."""
PUT_RECORDS = 4096
_R = TypeVar("_R")


class Mirrors:
    """The mirrors of one shard, as it sees them.

    Args:
        context: the shard's.
        restored: what came back from an earlier life, and the number of this one.
        history: knows which versions are on disk, if there is one.
    """

    def __init__(self, context: ShardContext, restored: Restored, history: History | None) -> None:
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._holdings = context.holdings
        self._peers = context.peers
        self._notifier = context.notifier
        self._wire = context.wire
        self._life = restored.life
        self._history = history
        self._buddies = Buddies(context)
        self._buddies.former |= restored.mirrors
        self._unheard = restored.unheard
        """Shards that may have heard of a later life than this one, which has ended nevertheless."""
        self._accepted = False
        """A buddy goes by this life."""
        self._stamps = 0
        self._ticker = Ticker("mirror", self._index, lambda: TICK_S, self._tick)

    @property
    def behind(self) -> int:
        """How many mirrors are missing, or not told all yet. Call it with the lock held."""
        return self._buddies.behind

    def news(self) -> None:
        """Something went or came other than by a commit: have the buddies told soon."""
        self._ticker.soon()

    # ---- commits ----------------------------------------------------------------------------------------

    async def secure(
        self, segments: Collection[SegmentId], records: Mapping[ModelRef, Kept], deadline: Deadline
    ) -> None:
        """Wait until all buddies have these, which must be held here.

        Raises:
            ShardUnavailableError: a buddy did not take them until `deadline`.
            StoreFullError: a buddy has no room.
        """
        done: set[Link] = set()

        def look() -> list[Link] | None:
            if self._ready():
                return [link for link in self._buddies.links if link not in done]
            self._ticker.soon()
            return None

        while True:
            left = await self._notifier.until(Change.REPLICAS, look, deadline)
            if left is None:
                raise self._late()
            if not left:
                return
            answers = await asyncio.gather(*(self._put(link, segments, records, deadline) for link in left))
            done |= {link for link, taken in zip(left, answers, strict=True) if taken}

    def have(self, ref: ModelRef) -> bool:
        """Tell whether all buddies have a version's record: they may be others by now than those that `secure` told.

        Call it with the lock held, in the step in which the version comes to exist.
        """
        return self._ready() and all(ref in link.records for link in self._buddies.links)

    async def leave(self, deadline: Deadline) -> None:
        """Wait until no shard that is about to drain keeps the mirror; what is late is finished behind."""

        def look() -> bool | None:
            if self._ready() and self._buddies.stay:
                return True
            self._ticker.soon()
            return None

        if not await self._notifier.until(Change.REPLICAS, look, deadline):
            log.warning("shard %d: a shard that drains keeps its mirror until another has it", self._index)

    async def _put(
        self, link: Link, segments: Collection[SegmentId], records: Mapping[ModelRef, Kept], deadline: Deadline
    ) -> bool:
        """Send a buddy what it has not; False when it fell behind."""
        with self._lock:
            if not link.synced:
                return False
            new = self._originals(segment for segment in segments if segment not in link.segments)
            link.begun += 1
            shelf = link.shelf
        try:
            left = deadline.left()
            of = ReplicaOf(self._index, self._life, shelf)
            put = ShardCalls.put_in_replica(of, new, records, self._wire, left)
            await self._peers.ask(link.shard, put, left)
        except (ShardUnavailableError, OperationTimeoutError) as exc:
            self._fell_behind(link, shelf, exc)
            return False
        finally:
            with self._lock:
                link.ended += 1
        with self._lock:
            if link.shelf == shelf:
                link.segments |= new.keys()
                link.records |= records.keys()
        return True

    def _late(self) -> ShardUnavailableError:
        with self._lock:
            late = [f"shard {link.shard}: {link.error}" for link in self._buddies.links if not link.synced]
        return ShardUnavailableError(
            f"shard {self._index}: expected copies on other shards before the commit; "
            f"{'; '.join(late) or 'no other shard answers'}"
        )

    # ---- the thread -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Keep the buddies up."""
        if self._index not in self._peers.topology.alive:  # it has drained: others have it all
            return
        self._buddies.review()
        for link in list(self._buddies.links):
            shelf = link.shelf
            try:
                if link.synced:
                    self._keep_up(link)
                else:
                    self._sync(link)
                link.silent_since = None
            except TensorVineError as exc:
                silent = isinstance(exc, (ShardUnavailableError, OperationTimeoutError))
                link.silent_since = (link.silent_since or time.monotonic()) if silent else None
                self._fell_behind(link, shelf if link.synced else None, exc)
        for shard in list(self._buddies.former) if self._ready() else ():
            try:
                self._open(shard)
                self._ask(shard, ShardCalls.leave_replica(self._index, self._life))
            except TensorVineError as exc:
                log.info("shard %d: shard %d keeps an old mirror for now: %s", self._index, shard, exc)
                if shard in self._peers.others:
                    continue
            self._buddies.former.discard(shard)

    def _sync(self, link: Link) -> None:
        """Tell a buddy everything that it has not."""
        opened = self._open(link.shard)
        self._buddies.seen_at(link.shard, opened.node)
        with self._lock:
            link.shelf = opened.shelf
        while True:
            with self._lock:
                wanted, moving = set(self._wanted()), self._moving()
                link.segments = self._state.unsaved()
                link.records = wanted | (link.records & moving)
                inventory = ShardCalls.sync_replica(self._of(link), set(link.segments), wanted | moving)
            segments, refs = self._ask(link.shard, inventory)
            if not segments and refs <= moving:
                with self._lock:
                    link.records -= refs  # it had them in an earlier life
                break
            self._tell(link, segments, refs - moving)
        self._mark(link)
        with self._lock:
            link.synced, link.odd, link.seen, self._accepted = True, 0, (), True
        self._notifier.tell(Change.REPLICAS)

    def _open(self, shard: int) -> Opened:
        """Begin this life at a shard.

        Raises:
            ShardUnavailableError: it knows of a later one, of another process.
        """
        opened = self._ask(shard, ShardCalls.open_replica(self._index, self._life))
        if opened.life > self._life:
            if self._accepted and shard not in self._unheard:
                raise ShardUnavailableError(
                    f"shard {self._index}: expected to be its latest life, {self._life}; {opened.life} runs elsewhere"
                )
            self._life = opened.life + 1  # buddies that go by the old number are told all again
            opened = self._ask(shard, ShardCalls.open_replica(self._index, self._life))
        self._unheard.discard(shard)
        return opened

    def _keep_up(self, link: Link) -> None:
        """Tell a buddy what went since, and see that it is there still."""
        with self._lock:
            again = self._state.uncovered() - link.segments
            now = self._fingerprint()
            late = time.monotonic() - link.marked >= MARK_S  # what came and went between two looks leaves no trace
            changed, link.seen = now != link.seen or late, now
            segments, refs, missing = self._changes(link) if changed else ((), (), set[ModelRef]())
            link.segments.difference_update(segments)
            link.records.difference_update(refs)
        if segments or refs:
            self._ask(link.shard, ShardCalls.drop_from_replica(self._of(link), segments, refs))
        if missing or again:
            self._tell(link, again, missing)
            with self._lock:
                link.segments |= again
                link.records |= missing
        if late:
            self._mark(link)

    def _changes(self, link: Link) -> tuple[tuple[SegmentId, ...], tuple[ModelRef, ...], set[ModelRef]]:
        """Return what a buddy has and does not need, and what it needs and has not."""
        segments = tuple(segment for segment in link.segments if not self._needs(segment))
        wanted, moving = self._wanted(), self._moving()
        early = sum(ref in link.records for ref in moving)
        if len(link.records) - early == len(wanted):
            return segments, (), set()
        refs = tuple(ref for ref in link.records if ref not in wanted and ref not in moving)
        return segments, refs, set(wanted - link.records)

    def _wanted(self) -> Set[ModelRef]:
        """Return the live versions that are not on disk. Call it with the lock held."""
        if self._history is None:
            return self._state.live
        return self._state.live & self._history.persister.waiting()

    def _moving(self) -> Set[ModelRef]:
        """Return the versions that a buddy keeps if it has them: being committed, or on their way.

        Call it with the lock held.
        """
        return self._state.begun().keys() | self._state.departing | self._state.arriving

    def _fingerprint(self) -> tuple[int, ...]:
        """Return something that changes when segments or versions come or go, or reach the disk."""
        stats = self._state.stats()
        return self._state.epoch, stats.tensors, stats.bytes_disk, len(self._wanted()), len(self._moving())

    def _mark(self, link: Link) -> None:
        with self._lock:
            begun, quiet = link.begun, link.begun == link.ended
            self._stamps += 1
        found = self._ask(link.shard, ShardCalls.mark_replica(self._of(link), (self._life, self._stamps)))
        link.marked = time.monotonic()
        with self._lock:
            if not quiet or link.begun != begun or not link.synced:
                return
            link.odd = link.odd + 1 if found != (len(link.segments), len(link.records)) else 0
            if link.odd > 1:
                raise ShardUnavailableError(
                    f"shard {link.shard}: expected {len(link.segments)} segments and {len(link.records)} versions of "
                    f"shard {self._index}; found {found}"
                )

    def _tell(self, link: Link, segments: Collection[SegmentId], refs: Collection[ModelRef]) -> None:
        """Put segments, and then versions; those that went meanwhile are left out."""
        with self._lock:
            originals = self._originals(segments)
        for some in batches(originals, PUT_BYTES):
            try:
                self._ask(link.shard, self._put_in(link, some, {}), PUT_S)
            except ModelLostError as exc:
                log.debug("shard %d: a segment went while it was copied: %s", self._index, exc)
        remaining = list(refs)
        while remaining:
            some_refs, remaining = remaining[:PUT_RECORDS], remaining[PUT_RECORDS:]
            with self._lock:
                live = self._state.live
                records = {ref: self._state.kept(ref) for ref in some_refs if ref in live}
            self._ask(link.shard, self._put_in(link, {}, records), PUT_S)

    def _of(self, link: Link) -> ReplicaOf:
        return ReplicaOf(self._index, self._life, link.shelf)

    def _put_in(
        self, link: Link, some: Mapping[SegmentId, Original], records: Mapping[ModelRef, Kept]
    ) -> Request[None]:
        return ShardCalls.put_in_replica(self._of(link), some, records, self._wire, PUT_S)

    def _fell_behind(self, link: Link, shelf: str | None, exc: TensorVineError) -> None:
        """Have a buddy told everything again; `shelf`: it was so in this life of it."""
        with self._lock:
            if shelf is not None and link.shelf != shelf:
                return
            fell = link.synced
            known = not fell and link.kind is type(exc)
            link.synced, link.error, link.kind = False, str(exc), type(exc)
        if not known:
            log.warning("shard %d: its mirror at shard %d is behind: %s", self._index, link.shard, exc)
        if fell:  # else the next try comes with the next tick: what was tried just now would only fail again
            self._ticker.soon()

    # ---- within -----------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Tell whether all buddies are there and have everything."""
        links = self._buddies.links
        return bool(links) and all(link.synced for link in links)

    def _needs(self, segment_id: SegmentId) -> bool:
        return not self._state.rests(segment_id)

    def _originals(self, segments: Collection[SegmentId] | Iterator[SegmentId]) -> dict[SegmentId, Original]:
        """Describe those of these that are needed. Call it with the lock held."""
        found = ((s, self._state.segment(s)) for s in segments if self._needs(s))
        return {s: original_of(segment, self._holdings) for s, segment in found if segment is not None}

    def _ask(self, shard: int, request: Request[_R], timeout: float = CALL_S) -> _R:
        return self._peers.call(shard, request, timeout)
