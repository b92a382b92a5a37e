"""The differences between tensors of two versions, computed at the shard that holds the newer ones.

Rules
- Tensors stay in place while they are compared: no copy is made of those that lie here.
- To be compared, a base in another shard is read over TCP, one at a time. Patches are made of bases here alone.
- The shard goes by its own content hashes. A reader's claim only selects a patch.
- The threads are this part's own, because they may wait for the shard itself to read a file. Those that answer, those
  that make patches, and those that make blocks of these are apart, because the former wait for the latter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from ....store.archive.segmentfile import Slot
from ....store.arrays import Array, from_bytes, nbytes_of
from ....store.errors import ModelLostError, ShardUnavailableError
from ....store.patches import make_patch
from ....store.patches.comparing import TensorDiff, difference
from ....store.segments.segment import SegmentId
from ....store.waiting import Deadline
from ...memory.workers import Workers
from ...rpc.calls import answers
from ...rpc.redis_keys import Address
from ...transport.frames import Served
from ...transport.tcp import TcpClient
from ..calls.patches import GONE, OTHER, TOO_LONG, Pair, PatchCalls, Update
from ..context import ShardContext
from .block_server import BlockServer
from .patch_cache import Made, PatchCache

THREADS = 2
MOST_THREADS = 4
"""That make the blocks of patches."""
WORTH = 0.75
"""A patch that is longer than this share of its tensor is not sent."""


class Patches:
    """Compares tensors of one shard, and makes patches.

    Args:
        context: the shard's.
        block_server: finds tensors, if the shard has one.
    """

    def __init__(self, context: ShardContext, block_server: BlockServer | None) -> None:
        self._context = context
        self._index = context.index
        self._block_server = block_server
        self._workers = Workers(THREADS, thread_name_prefix="tensorvine-compare")
        self._makers = Workers(THREADS, thread_name_prefix="tensorvine-patch")
        self._blocks = Workers(min(os.cpu_count() or 1, MOST_THREADS), thread_name_prefix="tensorvine-blocks")
        self.cache = PatchCache()

    @answers(PatchCalls.compare)
    async def compare(
        self, pairs: Sequence[Pair], elsewhere: Mapping[SegmentId, Address], bins: int, timeout: float
    ) -> list[TensorDiff]:
        return await self._workers.run(self._compare, pairs, elsewhere, bins, Deadline.after(timeout))

    @answers(PatchCalls.patches)
    async def patches(self, updates: Sequence[Update], timeout: float) -> list[np.ndarray | str]:
        return await self._workers.run(self._patches, updates, Deadline.after(timeout))

    def _compare(
        self, pairs: Sequence[Pair], elsewhere: Mapping[SegmentId, Address], bins: int, deadline: Deadline
    ) -> list[TensorDiff]:
        addresses = set(elsewhere.values())
        clients = {address: TcpClient((address.host, address.port), address.token) for address in addresses}
        try:
            found: list[TensorDiff] = []
            for pair in pairs:
                address = elsewhere.get(pair.base[0])
                tensor = self._kept(pair.tensor, pair, deadline)
                near = address is None
                base = self._kept(pair.base, pair, deadline) if near else _read(clients[address], pair, deadline)
                found.append(difference(tensor, base, bins))
            return found
        finally:
            for client in clients.values():
                client.close()

    def _patches(self, updates: Sequence[Update], deadline: Deadline) -> list[np.ndarray | str]:
        searched = {update.base for update in updates if update.place is None}
        with self._context.lock:
            places = self._context.state.places_of(searched) if searched else {}
        making = [
            self._makers.submit(self._patch, update, update.place or places.get(update.base), deadline)
            for update in updates
        ]
        found = [each.result(deadline.left_for("patches")) for each in making]
        with self._context.lock:
            self._context.bytes_sent += sum(each.nbytes for each in found if not isinstance(each, str))
        return found

    def _patch(self, update: Update, place: Slot | None, deadline: Deadline) -> Made:
        if place is None:
            return GONE
        server, slots = self._server(), dict[SegmentId, list[int]]()
        for segment, slot in (update.tensor, place):
            slots.setdefault(segment, []).append(slot)
        try:
            kept = server.kept(slots, deadline.left_for("patches"))
        except ModelLostError:
            return GONE
        hashes = server.hashes(kept, deadline)
        base, result = (hashes[segment][slot] for segment, slot in (place, update.tensor))
        if base != update.base:
            return OTHER
        old, new = (_array(kept, slot, update) for slot in (place, update.tensor))

        def make() -> Made:
            limit = int(WORTH * new.nbytes)
            patch = make_patch(new, old, hashes=(base, result), limit=limit, workers=self._blocks)
            return TOO_LONG if patch is None else patch

        return self.cache.get((base, result, update.dtype, update.shape), make, deadline.left_for("patches"))

    def _kept(self, slot: Slot, pair: Pair, deadline: Deadline) -> Array:
        """Return a tensor of this shard, in place; one on disk only is read first."""
        return _array(self._server().kept({slot[0]: [slot[1]]}, deadline.left_for("comparison")), slot, pair)

    def _server(self) -> BlockServer:
        if self._block_server is None:
            raise ShardUnavailableError(f"shard {self._index}: expected a TCP server, which finds tensors; found none")
        return self._block_server


def _array(kept: Mapping[SegmentId, Served], slot: Slot, of: Pair | Update) -> Array:
    segment, number = slot
    at, nbytes = kept[segment].slots[number]
    return from_bytes(kept[segment].block[at : at + nbytes], of.dtype, of.shape)


def _read(client: TcpClient, pair: Pair, deadline: Deadline) -> Array:
    """Return a base that another shard holds."""
    segment, number = pair.base
    nbytes, what = nbytes_of(pair.dtype, pair.shape), "comparison"
    came = client.read({segment: {number: nbytes}}, deadline.left_for(what), what)[segment]
    at = came.offsets[number]
    return from_bytes(came.block[at : at + nbytes], pair.dtype, pair.shape)
