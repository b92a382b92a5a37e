"""Keeping a shard's memory on other nodes as well: what `replicas=2` means.

Rules
- Each shard has `replicas - 1` backups (`planner.backups`), which keep a replica of it on their replica stores: the
  segments that its memory alone has, and the records of the versions whose home it is. With a path that is what a
  restart would not find there: a segment is let go when its file has it and manifests name all that versions need of
  it.
- A commit waits until the backups of every shard concerned have it. What goes is told behind, and asked for nowhere.
- A backup that fell behind, because it died or did not answer, is told everything again; commits wait meanwhile,
  reads do not. So is a new one: one that came to be on this shard's node is changed for one that is not, if there is
  one.
- One thread tells the backups; only commits' own copies go past it, and only to backups that are not behind.
- Every other shard hears of this incarnation, those that keep no copy as well: what a process of an earlier one told
  them, which was given up and came back, they let go of then, and they hear it no more.
- Without a lease (`tenure`) nobody is told anything: the copies may be all that the next incarnation has.
- The ledger says what was retired last: a replica that has not heard of it does not bring it back.
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
from ....store.versions.replica import Kept
from ....store.waiting import Deadline
from ...rpc.calls import Request
from ..calls import ShardCalls
from ..calls.copies import Original
from ..calls.replicas import Opened, ReplicaOf
from ..context import Change, ShardContext
from ..copying import batches, original_of
from ..disk.history import History
from ..ticker import Ticker
from .replica_set import Backup, ReplicaSet
from .restore import Restored

log = logging.getLogger(__name__)

TICK_S = 0.5
MARK_S = 1.0
"""How often a backup is asked whether it is still there."""
LOOK_S = 5.0
"""How often one of the others, in turn, is asked whether it has heard of this incarnation."""
ANSWER_S = 2.0
"""How long it may take to say so: one that does not answer holds the thread up, and is asked again."""
CALL_S = 10.0
PUT_S = 120.0
PUT_BYTES = 256 << 20
"""What the thread tells a backup in one message, at most."""
PUT_RECORDS = 4096
_R = TypeVar("_R")


class Replication:
    """The replicas of one shard, as it sees them.

    Args:
        context: the shard's.
        restored: what came back from an earlier incarnation, and the number of this one.
        history: knows which versions are on disk, if there is one.
    """

    def __init__(self, context: ShardContext, restored: Restored, history: History | None) -> None:
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._tenure = context.tenure
        self._notifier = context.notifier
        self._tcp_address = context.tcp_address
        self._incarnation = restored.incarnation
        self._history = history
        self._replica_set = ReplicaSet(context)
        self._replica_set.former |= restored.replicas
        self._unheard = restored.unheard
        """Shards that may have heard of a later incarnation than this one, which has ended nevertheless."""
        self._accepted = False
        """A backup goes by this incarnation."""
        self._marks = 0
        self._looked_at, self._looked = self._index, time.monotonic()
        """The shard that was asked last whether it has heard of this incarnation, and when."""
        self._ticker = Ticker("replica", f"shard {self._index}", lambda: TICK_S, self._tick)

    @property
    def behind(self) -> int:
        """How many replicas are missing, or not told all yet. Call it with the lock held."""
        return self._replica_set.behind

    def news(self) -> None:
        """Something went or came other than by a commit: have the backups told soon."""
        self._ticker.soon()

    # ---- commits --------------------------------------------------------------------------------------

    async def secure(
        self, segments: Collection[SegmentId], records: Mapping[ModelRef, Kept], deadline: Deadline
    ) -> None:
        """Wait until all backups have these, which must be held here.

        Raises:
            ShardUnavailableError: a backup did not take them until `deadline`.
            StoreFullError: a backup has no room.
        """
        done: set[Backup] = set()

        def look() -> list[Backup] | None:
            if self._ready():
                return [backup for backup in self._replica_set.backups if backup not in done]
            self._ticker.soon()
            return None

        while True:
            left = await self._notifier.until(Change.REPLICAS, look, deadline)
            if left is None:
                raise self._late()
            if not left:
                return
            answers = await asyncio.gather(*(self._put(backup, segments, records, deadline) for backup in left))
            done |= {backup for backup, taken in zip(left, answers, strict=True) if taken}

    def have(self, ref: ModelRef) -> bool:
        """Tell whether all backups have a version's record: they may be others by now than those that `secure` told.

        Call it with the lock held, in the step in which the version comes to exist.
        """
        return self._ready() and all(ref in backup.records for backup in self._replica_set.backups)

    async def leave(self, deadline: Deadline) -> None:
        """Wait until no shard that is about to drain keeps the replica; what is late is finished behind."""

        def look() -> bool | None:
            if self._ready() and self._replica_set.stay:
                return True
            self._ticker.soon()
            return None

        if not await self._notifier.until(Change.REPLICAS, look, deadline):
            log.warning("shard %d: a draining shard keeps its replica until another shard has a copy", self._index)

    async def _put(
        self, backup: Backup, segments: Collection[SegmentId], records: Mapping[ModelRef, Kept], deadline: Deadline
    ) -> bool:
        """Send a backup what it has not; False when it fell behind."""
        with self._lock:
            if not backup.synced:
                return False
            new = self._originals(segment for segment in segments if segment not in backup.segments)
            backup.begun += 1
            replica_store = backup.replica_store
        try:
            left = deadline.left()
            of = ReplicaOf(self._index, self._incarnation, replica_store)
            put = ShardCalls.put_in_replica(of, new, records, self._tcp_address, left)
            await self._peers.ask(backup.shard, put, left)
        except (ShardUnavailableError, OperationTimeoutError) as exc:
            self._fell_behind(backup, replica_store, exc)
            return False
        finally:
            with self._lock:
                backup.ended += 1
        with self._lock:
            if backup.replica_store == replica_store:
                backup.segments |= new.keys()
                backup.records |= records.keys()
        return True

    def _late(self) -> ShardUnavailableError:
        with self._lock:
            late = [
                f"shard {backup.shard}: {backup.error}" for backup in self._replica_set.backups if not backup.synced
            ]
        return ShardUnavailableError(
            f"shard {self._index}: expected copies on other shards before the commit; "
            f"{'; '.join(late) or 'no other shard answers'}"
        )

    # ---- the thread -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Keep the backups up."""
        if self._index not in self._peers.topology.alive:  # it has drained: others have it all
            return
        if not self._tenure.holds:
            return
        self._replica_set.review()
        for backup in list(self._replica_set.backups):
            replica_store = backup.replica_store
            try:
                if backup.synced:
                    self._keep_up(backup)
                else:
                    self._sync(backup)
                backup.silent_since = None
            except TensorVineError as exc:
                silent = isinstance(exc, (ShardUnavailableError, OperationTimeoutError))
                backup.silent_since = (backup.silent_since or time.monotonic()) if silent else None
                self._fell_behind(backup, replica_store if backup.synced else None, exc)
        if not self._ready():
            return
        if time.monotonic() - self._looked >= LOOK_S:
            self._look_around()
        for shard in list(self._replica_set.former):
            if not self._tenure.holds:  # it may have ended while others did not answer
                return
            try:
                self._open(shard)
                self._ask(shard, ShardCalls.leave_replica(self._index, self._incarnation))
            except TensorVineError as exc:
                log.info("shard %d: shard %d could not delete an old replica yet: %s", self._index, shard, exc)
                if shard in self._peers.others:
                    continue
            self._replica_set.former.discard(shard)

    def _look_around(self) -> None:
        """See whether the next shard that keeps no copy has heard of this incarnation; it is to let go, if not."""
        backups = {backup.shard for backup in self._replica_set.backups}
        others = sorted(set(self._peers.others) - backups - self._replica_set.former)
        if others:
            shard = next((other for other in others if other > self._looked_at), others[0])
            self._looked_at = shard
            try:
                heard, _ = self._ask(shard, ShardCalls.look_at_replica(self._index), ANSWER_S)
                if heard != self._incarnation:
                    self._replica_set.former.add(shard)
            except TensorVineError as exc:
                log.info("shard %d: shard %d did not return the state of its replica: %s", self._index, shard, exc)
        self._looked = time.monotonic()

    def _sync(self, backup: Backup) -> None:
        """Tell a backup everything that it has not."""
        opened = self._open(backup.shard)
        self._replica_set.seen_at(backup.shard, opened.node)
        with self._lock:
            backup.replica_store = opened.replica_store
        while True:
            with self._lock:
                wanted, moving = set(self._wanted()), self._moving()
                backup.segments = self._state.durability.unsaved()
                backup.records = wanted | (backup.records & moving)
                inventory = ShardCalls.sync_replica(self._of(backup), set(backup.segments), wanted | moving)
            segments, refs = self._ask(backup.shard, inventory)
            if not segments and refs <= moving:
                with self._lock:
                    backup.records -= refs  # it had them in an earlier incarnation
                break
            self._tell(backup, segments, refs - moving)
        self._mark(backup)
        with self._lock:
            backup.synced, backup.odd, backup.seen, self._accepted = True, 0, (), True
        self._notifier.tell(Change.REPLICAS)

    def _open(self, shard: int) -> Opened:
        """Begin this incarnation at a shard.

        Raises:
            ShardUnavailableError: it knows of a later one, of another process.
        """
        opened = self._ask(shard, ShardCalls.open_replica(self._index, self._incarnation))
        if opened.incarnation > self._incarnation:
            if self._accepted and shard not in self._unheard:
                raise ShardUnavailableError(
                    f"shard {self._index}: expected incarnation {self._incarnation} to be the latest; "
                    f"incarnation {opened.incarnation} runs elsewhere"
                )
            self._incarnation = opened.incarnation + 1  # backups that go by the old number are told all again
            opened = self._ask(shard, ShardCalls.open_replica(self._index, self._incarnation))
        self._unheard.discard(shard)
        return opened

    def _keep_up(self, backup: Backup) -> None:
        """Tell a backup what went since, and see that it is there still."""
        with self._lock:
            again = self._state.durability.uncovered() - backup.segments
            now = self._fingerprint()
            late = time.monotonic() - backup.marked >= MARK_S  # what came and went between two looks leaves no trace
            changed, backup.seen = now != backup.seen or late, now
            segments, refs, missing = self._changes(backup) if changed else ((), (), set[ModelRef]())
            backup.segments.difference_update(segments)
            backup.records.difference_update(refs)
        if segments or refs:
            self._ask(backup.shard, ShardCalls.drop_from_replica(self._of(backup), segments, refs))
        if missing or again:
            self._tell(backup, again, missing)
            with self._lock:
                backup.segments |= again
                backup.records |= missing
        if late:
            self._mark(backup)

    def _changes(self, backup: Backup) -> tuple[tuple[SegmentId, ...], tuple[ModelRef, ...], set[ModelRef]]:
        """Return what a backup has and does not need, and what it needs and has not."""
        segments = tuple(segment for segment in backup.segments if not self._needs(segment))
        wanted, moving = self._wanted(), self._moving()
        early = sum(ref in backup.records for ref in moving)
        if len(backup.records) - early == len(wanted):
            return segments, (), set()
        refs = tuple(ref for ref in backup.records if ref not in wanted and ref not in moving)
        return segments, refs, set(wanted - backup.records)

    def _wanted(self) -> Set[ModelRef]:
        """Return the live versions that are not on disk. Call it with the lock held."""
        if self._history is None:
            return self._state.live
        return self._state.live & self._history.persister.waiting()

    def _moving(self) -> Set[ModelRef]:
        """Return the versions that a backup keeps if it has them: being committed, or on their way.

        Call it with the lock held.
        """
        return self._state.begun().keys() | self._state.departing | self._state.arriving

    def _fingerprint(self) -> tuple[int, ...]:
        """Return something that changes when segments or versions come or go, or reach the disk."""
        stats = self._state.stats()
        return self._state.epoch, stats.tensors, stats.bytes_disk, len(self._wanted()), len(self._moving())

    def _mark(self, backup: Backup) -> None:
        with self._lock:
            begun, quiet = backup.begun, backup.begun == backup.ended
            self._marks += 1
        found = self._ask(backup.shard, ShardCalls.mark_replica(self._of(backup), (self._incarnation, self._marks)))
        backup.marked = time.monotonic()
        with self._lock:
            if not quiet or backup.begun != begun or not backup.synced:
                return
            backup.odd = backup.odd + 1 if found != (len(backup.segments), len(backup.records)) else 0
            if backup.odd > 1:
                raise ShardUnavailableError(
                    f"shard {backup.shard}: expected {len(backup.segments)} segments and "
                    f"{len(backup.records)} versions of shard {self._index}; found {found}"
                )

    def _tell(self, backup: Backup, segments: Collection[SegmentId], refs: Collection[ModelRef]) -> None:
        """Put segments, and then versions; those that went meanwhile are left out."""
        with self._lock:
            originals = self._originals(segments)
        for some in batches(originals, PUT_BYTES):
            try:
                self._ask(backup.shard, self._put_in(backup, some, {}), PUT_S)
            except ModelLostError as exc:
                log.debug("shard %d: a segment was released while it was copied: %s", self._index, exc)
        remaining = list(refs)
        while remaining:
            some_refs, remaining = remaining[:PUT_RECORDS], remaining[PUT_RECORDS:]
            with self._lock:
                live = self._state.live
                records = {ref: self._state.kept(ref) for ref in some_refs if ref in live}
            self._ask(backup.shard, self._put_in(backup, {}, records), PUT_S)

    def _of(self, backup: Backup) -> ReplicaOf:
        return ReplicaOf(self._index, self._incarnation, backup.replica_store)

    def _put_in(
        self, backup: Backup, some: Mapping[SegmentId, Original], records: Mapping[ModelRef, Kept]
    ) -> Request[None]:
        return ShardCalls.put_in_replica(self._of(backup), some, records, self._tcp_address, PUT_S)

    def _fell_behind(self, backup: Backup, replica_store: str | None, exc: TensorVineError) -> None:
        """Have a backup told everything again; `replica_store`: it was so in this incarnation of it."""
        with self._lock:
            if replica_store is not None and backup.replica_store != replica_store:
                return
            fell = backup.synced
            known = not fell and backup.kind is type(exc)
            backup.synced, backup.error, backup.kind = False, str(exc), type(exc)
        if not known:
            log.warning("shard %d: its replica at shard %d is behind: %s", self._index, backup.shard, exc)
        if fell:  # else the next try comes with the next tick: what was tried just now would only fail again
            self._ticker.soon()

    # ---- within ---------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Tell whether all backups are there and have everything."""
        backups = self._replica_set.backups
        return bool(backups) and all(backup.synced for backup in backups)

    def _needs(self, segment_id: SegmentId) -> bool:
        return not self._state.durability.rests(segment_id)

    def _originals(self, segments: Collection[SegmentId] | Iterator[SegmentId]) -> dict[SegmentId, Original]:
        """Describe those of these that are needed. Call it with the lock held."""
        found = ((s, self._state.segment(s)) for s in segments if self._needs(s))
        return {s: original_of(segment, self._segment_memory) for s, segment in found if segment is not None}

    def _ask(self, shard: int, request: Request[_R], timeout: float = CALL_S) -> _R:
        return self._peers.call(shard, request, timeout)
