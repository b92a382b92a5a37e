"""Aged evolution (Real et al. 2019): a queue of candidates; a child is the best of a sample with one decision changed.

Rules
- Pure: no clock, no I/O. All chance comes from one seeded generator, in the order of the calls: the same calls give the
  same candidates, so that a journal of the calls is all the state that there is (`journal`).
- Candidates are asked for and told independently of one another, as workers become free.
- What failed never enters the population.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from .space import Candidate, Space, draw, mutate


@dataclass(frozen=True, slots=True)
class Member:
    """A candidate of the population."""

    number: int
    """The one that `ask` gave it."""
    candidate: Candidate
    quality: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A candidate to evaluate."""

    number: int
    """Counts up from 0."""
    candidate: Candidate
    parent: int | None
    """Number of the member that it is a mutation of; None: it was drawn."""


class Evolution:
    """The search.

    Args:
        space: what is searched.
        population: how many members live; until so many were told, candidates are drawn.
        sample: of how many the best becomes a parent.
        seed: of the generator.

    >>> from .space import AttnSpace
    >>> search = Evolution(AttnSpace(2), population=2, sample=2, seed=1)
    >>> for quality in (0.5, 0.9):
    ...     asked = search.ask()
    ...     _ = search.tell(asked.number, quality)
    >>> child = search.ask()
    >>> child.parent, sum(a != b for a, b in zip(child.candidate, asked.candidate))
    (1, 1)
    """

    def __init__(self, space: Space, population: int = 50, sample: int = 5, seed: int = 0) -> None:
        if not 1 <= sample <= population:
            raise ValueError(f"Evolution: expected 1 <= sample <= population; found {sample} and {population}")
        self.space, self.size, self.sample = space, population, sample
        self._random = random.Random(seed)  # noqa: S311  for a search
        self._asked = 0
        self._open: dict[int, Asked] = {}
        self.members: deque[Member] = deque()
        """The population, the oldest first."""

    @property
    def asked(self) -> int:
        """How many candidates were asked for."""
        return self._asked

    @property
    def open(self) -> tuple[Asked, ...]:
        """Candidates that were asked for and not told, in order."""
        return tuple(self._open.values())

    def ask(self) -> Asked:
        """Return the next candidate."""
        if len(self.members) < self.size:
            parent, candidate = None, draw(self.space, self._random)
        else:
            best = max(self._random.sample(list(self.members), self.sample), key=lambda member: member.quality)
            parent, candidate = best.number, mutate(self.space, best.candidate, self._random)
        asked = Asked(self._asked, candidate, parent)
        self._asked += 1
        self._open[asked.number] = asked
        return asked

    def tell(self, number: int, quality: float | None) -> Member | None:
        """Take a candidate's quality.

        Args:
            number: of the candidate.
            quality: larger is better; None: it failed.

        Returns:
            The member that leaves the population for it, if any.

        Raises:
            KeyError: no such candidate is open.
        """
        asked = self._open.pop(number)
        if quality is None:
            return None
        self.members.append(Member(number, asked.candidate, quality))
        return self.members.popleft() if len(self.members) > self.size else None
