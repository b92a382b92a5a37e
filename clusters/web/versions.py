"""All live versions as the server knows them: kept up to date by asking for the new ones only.

Rules
- New versions are asked for by their time. When the number of versions shows that some were retired, all are listed
  again, but only so often that this takes a small share of the time.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from ...actors.client.repository import Repository
from ...actors.rpc.catalog_messages import CatalogStats
from ...store.refs import ModelRef
from ...store.versions.manifest import ModelInfo

OVERLAP = timedelta(seconds=2)
"""Clocks of shards, and the time from a version's creation to its commit, mostly differ by less."""
ANSWER_S = 10.0
"""How long an answer may take."""
SHARE = 40
"""Listing versions may use at most one part in `SHARE` of the time."""
NAMES, FEW = 4, 256
"""Names with new versions that are looked at for retired ones, and the most versions that such a name may have."""
Load = tuple[int, int, int]
"""Of the catalog: its term, its versions, and the number of its last record. Another one after each save."""
NEWEST = 12
"""Versions in a short list."""


@dataclass(frozen=True)
class Listing:
    """The versions at one time. Derived values are computed once."""

    infos: dict[ModelRef, ModelInfo]
    serial: int
    """Another one after each change."""

    @cached_property
    def newest(self) -> list[ModelInfo]:
        """The last versions, newest first."""
        return heapq.nlargest(NEWEST, self.infos.values(), key=_age)

    @cached_property
    def of_names(self) -> dict[str, list[ModelInfo]]:
        """Name -> its versions."""
        found: dict[str, list[ModelInfo]] = {}
        for info in self.infos.values():
            found.setdefault(info.ref.name, []).append(info)
        return found


class Versions:
    """The versions of one repository. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listing = Listing({}, 0)
        self._latest: datetime | None = None
        self._load: Load | None = None
        self._soonest = self._again = 0.0

    def listing(self, repository: Repository, load: Load | None = None) -> Listing:
        """Return the versions as they are now.

        Args:
            repository: answers.
            load: of the catalog, by which it is known whether there is anything new. None asks for it.

        Raises:
            TensorVineError: the errors of `Repository.infos`.
        """
        with self._lock:
            if load is None:
                load = load_of(repository.catalog_stats(ANSWER_S))
            now = time.monotonic()
            if self._latest is None:
                self._list_all(repository)
            elif load != self._load and now >= self._soonest:
                self._ask_new(repository, self._latest)
                self._soonest = now + SHARE * (time.monotonic() - now)
            else:
                return self._listing
            if len(self._listing.infos) != load[1] and time.monotonic() >= self._again:
                self._list_all(repository)
            self._load = load if len(self._listing.infos) == load[1] else None
            return self._listing

    def forget(self) -> None:
        """Forget all: another repository may answer next."""
        with self._lock:
            self._listing, self._latest, self._load = Listing({}, self._listing.serial + 1), None, None

    def _ask_new(self, repository: Repository, latest: datetime) -> None:
        known = self._listing.infos
        found = repository.infos(after=latest - OVERLAP, timeout=ANSWER_S)
        if fresh := {info.ref: info for info in found if info.ref not in known}:
            gone = self._retired(repository, {ref.name for ref in fresh})
            self._set({**{ref: info for ref, info in known.items() if ref not in gone}, **fresh})

    def _retired(self, repository: Repository, names: Collection[str]) -> set[ModelRef]:
        """Return the known versions of some names that are no longer live: a training run retires its old versions."""
        gone = set[ModelRef]()
        for name in list(names)[:NAMES]:
            known = {ref for ref in self._listing.infos if ref.name.startswith(name)}
            if len(known) <= FEW:
                gone |= known - {info.ref for info in repository.infos(name, timeout=ANSWER_S)}
        return gone

    def _list_all(self, repository: Repository) -> None:
        began = time.monotonic()
        found = {info.ref: info for info in repository.infos(timeout=ANSWER_S)}
        if found.keys() != self._listing.infos.keys():
            self._set(found)
        now = time.monotonic()
        self._again = now + SHARE * (now - began)

    def _set(self, infos: dict[ModelRef, ModelInfo]) -> None:
        self._listing = Listing(infos, self._listing.serial + 1)
        self._latest = max((info.created for info in infos.values()), default=None)


def load_of(stats: CatalogStats) -> Load:
    """Return the load of the catalog by its statistics."""
    return stats.term, stats.models, stats.sequence


def search(infos: Iterable[ModelInfo], words: str, parent: str, limit: int) -> tuple[list[ModelInfo], int]:
    """Return the versions whose reference contains all words, newest first, and how many there are.

    Args:
        infos: the versions.
        words: separated by spaces, in any case.
        parent: only children of this version. Empty means all versions.
        limit: of the result.
    """
    wanted = words.lower().split()
    found = [
        info
        for info in infos
        if (not parent or str(info.parent) == parent) and all(word in str(info.ref).lower() for word in wanted)
    ]
    found.sort(key=_age, reverse=True)
    return found[:limit], len(found)


def rows(infos: Sequence[ModelInfo]) -> list[dict[str, object]]:
    """Return versions as JSON has them."""
    return [
        {
            "ref": str(info.ref),
            "parent": str(info.parent) if info.parent else None,
            "quality": info.quality,
            "created": info.created.isoformat(),
            "bytes_owned": info.bytes_owned,
            "bytes_total": info.bytes_total,
        }
        for info in infos
    ]


def _age(info: ModelInfo) -> tuple[datetime, ModelRef]:
    return info.created, info.ref
