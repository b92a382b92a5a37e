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

from ...store.errors import ModelNotFoundError, OperationTimeoutError, ShardUnavailableError
from ...store.refs import ModelRef
from ..client.repository import Repository

log = logging.getLogger(__name__)


class Population:
    """The live candidates of an aged evolution, oldest first; who falls out is retired.

    A candidate in training that inherits from a retired one is not disturbed: it holds a pin (`Candidate`).

    Args:
        repository: where the candidates are saved.
        size: how many live; the population size of the search.

    Raises:
        ValueError: `size` is not positive.

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
        """Who lives, oldest first."""
        return tuple(self._queue)

    def add(self, ref: ModelRef) -> ModelRef | None:
        """Append a candidate; the oldest entry is removed when there are more than `size`, and its version retired.

        Returns:
            The entry that was removed; None while there is room.
        """
        self._queue.append(ref)
        gone = self._queue.popleft() if len(self._queue) > self.size else None
        self._leave([gone] if gone is not None else [])
        return gone

    def drop(self, ref: ModelRef) -> None:
        """Remove all entries of a version, such as one whose candidate failed, and retire it, added or not."""
        self._queue = deque(entry for entry in self._queue if entry != ref)
        self._leave([ref])

    def drop_versions(self, name: str, but: ModelRef | None = None) -> None:
        """Retire all that was saved under the name of one candidate, except `but`.

        For a worker that was killed after the save and before it told of it, whether or not it was begun again.

        Raises:
            ShardUnavailableError, OperationTimeoutError: the repository does not say what there is.
        """
        for ref in self._repository.models(name):
            if ref.name == name and ref != but:
                self.drop(ref)

    def restore(self, refs: Iterable[ModelRef]) -> None:
        """Take up the population of a search that was stopped, oldest first; the oldest beyond `size` are retired."""
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
    except ModelNotFoundError:
        log.info("%s was retired already", ref)
    except (ShardUnavailableError, OperationTimeoutError) as exc:
        log.warning("%s is to be retired; it is tried again later: %s", ref, exc)
        return False
    return True
