"""A shard's shelf: the mirrors that it keeps of other shards, their bytes in its own memory.

Rules
- What is to be kept and what may go says `store.versions.mirror`; this file finds room, fetches the bytes and hands
  them out.
- The shelf goes with the shard's process; its name tells those whom it mirrors that it is another one.
- Room that others want is waited for as every save waits for it; with none the copy fails, and the save with it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ....store.errors import ModelLostError, ShardUnavailableError
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId, layout
from ....store.versions.mirror import Copy, Kept, Mirror, Stamp
from ...rpc.calls import answers
from ...transport.frames import Served, Slots
from ...transport.wire import WireServer
from ..calls.copies import Address, Original
from ..calls.replicas import Offer, Opened, ReplicaCalls, ReplicaOf
from ..context import ShardContext
from ..copying import Copying


class Shelf:
    """The mirrors that one shard keeps.

    Args:
        context: the shard's; what becomes free is left in its state.
        copying: brings what is to be kept.
        settle: called after something became free, without the lock.
    """

    def __init__(self, context: ShardContext, copying: Copying, settle: Callable[[], None]) -> None:
        self.name = uuid.uuid4().hex
        self._node = context.engine.this_node()
        self._host = context.engine.address()
        self._state = context.state
        self._lock = context.lock
        self._holdings = context.holdings
        self._copying = copying
        self._settle = settle
        self._mirrors: dict[int, Mirror] = {}
        self._server: WireServer | None = None

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

    # ---- what is told -----------------------------------------------------------------------------------

    @answers(ReplicaCalls.open_replica)
    async def open_replica(self, source: int, life: int) -> Opened:
        with self._mirror_of(source) as mirror:
            return Opened(self.name, self._node, mirror.open(life))

    @answers(ReplicaCalls.put_in_replica)
    async def put_in_replica(
        self,
        of: ReplicaOf,
        segments: Mapping[SegmentId, Original],
        records: Mapping[ModelRef, Kept],
        address: Address | None,
        timeout: float,
    ) -> None:
        with self._lock:
            mirror = self._known(of)
            mirror.check(of.life)
            new = {segment: original for segment, original in segments.items() if segment not in mirror.copies}
        try:
            async with self._copying.copied(f"mirror of shard {of.source}", new, address, timeout, timeout) as copies:
                self._keep(mirror, of.life, copies, records)
        finally:
            self._settle()

    @answers(ReplicaCalls.drop_from_replica)
    async def drop_from_replica(self, of: ReplicaOf, segments: Sequence[SegmentId], refs: Sequence[ModelRef]) -> None:
        with self._mirror_of(of) as mirror:
            mirror.drop(of.life, segments, refs)

    @answers(ReplicaCalls.sync_replica)
    async def sync_replica(
        self, of: ReplicaOf, segments: set[SegmentId], refs: set[ModelRef]
    ) -> tuple[set[SegmentId], set[ModelRef]]:
        with self._mirror_of(of) as mirror:
            return mirror.sync(of.life, segments, refs)

    @answers(ReplicaCalls.mark_replica)
    async def mark_replica(self, of: ReplicaOf, stamp: Stamp) -> tuple[int, int]:
        with self._mirror_of(of) as mirror:
            mirror.stamp(of.life, stamp)
            return len(mirror.copies), len(mirror.records)

    @answers(ReplicaCalls.leave_replica)
    async def leave_replica(self, source: int, life: int) -> None:
        with self._mirror_of(source) as mirror:
            mirror.clear(life)

    @answers(ReplicaCalls.look_at_replica)
    async def look_at_replica(self, source: int) -> tuple[int, Stamp]:
        with self._mirror_of(source) as mirror:
            return mirror.life, mirror.complete

    @answers(ReplicaCalls.offer_replica)
    async def offer_replica(self, source: int) -> Offer:
        with self._mirror_of(source) as mirror:
            if self._server is None:
                self._server = WireServer(self._serve, self._host)
            originals = {segment: Original(copy.sizes, copy.slots, None) for segment, copy in mirror.copies.items()}
            address = (*self._server.address, self._server.token)
            return Offer(originals, dict(mirror.records), address)

    # ---- within -----------------------------------------------------------------------------------------

    def _keep(
        self, mirror: Mirror, life: int, copies: Mapping[SegmentId, Copy], records: Mapping[ModelRef, Kept]
    ) -> None:
        with self._lock:
            for copy in copies.values():
                if isinstance(copy.handle, Part):
                    self._holdings.keep(copy.handle)
            try:
                mirror.put(life, copies, records)
            finally:
                self._free(mirror)

    @contextlib.contextmanager
    def _mirror_of(self, source: int | ReplicaOf) -> Generator[Mirror]:
        """Have a mirror under the lock; afterwards what it let go is freed."""
        with self._lock:
            mirror = self._known(source)
            try:
                yield mirror
            finally:
                self._free(mirror)
        self._settle()

    def _known(self, source: int | ReplicaOf) -> Mirror:
        """Return a shard's mirror, an empty one where there is none. Call it with the lock held.

        Raises:
            ShardUnavailableError: another life of this shard is meant.
        """
        if isinstance(source, ReplicaOf):
            if source.shelf != self.name:
                raise ShardUnavailableError(
                    f"shard {self._state.index}: expected a message to its present life; found one "
                    "to an earlier one, whose mirrors are gone"
                )
            source = source.source
        return self._mirrors.setdefault(source, Mirror(source))

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
