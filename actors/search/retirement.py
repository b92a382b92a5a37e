"""Retirement: the population of a search, mirrored into the repository.

Rules
- Aged evolution removes the oldest, not the worst (EvoStore, section 4.3): the population is a queue.
- Only what was added is retired: other searches in the same repository are left alone.
- A version that is several times in the queue is retired when its last entry leaves.
- A version that is gone already is no error: it is what was wanted. A shard that does not answer, such as one that is
  restarting, ends no search: what it should have retired is tried again with the next candidate.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from ...store.errors import ModelNotFoundError, OperationTimeoutError, OptionError, ShardUnavailableError
from ...store.refs import ModelRef
from ..client.repository import Repository

log = logging.getLogger(__name__)


class Population:
    """The population of an aged (regularized) evolution search. The versions of removed candidates are retired.

    A candidate in training can still inherit from a retired version, because the candidate pins this version (see
    `Candidate`). A version that was added several times is retired when its last entry is removed. If a shard does not
    answer, the retirement is retried when the next candidate is added or dropped.

    Args:
        repository: Repository in which the candidates are saved.
        size: Maximum number of candidates: the population size of the search.

    Raises:
        ValueError: if `size` is not positive.

    >>> population = Population(repo, size=50)                                    # doctest: +SKIP
    >>> population.add(saved.ref)                                                 # doctest: +SKIP
    """

    def __init__(self, repository: Repository, size: int) -> None:
        if size < 1:
            raise ValueError(f"Population: size: expected a positive number; found {size!r}")
        self.size = size
        self._repository = repository
        self._queue: deque[ModelRef] = deque()
        self._leaving: dict[ModelRef, None] = {}
        """Versions whose retirement is retried."""

    @property
    def refs(self) -> tuple[ModelRef, ...]:
        """Versions of the candidates in the population, oldest first."""
        return tuple(self._queue)

    def add(self, ref: ModelRef) -> ModelRef | None:
        """Add a candidate. If the population exceeds `size`, remove the oldest candidate and retire its version.

        Args:
            ref: Version of the candidate.

        Returns:
            The version of the removed candidate, or None if no candidate was removed.
        """
        self._queue.append(ref)
        gone = self._queue.popleft() if len(self._queue) > self.size else None
        self._leave([gone] if gone is not None else [])
        return gone

    def drop(self, ref: ModelRef) -> None:
        """Retire a version and remove all its entries from the population. Use this method for a failed candidate."""
        self._queue = deque(entry for entry in self._queue if entry != ref)
        self._leave([ref])

    def drop_versions(self, name: str, but: ModelRef | None = None) -> None:
        """Retire all versions of a candidate's model, except `but`.

        Use this method if a worker may have been killed between the save and the report of a version.

        Args:
            name: Name of the candidate's model.
            but: Version to keep. None retires all versions.

        Raises:
            ShardUnavailableError, OperationTimeoutError: if the versions cannot be listed.
        """
        for ref in self._repository.models(name):
            if ref.name == name and ref != but:
                self.drop(ref)

    def restore(self, refs: Iterable[ModelRef]) -> None:
        """Replace the population with the candidates of a stopped search.

        If there are more than `size` candidates, the oldest are removed, and their versions are retired.

        Args:
            refs: Versions of the candidates of the stopped search, oldest first.
        """
        self._queue = deque(refs)
        self._leave([self._queue.popleft() for _ in range(len(self._queue) - self.size)])

    def _leave(self, refs: Iterable[ModelRef]) -> None:
        self._leaving.update(dict.fromkeys(refs))
        leaving = [ref for ref in self._leaving if ref not in self._queue]
        self._leaving = {ref: None for ref in leaving if not retire(self._repository, ref)}


def retire(repository: Repository, ref: ModelRef) -> bool:
    """Retire a version that a search does not need any more; False: nobody answered, try again later."""
    try:
        repository.retire(ref)
    except (ModelNotFoundError, OptionError) as exc:
        log.info("%s is not retired: %s", ref, exc)
    except (ShardUnavailableError, OperationTimeoutError) as exc:
        log.warning("cannot retire %s now, retrying later: %s", ref, exc)
        return False
    return True
