"""What readers of tensors ask of a shard: where blocks are, or the bytes."""

from __future__ import annotations

from ....store.refs import ModelRef
from ....store.segments.segment import Block, SegmentId
from ...collective.rendezvous import Endpoint, Endpoints
from ...rpc.calls import remote
from ...rpc.messages import Fetched
from ...transport.frames import Slots
from ...transport.parcels import PairAnswer, PairQuestion


class ReadCalls:
    """Answered by `shard.parts.reads`."""

    @remote("ctl", repeatable=True)
    def fetch(
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
            client: the caller's.
            name: of the model.
            version: its number; None: the latest.
            known: the version whose manifest the client has, and takes for the one that it asks for.
            wanted: slots, lying here, that it needs of that one.
            whole: of another one it needs all that lies here; else it asks for what it needs when it has the manifest.
        """
        ...

    @remote("ctl", repeatable=True)
    def blocks(self, wanted: Slots) -> dict[SegmentId, Block]:
        """Return blocks of this shard's segments, read from disk where need be, for clients that map its memory."""
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
    def check_manifest(self, client: str, ref: ModelRef) -> list[str]:
        """Hold a version's manifest on disk against what is answered here."""
        ...

    @remote("data", repeatable=True)
    def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        """Read tensors of this shard's segments, in memory and from disk, and say what is wrong with them."""
        ...
