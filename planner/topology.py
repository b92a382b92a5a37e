"""The shape of a repository that grows and shrinks: which shards there are, and where names and segments live.

Rules
- A topology never changes: each step of a change makes the next `version`. The planner tells it to all shards, and
  clients learn of it from a shard that refuses what is not its own any more.
- A name lives where rendezvous hashing among `shards` puts it. While `former` is not empty, names are on their way
  from where it put them among `former`.
- A segment stays where it was made for as long as that shard is there: a shard that joins moves no bytes. Where one
  drained, hashing of the segment among its successors says where its segments went.
- Numbers of shards are never used twice. The serial number of a segment says on which shard it was made: modulo the
  number of shards at the start, or, for one that joined later, by the shard's tag in the bits above `SERIAL_BITS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ..store.segments.segment import SegmentId
from .membership import NodeRule
from .owner import Owner
from .placement import holder_of, home_of

SERIAL_BITS = 60
"""Random bits of a segment's serial number."""
TAG_BITS = 36
"""Random bits that say which shard made a segment: old files on a path must not seem to be of a new shard."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The shape of a repository.

    >>> before = Topology("default", (0, 1), "starter")
    >>> after = before.grown([7])
    >>> after.shards, after.version, after.where((1, 5)), before.home("m") in (0, 1)
    ((0, 1, 2), 1, 1, True)
    """

    repository: str
    shards: tuple[int, ...]
    started_by: str
    """Chosen by whoever started it: of two starters at once, one finds its own word here."""
    path: str | None = field(default=None, repr=False)
    """Where its history is, perhaps a URI with a secret; None: in memory only."""
    replicas: int = 1
    """Nodes that must have a version's bytes before it is committed."""
    version: int = 0
    first: int = 0
    """How many shards it started with; 0: as many as now."""
    tags: Mapping[int, int] = field(default_factory=dict[int, int])
    """Shard that joined later -> what marks its segments."""
    gone: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Shard that drained -> those that took its segments over."""
    former: tuple[int, ...] = ()
    """The shards before, while names are on their way from them."""
    leaving: tuple[int, ...] = ()
    """Shards that are about to drain: nothing new should be put there."""
    owner: Owner | None = None
    """Who started it; None: it is not known."""
    nodes: NodeRule = field(default_factory=dict[str, "float | str"])
    """What a node must have to hold a shard."""

    @property
    def next(self) -> int:
        """The number of the next shard that joins: above all that were ever used."""
        return max((*self.shards, *self.gone, *self.tags)) + 1

    # ---- where things live ------------------------------------------------------------------------------

    @property
    def alive(self) -> tuple[int, ...]:
        """All shards that may hold something now."""
        return tuple(sorted({*self.shards, *self.former}))

    def home(self, name: str) -> int:
        """Return the shard that is to keep the metadata of `name`."""
        return home_of(name, self.shards)

    def former_home(self, name: str) -> int:
        """Return the shard that kept it before the change that is under way; the home where none is."""
        return home_of(name, self.former or self.shards)

    def where(self, segment: SegmentId) -> int:
        """Return the shard that holds a segment."""
        return holder_of(segment, self.gone)

    # ---- serial numbers ---------------------------------------------------------------------------------

    def serial(self, shard: int, drawn: int) -> int:
        """Make a random number the serial number of a segment of `shard`.

        >>> Topology("default", (0, 1), "").serial(1, 6), Topology("default", (0, 1), "").maker(7)
        (7, 1)
        """
        drawn %= 1 << SERIAL_BITS
        if shard in self.tags:
            return self.tags[shard] << SERIAL_BITS | drawn
        return drawn // self._first * self._first + shard

    def maker(self, serial: int) -> int:
        """Return the shard that a segment's serial number names."""
        tag = serial >> SERIAL_BITS
        found = next((shard for shard, known in self.tags.items() if known == tag), None) if tag else None
        return found if found is not None else serial % self._first

    # ---- changes ----------------------------------------------------------------------------------------

    def grown(self, tags: Sequence[int]) -> Topology:
        """Return what it becomes when a shard joins for each of `tags`, random numbers above 0 of `TAG_BITS` bits."""
        fresh = range(self.next, self.next + len(tags))
        return self._next(
            shards=(*self.shards, *fresh),
            former=self.shards,
            tags={**self.tags, **dict(zip(fresh, tags, strict=True))},
        )

    def warned(self, leaving: Sequence[int]) -> Topology:
        """Return it with the word that shards are about to drain, or, with none, that they stay."""
        return self._next(leaving=tuple(leaving))

    def shrunk(self, leaving: Sequence[int]) -> Topology:
        """Return what it becomes when shards drain.

        Raises:
            ValueError: none would be left.
        """
        left = tuple(shard for shard in self.shards if shard not in leaving)
        if not left:
            raise ValueError(f"drain of {list(leaving)}: expected a shard to be left; found only {list(self.shards)}")
        gone = {**self.gone, **dict.fromkeys(leaving, left)}
        return self._next(shards=left, former=self.shards, gone=gone, leaving=())

    def settled(self) -> Topology:
        """Return it as it is when all names have arrived."""
        return self._next(former=())

    # ---- as text ----------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Write it down.

        >>> topology = Topology("default", (0, 1), "starter").grown([7]).settled().shrunk([1])
        >>> Topology.from_json(topology.to_json()) == topology
        True
        """
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read what `to_json` wrote, that of earlier versions as well."""
        found = json.loads(text)
        found |= {name: tuple(found[name]) for name in ("shards", "former", "leaving")}
        found["tags"] = {int(shard): tag for shard, tag in found["tags"].items()}
        found["owner"] = Owner(**found["owner"]) if found.get("owner") is not None else None
        found["gone"] = {int(shard): tuple(successors) for shard, successors in found["gone"].items()}
        return cls(**found)

    @property
    def _first(self) -> int:
        return self.first or len(self.shards)

    def _next(
        self,
        *,
        shards: tuple[int, ...] | None = None,
        tags: Mapping[int, int] | None = None,
        gone: Mapping[int, tuple[int, ...]] | None = None,
        former: tuple[int, ...] | None = None,
        leaving: tuple[int, ...] | None = None,
    ) -> Topology:
        return replace(
            self,
            version=self.version + 1,
            first=self._first,
            shards=self.shards if shards is None else shards,
            tags=self.tags if tags is None else tags,
            gone=self.gone if gone is None else gone,
            former=self.former if former is None else former,
            leaving=self.leaving if leaving is None else leaving,
        )
