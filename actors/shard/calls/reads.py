"""What readers of tensors ask of a shard: where blocks are, or the bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ....store.segments.segment import Block, SegmentId
from ...collective.rendezvous import Endpoint, Endpoints
from ...rpc.calls import remote
from ...transport.frames import Slots
from ...transport.parcels import PairAnswer, PairQuestion


class ReadCalls:
    """Answered by `shard.parts.reads`."""

    @remote("ctl", repeatable=True)
    def blocks(self, wanted: Slots) -> dict[SegmentId, Block]:
        """Return blocks of this shard's segments, read from disk where need be, for clients that map its memory.

        Raises:
            ModelLostError: one is not here: ask the catalog where it is now.
            CorruptDataError, StorageError: its file cannot be read.
        """
        ...

    @remote("ctl", repeatable=True)
    def digests(self, segments: Sequence[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        """Return the content hashes of segments, of all slots; waits for those that are being computed."""
        ...

    @remote("ctl", repeatable=True)
    def carried(self, wanted: Slots) -> dict[SegmentId, Block]:
        """Return blocks as in `blocks`, with handles of copies in the engine's object store."""
        ...

    @remote("watch", repeatable=True)
    def send_by(self, backend: str, member: str, question: PairQuestion) -> PairAnswer:
        """Send slots of segments to a member, a client's reader, by its pair, a group; see `pair_sender`."""
        ...

    @remote("watch")
    def meet(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        """Let members of a group meet here; see `collective.rendezvous`."""
        ...

    @remote("data", repeatable=True)
    def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        """Read tensors of this shard's segments, in memory and from disk, and say what is wrong with them."""
        ...
