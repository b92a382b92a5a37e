"""A version of a model at its home: as it is wanted, as it is kept, as it answers a query.

Rules
- A draft has all of a manifest but what the commit adds: the version number and the time.
- Only a record's pins change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graphs.index import Rank, rank_of
from ..holders import Lease, Save
from ..refs import ModelRef
from ..segments.segment import SegmentId
from .manifest import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A version that wants to exist: all of its manifest but the version number."""

    name: str
    save: Save
    """Holds the segments that this save staged; released when the commit is done."""
    parent: ModelRef | None
    quality: float | None
    metadata: str
    graph_key: bytes
    architecture: tuple[str, str | None] | None
    """The graph's JSON and the framework's recipe; None when the shard keeps them: the pinned parent has the key."""
    body: bytes
    holds: dict[SegmentId, list[int]]
    bytes_owned: int
    bytes_total: int
    codec: str | None = None

    def header(self, ref: ModelRef, created_ns: int) -> Header:
        """Return the header of the version that this becomes."""
        return Header(
            ref=ref,
            parent=self.parent,
            quality=self.quality,
            metadata=self.metadata,
            created_ns=created_ns,
            graph_key=self.graph_key,
            bytes_owned=self.bytes_owned,
            bytes_total=self.bytes_total,
            codec=self.codec,
        )


@dataclass(slots=True)
class Record:
    """A version that this shard is home to."""

    header: Header
    body: bytes
    segments: tuple[SegmentId, ...]
    pins: dict[Lease, None] = field(default_factory=dict[Lease, None])


@dataclass(frozen=True, slots=True)
class Match:
    """This shard's best answer to a prefix query."""

    ref: ModelRef
    size: int
    """Layers of the query that the model has."""
    quality: float | None
    created_ns: int
    graph_key: bytes
    lease: Lease
    """Pins the model until it is released or the client's session ends."""

    @property
    def rank(self) -> tuple[int, Rank]:
        """Orders the answers of several shards as the index orders its own: the greatest is the best."""
        return (self.size, rank_of(self.quality, self.created_ns, self.ref))
