"""The shape of a repository that grows and shrinks: which shards there are.

Rules
- A topology never changes: each change makes the next `version`. The catalog decides on it and records it in the
  registry before any actor goes by it.
- Where segments are, the catalog knows. Numbers of shards are never used twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from .membership import NodeRule
from .owner import Owner


@dataclass(frozen=True, slots=True)
class Topology:
    """The shape of a repository.

    >>> topology = Topology("default", (0, 1), "starter").grown(1).draining([0]).left([0])
    >>> topology.shards, topology.version, topology.next
    ((1, 2), 3, 3)
    """

    repository: str
    shards: tuple[int, ...]
    started_by: str
    """Chosen by the starter: of two starters at once, one finds its own word here."""
    path: str | None = field(default=None, repr=False)
    """Where its history is, perhaps a URI with a secret; None: in memory only."""
    replicas: int = 1
    """Nodes that must have a version's bytes before it is committed."""
    version: int = 0
    used: int = 0
    """Numbers below this were given to shards; 0: those of `shards`."""
    leaving: tuple[int, ...] = ()
    """Shards that drain: nothing new is put there."""
    owner: Owner | None = None
    """Who started it; None: it is not known."""
    nodes: NodeRule = field(default_factory=dict[str, "float | str"])
    """What a node must have to hold a shard."""

    @property
    def next(self) -> int:
        """The number of the next shard that joins: above all that were ever used."""
        return max(self.used, max(self.shards, default=-1) + 1)

    @property
    def staying(self) -> tuple[int, ...]:
        """The shards that do not drain."""
        return tuple(shard for shard in self.shards if shard not in self.leaving)

    # ---- changes ----------------------------------------------------------------------------------------

    def grown(self, count: int) -> Topology:
        """Return what it becomes when `count` shards join."""
        return self._next(shards=(*self.shards, *range(self.next, self.next + count)), leaving=self.leaving)

    def draining(self, shards: Sequence[int]) -> Topology:
        """Return it with these shards draining, and no others.

        Raises:
            ValueError: none would be left.
        """
        leaving = tuple(shard for shard in self.shards if shard in shards)
        if len(leaving) == len(self.shards):
            raise ValueError(f"drain of {list(shards)}: expected a shard to be left; found only {list(self.shards)}")
        return self._next(shards=self.shards, leaving=leaving)

    def left(self, shards: Sequence[int]) -> Topology:
        """Return what it becomes when shards have left.

        Raises:
            ValueError: none would be left.
        """
        stay = tuple(shard for shard in self.shards if shard not in shards)
        if not stay:
            raise ValueError(f"end of {list(shards)}: expected a shard to be left; found only {list(self.shards)}")
        return self._next(shards=stay, leaving=tuple(shard for shard in self.leaving if shard in stay))

    def _next(self, *, shards: tuple[int, ...], leaving: tuple[int, ...]) -> Topology:
        used = max(self.next, max(shards) + 1)
        return replace(self, version=self.version + 1, shards=shards, leaving=leaving, used=used)

    # ---- as text ----------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Write it down.

        >>> topology = Topology("default", (0, 1), "starter").grown(1).draining([1])
        >>> Topology.from_json(topology.to_json()) == topology
        True
        """
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read what `to_json` wrote."""
        found = json.loads(text)
        found |= {name: tuple(found[name]) for name in ("shards", "leaving")}
        found["owner"] = Owner(**found["owner"]) if found.get("owner") is not None else None
        return cls(**found)
