"""What the other shards of a repository, and its planner, ask of a shard while the topology stays.

Rules
- A version's home tells the shards that have its tensors: hold, release, cool, write, mirror. Telling twice changes
  nothing.
- A shard whose segments went to its heirs passes on what it is told of them (`estate`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ..store.refs import ModelRef
from ..store.segment import Holds, SegmentId, Stored
from .claims import claims_on
from .engine import group
from .messages import Chains, ToStore
from .mirror_messages import Message
from .shard_parts import ShardParts


class ShardPeers(ShardParts):
    """A shard, as the other shards see it."""

    # ---- holders ----------------------------------------------------------------------------------------

    @group("ctl")
    async def hold(self, holder: str, holds: Holds) -> None:
        """Hold slots here for a version whose home is elsewhere."""
        with self._lock:
            moved = self._estate.moved
            if not moved:
                self._state.hold(holder, holds)
        if moved:
            await self._estate.hold(holder, holds)

    @group("ctl")
    async def release(self, holder: str) -> None:
        """Forget a holder whose home is elsewhere."""
        with self._lock:
            self._state.release(holder)
            if self._claims is not None:
                self._claims.released(holder)
        await self._settle()
        await self._pass_on("release", holder)

    @group("ctl")
    async def release_homes(self, home: int, keep: Sequence[str]) -> None:
        """Forget what a shard that lost its memory held here, but for the versions that are on disk."""
        with self._lock:
            self._state.release_homes(home, keep)
        await self._settle()
        await self._pass_on("release_homes", home, keep)

    @group("ctl")
    async def release_all(self, holders: Sequence[str]) -> None:
        """Forget holders."""
        for holder in holders:
            await self.release(holder)

    @group("ctl")
    async def cool(self, ref: ModelRef) -> None:
        """Let a version whose home is elsewhere go from memory."""
        with self._lock:
            self._state.cool(str(ref))
        await self._settle()
        await self._pass_on("cool", ref)

    # ---- disk and mirrors -------------------------------------------------------------------------------

    @group("data")
    async def store(self, wanted: ToStore) -> Chains:
        """Write segments for a version whose home is elsewhere."""
        with self._lock:
            moved = self._estate.moved
        if moved:
            await self._estate.heard()
            return await asyncio.to_thread(self._disk().store_elsewhere, wanted)
        return await self._disk().store(wanted)

    @group("data")
    async def relearn(self, ref: ModelRef, segments: Sequence[SegmentId]) -> None:
        """Know the segments of this shard that a version on disk names, although its manifest came after a restart.

        Raises:
            ModelLostError: one of them has no file.
        """
        with self._lock:
            known = all(self._state.knows_segment(segment) for segment in segments)
        if not known:
            await self._disk().relearn(ref)
            await self._settle()

    @group("ctl")
    async def stored(self, segment: SegmentId) -> Stored:
        """Give the file of a segment of this shard."""
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
            self._state.blocks(dict.fromkeys(segments, -1))
        if self._mirrors is not None:
            await self._mirrors.secure(segments, {}, time.monotonic() + timeout)

    # ---- an earlier life --------------------------------------------------------------------------------

    @group("ctl")
    async def claims(self, shard: int) -> dict[str, dict[SegmentId, list[int]]]:
        """Tell a shard that started again what this home's versions name there."""
        with self._lock:
            return claims_on(self._state, shard)

    @group("ctl")
    async def census(self) -> dict[ModelRef, tuple[ModelRef | None, bool]]:
        """Tell the planner, which lost it, what this shard was ever home to."""
        with self._lock:
            return self._state.census()
