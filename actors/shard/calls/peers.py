"""What the other shards of a repository, and its planner, ask of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....store.refs import ModelRef
from ....store.segments.segment import Holds, SegmentId, Stored
from ....store.versions.ledger import Fact, Told
from ...rpc.calls import remote
from ...rpc.messages import Account, Chains, ToStore
from .mirror_messages import Message


class PeerCalls:
    """Answered by `shard.peer_calls`."""

    @remote("ctl", repeatable=True)
    def hold(self, holder: str, holds: Holds) -> None:
        """Hold slots here for a version whose home is elsewhere.

        Raises:
            OperationTimeoutError: it was given up already.
        """
        ...

    @remote("ctl", repeatable=True)
    def release(self, holder: str) -> None:
        """Forget a holder whose home is elsewhere."""
        ...

    @remote("ctl", repeatable=True)
    def release_homes(self, home: int, keep: Sequence[str], version: int, restart: int) -> None:
        """Forget what a shard that lost its memory held here, but for the versions that are on disk.

        Args:
            home: the shard.
            keep: holders that stay.
            version: of the topology by which homes are meant: by another one, nothing is let go.
            restart: which one of the shard's it is. Each counts once: it holds anew after that.
        """
        ...

    @remote("ctl")
    def release_all(self, holders: Sequence[str]) -> None:
        """Forget holders that were lost with their home."""
        ...

    @remote("ctl")
    def cool(self, ref: ModelRef) -> None:
        """Let a version whose home is elsewhere go from memory."""
        ...

    @remote("ctl", repeatable=True)
    def named(self, segments: Sequence[SegmentId]) -> set[SegmentId]:
        """Tell which of another shard's segments versions of this home, or commits on their way, name."""
        ...

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

    @remote("data")
    def mirror(self, message: Message) -> Any:
        """Keep, or give back, what is another shard's; see `shelf`."""
        ...

    @remote("data")
    def secure(self, segments: Sequence[SegmentId], timeout: float) -> None:
        """Have copies of segments of this shard on other nodes, for a version whose home is elsewhere.

        Raises:
            ModelLostError: one went with an earlier life of this shard, after the home had it held.
        """
        ...

    @remote("data")
    def leaves(self, holder: str, segments: Sequence[SegmentId], timeout: float) -> None:
        """Have copies on other nodes of what only a version's manifest tells of, which is about to go."""
        ...

    @remote("ctl", repeatable=True)
    def claims(self, shard: int) -> dict[str, dict[SegmentId, list[int]]]:
        """Tell a shard that started again what this home's versions name there."""
        ...

    @remote("ctl", repeatable=True)
    def unknown(self, holders: Sequence[str], version: int) -> list[str]:
        """Tell which of some versions of this home are none (any more).

        Args:
            holders: the versions.
            version: of the topology by which they are at home here: by another one, or while names move, nothing is
                said of them.
        """
        ...

    @remote("ctl", repeatable=True)
    def note(self, news: Mapping[ModelRef, Fact]) -> None:
        """Take what another home committed or retired."""
        ...

    @remote("ctl")
    def merge(self, told: Told) -> None:
        """Take what the planner has heard from all."""
        ...

    @remote("ctl", repeatable=True)
    def catch_up(self, told: Told) -> None:
        """Have the whole ledger, as one that has joined: from before this on, it hears of every commit."""
        ...

    @remote("ctl")
    def account(self) -> Account:
        """Tell the planner, which starts again, how things stand here."""
        ...
