"""Reports: what a shard tells the catalog about its bytes.

Rules
- The reports of one incarnation to one term have serial numbers from 1. They are sent one at a time, in that order, and
  each again until it was answered; the catalog applies each once.
- Number 1 is the whole state of the shard. A shard proposes no commit to a term that has not answered it. So whatever
  the catalog thinks is there, and the whole does not name, is gone.
- A new file counts when its report was answered, and not refused. Until then the shard keeps the tensors in memory, and
  the former file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..holders import Request
from ..segments.segment import File, SegmentId
from .orders import Slots


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment's block lay when the shard last said so. A hint: the header check decides."""

    shard: int
    offset: int
    """Of its part, in the shard's memory."""
    length: int
    """Of the part."""
    generation: int
    offsets: tuple[int, ...] | None = None
    """Where each slot starts, -1 where it is not there; None: as `segment.layout` does it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A committed segment of a shard."""

    slots: tuple[int, ...]
    """Live slots: in memory or in its file."""
    in_memory: bool
    """All of them are in memory, too."""
    place: Place | None = None
    """Where, if it is in shared memory."""
    keeper: bool = True
    """The shard takes itself for the keeper."""
    generation: int | None = None
    """Of the file that it takes for the segment's; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """All of a shard, in its first report to a term."""

    node: str
    address: tuple[str, int, str] | None
    """Host, port and token of its TCP server; None: it has none."""
    capacity: int
    """Bytes of memory for segments."""
    allocated: int
    """Bytes of it that are in use."""
    segments: Mapping[SegmentId, Held]
    """Committed segments."""
    sent: Mapping[SegmentId, Held]
    """Segments of saves whose commit was sent and not answered. An earlier term may have committed them; if not, the
    commit is sent again, so they are not freed."""
    clients: tuple[str, ...]
    """Clients that have sessions here."""
    draining: bool = False
    """It was ordered to drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What changed at a shard."""

    shard: int
    incarnation: int
    """Counts the processes of this shard."""
    term: int
    """The term that it reports to."""
    serial: int
    whole: Whole | None = None
    """In report 1 only."""
    stored: Mapping[SegmentId, File] = field(default_factory=dict[SegmentId, File])
    """New files."""
    copied: Slots = field(default_factory=dict[SegmentId, "tuple[int, ...]"])
    """Slots that copies here have since an order."""
    lost: Slots = field(default_factory=dict[SegmentId, "tuple[int, ...]"])
    """Slots that cannot be read and never will be: their file is damaged, or not there."""
    failing: Mapping[SegmentId, str] = field(default_factory=dict[SegmentId, str])
    """Segments whose files cannot be written, or read, just now -> why. Each report replaces the one before, if it
    says anything of `failing` or `stored`."""
    kept: Mapping[Request, tuple[SegmentId, ...]] = field(default_factory=dict[Request, "tuple[SegmentId, ...]"])
    """Copies that another shard sent for a save (`keep_copies`) 30 s ago or more, with no news of its commit."""
    allocated: int | None = None
    """Bytes of memory in use; None: as before."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to a report."""

    refused: tuple[SegmentId, ...] = ()
    """New files that do not count: what they are encoded against is gone, or the shard is not the keeper. The keeper
    writes another one without bases; anybody else deletes it."""
    settled: Mapping[Request, tuple[SegmentId, ...]] = field(default_factory=dict[Request, "tuple[SegmentId, ...]"])
    """Of the saves in `kept` that are not under way any more: the copies that are needed. The others go."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A segment that a save brings, in a proposal."""

    slots: int
    """How many it has."""
    shards: tuple[int, ...]
    """Shards that have its bytes, the one that proposes first, which becomes its keeper."""
    place: Place | None = None
    file: File | None = None
    """Of a durable save: its file, if that was answered for already, perhaps by an earlier term."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The incarnation of a shard that asks the catalog for something, and the term that it goes by."""

    shard: int
    incarnation: int
    term: int
    allocated: int | None = None
    """Bytes of its memory in use; None: as it said last."""
