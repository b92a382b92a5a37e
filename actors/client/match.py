"""Prefix queries: which stored model shares the longest prefix with a graph (EvoStore, section 4.2).

Rules
- The catalog answers, and pins what it found for the numbered query, which is over when its last match is released.
- A query that fails or is interrupted is given up: nothing stays pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import TracebackType

from ...store import traces
from ...store.graphs.graph import ModelGraph
from ...store.graphs.index import PrefixQuery
from ...store.holders import Lease
from ...store.metrics import QUERIES, QUERY
from ...store.refs import ModelRef
from ...store.versions.version import Match
from ..rpc.catalog_calls import CatalogCalls
from .catalog import Catalog
from .reader import Reader
from .requests import Numbered
from .session import Session


class PrefixMatch:
    """The version that shares the longest prefix of layers with a queried architecture (EvoStore, section 4.2).

    The match pins the version: its tensors stay available to this client even if the version is retired. The pin is
    removed by `release`, at the end of a `with` block, when the client is closed, or soon after the match is
    garbage-collected.

    The client renews its session in the background. If the session is not renewed for 60 s, for example
    because the process was suspended, the pin is lost. The next renewal restores the pin, unless the version was
    retired in the meantime. In this case, `layers` and `tensors` raise `ModelNotFoundError`.
    """

    def __init__(
        self,
        session: Session,
        query: ModelGraph,
        ref: ModelRef,
        quality: float | None,
        lease: Lease,
        numbered: Numbered,
        ancestor: Callable[[], ModelGraph],
    ) -> None:
        self.ref = ref
        """The matching version."""
        self.quality = quality
        """Quality of the version, or None."""
        self._query = query
        self._ancestor = ancestor
        self._session = session
        self._lease = lease
        self._owned = session.pins.own(self, lease)
        session.pins.hold(lease, ref, numbered)

    def __repr__(self) -> str:
        return f"PrefixMatch({self.ref}, {len(self._layers)} of {len(self._query)} layers, quality={self.quality})"

    @property
    def layers(self) -> dict[str, str]:
        """Mapping of layer names in the queried architecture to layer names in the version, for all matching layers.

        `Repository.save` accepts this mapping as `inherit`.

        Raises:
            ModelNotFoundError: if the version was retired while this client's session was expired.
        """
        self._session.pins.check(self._lease)
        return self._layers

    @property
    def tensors(self) -> dict[str, str]:
        """Mapping of tensor names in the queried architecture to tensor names in the version, for all matching layers.

        Raises:
            ModelNotFoundError: if the version was retired while this client's session was expired.
        """
        self._session.pins.check(self._lease)
        return self._tensors

    @cached_property
    def _layers(self) -> dict[str, str]:
        return self._query.common_prefix(self._ancestor())

    @cached_property
    def _tensors(self) -> dict[str, str]:
        graph = self._ancestor()
        return {
            mine: theirs
            for layer, source in self._layers.items()
            for mine, theirs in zip(self._query.by_name[layer].tensors, graph.by_name[source].tensors, strict=False)
        }

    def release(self, wait: bool = True) -> None:
        """Unpin the version. A second call does nothing.

        Args:
            wait: Whether to wait until the pin is removed. False removes the pin in the background.
        """
        pins = self._session.pins
        if pins.is_owned(self._owned):
            (pins.unpin if wait else pins.unpin_behind)([self._lease])
            pins.disown(self._owned)

    def __enter__(self) -> PrefixMatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Prefixes:
    """Asks for one client."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._reader = reader

    @traces.traced("query")
    def longest(
        self, graphs: Sequence[ModelGraph], meanwhile: Callable[[], None] | None = None
    ) -> list[PrefixMatch | None]:
        """Answer queries, at least one; see `Repository.longest_prefix`.

        Args:
            graphs: what is looked for.
            meanwhile: called while the catalog looks; what it raises is raised here, and nothing stays pinned.
        """
        begun, counts = time.perf_counter(), self._session.counts
        numbered = self._session.number()
        try:
            found = self._longest(numbered, graphs, meanwhile)
        except BaseException as exc:
            self._session.give_up(numbered)
            counts.failed("query", exc)
            raise
        counts.observe(QUERY, time.perf_counter() - begun)
        none = found.count(None)
        traces.note(found=len(found) - none, graphs=len(found))
        counts.add(QUERIES, len(found) - none, "found")
        counts.add(QUERIES, none, "none")
        return found

    def _longest(
        self, numbered: Numbered, graphs: Sequence[ModelGraph], meanwhile: Callable[[], None] | None
    ) -> list[PrefixMatch | None]:
        one = len(graphs) == 1
        request = CatalogCalls.match(numbered.request, [PrefixQuery.of(graph) for graph in graphs], one)
        answer = self._session.ask(request) if meanwhile is None else self._session.ask_aside(request, meanwhile)
        for located in answer.places.values():
            self._reader.expect(located)
        results = [
            self._match(graph, found, numbered, answer.graphs) if found is not None else None
            for graph, found in zip(graphs, answer.found, strict=True)
        ]
        if not any(results):
            self._session.requests.end(numbered)
        return results

    def _match(self, graph: ModelGraph, best: Match, numbered: Numbered, texts: Mapping[bytes, str]) -> PrefixMatch:
        key, text = best.graph_key, texts[best.graph_key]
        return PrefixMatch(
            self._session,
            graph,
            best.ref,
            best.quality,
            best.lease,
            numbered,
            lambda: self._catalog.graph_from(key, text),
        )
