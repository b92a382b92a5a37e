"""Who holds tensors of a shard: versions of other homes, by name, as these homes tell it.

Rules
- A shard without a lease refuses holds and releases (`tenure`): its next incarnation may have asked all homes already.
- A version's home tells the shards that have its tensors to hold and to release them. Telling twice changes nothing,
  and a release counts whether it comes after the hold that it undoes or before (`store.versions.overtaken`).
- A shard whose segments went to its successors passes on what it is told of them (`segment_handoff`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....store.holders import Holder
from ....store.refs import ModelRef
from ....store.segments.segment import Holds, SegmentId
from ....store.versions.overtaken import Overtaken
from ...rpc.calls import answers
from ..calls import ShardCalls
from ..calls.holders import HolderCalls
from ..context import ShardContext
from ..disk.care import named_here
from ..disk.history import History
from ..handoff.reconciliation import Reconciliation, claims_on
from ..handoff.segment_handoff import SegmentHandoff
from ..handoff.strays import Strays, unknown_here
from ..settling import Settling

log = logging.getLogger(__name__)


class Holders:
    """The holders of one shard's tensors.

    Args:
        context: the shard's.
        settling: carries out what follows.
        history: the shard's disk, if there is one.
        segment_handoff: the shard's segments, which may be elsewhere by now.
        reconciliation: what other homes name here, where they must still be asked.
        strays: holders that may be no version's.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        history: History | None,
        segment_handoff: SegmentHandoff,
        reconciliation: Reconciliation | None,
        strays: Strays,
    ) -> None:
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._tenure = context.tenure
        self._settling = settling
        self._history = history
        self._segment_handoff = segment_handoff
        self._reconciliation = reconciliation
        self._strays = strays
        self._overtaken = Overtaken()
        self._restarts_heard = self._peers.restarts()
        """Shard -> the last restart of it at which its earlier incarnation's holders went."""

    @answers(HolderCalls.hold)
    async def hold(self, ref: ModelRef, holds: Holds) -> None:
        if self._history is not None:
            await self._history.check_files(holds)
        with self._lock:
            self._tenure.check()
            self._overtaken.check(ref)
            self._strays.held(ref)
            moved = self._segment_handoff.moved
            if not moved:
                self._state.hold(ref, holds)
        if moved:
            await self._segment_handoff.hold(ref, holds)

    @answers(HolderCalls.release)
    async def release(self, holder: Holder) -> None:
        with self._lock:
            self._tenure.check()
            if isinstance(holder, ModelRef):
                if not self._state.is_holder(holder):
                    self._overtaken.released(holder)
                if self._reconciliation is not None:
                    self._reconciliation.released(holder)
            self._settling.forget(holder)
        await self._settling.settle()

    @answers(HolderCalls.release_homes)
    async def release_homes(self, home: int, keep: Sequence[ModelRef], version: int, restart: int) -> None:
        with self._lock:
            if restart <= self._restarts_heard.get(home, 0):
                return
            self._restarts_heard[home] = restart
            if version != self._peers.topology.version:
                log.warning("shard %d keeps the holds of shard %d, because the topology changed", self._index, home)
                return
            for ref in set(self._state.held_by(home)) - set(keep):
                self._settling.forget(ref)  # at successors too, by name: when they hear it, that shard may hold anew
        await self._settling.settle()

    @answers(HolderCalls.release_all)
    async def release_all(self, refs: Sequence[ModelRef]) -> None:
        with self._lock:
            here = [ref for ref in refs if self._segment_handoff.moved or self._state.is_holder(ref)]
        for ref in here:
            await self.release(ref)

    @answers(HolderCalls.cool)
    async def cool(self, ref: ModelRef) -> None:
        with self._lock:
            self._state.residents.cool(ref)
        await self._settling.settle()
        await self._settling.pass_on(ShardCalls.cool(ref))

    # ---- what this home holds elsewhere ---------------------------------------------------------------

    @answers(HolderCalls.named)
    async def named(self, segments: Sequence[SegmentId]) -> set[SegmentId]:
        with self._lock:
            return named_here(self._state, segments)

    @answers(HolderCalls.claims)
    async def claims(self, shard: int) -> dict[ModelRef, dict[SegmentId, list[int]]]:
        with self._lock:
            return claims_on(self._state, shard)

    @answers(HolderCalls.unknown)
    async def unknown(self, refs: Sequence[ModelRef], version: int) -> list[ModelRef]:
        with self._lock:
            topology = self._peers.topology
            settled = topology.version == version and not topology.former
            return unknown_here(self._state, refs) if settled else []
