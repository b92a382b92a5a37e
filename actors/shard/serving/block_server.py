"""A shard's TCP server: what clients without a map of its memory read from it.

Rules
- An answer is a view on the shard's memory, kept in place until it is sent: no copy is made for it.
- What is on disk only is read first, as for every other reader: the shard is asked to, in a message to itself.
- Content hashes are those that the shard keeps of the block that is sent, computed while the bytes go out if need be. A
  segment that was read again from its file meanwhile may have other bytes (a lossy codec): what is sent is hashed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

import numpy as np

from ....store.errors import ModelLostError, OperationTimeoutError
from ....store.segments.segment import GONE, Segment, SegmentId
from ....store.versions.manifest import digest_of
from ....store.waiting import Deadline
from ...rpc.redis_keys import Address
from ...transport.frames import Digests, Served, Slots
from ...transport.tcp_server import TcpServer
from ..calls import ShardCalls
from ..context import ShardContext
from ..segment_memory import READ_ROUNDS


class BlockServer:
    """Serves reads of one shard.

    Args:
        context: the shard's.

    Raises:
        OSError: nothing can listen at that address.
    """

    def __init__(self, context: ShardContext) -> None:
        self._context = context
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._server = TcpServer(self._answer, context.engine.address())
        self.address = Address(*self._server.address, self._server.token)
        """Where it listens, as long as the process lives."""

    def find(self, slots: Slots, timeout: float) -> dict[SegmentId, Served]:
        """Return slots of segments that are about to be sent, and count them; errors as in `kept`."""
        found = self.kept(slots, timeout)
        with self._lock:
            self._context.bytes_sent += sum(nbytes for each in found.values() for _, nbytes in each.slots.values())
        return found

    def kept(self, slots: Slots, timeout: float) -> dict[SegmentId, Served]:
        """Return slots of segments, kept in place; what is on disk only is read first. Not for the shard's own loops.

        Raises:
            ModelLostError: a slot is not there any more.
            LapsedError: a slot is not there, and this shard has no lease.
            OperationTimeoutError: reading took longer than `timeout` seconds.
            StoreFullError: others push out again what is read.
        """
        deadline = Deadline.after(timeout)
        for _ in range(READ_ROUNDS):
            with self._lock:
                try:
                    served = self._served(slots)
                except ModelLostError:
                    self._context.tenure.check()  # without a lease: the next incarnation may have it
                    raise
            if served is not None:
                return served
            self._peers.call(self._index, ShardCalls.blocks(slots), deadline.left())
        raise self._segment_memory.crowded(f"segments {list(slots)} for sending")

    def hashes(self, kept: Mapping[SegmentId, Served], deadline: Deadline) -> Digests:
        """Return the content hashes of slots that are kept in place.

        Raises:
            OperationTimeoutError: hashing took longer.
        """
        return self._digests(self._segment_memory.hashing.futures(list(kept)), kept, deadline)

    def _answer(
        self, slots: Slots, timeout: float, hashed: bool
    ) -> tuple[dict[SegmentId, Served], Callable[[], Digests] | None]:
        deadline = Deadline.after(timeout)
        segments = list(slots)
        served = self.find(slots, timeout)
        if not hashed:
            return served, None
        hashing = self._segment_memory.hashing.futures(segments)
        return served, lambda: self._digests(hashing, served, deadline)

    def _digests(
        self, hashing: Sequence[Future[None]], served: Mapping[SegmentId, Served], deadline: Deadline
    ) -> Digests:
        _, late = wait(hashing, deadline.left())
        if late:
            raise OperationTimeoutError(
                f"segments {list(served)}: expected their hashes in time; {len(late)} hashes are missing"
            )
        with self._lock:
            known = self._state.digests(segment for segment, sent in served.items() if self._lies_at(segment, sent))
        return {segment: known.get(segment) or _hashed(sent) for segment, sent in served.items()}

    def _lies_at(self, segment_id: SegmentId, sent: Served) -> bool:
        """Tell whether a segment is still in the block that is sent, which nothing else replaces as long as it is."""
        segment = self._state.segment(segment_id)
        view = self._segment_memory.view(segment) if segment is not None else None
        return view is not None and view.ctypes.data == sent.block.ctypes.data

    def _served(self, slots: Slots) -> dict[SegmentId, Served] | None:
        """Keep what is asked for in place; None when some is on disk only. Call it with the lock held."""
        self._state.blocks(slots)  # all are here, and were used now
        segments = [segment for segment_id in slots if (segment := self._state.segment(segment_id)) is not None]
        chosen = [places for segment in segments if (places := _chosen(segment, slots[segment.id])) is not None]
        if len(chosen) < len(segments):
            return None
        found: dict[SegmentId, Served] = {}
        for segment, places in zip(segments, chosen, strict=True):
            view = self._segment_memory.view(segment) if places else None
            found[segment.id] = Served(view if view is not None else np.empty(0, np.uint8), places)
        return found


def _hashed(sent: Served) -> dict[int, str]:
    return {slot: digest_of(sent.block[at : at + nbytes]) for slot, (at, nbytes) in sent.slots.items()}


def _chosen(segment: Segment, slots: Sequence[int]) -> dict[int, tuple[int, int]] | None:
    """Return where slots are: slot -> (offset, bytes); None when some are on disk only.

    Raises:
        ModelLostError: there is no such slot, or it was let go.
    """
    gone = [slot for slot in slots if slot >= len(segment.sizes) or segment.offsets[slot] == GONE]
    if gone:
        raise ModelLostError(f"segment {segment.id}: expected slots {list(slots)}; slots {gone} no longer exist")
    found = {slot: (at, segment.sizes[slot]) for slot in slots if isinstance(at := segment.offsets[slot], int)}
    return found if len(found) == len(set(slots)) else None
