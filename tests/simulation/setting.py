"""What all who act in one world share: the world, its kind, what runs in it, and what was promised.

Rules
- It is made from the seed alone, and draws in a fixed order.
"""

from __future__ import annotations

from typing import Any

from tensorvine.actors.catalog.parts.versions import Versions
from tensorvine.actors.rpc.messages import catalog_name, planner_name
from tensorvine.actors.shard.parts.sessions import Sessions
from tensorvine.store.refs import ModelRef

from . import disk as disks
from .cluster import Cluster, Hosted, Weather, told
from .kinds import Kind
from .oracle import Oracle
from .scheduler import Process, Thread, World

NAME = "sim"


class Setting:
    """A world with an engine, a disk and rules, before anything runs in it."""

    def __init__(self, seed: int, traced: bool = False, theme: str | None = None) -> None:
        w = self.world = World(seed)
        if traced:
            w.trace = []
        self.random = w.random
        kind = self.kind = Kind.drawn(w.random, theme)
        w.stall_chance, w.stalls_s = kind.stalls
        w.copy_chance = kind.copying if kind.copying is not None else min(0.5, 5 * w.stall_chance)
        w.switch_chance = w.random.choice((0.1, 0.3, 0.6))
        self.weather = Weather(
            w.random.choice((0.0002, 0.002)), w.random.choice((0.0, 0.05)), w.random.choice((0.05, 0.5))
        )
        self.cluster = w.cluster = Cluster(w, [f"node-{i}" for i in range(kind.nodes)], self.weather)  # type: ignore[attr-defined]
        w.disk = disks.Disk(w, kind.slowness_s)  # type: ignore[attr-defined]
        w.thread_died = self._thread_died  # type: ignore[method-assign]
        self.oracle = Oracle(w)
        self.at_work = 0
        """Clients that have not done all they will."""
        self.troubled = kind.lost > 0
        """Something was done to the world that may make operations fail."""
        self.operator = Process(w, "operator", "node-0")
        w.note(f"seed {seed}: {kind}, {self.weather}")

    def shards(self) -> list[Hosted]:
        """Return the shards that were not stopped for good."""
        return [h for h in self.cluster.actors.values() if not h.gone and "/shard-" in h.ref.name]

    def catalog(self) -> Hosted:
        """Return the catalog."""
        return next(h for h in self.cluster.actors.values() if h.ref.name == catalog_name(NAME) and not h.gone)

    def planner(self) -> Hosted:
        """Return the planner."""
        return next(h for h in self.cluster.actors.values() if h.ref.name == planner_name(NAME))

    def versions(self, name: str) -> set[ModelRef]:
        """Return the versions of a name that there are at this moment, as no client could."""
        context = context_of(self.catalog())
        return {ref for ref in context.state.models(name) if ref.name == name} if context is not None else set()

    def _thread_died(self, thread: Thread, error: Exception) -> None:
        self.world.errors.append(f"{thread.name} of {thread.process.name}: {told(error)}")


def context_of(hosted: Hosted) -> Any:
    """Return what the parts of a shard or of the catalog share; None: it does not run."""
    if hosted.instance is None:
        return None
    parts = hosted.instance.parts
    return parts[Sessions if Sessions in parts else Versions]._context
