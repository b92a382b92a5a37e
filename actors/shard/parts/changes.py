"""A shard's part in a change of the topology: names move by `name_handoff`, segments by `segment_handoff`; here they
are told to.

Rules
- Whoever takes something over has its replicas told before it answers.
- What all shards are asked is answered with how things stood (`Tag`): the asker sees whether a name was on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....planner.topology import Topology
from ....store.errors import ShardUnavailableError, StorageError
from ....store.holders import Drain, Save
from ....store.segments.segment import SegmentId
from ....store.versions.handover import Bundle, MovedSegment
from ....store.waiting import Backoff, Deadline
from ...rpc.calls import answers
from ...rpc.messages import PEER_TIMEOUT_S, Moved, Sender, Tag, Unwritten
from ..calls.changes import ChangeCalls
from ..calls.copies import Address, Original
from ..context import ShardContext
from ..copying import Copying
from ..disk.history import History
from ..handoff.name_handoff import NameHandoff
from ..handoff.reconciliation import Reconciliation
from ..handoff.segment_handoff import SegmentHandoff
from ..peers import LONG_TIMEOUT_S
from ..replicas.securing import Securing
from ..settling import Settling
from .writes import Writes

log = logging.getLogger(__name__)

CLAIM_PAUSE_S = 0.1
"""How often a shard that is to drain looks whether all others have said what they hold here."""


class Changes:
    """What one shard does when the topology changes.

    Args:
        context: the shard's.
        settling: carries out what follows.
        names: go and come.
        segment_handoff: segments that go and come.
        reconciliation: what other homes name here, where they must still be asked.
        history: the shard's disk, if there is one.
        copying: brings segments that come.
        securing: has copies made on other nodes.
        writes: the saves under way.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        names: NameHandoff,
        segment_handoff: SegmentHandoff,
        reconciliation: Reconciliation | None,
        history: History | None,
        copying: Copying,
        securing: Securing,
        writes: Writes,
    ) -> None:
        self._context = context
        self._index = context.index
        self._engine = context.engine
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._settling = settling
        self._names = names
        self._segment_handoff = segment_handoff
        self._reconciliation = reconciliation
        self._history = history
        self._copying = copying
        self._securing = securing
        self._writes = writes

    # ---- topology -------------------------------------------------------------------------------------

    @answers(ChangeCalls.learn)
    async def learn(self, topology: Topology) -> None:
        with self._lock:
            missed = self._segment_handoff.missed(topology)
        if missed and self._history is not None and self._reconciliation is not None:
            log.warning(
                "shard %d restarted while shards %s drained to it: reading their segments from the path",
                self._index,
                missed,
            )
            await self._history.recovery.take_over(self._reconciliation.ask_anew, lambda: self._names.learn(topology))
        self._names.learn(topology)
        self._segment_handoff.learned()
        await self._settling.settle()
        self._context.show()
        if topology.leaving:
            await self._securing.away_from_leaving()

    @answers(ChangeCalls.topology)
    async def topology(self) -> Topology:
        return self._peers.topology

    @answers(ChangeCalls.node)
    async def node(self) -> str:
        return self._engine.this_node()

    @answers(ChangeCalls.tag)
    async def tag(self) -> Tag:
        return self._names.tag()

    # ---- names ----------------------------------------------------------------------------------------

    @answers(ChangeCalls.hand_over)
    async def hand_over(self) -> Moved:
        return await self._names.hand_over()

    @answers(ChangeCalls.take)
    async def take(self, bundle: Bundle, unwritten: Sequence[Unwritten], sender: Sender) -> int:
        if not self._securing.wanted:
            await self._names.announce(list(bundle.names), sender)
            return self._names.take(bundle, unwritten)
        in_memory = {header.ref for header, _ in unwritten} if self._history is not None else None
        records = bundle.records(in_memory)
        with self._lock:
            self._state.arriving |= records.keys()
        try:
            await self._securing.records(records)
            await self._names.announce(list(bundle.names), sender)
            return self._names.take(bundle, unwritten)
        finally:
            with self._lock:
                self._state.arriving -= records.keys()

    @answers(ChangeCalls.arrived)
    async def arrived(self, former: int, version: int) -> None:
        self._names.arrived(former, version)

    # ---- segments -------------------------------------------------------------------------------------

    @answers(ChangeCalls.copy_out)
    async def copy_out(self, after: Topology) -> int:
        for unread in self._state.unreadable():
            raise StorageError(
                f"shard {self._index}: expected all manifests to be readable before it drains; {unread.reason}"
            )
        await self._claimed()
        return await self._segment_handoff.copy(after)

    @answers(ChangeCalls.has_moved)
    async def has_moved(self) -> bool:
        with self._lock:
            return self._segment_handoff.moved

    @answers(ChangeCalls.move_segments)
    async def move_segments(self, after: Topology) -> int:
        await self._claimed()
        nbytes = await self._segment_handoff.hand_over(after)
        await self._settling.settle()
        return nbytes

    async def _claimed(self) -> None:
        """Wait until all other shards have said what they hold here, if this one has started again."""
        deadline, pauses = Deadline.after(PEER_TIMEOUT_S), Backoff(CLAIM_PAUSE_S, CLAIM_PAUSE_S)
        while self._reconciliation is not None and self._reconciliation.open:
            if not await pauses.wait_async(deadline):
                raise ShardUnavailableError(
                    f"shard {self._index}: expected the claims of all other shards before it drains; some are missing"
                )

    @answers(ChangeCalls.receive)
    async def receive(
        self, moved: MovedSegment, original: Original, address: Address | None, holder: Drain | Save
    ) -> None:
        owner = self._copying.owner("move")
        async with self._copying.copied(owner, {moved.id: original}, address, LONG_TIMEOUT_S) as copies:
            self._segment_handoff.receive(moved, copies[moved.id], holder)

    @answers(ChangeCalls.inherit)
    async def inherit(self, drain: Drain, segments: Sequence[MovedSegment]) -> list[SegmentId]:
        lacking = self._segment_handoff.inherit(drain, segments)
        await self._settling.settle()
        if not lacking:
            await self._securing.segments([moved.id for moved in segments])
        return lacking

    @answers(ChangeCalls.is_needed)
    async def is_needed(self) -> bool:
        with self._lock:
            return self._segment_memory.serves_saves or bool(self._writes.committing) or self._settling.is_telling
