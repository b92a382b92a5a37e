"""Longest-common-prefix queries over 60,000 graphs, compared with Redis-Queries (EvoStore, section 5.5).

All parties see the same graphs. Times are per query. Queries are new graphs each time: hashing them is part of a call,
and no answer can come from a cache. Redis-Queries is slow and gets a sample of the queries; its answers are compared
with TensorVine's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tensorvine.store import ModelGraph, ModelRef
from tensorvine.store.graphs.index import PrefixIndex, PrefixQuery

from .core.clusters import NAME, Names, fill, quality_of, repository
from .core.fleet import Fleet, round_trip, seconds_of
from .core.measure import GIB, ROUND_TRIP, Sample, expect, progress, sample, timed
from .core.models import nas_graphs
from .core.redis import RedisQueries, RedisServer, concurrent_queries
from .core.report import Goal, Report

PEER = "Redis-Queries"
PAPER_GRAPHS = 60_000
CALLERS, BATCH = 8, 256
QUERIES = 10_000
"""New graphs for queries: the search that drew the stored graphs goes on."""
INDEX = "the index in process"


class Caller:
    """A process that queries."""

    def __init__(self, name: str) -> None:
        from tensorvine.actors import Repository

        self._repo = Repository.connect(name)
        self._graphs: list[ModelGraph] = []
        self._found: list[Any] = []

    def prepare(self, texts: Sequence[str]) -> None:
        """Parse graphs and connect; release the matches of the queries before."""
        release_all(self._found)
        self._graphs = [ModelGraph.from_json(text) for text in texts]
        release_all(query_in_batches(self._repo, self._graphs[:1], 1))

    def query(self, batch: int) -> None:
        """Query all graphs."""
        self._found = query_in_batches(self._repo, self._graphs, batch)

    def close(self) -> None:
        """Disconnect."""
        release_all(self._found)
        self._repo.close()


def per_query(callers: Fleet, graphs: Sequence[ModelGraph], batch: int) -> Sample:
    """Let each caller query an equal share; return the seconds per query of all callers together."""
    texts, count = [graph.to_json() for graph in graphs], len(callers.actors)
    callers.each("prepare", [(texts[place::count],) for place in range(count)], timeout=300)
    return sample(seconds_of(callers.spans("query", batch, timeout=600)) / len(graphs))


def query_in_batches(repo: Any, graphs: Sequence[ModelGraph], batch: int) -> list[Any]:
    """Query one graph at a time (`batch` 1) or in batches; the matches stay pinned."""
    if batch == 1:
        return [repo.longest_prefix(graph) for graph in graphs]
    found: list[Any] = []
    for start in range(0, len(graphs), batch):
        found += repo.longest_prefixes(graphs[start : start + batch])
    return found


def release_all(matches: Sequence[Any]) -> None:
    """Unpin matches."""
    for match in matches:
        if match is not None:
            match.release()


def run(report: Report) -> None:
    """Fill the index, the repository and the peer with the same graphs, then query."""
    count, singles, batches, checked = report.pick(quick=(200, 10, 1, 3), normal=(PAPER_GRAPHS, 500, 4, 5))
    index, size = PrefixIndex(), 0
    with RedisServer() as server, repository(GIB) as repo:
        progress(f"{count} graphs into the repository, the index and Redis")
        fill(nas_graphs(count), Names("nas"))
        redis, graphs = RedisQueries(server.socket), nas_graphs(count + QUERIES)
        numbered = enumerate(islice(graphs, count))
        while chunk := list(islice(numbered, 1000)):
            redis.add_all([(graph, quality_of(place)) for place, graph in chunk])
            for place, graph in chunk:
                index.add(ModelRef(f"nas/{place + 1}", 1), PrefixQuery.of(graph), quality_of(place), place)
                size += len(graph.to_json())
        one, many = _peer(repo, redis, server.socket, index, list(islice(graphs, checked)))
        redis.close()
        _measure(report, repo, index, size, graphs, (one, many), singles, batches)


def _peer(
    repo: Any, redis: RedisQueries, socket: str, index: PrefixIndex, graphs: Sequence[ModelGraph]
) -> tuple[Sample, Sample]:
    """Time the peer with one caller and with several; check that all parties find prefixes of the same length."""
    progress(f"{len(graphs)} queries to {PEER}")
    times: list[float] = []
    for graph in graphs:
        took, theirs = timed(lambda graph=graph: redis.query(graph))
        times.append(took)
        with repo.longest_prefix(graph) as ours:
            found = {len(ours.layers), index.match(PrefixQuery.of(graph)).size, theirs.layers}
        expect(len(found) == 1, "prefix_query", f"prefixes of one length for {graph}, not {found}")
    progress(f"{CALLERS} callers of {PEER}")
    return sample(times), sample(concurrent_queries(socket, [graphs[0]] * CALLERS, CALLERS) / CALLERS)


def _measure(
    report: Report,
    repo: Any,
    index: PrefixIndex,
    size: int,
    queries: Iterator[ModelGraph],
    peer: tuple[Sample, Sample],
    singles: int,
    batches: int,
) -> None:
    """Query in all ways; each takes its own share of the new graphs."""

    def throughput(ours: Sample, theirs: Sample) -> Sequence[Goal]:
        if len(index) < PAPER_GRAPHS:
            return ()
        return (Goal(f"times {PEER}' throughput", theirs.median / ours.median, at_least=1000),)

    one, many = peer
    progress("the index, one caller, batches")
    graphs = list(islice(queries, singles))
    hashing_s, asked = timed(lambda: [PrefixQuery.of(graph) for graph in graphs])
    alone = sample([timed(lambda query=query: index.match(query))[0] for query in asked])
    report.add(
        f"{INDEX}, without hashing the graph",
        alone,
        size,
        peer=(PEER, one),
        goals=[Goal("median in microseconds", alone.median * 1e6, at_most=100)],
        hashing_us=hashing_s / len(graphs) * 1e6,
    )
    found: list[float] = []
    trips: list[float] = []
    with round_trip() as trip:
        for graph in islice(queries, singles):
            took, match = timed(lambda graph=graph: repo.longest_prefix(graph))
            found.append(took)
            release_all([match])
            trips.append(timed(trip)[0])
    ours, floor = sample(found), sample(trips)
    goals = [Goal("actor round trips", ours.median / floor.median, at_most=3)]
    report.add("one caller, one at a time", ours, size, peer=(PEER, one), floor=(ROUND_TRIP, floor), goals=goals)
    found = []
    for _ in range(batches):
        batch = list(islice(queries, BATCH))
        start = time.perf_counter()
        matches = query_in_batches(repo, batch, BATCH)
        found.append((time.perf_counter() - start) / len(batch))
        release_all(matches)
    ours, floor = sample(found), (INDEX, alone)
    goals = throughput(ours, one)
    report.add(f"one caller, batches of {BATCH}", ours, size, peer=(PEER, one), floor=floor, goals=goals, headline=True)
    progress(f"{CALLERS} callers")
    with Fleet(Caller, [(NAME,)] * CALLERS) as callers:
        for way, batch, count in (
            ("one at a time", 1, max(singles, CALLERS)),
            (f"batches of {BATCH}", BATCH, BATCH * CALLERS),
        ):
            ours = per_query(callers, list(islice(queries, count)), batch)
            goals = throughput(ours, many) if batch > 1 else ()
            name = f"{PEER}, {CALLERS} callers"
            report.add(f"{CALLERS} callers, {way}", ours, size, peer=(name, many), floor=floor, goals=goals)
