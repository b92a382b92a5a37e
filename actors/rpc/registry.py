"""The few facts of a repository that outlive all of its actors: the engine keeps them for as long as its cluster lives.

Rules (docs/design/ledger.md)
- A topology is decided when it stands here, before any actor goes by it.
- A shard that could not tell another what it committed says so here before the version exists, until it has.
- A count is the highest of the numbers that are claimed for it, one by one: two that count at once get two numbers.
- Facts belong to one start of a repository; the next one under the same name removes them.
"""

from __future__ import annotations

from ...planner.topology import Topology
from ...store.versions.ledger import FLOOR
from ..engine.engine import Engine

_TOPOLOGY, _COUNT, _FLOOR = "topology", "count", "floor/"
_BEHIND, _RESTARTS, _TENURE, _PLANNER = "behind/", "restarts/", "tenure/", "planner/"


class Registry:
    """The lasting facts of one start of a repository.

    Args:
        engine: keeps them.
        repository: its name.
        start: the id of this start.
    """

    def __init__(self, engine: Engine, repository: str, start: str) -> None:
        self._engine = engine
        self._all = f"{repository}:"  # no name has a colon
        self._own = f"{repository}:{start}:"

    def clear(self) -> None:
        """Remove what earlier repositories of this name have left."""
        for name in self._engine.kept(self._all):
            self._engine.keep(name, None)

    def topology(self) -> Topology | None:
        """Return the topology that was decided last; None: none ever was."""
        found = self._engine.kept(self._own + _TOPOLOGY)
        return Topology.from_json(next(iter(found.values())).decode()) if found else None

    def decide(self, topology: Topology) -> None:
        """Decide on a topology."""
        self._engine.keep(self._own + _TOPOLOGY, topology.to_json().encode())

    def wanted(self) -> int | None:
        """Return how many shards were asked for last; None: one on each node."""
        found = self._engine.kept(self._own + _COUNT).get(self._own + _COUNT)
        return int(found) if found else None

    def want(self, count: int | None) -> None:
        """Note how many shards are asked for; None: one on each node."""
        self._engine.keep(self._own + _COUNT, str(count).encode() if count is not None else None)

    def raise_floor(self) -> int:
        """Return a floor of version numbers above all that any name has used in this repository."""
        return FLOOR * self._next(self._own + _FLOOR)

    def count_restart(self, shard: int) -> int:
        """Return how often a shard has started again, this time included."""
        return self._next(f"{self._own}{_RESTARTS}{shard}/")

    def count_planner_restart(self) -> int:
        """Return how often the planner has started again, this time included."""
        return self._next(self._own + _PLANNER)

    def restarts(self) -> dict[int, int]:
        """Return how often each shard has started again."""
        counts: dict[int, int] = {}
        for name in self._engine.kept(self._own + _RESTARTS):
            _, shard, count = name.rsplit("/", 2)
            counts[int(shard)] = max(int(count), counts.get(int(shard), 0))
        return counts

    def enter(self, actor: str, entry: bytes) -> bytes | None:
        """Note which incarnation is an actor from now on; give the entry of the one that was, if one ever was."""
        former = self.tenure(actor)
        self._engine.keep(f"{self._own}{_TENURE}{actor}", entry)
        return former

    def tenure(self, actor: str) -> bytes | None:
        """Return the entry of the incarnation that is an actor."""
        name = f"{self._own}{_TENURE}{actor}"
        return self._engine.kept(name).get(name)

    def owes(self, shard: int, owing: bool) -> None:
        """Note whether a shard has committed what another one has not heard of."""
        self._engine.keep(f"{self._own}{_BEHIND}{shard}", b"" if owing else None)

    def owing(self) -> set[int]:
        """Return the shards that have."""
        return {int(name.rpartition("/")[2]) for name in self._engine.kept(self._own + _BEHIND)}

    def _next(self, prefix: str) -> int:
        """Claim a number above all that were claimed under a prefix."""
        number = 1 + max((int(name.removeprefix(prefix)) for name in self._engine.kept(prefix)), default=0)
        while not self._engine.claim(f"{prefix}{number}"):
            number += 1
        return number
