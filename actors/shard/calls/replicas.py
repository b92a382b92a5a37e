"""What shards tell each other of the copies that they keep of each other's memory, and what they say with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.versions.replica import Kept, SequenceNumber
from ...rpc.calls import remote
from .copies import Address, Original


@dataclass(frozen=True, slots=True)
class ReplicaOf:
    """Whose copy is meant, and which."""

    source: int
    """The shard that owns what is copied."""
    incarnation: int
    """Of that shard."""
    replica_store: str
    """Names the incarnation of the shard that keeps the copy: in another one it has nothing of before."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to `open_replica`."""

    replica_store: str
    """See `ReplicaOf`."""
    node: str
    incarnation: int
    """The latest of the source that the keeper heard of."""


@dataclass(frozen=True, slots=True)
class Offer:
    """All that is kept of a shard."""

    segments: Mapping[SegmentId, Original]
    """Their bytes are at the address."""
    records: Mapping[ModelRef, Kept]
    address: Address


class ReplicaCalls:
    """Answered by `shard.replicas`: by the replica store, and of the shard's own copies elsewhere by `securing`."""

    @remote("data")
    def open_replica(self, source: int, incarnation: int) -> Opened:
        """Begin an incarnation of a shard at one that is to keep copies of it."""
        ...

    @remote("data")
    def put_in_replica(
        self,
        of: ReplicaOf,
        segments: Mapping[SegmentId, Original],
        records: Mapping[ModelRef, Kept],
        address: Address | None,
        timeout: float,
    ) -> None:
        """Keep copies, for which there are `timeout` seconds.

        Raises:
            ShardUnavailableError: it is meant for another incarnation of the keeper, or is of an incarnation that is
                over.
            StoreFullError: there is no room for a copy.
            TensorVineError: a copy could not be fetched.
        """
        ...

    @remote("data")
    def drop_from_replica(self, of: ReplicaOf, segments: Sequence[SegmentId], refs: Sequence[ModelRef]) -> None:
        """Let go of what is not needed any more."""
        ...

    @remote("data")
    def sync_replica(
        self, of: ReplicaOf, segments: set[SegmentId], refs: set[ModelRef]
    ) -> tuple[set[SegmentId], set[ModelRef]]:
        """Hear all that is needed, and return what of it is missing: (segments, versions)."""
        ...

    @remote("data")
    def mark_replica(self, of: ReplicaOf, number: SequenceNumber) -> tuple[int, int]:
        """Hear that a copy is complete, and return how many segments and versions it has."""
        ...

    @remote("data")
    def leave_replica(self, source: int, incarnation: int) -> None:
        """Let go of a copy, which another shard keeps now."""
        ...

    @remote("data")
    def look_at_replica(self, source: int) -> tuple[int, SequenceNumber]:
        """Tell how good the copy of a shard is: (latest incarnation of it, sequence number at which the copy was
        complete)."""
        ...

    @remote("data")
    def offer_replica(self, source: int) -> Offer:
        """Return all that is kept of a shard."""
        ...

    @remote("data", repeatable=True)
    def secure(self, segments: Sequence[SegmentId], timeout: float) -> None:
        """Have copies of segments of this shard on other nodes, for a version whose home is elsewhere.

        Raises:
            ModelLostError: one went with an earlier incarnation of this shard, after the home had it held.
            LapsedError: this shard has no lease.
        """
        ...

    @remote("data")
    def leaves(self, ref: ModelRef, segments: Sequence[SegmentId], timeout: float) -> None:
        """Have copies on other nodes of what only a version's manifest tells of, which is about to go."""
        ...
