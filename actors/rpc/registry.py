"""The few facts of a repository that outlive all of its actors: the engine keeps them for as long as its cluster lives.

Rules (docs/design/catalog.md)
- A topology is decided when it stands here, before any actor goes by it.
- Of the entries of an actor the one with the highest number says which process is the actor. Entries are put only where
  there is none, each with a token of its own.
- Facts belong to one start of a repository; the next one under the same name removes them.
"""

from __future__ import annotations

from ...planner.topology import Topology
from ..engine.engine import Engine

FLOOR = 10**12
"""Numbers of versions between two floors: more than a name ever uses."""
_TOPOLOGY, _COUNT, _FLOOR, _LEASE = "topology", "count", "floor/", "lease/"


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
        """Remove what earlier starts of a repository of this name have left."""
        for name in self._engine.kept(self._all):
            if not name.startswith(self._own):
                self._engine.keep(name, None)

    # ---- the shape ------------------------------------------------------------------------------------

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

    # ---- numbers of versions --------------------------------------------------------------------------

    def floor(self) -> int:
        """Return the floor of version numbers: 0, or a number that no name has used when the floor rose."""
        names = self._engine.kept(self._own + _FLOOR)
        return FLOOR * max((int(name.removeprefix(self._own + _FLOOR)) for name in names), default=0)

    def raise_floor(self, above: int) -> int:
        """Return a floor of version numbers above all that any name has used in this repository.

        Args:
            above: The highest known number or floor, also of earlier starts.
        """
        number = max(self.floor(), above) // FLOOR + 1
        self._engine.keep_absent(f"{self._own}{_FLOOR}{number}", b"")
        return FLOOR * number

    # ---- which process is an actor --------------------------------------------------------------------

    def restarts(self) -> dict[int, int]:
        """Return how often each shard has started again."""
        counts: dict[int, int] = {}
        prefix = f"{self._own}{_LEASE}shard-"
        for name in self._engine.kept(prefix):
            shard, number = name.removeprefix(prefix).split("/")
            counts[int(shard)] = max(int(number) - 1, counts.get(int(shard), 0))
        return counts

    def take(self, actor: str, entry: bytes, above: int = 0) -> tuple[int, dict[int, bytes]]:
        """Make a process an actor; return its number and the entries of the processes before, by number.

        Args:
            actor: "catalog", "planner" or "shard-3".
            entry: no other process's.
            above: the number is to be above this one.
        """
        before = self.entries(actor)
        number = max(above, *before) + 1 if before else above + 1
        while not self._put(actor, number, entry):
            number += 1
        return number, {other: found for other, found in self.entries(actor).items() if other < number}

    def entries(self, actor: str) -> dict[int, bytes]:
        """Return the entries of an actor's processes, by number."""
        prefix = f"{self._own}{_LEASE}{actor}/"
        return {int(name.removeprefix(prefix)): entry for name, entry in self._engine.kept(prefix).items()}

    def renew(self, actor: str, number: int, entry: bytes) -> None:
        """Say something else in the entry of a process that holds the lease."""
        self._engine.keep(f"{self._own}{_LEASE}{actor}/{number}", entry)

    def drop(self, actor: str, numbers: list[int]) -> None:
        """Remove entries of former processes."""
        for number in numbers:
            self._engine.keep(f"{self._own}{_LEASE}{actor}/{number}", None)

    def _put(self, actor: str, number: int, entry: bytes) -> bool:
        name = f"{self._own}{_LEASE}{actor}/{number}"
        return self._engine.keep_absent(name, entry) or self._engine.kept(name).get(name) == entry
