"""What is asked of a shard about the files of its segments."""

from __future__ import annotations

from collections.abc import Sequence

from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId, Stored
from ...rpc.calls import remote
from ...rpc.messages import Chains, ToStore


class FileCalls:
    """Answered by `shard.parts.files`."""

    @remote("data")
    def store(self, wanted: ToStore) -> Chains:
        """Write segments for a version whose home is elsewhere."""
        ...

    @remote("data")
    def relearn(self, ref: ModelRef, segments: Sequence[SegmentId]) -> None:
        """Know the segments of this shard that a version on disk names, although its manifest came after a restart.

        Raises:
            ModelLostError: one of them has no file.
        """
        ...

    @remote("ctl", repeatable=True)
    def stored(self, segment: SegmentId) -> Stored:
        """Return the file of a segment of this shard."""
        ...
