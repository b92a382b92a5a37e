"""What readers of tensors ask of a shard: where blocks are, or the bytes.

Rules
- All that is asked for is in memory at one time when it is answered. What was read from the disk for it stays until the
  reader has locked it, for `LOCK_S` at most.
- What is on disk only is read into the memory first.
- A shard without a lease returns no positions (`tenure`): the reader may have mapped its successor's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from ....store.errors import ModelLostError
from ....store.metrics import SHARD_READS
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import Block, SegmentId
from ....store.versions.version import Record
from ....store.waiting import Deadline
from ...collective.rendezvous import Endpoint, Endpoints, LocalRendezvous
from ...rpc.calls import answers
from ...rpc.messages import Fetched
from ...transport.frames import Slots
from ...transport.parcels import PairAnswer, PairQuestion
from ..admission import Admission
from ..calls.reads import ReadCalls
from ..context import ShardContext
from ..disk.history import History, required
from ..handoff.name_handoff import NameHandoff
from ..segment_memory import READ_ROUNDS
from ..serving.exports import Exports
from ..serving.senders import Senders

LOOK_S, LOCK_S = 0.25, 5.0
"""How often the shard looks whether a reader has locked what was read from the disk for it, and how long it waits."""

_Found = tuple[dict[SegmentId, Block], int, dict[SegmentId, np.ndarray]]
"""(blocks, the epoch at which this was answered, what keeps them in place)."""


class Reads:
    """What one shard does for readers of tensors.

    Args:
        context: the shard's.
        admission: has memory for what is read from the disk.
        history: the shard's disk, if there is one.
        names: which names are at home here.
        senders: send to groups.
        rendezvous: where the members of a group meet.
        exports: blocks in the engine's object store.
    """

    def __init__(
        self,
        context: ShardContext,
        *,
        admission: Admission,
        history: History | None,
        names: NameHandoff,
        senders: Senders,
        rendezvous: LocalRendezvous,
        exports: Exports,
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._admission = admission
        self._history = history
        self._names = names
        self._senders = senders
        self._rendezvous = rendezvous
        self._exports = exports

    @answers(ReadCalls.fetch)
    async def fetch(
        self,
        client: str,
        name: str,
        version: int | None,
        known: ModelRef | None,
        wanted: Slots,
        whole: bool,
    ) -> Fetched:
        found: list[Record] = []

        def places() -> Slots:
            self._context.requests += 1
            self._names.check(name)
            found[:] = [self._state.record(name, version, client)]
            if found[0].header.ref == known:
                return wanted
            return self._state.held(found[0].header.ref) if whole else {}

        blocks, epoch, _ = await self._brought(places, True, name)
        record = found[0]
        return Fetched(record.header, None if record.header.ref == known else record.body, blocks, epoch)

    @answers(ReadCalls.blocks)
    async def blocks(self, wanted: Slots) -> dict[SegmentId, Block]:
        blocks, _, _ = await self._brought(lambda: wanted, True, "blocks for another shard's version")
        return blocks

    @answers(ReadCalls.carried)
    async def carried(self, wanted: Slots) -> dict[SegmentId, Block]:
        blocks, _, views = await self._brought(lambda: wanted, False, "blocks for another shard's version")
        return await self._segment_memory.workers.run(self._exports.exported, blocks, views)

    @answers(ReadCalls.send_by)
    async def send_by(self, backend: str, member: str, question: PairQuestion) -> PairAnswer:
        with self._lock:
            sender = self._senders.by(backend)
        return await asyncio.wrap_future(sender.ask(member, question))

    @answers(ReadCalls.meet)
    async def meet(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        return await self._rendezvous.met(key, rank, size, endpoint, timeout)

    @answers(ReadCalls.check_manifest)
    async def check_manifest(self, client: str, ref: ModelRef) -> list[str]:
        with self._lock:
            self._names.check(ref.name)
            record = self._state.record(ref.name, ref.version, client)
        return await required(self._history, self._context.index).check_manifest(record.header, record.body)

    @answers(ReadCalls.check_tensors)
    async def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        problems: list[str] = []
        for segment, slots in names.items():
            problems += await self._segment_memory.workers.run(self._segment_memory.hashing.check, segment, slots)
        return problems + (await self._history.check_tensors(names) if self._history is not None else [])

    # ---- within ---------------------------------------------------------------------------------------

    async def _brought(self, places: Callable[[], Slots], local: bool, what: str) -> _Found:
        """Find blocks, and read what is on disk only until all of it is in the memory at one time.

        Args:
            places: says what is wanted, with the lock held.
            local: see `_found`.
            what: names the read in errors.
        """
        kept: list[np.ndarray] = []
        for tried in range(READ_ROUNDS):
            with self._lock:
                self._context.tenure.check()
                wanted = places()
                if not self._state.absent(wanted):
                    found = self._found(wanted, local)
                    if wanted:
                        self._context.counts.add(SHARD_READS, 1.0, "path" if tried else "memory")
                    if kept:
                        self._release_when_locked(kept, found[0], Deadline.after(LOCK_S))
                    return found
            kept = []  # a load that waits for room must keep nothing; it takes it up again
            try:
                loading = required(self._history, self._context.index).loading
                kept = await loading.load(what, wanted, self._admission.taken)
            except ModelLostError:
                with self._lock:
                    places()  # this says so where the version was retired meanwhile
                raise
        raise self._segment_memory.crowded(what)

    def _found(self, wanted: Slots, local: bool) -> _Found:
        """Return what is wanted, all of which is in memory; for others than `local` clients, kept there.

        Call it with the lock held.
        """
        blocks = self._state.blocks(wanted)
        return blocks, self._segment_memory.epoch, {} if local else self._segment_memory.views(blocks)

    def _release_when_locked(self, kept: list[np.ndarray], blocks: dict[SegmentId, Block], deadline: Deadline) -> None:
        """Drop what keeps blocks in the memory as soon as the reader has locked them, or the deadline has passed."""
        parts = [block.handle for block in blocks.values() if isinstance(block.handle, Part)]

        def look() -> None:
            if deadline.passed or all(map(self._segment_memory.memory.is_read_by_others, parts)):
                kept.clear()
            else:
                asyncio.get_running_loop().call_later(LOOK_S, look)

        asyncio.get_running_loop().call_later(LOOK_S, look)
