"""Prefix queries: which stored model shares the longest prefix with a graph (EvoStore, section 4.2).

Rules
- Each shard answers for the models at home there, and pins what it found; the best answer stays pinned, as a
  `PrefixMatch`, and the pins of the others are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...store.graphs.graph import ModelGraph
from ...store.graphs.index import PrefixQuery
from ...store.holders import Lease
from ...store.versions.version import Match
from ..rpc.messages import Matches
from ..shard.calls import ShardCalls
from .catalog import Catalog
from .match import PrefixMatch
from .reader import Reader
from .session import Session


class Prefixes:
    """Asks for one client."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._reader = reader

    def longest(
        self, graphs: Sequence[ModelGraph], meanwhile: Callable[[], None] | None = None
    ) -> list[PrefixMatch | None]:
        """Answer queries, at least one; see `Repository.longest_prefix`.

        Args:
            graphs: what is looked for.
            meanwhile: called while the shards look; what it raises is raised here, and nothing stays pinned.
        """
        self._session.keep_alive()
        self._session.connect_all()  # so that each watches this process, which it will hold pins for
        queries = [PrefixQuery.of(graph) for graph in graphs]
        topology, one = self._session.topology, len(graphs) == 1
        request = ShardCalls.match(self._session.client, queries, places=one)
        aside = _Aside(meanwhile)
        answers = self._session.broadcast(request, spoiled=self._unmatch, meanwhile=aside.run)
        if aside.error is not None:
            self._unmatch(answers)
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
        self._session.unpin_behind(losers)
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
        """Let go of what was pinned for nothing."""
        self._session.unpin([match.lease for answer in answers for match in answer.found if match is not None])


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
