"""What savers ask of a shard: memory to fill, and versions that come to exist and cease to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....store.holders import Lease, Query, Save
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId
from ....store.versions.version import Draft
from ...rpc.calls import remote
from ...rpc.messages import Beginning, Begun, Filled
from .copies import Address, Original, Piece


class WriteCalls:
    """Answered by `shard.parts.writes`."""

    @remote("ctl", repeatable=True)
    def begin(self, asked: Beginning) -> Begun:
        """Start a save: pin the parent, unless it is optional and there is none.

        Waits first for as long as too much waits to be written to disk. Grants memory for blocks, as far as there is
        some, unless what the saver inherits can make them needless. The answer has the parent's content hashes, or,
        where the saver can compare and all of them are in memory here, the places of its bytes.

        Raises:
            OperationTimeoutError, StorageError: the disk is slower than the savers, or does not take anything.
        """
        ...

    @remote("ctl", repeatable=True)
    def digests(self, segments: Sequence[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        """Return the content hashes of segments, waiting for those that are being computed."""
        ...

    @remote("ctl", repeatable=True)
    def reserve(self, client: str, save: Save, sizes: Sequence[int]) -> list[int]:
        """Grant memory for a save to come, if there is plenty; none else."""
        ...

    @remote("ctl")
    def is_short(self) -> bool:
        """Tell whether somebody waits for memory: then clients give back what they reserved for saves to come."""
        ...

    @remote("ctl")
    def grant(self, client: str, save: Save, sizes: Sequence[int], timeout: float) -> list[int]:
        """Grant memory for at least the first of `sizes`, waiting while what others hold may become free.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
            ShardUnavailableError: the client is not known here (any more).
        """
        ...

    @remote("ctl")
    def adopt(self, save: Save, incarnation: int, blocks: Sequence[Filled]) -> None:
        """Take what a client filled, in this `incarnation` of the shard, for a version whose home is elsewhere."""
        ...

    @remote("data")
    def pull(
        self, save: Save, originals: Mapping[SegmentId, Original], address: Address | None, timeout: float
    ) -> str | None:
        """Fetch what a client that does not share this shard's memory offers at an address, and take that.

        Gives None, or why this shard cannot connect to the client; then it has taken nothing.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
            ShardUnavailableError, OperationTimeoutError: the client died or is slow, or the save has ended.
        """
        ...

    @remote("ctl")
    def allocate(self, client: str, save: Save, sizes: Sequence[int], timeout: float) -> list[int]:
        """Grant memory as `grant` does, which this shard fills itself, by `place`."""
        ...

    @remote("data")
    def place(
        self, save: Save, part: Part, pieces: Sequence[Piece], address: Address | None, timeout: float
    ) -> str | None:
        """Fetch pieces of a tensor that a process of the save's offers at an address to where they belong.

        The n-th of those that no message brings is slot n of segment (0, 0) there. Gives None, or why this shard cannot
        connect there.

        Raises:
            ShardUnavailableError, OperationTimeoutError: who offers them died or is slow, or the save has ended.
            CorruptDataError: they are not pieces of a tensor in that part.
        """
        ...

    @remote("data")
    def adopt_block(
        self, save: Save, segment: SegmentId, block: np.ndarray, sizes: Sequence[int], timeout: float
    ) -> None:
        """Copy a block out of the engine's object store, where a client put it that this shard cannot connect to."""
        ...

    @remote("ctl")
    def commit(
        self,
        draft: Draft,
        client: str,
        incarnation: int,
        blocks: Sequence[Filled],
        leases: Sequence[Lease],
        durable: bool,
        timeout: float,
    ) -> tuple[ModelRef, int]:
        """Take what a client filled in this `incarnation` of the shard, and make a version exist, on every shard it
        needs.

        A `durable` one is written to disk first. Gives its reference and its time (UTC, ns).
        """
        ...

    @remote("ctl", repeatable=True)
    def abort(self, operation: Save | Query) -> None:
        """Drop the pins of an operation, and what an unfinished save brought; refuse what is asked for it later."""
        ...

    @remote("ctl")
    def retire(self, name: str, version: int | None) -> ModelRef:
        """Make a version cease to exist."""
        ...

    @remote("watch", repeatable=True)
    def flush(self, timeout: float) -> None:
        """Wait until all that waits now is on disk."""
        ...
