"""The catalog's inverted index: which live model shares the longest prefix with a graph?

Rules
- A query is fingerprints and edges only. A model's score is the number of query layers whose fingerprints it
  has; the answer has the greatest score, then the greatest rank: quality, then creation time, then reference.
- The answer is exact: it is what a scan of all models with `common_prefix` would find.
- Models whose graphs have the same set of fingerprints share an *architecture*; only its best model competes.
- A posting says which architectures have a fingerprint. With one member it is that architecture's number,
  with more it is a `_Posting`: most fingerprints belong to one architecture only, and these must stay small.
- Postings shrink along the edges: who has a layer has all that it depends on. So among the query's
  fingerprints that are known here, the one with the smallest posting feeds no other.
- Heaps are lazy: an entry that is no longer its architecture's best is stale and is dropped when it surfaces,
  or all at once when the stale ones outnumber the members.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ModelNotFoundError
from .graph import FINGERPRINT_BYTES

if TYPE_CHECKING:
    from ..refs import ModelRef
    from .graph import ModelGraph

Rank: TypeAlias = "tuple[float, int, ModelRef]"
"""(quality or -inf, created_ns, ref): of two models with equal scores, the greater rank wins."""

_FEW = 32
"""Up to so many architectures are scored one by one; above, whole sets are intersected."""
_STEPS = 64
"""So many set intersections are tried before all architectures are scored by counting."""


def rank_of(quality: float | None, created_ns: int, ref: ModelRef) -> Rank:
    """Rank a model; NaN counts as no quality.

    >>> from tensorvine.store.refs import ModelRef
    >>> rank_of(0.5, 1, ModelRef("a", 1)) > rank_of(None, 2, ModelRef("b", 1))
    True
    """
    return (-math.inf if quality is None or math.isnan(quality) else float(quality), created_ns, ref)


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A graph as prefix queries need it, without configs and names: this is what travels to a shard.

    >>> from tensorvine.store import Layer, ModelGraph
    >>> graph = ModelGraph([Layer("in", {"class": "Input"}), Layer("a", {"class": "ReLU"}, ["in"])])
    >>> PrefixQuery.of(graph).inputs
    ((), (0,))
    """

    fingerprints: tuple[bytes, ...]
    """One per layer, in topological order."""
    inputs: tuple[tuple[int, ...], ...]
    """Positions in `fingerprints` of each layer's inputs, in order."""

    @classmethod
    def of(cls, graph: ModelGraph) -> PrefixQuery:
        """Take from `graph` what a query needs."""
        position = {layer.name: i for i, layer in enumerate(graph.layers)}
        inputs = tuple(tuple(position[name] for name in layer.inputs) for layer in graph.layers)
        return cls(tuple(graph.fingerprints[layer.name] for layer in graph.layers), inputs)


@dataclass(frozen=True, slots=True)
class IndexMatch:
    """The model that shares the longest prefix with a query."""

    ref: ModelRef
    """The model."""
    size: int
    """Layers of the query that the model has; each of several equal layers counts."""
    quality: float | None
    """The model's quality; None if it has none."""
    created_ns: int
    """When the model was created, in ns since the epoch (UTC)."""


