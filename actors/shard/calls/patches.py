"""Requests about the differences between tensors of two versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....store.archive.segmentfile import Slot
from ....store.patches.comparing import TensorDiff
from ....store.segments.segment import SegmentId
from ...rpc.calls import remote
from ...rpc.redis_keys import Address


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of the same dtype and shape."""

    tensor: Slot
    """In a segment of the shard that is asked."""
    base: Slot
    dtype: str
    shape: tuple[int, ...]


class PatchCalls:
    """Answered by `shard.serving.patches`."""

    @remote("data", repeatable=True)
    def compare(
        self, pairs: Sequence[Pair], elsewhere: Mapping[SegmentId, Address], bins: int, timeout: float
    ) -> list[TensorDiff]:
        """Compare tensors with their bases.

        Args:
            pairs: the tensors.
            elsewhere: segments of bases that other shards hold, with the addresses of these shards.
            bins: of the histograms; 0: none.
            timeout: seconds.

        Raises:
            ModelLostError: a segment no longer exists.
            ShardUnavailableError: this shard has no TCP server, or cannot connect to another one.
            OperationTimeoutError: it took longer.
        """
        ...
