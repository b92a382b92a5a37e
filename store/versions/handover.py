"""What one shard hands to another when names, or segments, move (see `planner.topology`).

Rules
- A name moves whole: all its versions, live, pinned, lost or retired, with its next version number and the leases on
  them. Who takes it answers just as who handed it over did.
- No bytes of tensors are in a bundle of names: segments stay where they are.
- A segment moves with those who hold it. What its id is does not change, so no manifest does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import Unreadable
from ..holders import Holder, Lease
from ..refs import ModelRef
from ..segments.segment import ABSENT, GONE, Offset, Segment, SegmentId, Stored
from .architectures import packed
from .ledger import Told
from .manifest import Header
from .replica import Kept

MOVED_ON = 1 << 20
"""Added to the generations of a segment that another shard takes over: the one before may count on for a moment."""


@dataclass(frozen=True, slots=True)
class MovedVersion:
    """A live version, or a retired one that is still pinned."""

    header: Header
    body: bytes
    segments: tuple[SegmentId, ...]
    pins: tuple[Lease, ...]
    retired: bool
    """It is retired."""


@dataclass(frozen=True, slots=True)
class MovedName:
    """What is known of a name beside its versions."""

    next_version: int
    warm: tuple[int, ...]
    """Versions that retention has not let go from memory."""
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Names on their way from one home to another."""

    names: Mapping[str, MovedName]
    versions: tuple[MovedVersion, ...]
    ledger: Told
    """What numbers they have used, and their lineage."""
    qualities: Mapping[ModelRef, float]
    """Of the versions in it that had one."""
    graphs: Mapping[bytes, tuple[str, str | None]]
    """Key -> the graph's JSON and the framework's recipe."""
    unread: Mapping[ModelRef, Unreadable] = field(default_factory=dict[ModelRef, Any])
    """Versions whose manifests could not be read yet -> why."""

    def records(self, refs: Set[ModelRef] | None) -> dict[ModelRef, Kept]:
        """Return what replicas keep of the live versions in it; of some, or of all."""
        live = [v for v in self.versions if not v.retired and (refs is None or v.header.ref in refs)]
        graphs = {key: packed(self.graphs[key]) for key in {v.header.graph_key for v in live}}
        return {v.header.ref: Kept(v.header, v.body, graphs[v.header.graph_key]) for v in live}

    @property
    def leases(self) -> list[Lease]:
        """Name the leases that move along."""
        return [lease for version in self.versions for lease in version.pins]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedSegment:
    """A segment on its way: what there is to know but its bytes."""

    id: SegmentId
    sizes: tuple[int, ...]
    offsets: tuple[Offset, ...]
    """Where each slot lies in the block that goes with this."""
    allocated: int
    """Length of that block."""
    generation: int
    digests: tuple[str, ...] | None
    stored: Stored | None
    files: int
    holders: Mapping[Holder, Sequence[int]] = field(default_factory=dict[Holder, Sequence[int]])
    waiting: frozenset[ModelRef] = frozenset()
    """Those of them whose manifests are not on disk."""

    @classmethod
    def of(cls, segment: Segment, waiting: frozenset[ModelRef]) -> MovedSegment:
        """Return what there is to know of a segment, some of whose holders are `waiting`."""
        return cls(
            id=segment.id,
            sizes=segment.sizes,
            offsets=segment.offsets,
            allocated=segment.allocated,
            generation=segment.generation,
            digests=segment.digests,
            stored=segment.stored,
            files=segment.files,
            holders={holder: sorted(slots) for holder, slots in segment.holders.items()},
            waiting=waiting,
        )

    @property
    def without_block(self) -> MovedSegment:
        """The same where no block goes with it: all is on disk only."""
        offsets = tuple(ABSENT if offset != GONE else GONE for offset in self.offsets)
        return replace(self, offsets=offsets, allocated=0)

    def copied(self, handle: object) -> Segment:
        """Return the segment as a copy of its block is taken, before its file and its holders are."""
        return Segment(self.id, handle, self.sizes, self.offsets, self.allocated, self.generation + MOVED_ON)

    @property
    def needs_memory(self) -> bool:
        """Whether the disk does not have all that somebody holds."""
        on_disk = self.stored.slots if self.stored is not None else frozenset[int]()
        return any(not on_disk.issuperset(slots) for slots in self.holders.values())
