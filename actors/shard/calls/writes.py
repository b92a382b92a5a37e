"""What savers ask of a shard: memory to fill, and the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....store.holders import Request
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId
from ...rpc.calls import remote
from ...rpc.catalog_messages import Committed, Refused
from ...rpc.messages import Handed
from .copies import Address, Original, Piece


class WriteCalls:
    """Answered by `shard.parts.writes`."""

    @remote("ctl", repeatable=True)
    def reserve(self, client: str, save: Request, sizes: Sequence[int]) -> list[int]:
        """Grant memory for a save to come, if there is plenty; none else."""
        ...

    @remote("ctl")
    def is_short(self) -> bool:
        """Tell whether somebody waits for memory: then clients give back what they reserved for saves to come."""
        ...

    @remote("ctl")
    def grant(self, client: str, save: Request, sizes: Sequence[int], timeout: float) -> list[int]:
        """Grant memory for at least the first of `sizes`, waiting while what others hold may become free.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
            ShardUnavailableError: the client is not known here (any more).
        """
        ...

    @remote("data")
    def pull(
        self, save: Request, originals: Mapping[SegmentId, Original], address: Address | None, timeout: float
    ) -> str | None:
        """Fetch what a client that does not share this shard's memory offers at an address, and take that.

        Gives None, or why this shard cannot connect to the client; then it has taken nothing.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
            ShardUnavailableError, OperationTimeoutError: the client died or is slow, or the save has ended.
        """
        ...

    @remote("ctl")
    def allocate(self, client: str, save: Request, sizes: Sequence[int], timeout: float) -> list[int]:
        """Grant memory as `grant` does, which this shard fills itself, by `place`."""
        ...

    @remote("data")
    def place(
        self, save: Request, part: Part, pieces: Sequence[Piece], address: Address | None, timeout: float
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
        self, save: Request, segment: SegmentId, block: np.ndarray, sizes: Sequence[int], timeout: float
    ) -> None:
        """Copy a block out of the engine's object store, where a client put it that this shard cannot connect to."""
        ...

    @remote("ctl", repeatable=True)
    def commit(self, handed: Handed) -> Committed | Refused:
        """Take the segments that a client filled, and have the catalog make a version exist.

        What was sent on to the catalog waits for its answer, whatever becomes of the client; an `abort` waits, too.
        A call that is repeated waits for the same answer.

        Raises:
            ShardUnavailableError: this is another incarnation than the one that granted the memory, or the shard has no
                lease.
            OperationTimeoutError: the save is over, or the catalog did not answer in time: it is not known whether the
                version exists.
            StoreFullError, StorageError: as `CatalogCalls.commit`.
            CorruptDataError: it inherits a tensor that is on disk only, in a damaged file.
        """
        ...

    @remote("ctl", repeatable=True)
    def abort(self, save: Request) -> None:
        """End a save: free what it was granted and has staged, and refuse it from now on."""
        ...
