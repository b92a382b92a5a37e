"""Requests about the differences between tensors of two versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Update:
    """A tensor that a reader wants, and the base that it has in its place, of the same dtype and shape."""

    tensor: Slot
    """In a segment of the shard that is asked."""
    base: str
    """Content hash of the base."""
    place: Slot | None
    """A slot of that shard that should have this content. Without it, the shard searches for the content."""
    dtype: str
    shape: tuple[int, ...]


GONE = "the shard no longer has the base"
OTHER = "the shard has other content"
TOO_LONG = "the patch would not be much shorter"
"""Reasons for the absence of a patch."""


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

    @remote("data", repeatable=True)
    def patches(self, updates: Sequence[Update], timeout: float) -> list[np.ndarray | str]:
        """Return a patch for each tensor, or the reason for its absence; errors as in `compare`.

        A patch is made once for all readers with the same base.
        """
        ...