class PrefixIndex:
    """All live models by the fingerprints of their layers (EvoStore, section 4.1, without the scan).

    >>> from tensorvine.store import Layer, ModelGraph, ModelRef
    >>> stem = [Layer("in", {"class": "Input"}), Layer("a", {"class": "ReLU"}, ["in"])]
    >>> index = PrefixIndex()
    >>> index.add(ModelRef("m", 1), PrefixQuery.of(ModelGraph(stem)), quality=0.5, created_ns=1)
    >>> match = index.match(PrefixQuery.of(ModelGraph([*stem, Layer("b", {"class": "Dense"}, ["a"])])))
    >>> str(match.ref), match.size
    ('m@1', 2)
    """

    def __init__(self) -> None:
        self._models: dict[ModelRef, _Entry] = {}
        self._numbers: dict[bytes, int] = {}
        """Joined fingerprints -> number of the architecture."""
        self._architectures: dict[int, _Architecture] = {}
        self._postings: dict[bytes, int | _Posting] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, ref: object) -> bool:
        return ref in self._models

    def add(self, ref: ModelRef, query: PrefixQuery, quality: float | None, created_ns: int) -> None:
        """Add a model. One of the same reference is replaced.

        Args:
            ref: the model.
            query: `PrefixQuery.of` its graph.
            quality: greater is better; None or NaN ranks below every number.
            created_ns: when it was created, in ns since the epoch (UTC).
        """
        if ref in self._models:
            self.remove(ref)
        joined = b"".join(sorted(set(query.fingerprints)))
        number = self._numbers.get(joined)
        if number is None:
            number = self._next
            self._next += 1
        value, created_ns, ref = rank_of(quality, created_ns, ref)
        entry = (-value, -created_ns, _Descending(ref), number)
        self._models[ref] = entry
        architecture = self._architectures.get(number)
        if architecture is None:
            self._architectures[number] = _Architecture(joined, entry)
            self._numbers[joined] = number
            self._post(joined, number, entry)
        elif architecture.add(entry, self._models):
            self._promote(joined, entry)

    def remove(self, ref: ModelRef) -> None:
        """Remove a model.

        Raises:
            ModelNotFoundError: it is not in the index, which is unchanged.
        """
        entry = self._models.pop(ref, None)
        if entry is None:
            raise ModelNotFoundError(f"prefix index: expected a model that it holds; found {ref}")
        number = entry[3]
        architecture = self._architectures[number]
        architecture.models -= 1
        if not architecture.models:
            del self._architectures[number], self._numbers[architecture.joined]
            self._unpost(architecture.joined, number)
        elif architecture.best is entry:
            architecture.best = architecture.top(self._models)
            self._promote(architecture.joined, architecture.best)

    def match(self, query: PrefixQuery) -> IndexMatch | None:
        """Find the model that shares the longest prefix with the query, by rank among equals.

        Returns:
            None if no model has any layer of the query.
        """
        known = _Known(query, self._postings)
        if not known.closures:
            return None
        last, closure = next(reversed(known.closures.items()))
        if closure == known.all:  # one layer depends on all others: who has it has all, and nobody has more
            return self._result(known.size, _top(known.postings[last], self._architectures))
        search = _Search(self._architectures, known)
        return self._result(search.size, search.best) if search.run() else self._count(known)

    def _post(self, joined: bytes, number: int, entry: _Entry) -> None:
        postings = self._postings
        for fingerprint in _split(joined):
            posting = postings.setdefault(fingerprint, number)
            if isinstance(posting, _Posting):
                posting.members.add(number)
                posting.push(entry, self._architectures)
            elif posting != number:
                heap = [self._architectures[posting].best, entry]
                heapify(heap)
                postings[fingerprint] = _Posting({posting, number}, heap)

    def _unpost(self, joined: bytes, number: int) -> None:
        postings = self._postings
        for fingerprint in _split(joined):
            posting = postings[fingerprint]
            if not isinstance(posting, _Posting):
                del postings[fingerprint]
                continue
            posting.members.discard(number)
            if len(posting.members) == 1:
                postings[fingerprint] = posting.members.pop()
            else:
                posting.compact(self._architectures)

    def _promote(self, joined: bytes, entry: _Entry) -> None:
        """Tell the postings of an architecture that `entry` is its best now."""
        for fingerprint in _split(joined):
            posting = self._postings[fingerprint]
            if isinstance(posting, _Posting):
                posting.push(entry, self._architectures)

    def _count(self, known: _Known) -> IndexMatch:
        """Score every architecture that has any layer of the query."""
        scores: Counter[int] = Counter()
        for position, posting in known.postings.items():
            members = _members(posting)
            for _ in range(known.weight(1 << position)):
                scores.update(members)
        size = max(scores.values())
        best = min(self._architectures[number].best for number, score in scores.items() if score == size)
        return self._result(size, best)

    def _result(self, size: int, entry: _Entry) -> IndexMatch:
        quality = None if entry[0] == math.inf else -entry[0]
        return IndexMatch(entry[2].ref, size, quality, -entry[1])


class _Descending:
    """A reference that sorts the other way round, so that a heap's least entry is the greatest rank."""

    __slots__ = ("ref",)

    def __init__(self, ref: ModelRef) -> None:
        self.ref = ref

    def __lt__(self, other: _Descending) -> bool:
        return other.ref < self.ref


_Entry: TypeAlias = tuple[float, int, _Descending, int]
"""(-quality, -created_ns, ref, architecture): a model's rank, negated. All heaps hold the same tuple."""


class _Architecture:
    """The models of one set of fingerprints."""

    __slots__ = ("best", "heap", "joined", "models")

    def __init__(self, joined: bytes, entry: _Entry) -> None:
        self.joined = joined
        """Its fingerprints, sorted, one after the other."""
        self.best = entry
        self.heap = [entry]
        self.models = 1
        """Live models."""

    def add(self, entry: _Entry, live: dict[ModelRef, _Entry]) -> bool:
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

    def top(self, live: dict[ModelRef, _Entry]) -> _Entry:
        heap = self.heap
        while live.get(heap[0][2].ref) is not heap[0]:
            heappop(heap)
        return heap[0]


