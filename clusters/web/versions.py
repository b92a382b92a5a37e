"""All live versions as the server knows them: kept up to date by asking for the new ones only.

Rules
- New versions are asked for by their time. When the number of versions shows that some were retired, all are listed
  again, but only so often that this takes a small share of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ...actors.client.repository import Repository
from ...store.refs import ModelRef
from ...store.versions.manifest import ModelInfo

OVERLAP = timedelta(seconds=10)
"""Clocks of shards, and the time from a version's creation to its commit, differ by less."""
SHARE = 40
"""All versions are listed at most once in so many times of what a list takes."""
NEWEST = 12
"""Versions in a short list."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The versions at one time."""

    infos: dict[ModelRef, ModelInfo]
    serial: int
    """Another one after each change."""

    def newest(self) -> list[ModelInfo]:
        """Return the last versions, newest first."""
        return sorted(self.infos.values(), key=_age, reverse=True)[:NEWEST]


class Versions:
    """The versions of one repository. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listing = Listing({}, 0)
        self._latest: datetime | None = None
        self._again = 0.0

    def listing(self, repository: Repository, count: int | None = None) -> Listing:
        """Return the versions as they are now.

        Args:
            repository: answers.
            count: number of versions that the shards have. None asks them.

        Raises:
            TensorVineError: the errors of `Repository.infos`.
        """
        with self._lock:
            known = self._listing.infos
            if count is None:
                count = repository.stats().models
            if not known or self._latest is None:
                self._list_all(repository)
                return self._listing
            found = repository.infos(after=self._latest - OVERLAP)
            fresh = [info for info in found if info.ref not in known]
            if fresh:
                self._set({**known, **{info.ref: info for info in fresh}})
            if len(self._listing.infos) != count and time.monotonic() >= self._again:
                self._list_all(repository)
            return self._listing

    def forget(self) -> None:
        """Forget all: another repository may answer next."""
        with self._lock:
            self._listing, self._latest = Listing({}, self._listing.serial + 1), None

    def _list_all(self, repository: Repository) -> None:
        began = time.monotonic()
        found = {info.ref: info for info in repository.infos()}
        if found.keys() != self._listing.infos.keys():
            self._set(found)
        now = time.monotonic()
        self._again = now + SHARE * (now - began)

    def _set(self, infos: dict[ModelRef, ModelInfo]) -> None:
        self._listing = Listing(infos, self._listing.serial + 1)
        self._latest = max((info.created for info in infos.values()), default=None)


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
