"""Where candidates are stored: how workers reach it, and what the controller keeps and lets go.

Rules
- `Access` is small and can be sent to workers; each opens a client of its own.
- Only what belongs to this search is let go: several searches may run in one repository, and inherit from each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tensorvine.actors import Repository
from tensorvine.actors.search.retirement import Population
from tensorvine.store import ModelRef
from tensorvine.store.errors import ModelNotFoundError

from .files import FileStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """The way to a store."""

    repository: str | None = None
    """Name of a running repository."""
    redis: str | None = field(default=None, repr=False)
    """URL of the Redis server with the baseline's catalogue; None, as the repository: nothing is stored."""
    folder: Path = Path()
    """Of the baseline's files."""

    def open(self) -> Repository | FileStore | None:
        """Make a client; None where nothing is stored."""
        if self.repository is not None:
            return Repository.connect(self.repository)
        return None if self.redis is None else FileStore(self.redis, self.folder)


class Keeper:
    """The controller's side: the population's models stay, those that leave it go.

    Args:
        store: a client.
        name: of the search.
        population: how many live; None: nothing is retired.
    """

    def __init__(self, store: Repository | FileStore | None, name: str, population: int | None) -> None:
        self.name = name
        self._store = store
        self._population = None if store is None or population is None else Population(store, population)
        self._kept: set[ModelRef] = set()
        """Who lives, where nothing is retired."""

    def name_of(self, number: int, attempt: int) -> str:
        """Return the name as which a candidate is saved when it is evaluated for the `attempt`-th time, from 1."""
        return f"{self.name}/{number:06d}" + (f"-{attempt}" if attempt > 1 else "")

    def add(self, ref: ModelRef) -> None:
        """Take a candidate into the population; the oldest may leave it and is retired."""
        if self._population is not None:
            self._population.add(ref)
        else:
            self._kept.add(ref)

    def drop(self, name: str) -> None:
        """Retire whatever a candidate that failed, or whose worker died, may have saved as `name`."""
        if self._store is not None:
            for ref in self._store.models(name):
                self._retire(ref)

    def restore(self, refs: Iterable[ModelRef]) -> None:
        """Go on with a population, the oldest first; all else that the search saved and that nobody knows goes."""
        if self._population is not None:
            self._population.restore(refs)
        else:
            self._kept = set(refs)
        self.sweep()

    def sweep(self) -> None:
        """Retire what this search saved and nobody knows: its worker or controller died before it was told."""
        if self._store is None:
            return
        known = self._kept if self._population is None else set(self._population.refs)
        stored = self._store.models(f"{self.name}/")
        if lost := known.difference(stored):
            log.warning("%d candidates of the population are not in store any more, such as %s", len(lost), min(lost))
        for ref in stored:
            if ref not in known:
                self._retire(ref)

    def settle(self) -> None:
        """Wait until what is saved outlives this machine, where the store is one that does."""
        if isinstance(self._store, Repository) and self._store.has_path:
            self._store.flush()

    def space(self) -> int:
        """Return the bytes of tensors that are stored: in the repository's memory, or in the baseline's files."""
        if isinstance(self._store, Repository):
            return self._store.stats().bytes_memory
        return 0 if self._store is None else self._store.bytes_stored()

    def _retire(self, ref: ModelRef) -> None:
        if self._store is not None:
            try:
                self._store.retire(ref)
            except ModelNotFoundError:
                log.info("%s is gone already", ref)
