"""What becomes of a drained shard's tensors: copied to its successors first, handed to them then, passed on for the
rest.

Rules
- Which successor takes a segment, the topology after the drain says (`planner.topology`). Its id stays, so no manifest
  changes.
- Copies are held by the drain at the successor until it is told who holds them. When it learns a topology by
  which that shard stays, they go, and a copy that comes after that is refused.
- Files are written by one shard at any time: see D10 of docs/design/persistence.md.
- In one step, with nothing left to copy, the shard notes who holds what. From then on it passes on what it is told of
  its segments, and says what it lets go itself, once the successors have heard this; it goes on answering readers from
  its own memory.
- What savers bring after that is copied to its successor before anything is committed on it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ....planner.topology import Topology
from ....store.errors import (
    ModelLostError,
    MovedError,
    OperationTimeoutError,
    ShardUnavailableError,
    TensorVineError,
    without_frames,
)
from ....store.holders import Drain, Reason, Save
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import Holds, SegmentId
from ....store.versions.handover import MovedSegment
from ....store.versions.replica import Copy
from ....store.waiting import Backoff, Deadline
from ...rpc.calls import Request
from ...rpc.messages import PEER_TIMEOUT_S
from ..calls import ShardCalls
from ..context import ShardContext
from ..copying import original_of, with_bytes
from ..peers import LONG_TIMEOUT_S

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Segments that are copied at one time."""
RETRY_S = (0.2, 1.0)
"""Shortest and longest pause between two tries to reach a shard."""

_R = TypeVar("_R")


