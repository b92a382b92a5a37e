"""The differences between tensors of two versions, computed at the shard that holds the newer ones.

Rules
- Tensors stay in place while they are compared: no copy is made of those that lie here. A base in another shard is read
  over TCP, one at a time.
- The threads are this part's own, because they may wait for the shard itself to read a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....store.archive.segmentfile import Slot
from ....store.arrays import Array, from_bytes, nbytes_of
from ....store.errors import ShardUnavailableError
from ....store.patches.comparing import TensorDiff, difference
from ....store.segments.segment import SegmentId
from ....store.waiting import Deadline
from ...memory.workers import Workers
from ...rpc.calls import answers
from ...rpc.redis_keys import Address
from ...transport.tcp import TcpClient
from ..calls.patches import Pair, PatchCalls
from ..context import ShardContext
from .block_server import BlockServer

THREADS = 2


class Patches:
    """Compares tensors for one shard.

    Args:
        context: the shard's.
        block_server: finds tensors, if the shard has one.
    """

    def __init__(self, context: ShardContext, block_server: BlockServer | None) -> None:
        self._index = context.index
        self._block_server = block_server
        self._workers = Workers(THREADS, thread_name_prefix="tensorvine-patch")

    @answers(PatchCalls.compare)
    async def compare(
        self, pairs: Sequence[Pair], elsewhere: Mapping[SegmentId, Address], bins: int, timeout: float
    ) -> list[TensorDiff]:
        return await self._workers.run(self._compare, pairs, elsewhere, bins, Deadline.after(timeout))

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

    def _kept(self, slot: Slot, pair: Pair, deadline: Deadline) -> Array:
        """Return a tensor of this shard, in place; one on disk only is read first."""
        if self._block_server is None:
            raise ShardUnavailableError(f"shard {self._index}: expected a TCP server, which finds tensors; found none")
        segment, number = slot
        kept = self._block_server.kept({segment: [number]}, deadline.left_for("comparison"))[segment]
        at, nbytes = kept.slots[number]
        return from_bytes(kept.block[at : at + nbytes], pair.dtype, pair.shape)


def _read(client: TcpClient, pair: Pair, deadline: Deadline) -> Array:
    """Return a base that another shard holds."""
    segment, number = pair.base
    nbytes, what = nbytes_of(pair.dtype, pair.shape), "comparison"
    came = client.read({segment: {number: nbytes}}, deadline.left_for(what), what)[segment]
    at = came.offsets[number]
    return from_bytes(came.block[at : at + nbytes], pair.dtype, pair.shape)
