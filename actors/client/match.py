"""Prefix queries: which stored model shares the longest prefix with a graph (EvoStore, section 4.2).

Rules
- Each shard answers for the models at home there, and pins what it found. The best answer stays pinned, as a
  `PrefixMatch`; the pins of the others are removed.
- A query that fails or is interrupted is aborted on every shard: nothing stays pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import TracebackType

from ...store import traces
from ...store.graphs.graph import ModelGraph
from ...store.graphs.index import PrefixQuery
from ...store.holders import Lease, Query
from ...store.metrics import QUERIES, QUERY
from ...store.refs import ModelRef
from ...store.versions.version import Match
from ..rpc.messages import Matches
from ..shard.calls import ShardCalls
from .catalog import Catalog
from .reader import Reader
from .session import Session


class PrefixMatch:
    """The version that shares the longest prefix of layers with a queried architecture (EvoStore, section 4.2).

    The match pins the version: its tensors stay available to this client even if the version is retired. The pin is
    removed by `release`, at the end of a `with` block, when the client is closed, or soon after the match is
    garbage-collected.

    The client renews its session with the shards in the background. If the session is not renewed for 60 s, for example
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
        session.pins.hold(lease, ref)

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
            wait: Whether to wait until the shard has removed the pin. False removes the pin in the background.
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
            meanwhile: called while the shards look; what it raises is raised here, and nothing stays pinned.
        """
        begun, counts = time.perf_counter(), self._session.counts
        query, asked = self._session.pins.query()
        try:
            found = self._longest(query, graphs, meanwhile)
            asked.kept()
        except BaseException as exc:
            asked.abort()
            counts.failed("query", exc)
            raise
        counts.observe(QUERY, time.perf_counter() - begun)
        none = found.count(None)
        traces.note(found=len(found) - none, graphs=len(found))
        counts.add(QUERIES, len(found) - none, "found")
        counts.add(QUERIES, none, "none")
        return found

    def _longest(
        self, query: Query, graphs: Sequence[ModelGraph], meanwhile: Callable[[], None] | None
    ) -> list[PrefixMatch | None]:
        self._session.keep_alive()
        self._session.connect_all()  # so that each watches this process, which it will hold pins for
        queries = [PrefixQuery.of(graph) for graph in graphs]
        topology, one = self._session.topology, len(graphs) == 1
        request = ShardCalls.match(query, queries, places=one)
        aside = _Aside(meanwhile)
        answers = self._session.broadcast(request, spoiled=self._unmatch, meanwhile=aside.run)
        if aside.error is not None:
            raise aside.error
        texts = {key: text for answer in answers for key, text in answer.graphs.items()}
        results: list[PrefixMatch | None] = []
        losers: list[Lease] = []
        for position, graph in enumerate(graphs):
            found = [match for answer in answers if (match := answer.found[position]) is not None]
            best = max(found, key=lambda match: match.rank, default=None)
            losers += [match.lease for match in found if match is not best]
            results.append(self._match(graph, best, texts) if best is not None else None)
            if best is not None and one:
                told = next(answer.places[best.ref] for answer in answers if best.ref in answer.places)
                self._reader.expect(told, topology)
        self._session.pins.unpin_behind(losers)
        return results

    def _match(self, graph: ModelGraph, best: Match, texts: Mapping[bytes, str]) -> PrefixMatch:
        key, text = best.graph_key, texts[best.graph_key]
        return PrefixMatch(
            self._session,
            graph,
            best.ref,
            best.quality,
            best.lease,
            lambda: self._catalog.graph_from(key, text),
        )

    def _unmatch(self, answers: list[Matches]) -> None:
        """Unpin what answers that do not count have pinned."""
        self._session.pins.unpin([match.lease for answer in answers for match in answer.found if match is not None])


class _Aside:
    """What is done once, while others are at work; its error waits until they are done."""

    def __init__(self, work: Callable[[], None] | None) -> None:
        self._work = work
        self.error: Exception | None = None

    def run(self) -> None:
        """Do it, the first time."""
        work, self._work = self._work, None
        try:
            if work is not None:
                work()
        except Exception as exc:  # noqa: BLE001  raised by who asked for it
            self.error = exc
