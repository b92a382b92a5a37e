"""What the homes of versions tell and ask the shards that hold their tensors."""

from __future__ import annotations

from collections.abc import Sequence

from ....store.holders import Holder
from ....store.refs import ModelRef
from ....store.segments.segment import Holds, SegmentId
from ...rpc.calls import remote


class HolderCalls:
    """Answered by `shard.parts.holders`."""

    @remote("ctl", repeatable=True)
    def hold(self, ref: ModelRef, holds: Holds) -> None:
        """Hold slots here for a version whose home is elsewhere.

        Raises:
            OperationTimeoutError: it was given up already.
            LapsedError: this shard has no lease.
            CorruptDataError: a slot is on disk only, and its file is damaged.
        """
        ...

    @remote("ctl", repeatable=True)
    def release(self, holder: Holder) -> None:
        """Forget a holder whose home is elsewhere."""
        ...

    @remote("ctl", repeatable=True)
    def release_homes(self, home: int, keep: Sequence[ModelRef], version: int, restart: int) -> None:
        """Forget what a shard that lost its memory held here, but for the versions that are on disk.

        Args:
            home: the shard.
            keep: versions that stay.
            version: of the topology by which homes are meant: by another one, nothing is let go.
            restart: which one of the shard's it is. Each counts once: it holds anew after that.
        """
        ...

    @remote("ctl")
    def release_all(self, refs: Sequence[ModelRef]) -> None:
        """Forget versions that were lost with their home."""
        ...

    @remote("ctl")
    def cool(self, ref: ModelRef) -> None:
        """Let a version whose home is elsewhere go from memory."""
        ...

    @remote("ctl", repeatable=True)
    def named(self, segments: Sequence[SegmentId]) -> set[SegmentId]:
        """Tell which of another shard's segments versions of this home, or commits on their way, name."""
        ...

    @remote("ctl", repeatable=True)
    def claims(self, shard: int) -> dict[ModelRef, dict[SegmentId, list[int]]]:
        """Tell a shard that started again what this home's versions name there."""
        ...

    @remote("ctl", repeatable=True)
    def unknown(self, refs: Sequence[ModelRef], version: int) -> list[ModelRef]:
        """Tell which of some versions of this home are none (any more).

        Args:
            refs: the versions.
            version: of the topology by which they are at home here: by another one, or while names move, nothing is
                said of them.
        """
        ...
