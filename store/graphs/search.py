"""The search behind prefix queries: postings of architectures, and a branch and bound over sets of them.

Rules
- A posting says which architectures have a fingerprint. With one member it is that architecture's number,
  with more it is a `Posting`: most fingerprints belong to one architecture only, and these must stay small.
- Postings shrink along the edges: who has a layer has all that it depends on. So among the query's
  fingerprints that are known here, the one with the smallest posting feeds no other.
- Heaps are lazy: an entry that is no longer its architecture's best is stale and is dropped when it surfaces,
  or all at once when the stale ones outnumber the members.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from ..refs import ModelRef
from .graph import FINGERPRINT_BYTES

_FEW = 32
"""Up to so many architectures are scored one by one; above, whole sets are intersected."""
_STEPS = 64
"""So many set intersections are tried before all architectures are scored by counting."""


class Known:
    """The part of a query that the index has. A fingerprint is known by its first position."""

    __slots__ = ("all", "closures", "extra", "postings", "size")

    def __init__(
        self,
        fingerprints: Sequence[bytes],
        inputs_of: Sequence[Sequence[int]],
        postings: dict[bytes, int | Posting],
    ) -> None:
        self.postings: dict[int, int | Posting] = {}
        """Position -> posting."""
        self.closures: dict[int, int] = {}
        """Position -> bits of the positions that it depends on, itself included."""
        self.extra: dict[int, int] = {}
        """Position -> further layers of the query with the same fingerprint."""
        self.all = 0
        first: dict[bytes, int] = {}
        masks: list[int] = []
        for position, (fingerprint, inputs) in enumerate(zip(fingerprints, inputs_of, strict=True)):
            mask = 0
            posting = postings.get(fingerprint)
            if posting is not None:
                seen = first.setdefault(fingerprint, position)
                if seen != position:
                    self.extra[seen] = self.extra.get(seen, 0) + 1
                    mask = masks[seen]
                else:
                    mask = 1 << position
                    for i in inputs:
                        mask |= masks[i]
                    self.postings[position] = posting
                    self.closures[position] = mask
                    self.all |= 1 << position
            masks.append(mask)
        self.size = len(self.postings) + sum(self.extra.values())
        """Layers of the query that the index knows."""

    def weight(self, mask: int) -> int:
        """Count the query's layers whose fingerprints are those in `mask`."""
        extra = sum(count for position, count in self.extra.items() if mask >> position & 1) if self.extra else 0
        return mask.bit_count() + extra


class Search:
    """Branch and bound over sets of architectures.

    A branch is a set of architectures that all have certain layers, and a mask of the other layers that they
    may have. It is split by a layer that feeds no other of these: who has it, and who has not. The bound is
    the weight of all that a branch may have; one that cannot beat the best found is left out.
    """

    __slots__ = ("_architectures", "_known", "_order", "_steps", "best", "size")

    best: Entry

    def __init__(self, architectures: dict[int, Architecture], known: Known) -> None:
        self._architectures = architectures
        self._known = known
        sizes = {i: len(p.members) if isinstance(p, Posting) else 1 for i, p in known.postings.items()}
        # Smallest first; among equal ones the last, because equal postings may depend on one another.
        self._order = sorted(sizes, key=lambda i: (sizes[i], -i))
        self._steps = _STEPS
        self.size = 0
        """The best score found so far, and in `best` whose it is."""

    def run(self) -> bool:
        """Search everything; False if it was given up because too many sets were to be intersected."""
        self._branch(None, self._known.all, 0, None)
        return self._steps >= 0

    def _branch(self, members: set[int] | None, mask: int, base: int, ceiling: Entry | None) -> None:
        """Search the architectures `members` (None: all), which have `base` layers and maybe some of `mask`.

        `ceiling` ranks at least as high as all of `members`.
        """
        known = self._known
        for position in self._order:
            if not mask >> position & 1:
                continue
            bound = base + known.weight(mask)
            if bound < self.size or self._steps < 0:
                return
            posting = known.postings[position]
            first = top_of(posting, self._architectures)
            lower = first if ceiling is None or ceiling < first else ceiling
            if bound == self.size and not lower < self.best:
                return
            common = members_of(posting) if members is None else members & members_of(posting)
            self._steps -= members is not None
            if common:
                closure = known.closures[position]
                self._score(common, mask & ~closure, base + known.weight(mask & closure), lower)
            mask &= ~(1 << position)
        if members is not None and base >= self.size:
            top = ceiling if ceiling is not None and ceiling[3] in members else self._best_of(members)
            self._offer(base, top)

    def _score(self, members: set[int], mask: int, base: int, ceiling: Entry) -> None:
        """Score `members`, of which there is at least one: see `_branch`."""
        if ceiling[3] in members and self._has_all(ceiling[3], mask):
            self._offer(base + self._known.weight(mask), ceiling)
        elif len(members) > _FEW:
            self._branch(members, mask, base, ceiling)
        else:
            for number in members:
                self._score_one(number, mask, base)

    def _score_one(self, number: int, mask: int, base: int) -> None:
        known = self._known
        for position in self._order:
            if mask >> position & 1:
                if number in members_of(known.postings[position]):
                    base += known.weight(mask & known.closures[position])
                    mask &= ~known.closures[position]
                else:
                    mask &= ~(1 << position)
                if base + known.weight(mask) < self.size:
                    return
        self._offer(base, self._architectures[number].best)

    def _has_all(self, number: int, mask: int) -> bool:
        postings = self._known.postings
        return all(number in members_of(postings[p]) for p in self._order if mask >> p & 1)

    def _best_of(self, members: set[int]) -> Entry:
        return min([self._architectures[number].best for number in members])

    def _offer(self, size: int, entry: Entry) -> None:
        if size > self.size or (size == self.size and entry < self.best):
            self.size, self.best = size, entry


