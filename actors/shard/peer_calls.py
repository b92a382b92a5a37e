"""What the other shards of a repository, and its planner, ask of a shard while the topology stays.

Rules
- A version's home tells the shards that have its tensors: hold, release, cool, write, mirror. Telling twice changes
  nothing, and a release counts whether it comes after the hold that it undoes or before (`store.versions.overtaken`).
- A shard whose segments went to its heirs passes on what it is told of them (`estate`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...store.errors import MovedError
from ...store.refs import ModelRef
from ...store.segments.segment import Holds, SegmentId, Stored
from ...store.versions.ledger import Fact, Told
from ..rpc.calls import answers
from ..rpc.messages import Account, Chains, ToStore
from .calls import ShardCalls
from .calls.mirror_messages import Message
from .calls.peers import PeerCalls
from .disk.care import named_here
from .handoff.claims import claims_on
from .handoff.strays import unknown_here
from .parts import ShardParts

log = logging.getLogger(__name__)


class ShardPeers(ShardParts):
    """A shard, as the other shards see it."""

    # ---- holders ----------------------------------------------------------------------------------------

    @answers(PeerCalls.hold)
    async def hold(self, holder: str, holds: Holds) -> None:
        with self._lock:
            self._overtaken.check(holder)
            self._strays.held(holder)
            moved = self._estate.moved
            if not moved:
                self._state.hold(holder, holds)
        if moved:
            await self._estate.hold(holder, holds)

    @answers(PeerCalls.release)
    async def release(self, holder: str) -> None:
        with self._lock:
            if "@" in holder and not self._state.is_holder(holder):
                self._overtaken.released(holder)
            self._forget(holder)
            if self._claims is not None:
                self._claims.released(holder)
        await self._settle()

    @answers(PeerCalls.release_homes)
    async def release_homes(self, home: int, keep: Sequence[str], version: int, restart: int) -> None:
        with self._lock:
            if restart <= self._restarts_heard.get(home, 0):
                return
            self._restarts_heard[home] = restart
            if version != self._peers.topology.version:
                log.warning("shard %d keeps what shard %d held: the topology changed", self._config.index, home)
                return
            for holder in set(self._state.held_by(home)) - set(keep):
                self._forget(holder)  # at heirs too, by name: when they hear it, that shard perhaps holds anew
        await self._settle()

    @answers(PeerCalls.release_all)
    async def release_all(self, holders: Sequence[str]) -> None:
        with self._lock:
            here = [holder for holder in holders if self._estate.moved or self._state.is_holder(holder)]
        for holder in here:
            await self.release(holder)

    @answers(PeerCalls.cool)
    async def cool(self, ref: ModelRef) -> None:
        with self._lock:
            self._state.cool(str(ref))
        await self._settle()
        await self._pass_on(ShardCalls.cool(ref))

    @answers(PeerCalls.named)
    async def named(self, segments: Sequence[SegmentId]) -> set[SegmentId]:
        with self._lock:
            return named_here(self._state, segments)

    # ---- disk and mirrors -------------------------------------------------------------------------------

    @answers(PeerCalls.store)
    async def store(self, wanted: ToStore) -> Chains:
        with self._lock:
            moved = self._estate.moved
        if not moved:
            try:
                return await self._disk().store(wanted)
            except MovedError:  # handed over while they were written; else who asks is to ask again
                with self._lock:
                    if not self._estate.moved:
                        raise
        await self._estate.heard()
        return await asyncio.to_thread(self._disk().store_elsewhere, wanted)

    @answers(PeerCalls.relearn)
    async def relearn(self, ref: ModelRef, segments: Sequence[SegmentId]) -> None:
        with self._lock:
            known = not self._state.unread and all(self._state.knows_segment(segment) for segment in segments)
        if not known:
            await self._disk().relearn(ref)
            await self._settle()
        with self._lock:
            self._state.written(str(ref))
        await self._pass_on(ShardCalls.relearn(ref, segments))

    @answers(PeerCalls.stored)
    async def stored(self, segment: SegmentId) -> Stored:
        return self._disk().stored(segment)

    @answers(PeerCalls.mirror)
    async def mirror(self, message: Message) -> Any:
        return await self._shelf.take(message)

    @answers(PeerCalls.secure)
    async def secure(self, segments: Sequence[SegmentId], timeout: float) -> None:
        with self._lock:
            self._state.blocks(segments)
        if self._mirrors is not None:
            await self._mirrors.secure(segments, {}, time.monotonic() + timeout)

    @answers(PeerCalls.leaves)
    async def leaves(self, holder: str, segments: Sequence[SegmentId], timeout: float) -> None:
        await self._copy_leaving(holder, segments, timeout)

    # ---- an earlier life --------------------------------------------------------------------------------

    @answers(PeerCalls.claims)
    async def claims(self, shard: int) -> dict[str, dict[SegmentId, list[int]]]:
        with self._lock:
            return claims_on(self._state, shard)

    @answers(PeerCalls.unknown)
    async def unknown(self, holders: Sequence[str], version: int) -> list[str]:
        with self._lock:
            topology = self._peers.topology
            settled = topology.version == version and not topology.former
            return unknown_here(self._state, holders) if settled else []

    # ---- the ledger -------------------------------------------------------------------------------------

    @answers(PeerCalls.note)
    async def note(self, news: Mapping[ModelRef, Fact]) -> None:
        with self._lock:
            self._state.ledger.note(news)

    @answers(PeerCalls.merge)
    async def merge(self, told: Told) -> None:
        with self._lock:
            self._state.ledger.merge(told)

    @answers(PeerCalls.catch_up)
    async def catch_up(self, told: Told) -> None:
        with self._lock:
            self._state.ledger.merge(told)
            self._whole = True

    @answers(PeerCalls.account)
    async def account(self) -> Account:
        with self._lock:
            topology = self._peers.topology
            moved = [name for name in self._state.names() if topology.former_home(name) != self._config.index]
            return Account(topology, self._state.ledger.told(), self._whole, tuple(moved), self._elastic.delivered)
