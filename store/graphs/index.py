"""The catalog's inverted index: which live model shares the longest prefix with a graph?

Rules
- A query is fingerprints and edges only. A model's score is the number of query layers whose fingerprints it
  has; the answer has the greatest score, then the greatest rank: quality, then creation time, then reference.
- The answer is exact: it is what a scan of all models with `common_prefix` would find.
- Models whose graphs have the same set of fingerprints share an *architecture*; only its best model competes.
- What is kept for each fingerprint, and how it is searched: see `search`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from heapq import heapify
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ModelNotFoundError
from .search import Architecture, Descending, Entry, Known, Posting, Search, members_of, split, top_of

if TYPE_CHECKING:
    from ..refs import ModelRef
    from .graph import ModelGraph

Rank: TypeAlias = "tuple[float, int, ModelRef]"
"""(quality or -inf, created_ns, ref): of two models with equal scores, the greater rank wins."""


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
        self._models: dict[ModelRef, Entry] = {}
        self._numbers: dict[bytes, int] = {}
        """Joined fingerprints -> number of the architecture."""
        self._architectures: dict[int, Architecture] = {}
        self._postings: dict[bytes, int | Posting] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._models)

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
        entry = (-value, -created_ns, Descending(ref), number)
        self._models[ref] = entry
        architecture = self._architectures.get(number)
        if architecture is None:
            self._architectures[number] = Architecture(joined, entry)
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
            raise ModelNotFoundError(f"prefix index: expected a model in the index; found {ref}")
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
        known = Known(query.fingerprints, query.inputs, self._postings)
        if not known.closures:
            return None
        last, closure = next(reversed(known.closures.items()))
        if closure == known.all:  # one layer depends on all others: who has it has all, and nobody has more
            return self._result(known.size, top_of(known.postings[last], self._architectures))
        search = Search(self._architectures, known)
        return self._result(search.size, search.best) if search.run() else self._count(known)

    def _post(self, joined: bytes, number: int, entry: Entry) -> None:
        postings = self._postings
        for fingerprint in split(joined):
            posting = postings.setdefault(fingerprint, number)
            if isinstance(posting, Posting):
                posting.members.add(number)
                posting.push(entry, self._architectures)
            elif posting != number:
                heap = [self._architectures[posting].best, entry]
                heapify(heap)
                postings[fingerprint] = Posting({posting, number}, heap)

    def _unpost(self, joined: bytes, number: int) -> None:
        postings = self._postings
        for fingerprint in split(joined):
            posting = postings[fingerprint]
            if not isinstance(posting, Posting):
                del postings[fingerprint]
                continue
            posting.members.discard(number)
            if len(posting.members) == 1:
                postings[fingerprint] = posting.members.pop()
            else:
                posting.compact(self._architectures)

    def _promote(self, joined: bytes, entry: Entry) -> None:
        """Tell the postings of an architecture that `entry` is its best now."""
        for fingerprint in split(joined):
            posting = self._postings[fingerprint]
            if isinstance(posting, Posting):
                posting.push(entry, self._architectures)

    def _count(self, known: Known) -> IndexMatch:
        """Score every architecture that has any layer of the query."""
        scores: Counter[int] = Counter()
        for position, posting in known.postings.items():
            members = members_of(posting)
            for _ in range(known.weight(1 << position)):
                scores.update(members)
        size = max(scores.values())
        best = min(self._architectures[number].best for number, score in scores.items() if score == size)
        return self._result(size, best)

    def _result(self, size: int, entry: Entry) -> IndexMatch:
        quality = None if entry[0] == math.inf else -entry[0]
        return IndexMatch(entry[2].ref, size, quality, -entry[1])
