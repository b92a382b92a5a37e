"""A shard's replica store: the replicas that it keeps of other shards, their bytes in its own memory.

Rules
- What is to be kept and what may go says `store.versions.replica`; this file finds room, fetches the bytes and hands
  them out.
- The replica store goes with the shard's process; its name tells those of which it keeps replicas that it is another
  one.
- A copy is checked by its source's content hashes when it is written, and by these hashes when it is read back.
- Room that others want is waited for as every save waits for it; with none the copy fails, and the save with it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import numpy as np

from ....store.errors import ModelLostError, ShardUnavailableError
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId, layout
from ....store.versions.replica import Copy, Kept, Replica, SequenceNumber
from ...rpc.calls import answers
from ...transport.frames import Digests, Served, Slots
from ...transport.tcp_server import TcpServer
from ..calls.copies import Address, Original
from ..calls.replicas import Offer, Opened, ReplicaCalls, ReplicaOf
from ..context import ShardContext
from ..copying import Copying


class ReplicaStore:
    """The replicas that one shard keeps.

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
        self._segment_memory = context.segment_memory
        self._copying = copying
        self._settle = settle
        self._replicas: dict[int, Replica] = {}
        self._server: TcpServer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for others, padding included."""
        return sum(replica.nbytes for replica in self._replicas.values())

    def forget(self, shards: Iterable[int]) -> None:
        """Let go of the replicas of shards that have drained. Call it with the lock held."""
        for shard in shards:
            replica = self._replicas.pop(shard, None)
            if replica is not None:
                replica.clear(replica.incarnation)
                self._free(replica)

    # ---- what is told ---------------------------------------------------------------------------------

    @answers(ReplicaCalls.open_replica)
    async def open_replica(self, source: int, incarnation: int) -> Opened:
        with self._replica_of(source) as replica:
            return Opened(self.name, self._node, replica.open(incarnation))

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
            replica = self._known(of)
            replica.check(of.incarnation)
            new = {segment: original for segment, original in segments.items() if segment not in replica.copies}
        owner = self._copying.owner(f"replica of shard {of.source}")
        try:
            async with self._copying.copied(owner, new, address, timeout, timeout, hashed=True) as copies:
                self._keep(replica, of.incarnation, copies, records)
        finally:
            self._settle()

    @answers(ReplicaCalls.drop_from_replica)
    async def drop_from_replica(self, of: ReplicaOf, segments: Sequence[SegmentId], refs: Sequence[ModelRef]) -> None:
        with self._replica_of(of) as replica:
            replica.drop(of.incarnation, segments, refs)

    @answers(ReplicaCalls.sync_replica)
    async def sync_replica(
        self, of: ReplicaOf, segments: set[SegmentId], refs: set[ModelRef]
    ) -> tuple[set[SegmentId], set[ModelRef]]:
        with self._replica_of(of) as replica:
            return replica.sync(of.incarnation, segments, refs)

    @answers(ReplicaCalls.mark_replica)
    async def mark_replica(self, of: ReplicaOf, number: SequenceNumber) -> tuple[int, int]:
        with self._replica_of(of) as replica:
            replica.complete_at(of.incarnation, number)
            return len(replica.copies), len(replica.records)

    @answers(ReplicaCalls.leave_replica)
    async def leave_replica(self, source: int, incarnation: int) -> None:
        with self._replica_of(source) as replica:
            replica.clear(incarnation)

    @answers(ReplicaCalls.look_at_replica)
    async def look_at_replica(self, source: int) -> tuple[int, SequenceNumber]:
        with self._replica_of(source) as replica:
            return replica.incarnation, replica.complete

    @answers(ReplicaCalls.offer_replica)
    async def offer_replica(self, source: int) -> Offer:
        with self._replica_of(source) as replica:
            if self._server is None:
                self._server = TcpServer(self._serve, self._host)
            originals = {segment: Original(copy.sizes, copy.slots, None) for segment, copy in replica.copies.items()}
            address = Address(*self._server.address, self._server.token)
            return Offer(originals, dict(replica.records), address)

    # ---- within ---------------------------------------------------------------------------------------

    def _keep(
        self, replica: Replica, incarnation: int, copies: Mapping[SegmentId, Copy], records: Mapping[ModelRef, Kept]
    ) -> None:
        with self._lock:
            for copy in copies.values():
                if isinstance(copy.handle, Part):
                    self._segment_memory.keep(copy.handle)
            try:
                replica.put(incarnation, copies, records)
            finally:
                self._free(replica)

    @contextlib.contextmanager
    def _replica_of(self, source: int | ReplicaOf) -> Generator[Replica]:
        """Have a replica under the lock; afterwards what it let go is freed."""
        with self._lock:
            replica = self._known(source)
            try:
                yield replica
            finally:
                self._free(replica)
        self._settle()

    def _known(self, source: int | ReplicaOf) -> Replica:
        """Return a shard's replica, an empty one where there is none. Call it with the lock held.

        Raises:
            ShardUnavailableError: another incarnation of this shard is meant.
        """
        if isinstance(source, ReplicaOf):
            if source.replica_store != self.name:
                raise ShardUnavailableError(
                    f"shard {self._state.index}: expected a message to its current incarnation; found a message to an "
                    "earlier one, whose replicas no longer exist"
                )
            source = source.source
        return self._replicas.setdefault(source, Replica(source))

    def _serve(
        self, slots: Slots, timeout: float, hashed: bool
    ) -> tuple[dict[SegmentId, Served], Callable[[], Digests] | None]:
        """Answer a TCP client, with the hashes that the copies had when they were written; nothing is waited for."""
        with self._lock:
            copies = {segment: self._copy(segment, numbers) for segment, numbers in slots.items()}
            served = {segment: self._served(copy, slots[segment]) for segment, copy in copies.items()}
        digests = {s: dict(zip(copy.slots, copy.digests, strict=True)) for s, copy in copies.items()}
        return served, (lambda: digests) if hashed else None

    def _copy(self, segment: SegmentId, slots: Sequence[int]) -> Copy:
        copy = next((m.copies[segment] for m in self._replicas.values() if segment in m.copies), None)
        if copy is None or not set(slots) <= set(copy.slots):
            raise ModelLostError(
                f"replica store of {self._node}: expected slots {list(slots)} of segment {segment}; they were deleted"
            )
        return copy

    def _served(self, copy: Copy, slots: Sequence[int]) -> Served:
        offsets = dict(zip(copy.slots, layout([copy.sizes[slot] for slot in copy.slots])[0], strict=True))
        places = {slot: (offsets[slot], copy.sizes[slot]) for slot in slots}
        handle = copy.handle
        block = (
            self._segment_memory.memory.read(handle) if isinstance(handle, Part) else np.frombuffer(handle, np.uint8)
        )
        return Served(block, places)

    def _free(self, replica: Replica) -> None:
        freed, replica.freed = replica.freed, []
        self._state.residents.freed += freed