class _Posting:
    """The two or more architectures that have a fingerprint."""

    __slots__ = ("heap", "members")

    def __init__(self, members: set[int], heap: list[_Entry]) -> None:
        self.members = members
        self.heap = heap

    def push(self, entry: _Entry, architectures: dict[int, _Architecture]) -> None:
        heappush(self.heap, entry)
        self.compact(architectures)

    def compact(self, architectures: dict[int, _Architecture]) -> None:
        """Build the heap anew when most of it is stale; a constant cost per push and per removal."""
        if len(self.heap) > 2 * len(self.members) + 8:
            self.heap = [architectures[number].best for number in self.members]
            heapify(self.heap)

    def top(self, architectures: dict[int, _Architecture]) -> _Entry:
        heap = self.heap
        while True:
            architecture = architectures.get(heap[0][3])
            if architecture is not None and architecture.best is heap[0]:
                return heap[0]
            heappop(heap)


class _Known:
    """The part of a query that the index has. A fingerprint is known by its first position."""

    __slots__ = ("all", "closures", "extra", "postings", "size")

    def __init__(self, query: PrefixQuery, postings: dict[bytes, int | _Posting]) -> None:
        self.postings: dict[int, int | _Posting] = {}
        """Position -> posting."""
        self.closures: dict[int, int] = {}
        """Position -> bits of the positions that it depends on, itself included."""
        self.extra: dict[int, int] = {}
        """Position -> further layers of the query with the same fingerprint."""
        self.all = 0
        first: dict[bytes, int] = {}
        masks: list[int] = []
        for position, (fingerprint, inputs) in enumerate(zip(query.fingerprints, query.inputs, strict=True)):
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


class _Search:
    """Branch and bound over sets of architectures.

    A branch is a set of architectures that all have certain layers, and a mask of the other layers that they
    may have. It is split by a layer that feeds no other of these: who has it, and who has not. The bound is
    the weight of all that a branch may have; one that cannot beat the best found is left out.
    """

    __slots__ = ("_architectures", "_known", "_order", "_steps", "best", "size")

    best: _Entry

    def __init__(self, architectures: dict[int, _Architecture], known: _Known) -> None:
        self._architectures = architectures
        self._known = known
        sizes = {i: len(p.members) if isinstance(p, _Posting) else 1 for i, p in known.postings.items()}
        # Smallest first; among equal ones the last, because equal postings may depend on one another.
        self._order = sorted(sizes, key=lambda i: (sizes[i], -i))
        self._steps = _STEPS
        self.size = 0
        """The best score found so far, and in `best` whose it is."""

    def run(self) -> bool:
        """Search everything; False if it was given up because too many sets were to be intersected."""
        self._branch(None, self._known.all, 0, None)
        return self._steps >= 0

    def _branch(self, members: set[int] | None, mask: int, base: int, ceiling: _Entry | None) -> None:
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
            first = _top(posting, self._architectures)
            lower = first if ceiling is None or ceiling < first else ceiling
            if bound == self.size and not lower < self.best:
                return
            common = _members(posting) if members is None else members & _members(posting)
            self._steps -= members is not None
            if common:
                closure = known.closures[position]
                self._score(common, mask & ~closure, base + known.weight(mask & closure), lower)
            mask &= ~(1 << position)
        if members is not None and base >= self.size:
            top = ceiling if ceiling is not None and ceiling[3] in members else self._best_of(members)
            self._offer(base, top)

    def _score(self, members: set[int], mask: int, base: int, ceiling: _Entry) -> None:
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
                if number in _members(known.postings[position]):
                    base += known.weight(mask & known.closures[position])
                    mask &= ~known.closures[position]
                else:
                    mask &= ~(1 << position)
                if base + known.weight(mask) < self.size:
                    return
        self._offer(base, self._architectures[number].best)

    def _has_all(self, number: int, mask: int) -> bool:
        postings = self._known.postings
        return all(number in _members(postings[p]) for p in self._order if mask >> p & 1)

    def _best_of(self, members: set[int]) -> _Entry:
        return min([self._architectures[number].best for number in members])

    def _offer(self, size: int, entry: _Entry) -> None:
        if size > self.size or (size == self.size and entry < self.best):
            self.size, self.best = size, entry


def _members(posting: int | _Posting) -> set[int]:
    return posting.members if isinstance(posting, _Posting) else {posting}


def _top(posting: int | _Posting, architectures: dict[int, _Architecture]) -> _Entry:
    return posting.top(architectures) if isinstance(posting, _Posting) else architectures[posting].best


def _split(joined: bytes) -> list[bytes]:
    return [joined[i : i + FINGERPRINT_BYTES] for i in range(0, len(joined), FINGERPRINT_BYTES)]
