"""What all parts of the catalog share, and the one way by which it decides.

Rules
- There is one lock. It guards the state, the journal, and what the parts say of themselves that they guard by it.
- A decision is checked, appended to the journal and applied in one section under the lock (`decide`). What follows from
  it is handed to those who asked for it, still under the lock: they note it and return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from ...planner.topology import Topology
from ...store.archive.archive import Archive
from ...store.catalog.records import Record, encoded
from ...store.catalog.references import Freed
from ...store.catalog.state import CatalogState, Effects
from ...store.counting import Counts
from ..engine.engine import Engine
from ..memory.counters import CounterPage
from ..rpc.catalog_messages import CatalogConfig, Term
from ..rpc.lease import Lease
from ..rpc.notifier import Notifier
from ..rpc.registry import Registry
from .journal import Journal


class Change(Enum):
    """What waiting calls are woken by."""

    FILES = auto()
    """A file was reported, or a manifest written, or either failed."""
    SHARDS = auto()
    """A shard has reported, or has left."""
    COPIES = auto()
    """Copies of the journal or of segments have come."""
    ORDERS = auto()
    """A shard has acknowledged orders."""


Topic: TypeAlias = Change
Follower = Callable[[Effects], None]


@dataclass(slots=True, eq=False)
class CatalogContext:
    """The catalog's state and journal, the lock that guards them, and its term."""

    engine: Engine
    config: CatalogConfig
    registry: Registry
    lease: Lease
    topology: Topology
    state: CatalogState
    lock: threading.RLock
    journal: Journal
    page: CounterPage
    notifier: Notifier[Topic]
    archive: Archive | None
    """The path's files; None: there is no path."""
    followers: list[Follower] = field(default_factory=list[Follower])
    """Given what follows from decisions, with the lock held."""
    on_freed: Callable[[list[Freed]], None] = lambda freed: None
    """Given slots that became free, with the lock held."""
    requests: int = 0
    """Calls of clients since the start."""
    counts: Counts = field(default_factory=Counts, init=False)
    """Counts of the catalog, for `stats`."""

    @property
    def term(self) -> Term:
        """The term."""
        return Term(self.lease.number, self.lease.token)

    def decide(self, make: Callable[[], Sequence[Record]]) -> Sequence[Record]:
        """Decide: the records that `make` returns are in the journal and applied when this returns.

        Args:
            make: returns the records, having changed nothing. Called with the lock held; what it raises is raised.

        Raises:
            ShardUnavailableError: the catalog has no lease.
            StorageError: the journal cannot be written; nothing has changed.
        """
        with self.lock:
            self.lease.check()
            records = make()
            if not records:
                return records
            contents = [encoded(record) for record in records]
            self.journal.append(contents)
            for record, content in zip(records, contents, strict=True):
                self.state.apply(record, content)
            self._follow()
            self.lease.check()  # else the next term may have read the journal before: the caller asks that one
            return records

    def decide_on(self, topology: Topology) -> None:
        """Decide on a topology: it stands in the registry before anybody goes by it. Call it without the lock.

        Raises:
            ShardUnavailableError: the head does not take it, or the catalog has no lease.
        """
        self.lease.check()
        self.registry.decide(topology)
        with self.lock:
            self.topology = topology
        self.notifier.tell(Change.SHARDS)

    def _follow(self) -> None:
        effects, self.state.effects = self.state.effects, Effects()
        freed, self.state.references.freed = self.state.references.freed, []
        for name in effects.changed:
            self.page.raise_of(name)
        if freed:
            self.on_freed(freed)
        for follower in self.followers:
            follower(effects)
