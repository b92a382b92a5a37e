"""What readers of tensors ask of a shard: where blocks are, or the bytes.

Rules
- All that is asked for is in memory at one time when it is answered, and stays until the reader had time to lock it.
- What is on disk only is read into the memory first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...store.errors import ModelLostError
from ...store.refs import ModelRef
from ...store.segments.segment import Block, SegmentId
from ...store.versions.version import Record
from ..engine.engine import group
from ..rpc.messages import Fetched
from ..transport.desk import Cards
from ..transport.frames import Slots
from ..transport.parcels import GroupAnswer, GroupQuestion
from .holdings import READ_ROUNDS
from .parts import ShardParts

LOCK_S = 0.25

_Found = tuple[dict[SegmentId, Block], int, dict[SegmentId, np.ndarray]]
"""(blocks, the epoch at which this was answered, what keeps them in place)."""


class ShardReads(ShardParts):
    """A shard, as readers of tensors see it."""

    @group("ctl")
    async def fetch(
        self,
        client: str,
        name: str,
        version: int | None,
        known: ModelRef | None,
        wanted: Slots,
        whole: bool,
    ) -> Fetched:
        """Return a version's manifest, unless it is `known`, and where blocks are.

        What is on disk only is read first. Blocks are for clients that map this shard's memory.

        Args:
            client: who asks.
            name: of the model.
            version: its number; None: the latest.
            known: the version whose manifest the client has, and takes for the one that it asks for.
            wanted: slots, lying here, that it needs of that one.
            whole: of another one it needs all that lies here; else it asks for what it needs when it has the manifest.
        """
        found: list[Record] = []

        def places() -> Slots:
            self._requests += 1
            self._elastic.check(name)
            found[:] = [self._state.record(name, version, client)]
            if found[0].header.ref == known:
                return wanted
            return self._state.held(found[0].header.ref) if whole else {}

        blocks, epoch, _ = await self._brought(places, True, name)
        record = found[0]
        return Fetched(record.header, None if record.header.ref == known else record.body, blocks, epoch)

    @group("ctl")
    async def blocks(self, wanted: Slots) -> dict[SegmentId, Block]:
        """Return blocks of this shard's segments, read from disk where need be, for clients that map its memory."""
        blocks, _, _ = await self._brought(lambda: wanted, True, "blocks for another shard's version")
        return blocks

    @group("ctl", line=False)
    async def carried(self, wanted: Slots) -> dict[SegmentId, Block]:
        """Return blocks as in `blocks`, but such as the engine carries."""
        blocks, _, views = await self._brought(lambda: wanted, False, "blocks for another shard's version")
        return await self._holdings.in_thread(self._holdings.exported, blocks, views)

    @group("watch")
    async def send_by(self, backend: str, member: str, question: GroupQuestion) -> GroupAnswer:
        """Send slots of segments to a member, a client's reader, by a collective group; see `group_sender`."""
        with self._lock:
            sender = self._senders.by(backend)
        return await asyncio.wrap_future(sender.ask(member, question))

    @group("watch")
    async def meet(self, key: str, rank: int, size: int, card: Mapping[str, Any], timeout: float) -> Cards:
        """Let members of a group meet here; see `desk`."""
        return await self._desk.met(key, rank, size, card, timeout)

    @group("data")
    async def check_manifest(self, client: str, ref: ModelRef) -> list[str]:
        """Hold a version's manifest on disk against what is answered here."""
        with self._lock:
            self._elastic.check(ref.name)
            record = self._state.record(ref.name, ref.version, client)
        return await self._disk().check_manifest(record.header, record.body)

    @group("data")
    async def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        """Read tensors of this shard's segments, in memory and from disk, and say what is wrong with them."""
        problems: list[str] = []
        for segment, slots in names.items():
            problems += await self._holdings.in_thread(self._holdings.check, segment, slots)
        return problems + (await self._history.check_tensors(names) if self._history is not None else [])

    # ---- within -----------------------------------------------------------------------------------------

    async def _brought(self, places: Callable[[], Slots], local: bool, what: str) -> _Found:
        """Find blocks, and read what is on disk only until all of it is in the memory at one time.

        Args:
            places: says what is wanted, with the lock held.
            local: see `_found`.
            what: names the read in errors.
        """
        kept: list[np.ndarray] = []
        for _ in range(READ_ROUNDS):
            with self._lock:
                wanted = places()
                if not self._state.absent(wanted):
                    _let_go_soon(kept)
                    return self._found(wanted, local)
            kept = []  # a load that waits for room must keep nothing; it takes it up again
            try:
                kept = await self._disk().load(what, wanted, self._room.taken)
            except ModelLostError:
                with self._lock:
                    places()  # this says so where the version was retired meanwhile
                raise
        raise self._holdings.crowded(what)

    def _found(self, wanted: Slots, local: bool) -> _Found:
        """Return what is wanted, all of which is in memory; for others than `local` clients, kept there.

        Call it with the lock held.
        """
        blocks = self._state.blocks(wanted)
        return blocks, self._holdings.epoch, {} if local else self._holdings.views(blocks)


def _let_go_soon(kept: list[np.ndarray]) -> None:
    """Drop what keeps segments in the memory, once the reader had the time to lock them."""
    if kept:
        asyncio.get_running_loop().call_later(LOCK_S, kept.clear)
