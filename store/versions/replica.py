"""What one shard keeps of another one's memory, as a plain state machine. No engine, no clock.

Rules
- A replica is passive: it answers nobody but the shard that it is a replica of, when that one has lost its memory.
- Its shard tells it everything; each message names the shard's incarnation, and an incarnation that is over is not
  heard any more. A message may come twice: putting what is there and dropping what is not there change nothing.
- A replica that was cleared is closed until an incarnation opens it: a copy that was on its way then is not kept.
- The bytes of a segment never change, and no id is used twice. So what is put once is right until it is dropped.
- A replica is complete, at a sequence number, when it had all that its shard had committed then; since then every
  commit waited for it. Of several replicas of one shard the one with the latest sequence number counts: the others were
  given up before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ShardUnavailableError
from ..refs import ModelRef
from ..segments.segment import SegmentId, layout
from .manifest import Header

SequenceNumber = tuple[int, int]
"""(incarnation of the shard, serial number there)."""
NEVER: SequenceNumber = (0, 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a segment."""

    sizes: tuple[int, ...]
    """Bytes of all slots of the segment, without padding."""
    slots: tuple[int, ...]
    """Those that the copy has, in the order of their bytes; others were let go before it was made."""
    handle: Any
    """What has the bytes, laid out as `segment.layout` does it."""
    digests: tuple[str, ...] = ()
    """Content hashes of these slots, by which a replica is checked when it is written and when it is read."""

    @property
    def length(self) -> int:
        """Bytes of the copy, padding included."""
        return layout([self.sizes[slot] for slot in self.slots])[1]


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of a version's record."""

    header: Header
    body: bytes
    """Its table of tensors."""
    packed: bytes
    """Its graph and recipe, compressed."""


class Replica:
    """What is kept of one shard.

    Args:
        shard: the number of the one that is replicated.

    >>> replica = Replica(1)
    >>> replica.open(1)
    1
    >>> replica.put(1, {(1, 7): Copy((4,), (0,), b"abcd")}, {})
    >>> replica.sync(1, {(1, 7), (1, 8)}, set())
    ({(1, 8)}, set())
    >>> replica.drop(1, [(1, 7)], [])
    >>> replica.freed, replica.nbytes
    ([b'abcd'], 0)
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.incarnation = 0
        """The latest that it heard of."""
        self.closed = True
        """Another shard keeps it, or none does."""
        self.complete = NEVER
        self.copies: dict[SegmentId, Copy] = {}
        self.records: dict[ModelRef, Kept] = {}
        self.freed: list[Any] = []
        """Handles of copies that are not needed any more; who keeps the replica takes them."""
        self.nbytes = 0
        """Bytes of the copies, padding included."""

    def open(self, incarnation: int) -> int:
        """Hear an incarnation of the shard from now on; gives the latest that was heard: a greater one, if this is
        over."""
        if incarnation >= self.incarnation:
            self.incarnation, self.closed = incarnation, False
        return self.incarnation

    def put(self, incarnation: int, copies: Mapping[SegmentId, Copy], records: Mapping[ModelRef, Kept]) -> None:
        """Keep copies of segments and of versions' records.

        Raises:
            ShardUnavailableError: the incarnation is over, or the replica closed; nothing changes but that the copies'
                handles are free.
        """
        try:
            self.check(incarnation)
        except ShardUnavailableError:
            self.freed += [copy.handle for copy in copies.values()]
            raise
        for segment, copy in copies.items():
            if segment in self.copies:
                self.freed.append(copy.handle)
            else:
                self.copies[segment] = copy
                self.nbytes += copy.length
        self.records.update(records)

    def drop(self, incarnation: int, segments: Iterable[SegmentId], refs: Iterable[ModelRef]) -> None:
        """Let go of copies of segments and of versions' records; errors as in `put`."""
        self.check(incarnation)
        for segment in segments:
            copy = self.copies.pop(segment, None)
            if copy is not None:
                self.freed.append(copy.handle)
                self.nbytes -= copy.length
        for ref in refs:
            self.records.pop(ref, None)

    def sync(
        self, incarnation: int, segments: set[SegmentId], refs: set[ModelRef]
    ) -> tuple[set[SegmentId], set[ModelRef]]:
        """Let go of all but these, and give those of them that are missing. Errors as in `put`."""
        self.drop(incarnation, self.copies.keys() - segments, self.records.keys() - refs)
        return segments - self.copies.keys(), refs - self.records.keys()

    def complete_at(self, incarnation: int, number: SequenceNumber) -> None:
        """Count as complete at a sequence number; errors as in `put`."""
        self.check(incarnation)
        self.complete = max(self.complete, number)

    def clear(self, incarnation: int) -> None:
        """Let go of everything, and close: another shard keeps it now.

        Raises:
            ShardUnavailableError: the incarnation is over.
        """
        self.open(incarnation)
        self.sync(incarnation, set(), set())
        self.complete, self.closed = NEVER, True

    def check(self, incarnation: int) -> None:
        """See that an incarnation is the latest, and the replica open.

        Raises:
            ShardUnavailableError: it is over, or the replica closed.
        """
        if self.closed and incarnation == self.incarnation:
            raise ShardUnavailableError(f"replica of shard {self.shard}: expected it to be open; it was closed")
        if incarnation != self.incarnation:
            raise ShardUnavailableError(
                f"replica of shard {self.shard}: expected its incarnation {self.incarnation}; found a message of "
                f"incarnation {incarnation}"
            )
