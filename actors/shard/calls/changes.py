"""What a shard is told in a change of the topology."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....planner.topology import Topology
from ....store.holders import Drain, Save
from ....store.segments.segment import SegmentId
from ....store.versions.handover import Bundle, MovedSegment
from ...rpc.calls import remote
from ...rpc.messages import Moved, Sender, Tag, Unwritten
from .copies import Address, Original


class ChangeCalls:
    """Answered by `shard.parts.changes`."""

    @remote("ctl", repeatable=True)
    def learn(self, topology: Topology) -> None:
        """Go by a new topology.

        Raises:
            StorageError: what a shard that drained handed to an earlier incarnation of this one cannot be read just
                now.
        """
        ...

    @remote("ctl", repeatable=True)
    def topology(self) -> Topology:
        """Tell the planner, which lost it, by what topology this shard goes."""
        ...

    @remote("ctl")
    def node(self) -> str:
        """Tell on which node this shard is."""
        ...

    @remote("ctl", repeatable=True)
    def tag(self) -> Tag:
        """Tell how things stand."""
        ...

    @remote("ctl", repeatable=True)
    def gathered(self, method: str, arguments: Sequence[object]) -> tuple[Tag, Any]:
        """Answer what all shards are asked, and tell how things stood: where they changed meanwhile, as if sending."""
        ...

    @remote("watch", repeatable=True)
    def hand_over(self) -> Moved:
        """Hand all names over that are at home elsewhere now."""
        ...

    @remote("ctl")
    def take(self, bundle: Bundle, unwritten: Sequence[Unwritten], sender: Sender) -> int:
        """Become home to names; gives the bytes by which the metadata here grew.

        The replicas have them first; then the planner hears of it; then they are here.

        Raises:
            MovedError: who sent them has started again since, and is home to them.
        """
        ...

    @remote("ctl")
    def arrived(self, former: int, version: int) -> None:
        """Learn that a shard has handed over all that it had to."""
        ...

    @remote("watch")
    def copy_out(self, after: Topology) -> int:
        """Copy all segments to the shards that will have them; gives the bytes.

        Raises:
            StorageError: which segments are needed is not known, for a manifest cannot be read.
            ShardUnavailableError: the same, for another shard does not say what it holds here.
        """
        ...

    @remote("ctl", repeatable=True)
    def has_moved(self) -> bool:
        """Tell whether other shards hold the segments: then this one cannot stay any more."""
        ...

    @remote("watch", repeatable=True)
    def move_segments(self, after: Topology) -> int:
        """Have other shards hold the segments from now on; gives the bytes that were copied in all."""
        ...

    @remote("data")
    def receive(self, moved: MovedSegment, original: Original, address: Address | None, holder: Drain | Save) -> None:
        """Copy a segment of a shard that drains.

        Args:
            moved: what it is, its slots where the copy is to have them.
            original: what there is to copy.
            address: where, unless it comes with `original`.
            holder: holds the copy: the drain, or the save that brought it.

        Raises:
            MovedError: the drain was given up meanwhile.
            ModelLostError: some of it was let go meanwhile.
            StoreFullError: there is no room.
        """
        ...

    @remote("ctl")
    def inherit(self, drain: Drain, segments: Sequence[MovedSegment]) -> list[SegmentId]:
        """Hold segments for those who held them on the shard that drains; gives those that must come first."""
        ...

    @remote("ctl")
    def is_needed(self) -> bool:
        """Tell whether a save that began here was neither committed nor aborted, or others are being notified."""
        ...
