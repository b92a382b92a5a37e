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
from ..engine.engine import group
from ..rpc.messages import Account, Chains, ToStore
from .disk.care import named_here
from .handoff.claims import claims_on
from .handoff.strays import unknown_here
from .parts import ShardParts
from .replicas.messages import Message

log = logging.getLogger(__name__)


class ShardPeers(ShardParts):
    """A shard, as the other shards see it."""

    # ---- holders ----------------------------------------------------------------------------------------

    @group("ctl")
    async def hold(self, holder: str, holds: Holds) -> None:
        """Hold slots here for a version whose home is elsewhere.

        Raises:
            OperationTimeoutError: it was given up already.
        """
        with self._lock:
            self._overtaken.check(holder)
            self._strays.held(holder)
            moved = self._estate.moved
            if not moved:
                self._state.hold(holder, holds)
        if moved:
            await self._estate.hold(holder, holds)

    @group("ctl")
    async def release(self, holder: str) -> None:
        """Forget a holder whose home is elsewhere."""
        with self._lock:
            if "@" in holder and not self._state.is_holder(holder):
                self._overtaken.released(holder)
            self._forget(holder)
            if self._claims is not None:
                self._claims.released(holder)
        await self._settle()

    @group("ctl")
    async def release_homes(self, home: int, keep: Sequence[str], version: int, restart: int) -> None:
        """Forget what a shard that lost its memory held here, but for the versions that are on disk.

        Args:
            home: the shard.
            keep: holders that stay.
            version: of the topology by which homes are meant: by another one, nothing is let go.
            restart: which one of the shard's it is. Each counts once: it holds anew after that.
        """
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

    @group("ctl")
    async def release_all(self, holders: Sequence[str]) -> None:
        """Forget holders that were lost with their home."""
        with self._lock:
            here = [holder for holder in holders if self._estate.moved or self._state.is_holder(holder)]
        for holder in here:
            await self.release(holder)

    @group("ctl")
    async def cool(self, ref: ModelRef) -> None:
        """Let a version whose home is elsewhere go from memory."""
        with self._lock:
            self._state.cool(str(ref))
        await self._settle()
        await self._pass_on("cool", ref)

    @group("ctl")
    async def named(self, segments: Sequence[SegmentId]) -> set[SegmentId]:
        """Tell which of another shard's segments versions of this home, or commits on their way, name."""
        with self._lock:
            return named_here(self._state, segments)

    # ---- disk and mirrors -------------------------------------------------------------------------------

    @group("data")
    async def store(self, wanted: ToStore) -> Chains:
        """Write segments for a version whose home is elsewhere."""
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

    @group("data")
    async def relearn(self, ref: ModelRef, segments: Sequence[SegmentId]) -> None:
        """Know the segments of this shard that a version on disk names, although its manifest came after a restart.

        Raises:
            ModelLostError: one of them has no file.
        """
        with self._lock:
            known = not self._state.unread and all(self._state.knows_segment(segment) for segment in segments)
        if not known:
            await self._disk().relearn(ref)
            await self._settle()
        with self._lock:
            self._state.written(str(ref))
        await self._pass_on("relearn", ref, segments)

    @group("ctl")
    async def stored(self, segment: SegmentId) -> Stored:
        """Return the file of a segment of this shard."""
        return self._disk().stored(segment)

    @group("data")
    async def mirror(self, message: Message) -> Any:
        """Keep, or give back, what is another shard's; see `shelf`."""
        return await self._shelf.take(message)

    @group("data")
    async def secure(self, segments: Sequence[SegmentId], timeout: float) -> None:
        """Have copies of segments of this shard on other nodes, for a version whose home is elsewhere.

        Raises:
            ModelLostError: one went with an earlier life of this shard, after the home had it held.
        """
        with self._lock:
            self._state.blocks(segments)
        if self._mirrors is not None:
            await self._mirrors.secure(segments, {}, time.monotonic() + timeout)

    @group("data")
    async def leaves(self, holder: str, segments: Sequence[SegmentId], timeout: float) -> None:
        """Have copies on other nodes of what only a version's manifest tells of, which is about to go."""
        await self._copy_leaving(holder, segments, timeout)

    # ---- an earlier life --------------------------------------------------------------------------------

    @group("ctl")
    async def claims(self, shard: int) -> dict[str, dict[SegmentId, list[int]]]:
        """Tell a shard that started again what this home's versions name there."""
        with self._lock:
            return claims_on(self._state, shard)

    @group("ctl")
    async def unknown(self, holders: Sequence[str], version: int) -> list[str]:
        """Tell which of some versions of this home are none (any more).

        Args:
            holders: the versions.
            version: of the topology by which they are at home here: by another one, or while names move, nothing is
                said of them.
        """
        with self._lock:
            topology = self._peers.topology
            settled = topology.version == version and not topology.former
            return unknown_here(self._state, holders) if settled else []

    # ---- the ledger -------------------------------------------------------------------------------------

    @group("ctl")
    async def note(self, news: Mapping[ModelRef, Fact]) -> None:
        """Take what another home committed or retired."""
        with self._lock:
            self._state.ledger.note(news)

    @group("ctl")
    async def merge(self, told: Told) -> None:
        """Take what the planner has heard from all."""
        with self._lock:
            self._state.ledger.merge(told)

    @group("ctl")
    async def catch_up(self, told: Told) -> None:
        """Have the whole ledger, as one that has joined: from before this on, it hears of every commit."""
        with self._lock:
            self._state.ledger.merge(told)
            self._whole = True

    @group("ctl")
    async def account(self) -> Account:
        """Tell the planner, which starts again, how things stand here."""
        with self._lock:
            topology = self._peers.topology
            moved = [name for name in self._state.names() if topology.former_home(name) != self._config.index]
            return Account(topology, self._state.ledger.told(), self._whole, tuple(moved), self._elastic.delivered)