class SegmentHandoff:
    """The segments of one shard on their way to others, and of others on their way here.

    Args:
        context: the shard's.
    """

    def __init__(self, context: ShardContext) -> None:
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._tcp_address = context.tcp_address
        self.moved = False
        """Others hold this shard's segments now. Read it with the lock held."""
        self.successors: set[int] = set()
        """Who has them. Read it with the lock held."""
        self._said: dict[int, list[MovedSegment]] = {}
        """What the successors are told."""
        self._copied: set[SegmentId] = set()
        """What successors have; another set after a drain was given up."""
        self._bytes = 0
        self._heard = threading.Event()
        """The successors know who holds what."""
        self._heard.set()
        self._unreached: set[int] = set()
        """Successors that could not read from this shard's TCP server."""
        self._taken: set[Drain] = set()
        """Drains under which copies came here, and that are done with."""
        self._turn = asyncio.Lock()

    @property
    def is_telling(self) -> bool:
        """Whether successors are still told who holds what. Read it with the lock held."""
        return not self._heard.is_set()

    # ---- the shard that drains ------------------------------------------------------------------------

    async def copy(self, after: Topology) -> int:
        """Copy all segments to their successors; gives the bytes that were copied in all.

        Raises:
            StoreFullError: a successor has no room.
        """
        async with self._turn:
            copied = self._copied
            while copied is self._copied and (missing := self._missing()):
                await self._copy_all(missing[:AT_ONCE], after)
            return self._bytes

    def learned(self) -> None:
        """Let go of what is not to be any more by the topology that was learned last.

        Copies of shards that stay go. If this one stays, what it copied counts for nothing, and its copying ends.
        """
        with self._lock:
            topology = self._peers.topology
            for drain in self._state.drains():
                if drain.shard not in topology.leaving:
                    self._state.release(drain)
            if self._state.index not in topology.leaving and not self.moved:
                self._copied, self._bytes = set(), 0

    async def hand_over(self, after: Topology) -> int:
        """Have the successors be the ones that hold the segments; gives the bytes that were copied in all."""
        async with self._turn:
            while True:
                with self._lock:
                    missing = [] if self.moved else self._missing()
                    if not missing:
                        parts = self._note(after)
                        break
                await self._copy_all(missing[:AT_ONCE], after)
            for successor, part in parts.items():
                while lacking := await self._tell(successor, ShardCalls.inherit(self._drain(after), part)):
                    await self._copy_all(lacking[:AT_ONCE], after)  # it has started again meanwhile
            self._heard.set()
            return self._bytes

    async def hold(self, ref: ModelRef, holds: Holds) -> None:
        """Pass on that slots are held."""
        await self.heard()
        await self._peers.hold(ref, holds, Deadline.after(PEER_TIMEOUT_S))

    async def pass_on(self, request: Request[None]) -> None:
        """Tell all successors, also when the caller has given up waiting."""
        await self.heard(LONG_TIMEOUT_S)
        for successor in self.successors:
            await self._peers.tell_gently(successor, request)

    async def late(self, save: Save, segments: Sequence[SegmentId]) -> None:
        """Copy what a saver brought after all was handed over; nothing to do before."""
        with self._lock:
            if not self.moved:
                return
            self._keep(segments)
        await self.heard()
        for segment in segments:
            await self._copy(segment, self._peers.topology_after, save)

    async def heard(self, timeout: float = PEER_TIMEOUT_S) -> None:
        """Wait until the successors know who holds what.

        Raises:
            OperationTimeoutError: they did not within `timeout` seconds.
        """
        if not self._heard.is_set() and not await asyncio.to_thread(self._heard.wait, timeout):
            raise OperationTimeoutError(
                f"shard {self._state.index}: expected its successors to answer within {timeout} s; they did not"
            )

    # ---- the successor --------------------------------------------------------------------------------

    def receive(self, moved: MovedSegment, copy: Copy, holder: Drain | Save) -> None:
        """Take a copy of a segment into care, and keep it for `holder`.

        Args:
            moved: what it is, its slots where the copy has them.
            copy: its bytes; what of the memory is not kept here, its owner lets go.
            holder: the drain, or the save that brought it.

        Raises:
            MovedError: the drain was given up meanwhile.
            OperationTimeoutError: the save has ended: nothing would release the copy.
        """
        with self._lock:
            if isinstance(holder, Drain) and holder not in self._taken:
                self._check_drain(holder)
            if holder in self._taken or self._state.segment(moved.id) is not None:
                return  # told twice
            if isinstance(holder, Save):
                self._segment_memory.check_under_way(holder)
                self._state.open(holder.client, time.monotonic())
            self._state.receive(moved, copy.handle, holder)
            self._segment_memory.hashing.later(moved.id)
            if isinstance(copy.handle, Part):
                self._segment_memory.keep(copy.handle, moved.id)

    def inherit(self, drain: Drain, segments: Sequence[MovedSegment]) -> list[SegmentId]:
        """Hold segments for those who held them on the shard that drains; told again, nothing changes.

        Returns:
            Segments whose bytes are not here: then nothing has changed, and they must come first.
        """
        with self._lock:
            if drain in self._taken:
                return []
            lacking = [s.id for s in segments if s.needs_memory and self._state.segment(s.id) is None]
            if lacking:
                return lacking
            now = time.monotonic()
            for moved in segments:
                for other in moved.holders:
                    if isinstance(other, Save):
                        self._state.open(other.client, now)
                self._state.inherit(moved, drain)
            self._taken.add(drain)
            for each in self._state.drains():  # also of tries before, of another incarnation of the planner
                if each.shard == drain.shard:
                    self._state.release(each)
            return []

    def _check_drain(self, drain: Drain) -> None:
        """Refuse a copy of a drain that is not under way any more: nobody would let it go."""
        topology = self._peers.topology
        if drain.shard not in topology.leaving or drain.version != topology.version + 1:
            raise MovedError(
                f"shard {self._state.index}: expected a copy for a drain in progress; the {drain} was cancelled",
                topology.version,
            )

    def missed(self, topology: Topology) -> set[int]:
        """Name the shards that drained and handed to an earlier incarnation of this one what it has not heard of.

        Call it with the lock held, before this shard goes by the new `topology`.
        """
        known = self._peers.topology
        if topology.version <= known.version:
            return set()
        left = {
            shard
            for shard, successors in topology.gone.items()
            if shard not in known.gone and self._state.index in successors
        }
        return left - {drain.shard for drain in self._taken}

    # ---- within ---------------------------------------------------------------------------------------

    def _drain(self, after: Topology) -> Drain:
        return Drain(self._state.index, after.version)

    def _missing(self) -> list[SegmentId]:
        with self._lock:
            return [segment for segment in self._state.residents.ids() if segment not in self._copied]

    async def _copy_all(self, segments: Sequence[SegmentId], after: Topology) -> None:
        drain, copied = self._drain(after), self._copied
        found = await asyncio.gather(*(self._copy(s, after, drain) for s in segments), return_exceptions=True)
        for failure in found:
            if isinstance(failure, BaseException):
                raise without_frames(failure)  # it is in `found`: a cycle, which would keep what those frames hold
        copied.update(segments)

    async def _copy(self, segment_id: SegmentId, after: Topology, holder: Drain | Save) -> None:
        """Have what is in memory of a segment copied by its successor.

        Again, where it lost slots meanwhile; and with its bytes in the message, where the successor cannot read them
        here.
        """
        successor, tried = after.where(segment_id), None
        while True:
            with self._lock:
                segment = self._state.segment(segment_id)
                view = self._segment_memory.view(segment) if segment is not None else None
                if segment is None or view is None:
                    return
                original, before = original_of(segment, self._segment_memory), segment.offsets
                offsets, length = segment.arranged(original.slots)
                moved = replace(self._state.moving(segment_id), offsets=offsets, allocated=length)
            if original.data is None and (self._tcp_address is None or successor in self._unreached):
                original = await self._segment_memory.workers.run(with_bytes, original, view, before)
            del view  # the successor may take long, or refuse
            try:
                request = ShardCalls.receive(moved, original, self._tcp_address, holder)
                await self._peers.ask(successor, request, LONG_TIMEOUT_S)
                break
            except ModelLostError:
                if original == tried:
                    raise
                tried = original
            except ShardUnavailableError as exc:
                if original.data is not None:
                    self._unreached.discard(successor)  # it has gone, and comes again
                    raise
                if successor not in self._unreached:
                    log.warning(
                        "shard %d: shard %d cannot read its copies over TCP, sending them in messages: %s",
                        self._state.index,
                        successor,
                        exc,
                    )
                self._unreached.add(successor)
        self._bytes += sum(moved.sizes[slot] for slot in original.slots)

    def _note(self, after: Topology) -> dict[int, list[MovedSegment]]:
        """Take note of who holds what, by successor, and go by the new places from now on. Call it with the lock
        held."""
        if self.moved:  # said before; the successors may not all have heard it
            return self._said
        self.successors = set(after.shards)
        self._said = {successor: [] for successor in after.shards}
        for segment in self._state.segment_ids():
            self._said[after.where(segment)].append(self._state.moving(segment))
        self._heard.clear()
        self.moved = True
        self._keep(self._state.segment_ids())
        self._peers.topology_after = after
        self._state.where = after.where
        return self._said

    def _keep(self, segments: Sequence[SegmentId]) -> None:
        for segment in segments:
            found = self._state.segment(segment)
            if found is not None:
                self._state.hold(Reason.DRAINED, {segment: found.live_slots})

    async def _tell(self, successor: int, request: Request[_R]) -> _R:
        """Tell a successor until it has heard: there is no way back."""
        pauses = Backoff(*RETRY_S)
        while True:
            try:
                return await self._peers.ask(successor, request, LONG_TIMEOUT_S)
            except TensorVineError as exc:
                log.warning(
                    "shard %d: shard %d did not answer %s, retrying: %s",
                    self._state.index,
                    successor,
                    request.remote.name,
                    exc,
                )
            await pauses.wait_async()