class Descending:
    """A reference that sorts the other way round, so that a heap's least entry is the greatest rank."""

    __slots__ = ("ref",)

    def __init__(self, ref: ModelRef) -> None:
        self.ref = ref

    def __lt__(self, other: Descending) -> bool:
        return other.ref < self.ref


Entry: TypeAlias = tuple[float, int, Descending, int]
"""(-quality, -created_ns, ref, architecture): a model's rank, negated. All heaps hold the same tuple."""


class Architecture:
    """The models of one set of fingerprints."""

    __slots__ = ("best", "heap", "joined", "models")

    def __init__(self, joined: bytes, entry: Entry) -> None:
        self.joined = joined
        """Its fingerprints, sorted, one after the other."""
        self.best = entry
        self.heap = [entry]
        self.models = 1
        """Live models."""

    def add(self, entry: Entry, live: dict[ModelRef, Entry]) -> bool:
        """Add a model; True if it is the best now."""
        self.models += 1
        heappush(self.heap, entry)
        if len(self.heap) > 2 * self.models + 8:
            self.heap = [e for e in self.heap if live.get(e[2].ref) is e]
            heapify(self.heap)
        if not entry < self.best:
            return False
        self.best = entry
        return True

    def top(self, live: dict[ModelRef, Entry]) -> Entry:
        """Return the best live model."""
        heap = self.heap
        while live.get(heap[0][2].ref) is not heap[0]:
            heappop(heap)
        return heap[0]


class Posting:
    """The two or more architectures that have a fingerprint."""

    __slots__ = ("heap", "members")

    def __init__(self, members: set[int], heap: list[Entry]) -> None:
        self.members = members
        self.heap = heap

    def push(self, entry: Entry, architectures: dict[int, Architecture]) -> None:
        """Add what is the best of its architecture now."""
        heappush(self.heap, entry)
        self.compact(architectures)

    def compact(self, architectures: dict[int, Architecture]) -> None:
        """Build the heap anew when most of it is stale; a constant cost per push and per removal."""
        if len(self.heap) > 2 * len(self.members) + 8:
            self.heap = [architectures[number].best for number in self.members]
            heapify(self.heap)

    def top(self, architectures: dict[int, Architecture]) -> Entry:
        """Return the best model of all its architectures."""
        heap = self.heap
        while True:
            architecture = architectures.get(heap[0][3])
            if architecture is not None and architecture.best is heap[0]:
                return heap[0]
            heappop(heap)


def members_of(posting: int | Posting) -> set[int]:
    """Return the architectures that have a fingerprint."""
    return posting.members if isinstance(posting, Posting) else {posting}


def top_of(posting: int | Posting, architectures: dict[int, Architecture]) -> Entry:
    """Return the best model that has a fingerprint."""
    return posting.top(architectures) if isinstance(posting, Posting) else architectures[posting].best


def split(joined: bytes) -> list[bytes]:
    """Part joined fingerprints."""
    return [joined[i : i + FINGERPRINT_BYTES] for i in range(0, len(joined), FINGERPRINT_BYTES)]
