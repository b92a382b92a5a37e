"""A shard's shelf: the mirrors that it keeps of other shards, their bytes in its own memory.

Rules
- What is to be kept and what may go says `store.versions.mirror`; this file finds room, fetches the bytes and hands
  them out.
- The shelf goes with the shard's process; its name tells those whom it mirrors that it is another one.
- Room that others want is waited for as every save waits for it; with none the copy fails, and the save with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from ....store.errors import ModelLostError, ShardUnavailableError
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId, layout
from ....store.shard import ShardState
from ....store.versions.mirror import Mirror
from ...memory.workers import Workers
from ...transport.frames import Served, Slots
from ...transport.wire import WireServer
from ..calls.mirror_messages import (
    Claim,
    Drop,
    Leave,
    Look,
    Mark,
    Message,
    Offer,
    Open,
    Opened,
    Original,
    Put,
    Sync,
    Where,
)
from ..holdings import INLINE_BYTES, Holdings
from .copies import fetched, length_of

FETCHERS = 2
"""Threads that fetch what is to be kept."""

_Told = Open | Drop | Sync | Mark | Leave | Look | Claim
Grant = Callable[[str, Sequence[int], float], Any]
"""Gives an owner offsets of memory for at least the first of some lengths, waiting so many seconds."""


class Shelf:
    """The mirrors that one shard keeps.

    Args:
        node: id of its node.
        host: this machine's address, as others reach it.
        state: the shard's; what becomes free is left there.
        lock: guards it.
        holdings: the shard's memory.
        grant: see `Grant`.
        settle: called after something became free, without the lock.
    """

    def __init__(
        self,
        node: str,
        host: str,
        state: ShardState,
        lock: threading.RLock,
        holdings: Holdings,
        grant: Grant,
        settle: Callable[[], None],
    ) -> None:
        self.name = uuid.uuid4().hex
        self._node = node
        self._host = host
        self._state = state
        self._lock = lock
        self._holdings = holdings
        self._grant = grant
        self._settle = settle
        self._mirrors: dict[int, Mirror] = {}
        self._serial = count(1)
        self._server: WireServer | None = None
        self._fetchers = Workers(FETCHERS, thread_name_prefix="tensorvine-mirror")

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for others, padding included."""
        return sum(mirror.nbytes for mirror in self._mirrors.values())

    def forget(self, shards: Iterable[int]) -> None:
        """Let go of the mirrors of shards that have drained. Call it with the lock held."""
        for shard in shards:
            mirror = self._mirrors.pop(shard, None)
            if mirror is not None:
                mirror.clear(mirror.life)
                self._free(mirror)

    async def take(self, message: Message) -> Any:
        """Hear a shard; what it gives is described at the messages.

        Raises:
            ShardUnavailableError: it is meant for another life of this shard, or is of a life that is over.
            StoreFullError: there is no room for a copy.
            TensorVineError: a copy could not be fetched.
        """
        if isinstance(message, Where):
            return self._node
        if isinstance(message, Put):
            return await self._put(message)
        with self._lock:
            answer = self._answer(message)
        self._settle()
        return answer

    def _answer(self, message: _Told) -> Any:
        mirror = self._mirrors.setdefault(message.source, Mirror(message.source))
        match message:
            case Open(_, life):
                return Opened(self.name, self._node, mirror.open(life))
            case Drop(_, life, shelf, segments, refs):
                self._check(shelf)
                mirror.drop(life, segments, refs)
            case Sync(_, life, shelf, segments, refs):
                self._check(shelf)
                missing = mirror.sync(life, segments, refs)
                self._free(mirror)
                return missing
            case Mark(_, life, shelf, stamp):
                self._check(shelf)
                mirror.stamp(life, stamp)
                return len(mirror.copies), len(mirror.records)
            case Leave(_, life):
                mirror.clear(life)
            case Look():
                return mirror.life, mirror.complete
            case Claim():
                return self._offer(mirror)
        self._free(mirror)
        return None

    async def _put(self, put: Put) -> None:
        """Keep what is not here yet."""
        self._check(put.shelf)
        with self._lock:
            mirror = self._mirrors.setdefault(put.source, Mirror(put.source))
            mirror.check(put.life)
            new = {segment: o for segment, o in put.segments.items() if segment not in mirror.copies}
        owner = f"mirror/{put.source}.{next(self._serial)}"
        try:
            parts = await self._room(owner, new, put.timeout)
            loop = asyncio.get_running_loop()
            arguments = (new, parts, self._holdings, put.address, put.timeout)
            copies = await loop.run_in_executor(self._fetchers, fetched, *arguments)
            with self._lock:
                for part in parts.values():
                    self._holdings.keep(part)
                try:
                    mirror.put(put.life, copies, put.records)
                finally:
                    self._free(mirror)
        finally:
            with self._lock:
                self._holdings.drop_save(owner)
            self._settle()

    async def _room(self, owner: str, new: dict[SegmentId, Original], timeout: float) -> dict[SegmentId, Part]:
        """Have memory granted for all that does not fit into a message."""
        lengths = {segment: length_of(original) for segment, original in new.items()}
        large = [segment for segment, length in lengths.items() if length > INLINE_BYTES]
        parts: dict[SegmentId, Part] = {}
        deadline = time.monotonic() + timeout
        while len(parts) < len(large):
            left = large[len(parts) :]
            offsets = await self._grant(owner, [lengths[s] for s in left], deadline - time.monotonic())
            parts |= {s: Part(offset, lengths[s]) for s, offset in zip(left, offsets, strict=False)}
        return parts

    def _offer(self, mirror: Mirror) -> Offer:
        """Return all of a mirror; its bytes are served from now on."""
        if self._server is None:
            self._server = WireServer(self._serve, self._host)
        originals = {segment: Original(copy.sizes, copy.slots, None) for segment, copy in mirror.copies.items()}
        address = (*self._server.address, self._server.token)
        return Offer(originals, dict(mirror.records), address)

    def _serve(self, slots: Slots, timeout: float, hashed: bool) -> tuple[dict[SegmentId, Served], Any]:
        """Answer the wire: hashes are not asked for, and nothing is waited for."""
        with self._lock:
            return {segment: self._served(segment, numbers) for segment, numbers in slots.items()}, None

    def _served(self, segment: SegmentId, slots: Sequence[int]) -> Served:
        copy = next((m.copies[segment] for m in self._mirrors.values() if segment in m.copies), None)
        if copy is None or not set(slots) <= set(copy.slots):
            raise ModelLostError(f"shelf of {self._node}: expected slots {list(slots)} of {segment}; they were dropped")
        offsets = dict(zip(copy.slots, layout([copy.sizes[slot] for slot in copy.slots])[0], strict=True))
        places = {slot: (offsets[slot], copy.sizes[slot]) for slot in slots}
        handle = copy.handle
        block = self._holdings.memory.read(handle) if isinstance(handle, Part) else np.frombuffer(handle, np.uint8)
        return Served(block, places)

    def _free(self, mirror: Mirror) -> None:
        freed, mirror.freed = mirror.freed, []
        self._state.freed += freed

    def _check(self, shelf: str) -> None:
        if shelf != self.name:
            raise ShardUnavailableError(
                f"shard {self._state.index}: expected a message to its present life; found one "
                "to an earlier one, whose mirrors are gone"
            )
