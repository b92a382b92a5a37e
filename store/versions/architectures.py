"""The graphs of all versions, each kept once however many versions have it, and the indexes that find versions by them.

Rules
- A graph stays as long as a version uses it: one that exists, or a retired one whose tensors are not freed yet.
- It is kept compressed, and unpacked as far as `store.bounds` allows. It comes with its fingerprints, so nothing of
  it is read at a commit; patterns are indexed when somebody first looks for one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..bounds import jsontext
from ..bounds.allowance import allowed
from ..bounds.inflate import inflated
from ..errors import CorruptDataError, ModelNotFoundError
from ..graphs.graph import ModelGraph, believed
from ..graphs.index import IndexMatch, PrefixIndex, PrefixQuery, rank_of
from ..graphs.pattern import PatternIndex
from ..refs import ModelRef
from .manifest import Header

Architecture = tuple[str, str | None]
"""A graph's JSON text, and the framework's recipe for it."""


@dataclass(slots=True)
class _Graph:
    packed: bytes
    query: PrefixQuery
    refs: dict[ModelRef, None] = field(default_factory=dict[ModelRef, None])
    """Live versions."""
    users: int = 0
    indexed: bool = False
    """Patterns find it."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, roughly: its text, and fingerprints with their places in the index."""
        return len(self.packed) + 256 * len(self.query.fingerprints)


class Architectures:
    """The graphs of all versions, by their keys.

    >>> graphs, graph = Architectures(), ModelGraph(())
    >>> graphs.add(b"key", packed((graph.to_json(), None)), PrefixQuery.of(graph))
    >>> graphs.use(b"key")
    >>> graphs.architecture(b"key") == (graph.to_json(), None)
    True
    >>> graphs.leave(b"key")
    >>> graphs.nbytes
    0
    """

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of all graphs as they are kept."""
        self._graphs: dict[bytes, _Graph] = {}
        self._prefixes = PrefixIndex()
        self._patterns: PatternIndex[bytes] = PatternIndex()

    def __contains__(self, key: bytes) -> bool:
        return key in self._graphs

    # ---- what is kept ---------------------------------------------------------------------------------

    def add(self, key: bytes, content: bytes, query: PrefixQuery) -> None:
        """Keep a graph until its last user leaves; one that is here stays as it is.

        Args:
            key: its key.
            content: as `packed` makes it.
            query: of the same graph.
        """
        if key not in self._graphs:
            graph = self._graphs[key] = _Graph(content, query)
            self.nbytes += graph.nbytes

    def use(self, key: bytes) -> None:
        """Count a user of a graph.

        Raises:
            KeyError: it is not here.
        """
        self._graphs[key].users += 1

    def leave(self, key: bytes) -> None:
        """Count a user less; after the last one the graph goes."""
        graph = self._graphs[key]
        graph.users -= 1
        if graph.users <= 0:
            self.nbytes -= graph.nbytes
            if graph.indexed:
                self._patterns.remove(key)
            del self._graphs[key]

    def kept(self) -> Iterator[tuple[bytes, bytes, PrefixQuery]]:
        """List all graphs: key, packed, fingerprints."""
        return ((key, graph.packed, graph.query) for key, graph in self._graphs.items())

    def packed(self, key: bytes) -> bytes:
        """Return an architecture that is used, as it is kept: `unpacked` reads it."""
        return self._graphs[key].packed

    def query(self, key: bytes) -> PrefixQuery:
        """Return the fingerprints of a graph that is used."""
        return self._graphs[key].query

    def architecture(self, key: bytes) -> Architecture:
        """Return a graph's JSON text and the framework's recipe for it."""
        graph = self._graphs.get(key)
        if graph is None:
            raise ModelNotFoundError(f"expected graph {key.hex()}; its last version was retired")
        return unpacked(graph.packed)

    # ---- what is found --------------------------------------------------------------------------------

    def enter(self, header: Header) -> None:
        """Let a live version, whose graph is in use, be found."""
        graph = self._graphs[header.graph_key]
        graph.refs[header.ref] = None
        self._prefixes.add(header.ref, graph.query, header.quality, header.created_ns)

    def enter_all(self, headers: Collection[Header]) -> None:
        """As `enter` for each of them, in their order; cheaper for many."""
        for header in headers:
            self._graphs[header.graph_key].refs[header.ref] = None
        best_first = sorted(headers, key=lambda one: rank_of(one.quality, one.created_ns, one.ref), reverse=True)
        for header in best_first:  # so that each architecture is entered once where prefixes are looked up
            self._prefixes.add(header.ref, self._graphs[header.graph_key].query, header.quality, header.created_ns)

    def remove(self, header: Header) -> None:
        """Let a version be found no more."""
        del self._graphs[header.graph_key].refs[header.ref]
        self._prefixes.remove(header.ref)

    def match(self, query: PrefixQuery) -> IndexMatch | None:
        """Find the live version with the longest common prefix."""
        return self._prefixes.match(query)

    def refs(self, key: bytes) -> Iterable[ModelRef]:
        """Iterate over the live versions that have a graph, newest first."""
        return reversed(self._graphs[key].refs)

    def alike(self, query: PrefixQuery) -> list[ModelRef]:
        """List live versions of exactly the architecture of `query`, sorted."""
        wanted = sorted(query.fingerprints)
        return sorted(
            ref for graph in self._graphs.values() if sorted(graph.query.fingerprints) == wanted for ref in graph.refs
        )

    def find(self, pattern: Sequence[Mapping[str, object]], exact: bool) -> list[ModelRef]:
        """List live versions whose graph has a path that fits `pattern`, sorted."""
        for key, graph in self._graphs.items():
            if not graph.indexed:
                self._patterns.add(key, ModelGraph.from_json(unpacked(graph.packed)[0]))
                graph.indexed = True
        return sorted(ref for key in self._patterns.find(pattern, exact) for ref in self._graphs[key].refs)


def packed(architecture: Architecture) -> bytes:
    """Return an architecture as it is kept; one that would not be believed, as it becomes so short, stays long."""
    plain = json.dumps(architecture).encode()
    content = zlib.compress(plain, 1)
    if len(plain) > _longest(content) or jsontext.memory_of(architecture[0]) > believed(len(content)):
        content = zlib.compress(plain, 0)
    return content


def unpacked(content: bytes) -> Architecture:
    """Return what `packed` was given.

    Raises:
        CorruptDataError: it was given nothing of this, or it would take too much memory.
    """
    plain = inflated(content, _longest(content), "architecture")
    pair = jsontext.parsed(plain, "architecture", allowed(len(content)))
    text, recipe = cast("list[Any]", pair) if isinstance(pair, list) else (None, None)
    if not isinstance(text, str) or not (recipe is None or isinstance(recipe, str)):
        raise CorruptDataError("architecture: expected a graph and a recipe as texts; found other values")
    jsontext.check(text, "graph", believed(len(content)))
    return text, recipe


def _longest(content: bytes) -> int:
    """Return how long a packed architecture may be: there are three of it while it is read."""
    return allowed(len(content)) // 3
