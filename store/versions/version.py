"""A version of a model: as it is proposed, and as it answers a query."""

from __future__ import annotations

from dataclasses import dataclass

from ..graphs.index import PrefixQuery, Rank, rank_of
from ..holders import Lease, Request
from ..refs import ModelRef
from .manifest import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A version that is proposed: all of its manifest but the version number and the time."""

    name: str
    save: Request
    """Owns the segments that it brings until the commit."""
    parent: ModelRef | None
    quality: float | None
    metadata: str
    """The user's mapping as JSON text."""
    graph_key: bytes
    architecture: bytes | None
    """The graph and the framework's recipe as `architectures.packed` makes them; None: the catalog has them."""
    fingerprints: PrefixQuery | None
    """Of that graph; None with `architecture`."""
    body: bytes
    """The table, as `manifest.encode_body` makes it."""
    slots: bytes
    """The slots that the table names, by segment, as `slots.packed_slots` makes it."""
    bytes_owned: int
    bytes_total: int

    def header(self, ref: ModelRef, created_ns: int, codec: str | None) -> Header:
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
            codec=codec,
        )


@dataclass(frozen=True, slots=True)
class Match:
    """The best answer to a prefix query."""

    ref: ModelRef
    size: int
    """Layers of the query that the model has."""
    quality: float | None
    created_ns: int
    graph_key: bytes
    lease: Lease
    """Pins the model until it is removed, or the query is over."""

    @property
    def rank(self) -> tuple[int, Rank]:
        """Orders answers as the index orders its own: the greatest is the best."""
        return (self.size, rank_of(self.quality, self.created_ns, self.ref))
