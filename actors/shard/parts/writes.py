"""What savers ask of a shard: memory to fill, versions that come to exist, and their end.

Rules
- Memory is granted to a client whose process is watched, filled by it, and adopted; what is not adopted goes back when
  the save ends, and what is asked for it after that is refused (`store.versions.overtaken`).
- What a client cannot fill is fetched from it into memory that is the save's as well, and then adopted.
- A version exists when all shards that it needs hold its tensors, and its copies are where they were asked for: on
  other nodes, or on disk. Until then nobody sees it, and what went wrong is undone.
- A name that is being written does not move to another home (`name_handoff`).
- A shard whose lease is over makes no version exist (`tenure`): saves wait until it has one.
- Once a version exists, nothing that comes after can fail its save: that is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from ....store.errors import CorruptDataError, MovedError, ShardUnavailableError, StorageError
from ....store.holders import Lease, Query, Save
from ....store.metrics import SHARD_COMMIT
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import Header, check_metadata
from ....store.versions.version import Draft
from ....store.waiting import NEVER, Deadline
from ...rpc.calls import answers
from ...rpc.messages import PEER_TIMEOUT_S, Beginning, Begun, Filled
from ...transport.tcp import UnreachableError
from ..admission import Admission
from ..busy import Busy
from ..calls import ShardCalls
from ..calls.copies import Address, Original, Piece
from ..calls.writes import WriteCalls
from ..context import ShardContext
from ..copying import Copying, put_together
from ..disk.history import History, required
from ..disk.persister import Job
from ..handoff.name_handoff import NameHandoff
from ..handoff.segment_handoff import SegmentHandoff
from ..replicas.securing import Securing
from ..serving.redis_index import RedisIndex
from ..settling import Settling

log = logging.getLogger(__name__)

PULLS = 8
"""Saves whose bytes are fetched at once: so many slow savers keep others waiting."""


class Writes:
    """What one shard does for savers.

    Args:
        context: the shard's.
        settling: carries out what follows.
        room: has memory for savers.
        history: the shard's disk, if there is one.
        names: which names are at home here.
        segment_handoff: has what savers bring after the segments were handed over.
        securing: has copies made on other nodes.
        redis_index: posts versions in Redis, if there is one.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        admission: Admission,
        history: History | None,
        names: NameHandoff,
        segment_handoff: SegmentHandoff,
        securing: Securing,
        redis_index: RedisIndex | None,
    ) -> None:
        self._context = context
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._notifier = context.notifier
        self._settling = settling
        self._admission = admission
        self._pulling = Copying(context, admission, PULLS)
        self._history = history
        self._names = names
        self._segment_handoff = segment_handoff
        self._securing = securing
        self._redis_index = redis_index
        self._undoing: set[asyncio.Task[None]] = set()
        """What came to nothing while this shard had no lease."""
        self.committing = Busy()
        """With commits, and with what comes after them."""

    # ---- memory ---------------------------------------------------------------------------------------

    @answers(WriteCalls.begin)
    async def begin(self, asked: Beginning) -> Begun:
        deadline = Deadline.after(asked.timeout)
        await self._admission.keep_pace(f"save of {asked.name!r}", deadline)
        await self._context.tenure.held(deadline)
        shard, incarnation = self._index, os.getpid()
        with self._lock:
            self._names.check(asked.name)
            self._context.requests += 1
            self._state.open(asked.client, time.monotonic())
            newest, version = self._state.newer(asked.name, 0), asked.version
            absent = asked.optional and newest is None
            wanted = self._filled_by(asked.client, asked.sizes)
            offsets = self._segment_memory.grant(asked.save, wanted) if absent or not asked.inherits else []
            if asked.graph is not None:
                self._state.announce(asked.save, *asked.graph)
            if absent:
                return Begun(
                    header=None,
                    body=None,
                    lease=None,
                    digests={},
                    blocks=None,
                    offsets=offsets,
                    shard=shard,
                    incarnation=incarnation,
                )
            if asked.optional and newest is not None and version is None:
                version = newest.version  # also where a later one cannot be read now
            lease = Lease(asked.save, self._index)
            record = self._state.pin(asked.name, version, lease, time.monotonic())
            mine = [segment for segment in record.segments if self._state.where(segment) == self._index]
            held = self._state.held(record.header.ref)
            here = len(mine) == len(record.segments) and all(map(self._state.segment, mine))  # none was lost
            comparable = asked.compares and here and not self._state.absent(held)
            blocks = self._state.blocks(held) if asked.inherits and comparable else None
        hashes: dict[SegmentId, tuple[str, ...]] = {}
        if asked.inherits and not comparable:
            with contextlib.suppress(CorruptDataError, StorageError):  # the saver calls `digests`, and gets the reason
                hashes = await self.digests(mine)
        body = None if record.header.ref == asked.known else record.body
        return Begun(
            header=record.header,
            body=body,
            lease=lease,
            digests=hashes,
            blocks=blocks,
            offsets=offsets,
            shard=shard,
            incarnation=incarnation,
        )

    @answers(WriteCalls.digests)
    async def digests(self, segments: Sequence[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        if self._history is not None:
            await self._history.loading.digests(segments, self._admission.taken)
        for future in self._segment_memory.hashing.futures(segments):
            await asyncio.wrap_future(future)
        with self._lock:
            return self._state.digests(segments)

    @answers(WriteCalls.reserve)
    async def reserve(self, client: str, save: Save, sizes: Sequence[int]) -> list[int]:
        with self._lock:
            self._state.open(client, time.monotonic())
            wanted = self._filled_by(client, sizes)
            return self._segment_memory.reserve(save, wanted) if wanted else []

    def _filled_by(self, client: str, sizes: Sequence[int]) -> Sequence[int]:
        """Return what a client may be granted of `sizes`: a shard that drains grants nothing. See
        `Admission.filled_by`."""
        return () if self._context.is_leaving else self._admission.filled_by(client, sizes)

    @answers(WriteCalls.is_short)
    async def is_short(self) -> bool:
        return self._admission.is_short()

    @answers(WriteCalls.grant)
    async def grant(self, client: str, save: Save, sizes: Sequence[int], timeout: float) -> list[int]:
        self._open(client)
        return await self._admission.granted(save, sizes, timeout, client)

    @answers(WriteCalls.allocate)
    async def allocate(self, client: str, save: Save, sizes: Sequence[int], timeout: float) -> list[int]:
        self._open(client)
        offsets = await self._admission.granted(save, sizes, timeout)
        with self._lock:
            self._segment_memory.expect_pieces(save, offsets)
        return offsets

    @answers(WriteCalls.place)
    async def place(
        self, save: Save, part: Part, pieces: Sequence[Piece], address: Address | None, timeout: float
    ) -> str | None:
        try:
            await self._pulling.run(put_together, part, pieces, save, self._segment_memory, address, timeout)
        except UnreachableError as exc:
            return str(exc)
        return None

    def _open(self, client: str) -> None:
        """Note that a client is there, whom a shard that drains refuses: nothing new is put there."""
        with self._lock:
            self._state.open(client, time.monotonic())
            if self._context.is_leaving:
                version = self._peers.topology.version
                raise MovedError(f"shard {self._index}: expected a shard that accepts saves; it is draining", version)

    @answers(WriteCalls.adopt)
    async def adopt(self, save: Save, incarnation: int, blocks: Sequence[Filled]) -> None:
        with self._lock:
            self._segment_memory.adopt(save, incarnation, blocks)
        await self._segment_handoff.late(save, [segment for segment, _, _ in blocks])

    @answers(WriteCalls.pull)
    async def pull(
        self, save: Save, originals: Mapping[SegmentId, Original], address: Address | None, timeout: float
    ) -> str | None:
        try:
            async with self._pulling.copied(save, originals, address, timeout, timeout) as copies:
                blocks = [(segment, copy.handle, copy.sizes) for segment, copy in copies.items()]
                with self._lock:
                    self._segment_memory.adopt(save, os.getpid(), blocks)
        except UnreachableError as exc:
            return str(exc)
        await self._segment_handoff.late(save, list(originals))
        return None

    @answers(WriteCalls.adopt_block)
    async def adopt_block(
        self, save: Save, segment: SegmentId, block: np.ndarray, sizes: Sequence[int], timeout: float
    ) -> None:
        (offset,) = await self._admission.granted(save, [block.nbytes], timeout)
        part = Part(offset, block.nbytes)
        try:
            await self._segment_memory.workers.run(self._segment_memory.fill, part, save, block)
            with self._lock:
                self._segment_memory.adopt(save, os.getpid(), [(segment, part, sizes)])
            await self._segment_handoff.late(save, [segment])
        except BaseException:
            with self._lock:
                self._segment_memory.give_back(part, save)
            raise

    # ---- versions -------------------------------------------------------------------------------------

    @answers(WriteCalls.commit)
    async def commit(
        self,
        draft: Draft,
        client: str,
        incarnation: int,
        blocks: Sequence[Filled],
        leases: Sequence[Lease],
        durable: bool,
        timeout: float,
    ) -> tuple[ModelRef, int]:
        deadline = Deadline.after(timeout)
        check_metadata(draft.name, draft.metadata, self._context.config.metadata_bytes)
        with self.committing:
            await self._admission.keep_pace(f"save of {draft.name!r}", deadline)  # `begin` may have asked another shard
            await self._context.tenure.held(deadline)
            with self._names.writing(draft.name):
                with self._lock:
                    late = self._segment_handoff.moved and blocks
                    self._state.open(client, time.monotonic())
                if late:
                    await self.adopt(draft.save, incarnation, blocks)
                    blocks = []
                begun = time.perf_counter()
                committed = await self._commit(draft, client, incarnation, blocks, durable, deadline)
                self._context.counts.observe(SHARD_COMMIT, time.perf_counter() - begun)
            ref, _ = committed
            with _after(ref):
                await self._names.unpin(leases)
            with _after(ref):
                self._settling.forget(draft.save)
                await self._settling.settle()
        return committed

    async def _commit(
        self, draft: Draft, client: str, incarnation: int, blocks: Sequence[Filled], durable: bool, deadline: Deadline
    ) -> tuple[ModelRef, int]:
        if self._history is not None:
            await self._history.check_files(draft.holds)
        with self._lock:
            self._state.open(client, time.monotonic())
            draft = self._history.drafted(draft) if self._history is not None else draft
            self._segment_memory.adopt(draft.save, incarnation, blocks)
            ref = self._state.begin_commit(draft)
            created_ns = self._state.dated(ref, time.time_ns())
        tenure = self._context.tenure
        keepers = self._peers.keepers(draft.holds)
        try:
            await self._segment_handoff.heard()
            await self._peers.hold(ref, draft.holds, deadline)
            await self._peers.note({ref: (draft.parent, True)})
            await tenure.held(deadline)  # without a lease nothing is written
            if durable:
                await self._write_now(draft, draft.header(ref, created_ns), deadline)
            else:
                await self._securing.version(draft, draft.header(ref, created_ns), deadline)
                if self._history is not None:
                    await self._history.numbering.add(ref)
            while True:
                await tenure.held(deadline)
                with self._lock:
                    if tenure.holds and (durable or self._securing.have(ref)):
                        cold = self._publish(ref, draft, created_ns, durable)
                        break
                if not durable:  # others keep the copies by now
                    await self._securing.version(draft, draft.header(ref, created_ns), deadline)
        except BaseException:
            with self._lock:
                self._state.abandon(ref)
            undo = self._undo(ref, draft, keepers)
            if tenure.holds:
                await undo
            else:  # who saves is not kept waiting
                task = asyncio.create_task(undo)
                self._undoing.add(task)
                task.add_done_callback(self._undoing.discard)
            raise
        self._context.show()
        self._notifier.tell(ref.name)
        with _after(ref):
            for shard, other in cold:
                await self._peers.tell_gently(shard, ShardCalls.cool(other))
        return ref, created_ns

    async def _undo(self, ref: ModelRef, draft: Draft, keepers: set[int]) -> None:
        """Have others forget a version that came to nothing, if this shard may say so: its next incarnation may have
        the version, and has others let go of what it has not."""
        try:
            await self._context.tenure.held(NEVER)
        except ShardUnavailableError as exc:
            log.warning("%s cannot be undone at other shards: %s", ref, exc)
            return
        await self._peers.note_gently({ref: (draft.parent, False)})
        await self._peers.release(ref, keepers | self._peers.keepers(draft.holds))

    def _publish(self, ref: ModelRef, draft: Draft, created_ns: int, durable: bool) -> list[tuple[int, ModelRef]]:
        """Make a version exist; give (shard, version) for those that retention lets go. Call it with the lock held."""
        self._state.publish(ref, draft, created_ns)
        with _after(ref):
            if self._redis_index is not None:
                self._redis_index.announce([(draft.header(ref, created_ns), draft.body)])
            self._segment_memory.end_save(draft.save)
            if self._history is not None:
                if not durable:
                    self._history.persister.add(Job(draft.header(ref, created_ns), draft.body, urgent=False))
                return self._history.retain(ref.name)
        return []

    async def _write_now(self, draft: Draft, header: Header, deadline: Deadline) -> None:
        """Write a version to disk before it exists in memory."""
        if self._history is None:
            raise StorageError(
                f"save of {draft.name!r}: durability 'disk': expected a repository with path=; found one without"
            )
        job = Job(header, draft.body, urgent=True)
        self._history.persister.add(job)
        await self._history.written(job, deadline.left())

    @answers(WriteCalls.abort)
    async def abort(self, operation: Save | Query) -> None:
        with self._lock:
            if isinstance(operation, Save):
                self._settling.forget(operation)
                self._segment_memory.end_save(operation)
            else:
                self._state.ended.end(operation)
            leases = self._names.leases_of(operation)
        await self._names.unpin(leases)
        await self._settling.settle()

    @answers(WriteCalls.retire)
    async def retire(self, name: str, version: int | None) -> ModelRef:
        with self._names.writing(name):
            with self._lock:
                ref = self._state.resolve(name, version)
                header = self._state.record(ref.name, ref.version, "").header
            if self._history is not None:
                await self._securing.before_it_leaves(ref)
                await self._history.bury(header)
            await self._context.tenure.held(Deadline.after(PEER_TIMEOUT_S))
            with self._lock:
                self._context.tenure.check()
                self._state.retire(ref)
                if self._redis_index is not None:
                    self._redis_index.retired(ref)
            self._context.show()
            self._securing.news()
            await self._peers.note_gently({ref: (None, False)})
        await self._settling.settle()
        return ref

    @answers(WriteCalls.flush)
    async def flush(self, timeout: float) -> None:
        await required(self._history, self._index).flush(timeout)


@contextlib.contextmanager
def _after(ref: ModelRef) -> Generator[None]:
    """Do something after a version came to exist: whatever fails here, its save succeeded."""
    try:
        yield
    except Exception:
        log.exception("%s is committed, but a later step of its save failed", ref)
