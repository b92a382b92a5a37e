"""Longest-common-prefix queries over many graphs (EvoStore, section 5.5), beside Redis-Queries.

All ways of asking see the same graphs. Times are per query. Queries are fresh graphs each time: hashing them
is part of a call, and no answer can come from a cache. Redis-Queries is slow, so it gets a sample of the
queries; its answers are compared with ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from tensorvine.store import ModelGraph, ModelRef
from tensorvine.store.graphs.index import PrefixIndex, PrefixQuery

from .architectures import nas_graphs
from .callers import QueryCallers, RoundTrip, query_in_batches, release_all, timed
from .measure import GIB, ROUND_TRIP, Effort, Goal, Report, Row, Sample, progress
from .redis_queries import RedisQueries, RedisServer, concurrent_queries
from .session import NAME, Names, fill, quality_of, repository

if TYPE_CHECKING:
    from tensorvine.actors import Repository

PEER = "Redis-Queries"
PAPER_GRAPHS = 60_000
CALLERS = 8
BATCH = 256
QUERIES = 10_000
"""Fresh graphs for queries: the search that drew the stored graphs goes on."""
INDEX = "the index in process"


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    graphs: int
    singles: int
    """Queries of one caller, one at a time; as many go to the index."""
    batches: int
    """Batches a caller sends."""
    redis_queries: int
    """Queries that the peer answers, one caller."""


def run(effort: Effort) -> Report:
    """Fill the index, the repository and the peer with the same graphs, then ask."""
    sizes = Sizes(3_000, 200, 2, 10) if effort is Effort.QUICK else Sizes(PAPER_GRAPHS, 500, 4, 5)
    report = Report("prefix_query")
    index = PrefixIndex()
    with RedisServer() as server, repository(GIB) as repo:
        progress(f"{sizes.graphs} graphs into the repository")
        fill(nas_graphs(sizes.graphs), Names("nas"))
        progress(f"{sizes.graphs} graphs into the index and into Redis")
        redis = RedisQueries(server.socket)
        graphs = nas_graphs(sizes.graphs + QUERIES)
        size = _fill(index, redis, islice(graphs, sizes.graphs))
        bench = _Bench(report, repo, redis, server.socket, index, size)
        bench.check(list(islice(graphs, sizes.redis_queries)))
        bench.measure(graphs, sizes)
        redis.close()
    return report


def _fill(index: PrefixIndex, redis: RedisQueries, graphs: Iterator[ModelGraph]) -> int:
    """Give the same graphs to both; return the bytes of the graphs as JSON."""
    size = 0
    numbered = enumerate(graphs)
    while chunk := list(islice(numbered, 1000)):
        redis.add_all([(graph, quality_of(place)) for place, graph in chunk])
        for place, graph in chunk:
            index.add(ModelRef(f"nas/{place + 1}", 1), PrefixQuery.of(graph), quality_of(place), place)
            size += len(graph.to_json())
    return size


class _Bench:
    def __init__(
        self,
        report: Report,
        repo: Repository,
        redis: RedisQueries,
        socket: str,
        index: PrefixIndex,
        size: int,
    ) -> None:
        self._report = report
        self._repo = repo
        self._redis = redis
        self._socket = socket
        self._index = index
        self._size = size
        self._redis_one = Sample(())
        self._redis_many = Sample(())
        self._index_times = Sample(())

    def check(self, graphs: Sequence[ModelGraph]) -> None:
        """Time the peer, and see that all ways give prefixes of the same length.

        Raises:
            RuntimeError: they do not; then there is nothing to compare.
        """
        progress(f"{len(graphs)} queries to Redis-Queries")
        times: list[float] = []
        for graph in graphs:
            took, theirs = timed(lambda graph=graph: self._redis.query(graph))
            times.append(took)
            with self._repo.longest_prefix(graph) as ours:
                found = (len(ours.layers), self._index.match(PrefixQuery.of(graph)).size, theirs.layers)
            if len(set(found)) != 1:
                raise RuntimeError(
                    f"prefix of {graph}: expected one length; found repository, index, Redis-Queries {found}"
                )
        self._redis_one = Sample(tuple(times))
        progress(f"{CALLERS} callers of Redis-Queries")
        self._redis_many = Sample((concurrent_queries(self._socket, [graphs[0]] * CALLERS, CALLERS) / CALLERS,))

    def measure(self, queries: Iterator[ModelGraph], sizes: Sizes) -> None:
        """Ask in all ways; each takes its own share of the fresh graphs."""
        progress("the index in process")
        self._in_process(list(islice(queries, sizes.singles)))
        progress("one caller, one at a time")
        self._one_at_a_time(list(islice(queries, sizes.singles)))
        progress(f"one caller, batches of {BATCH}")
        self._batches(list(islice(queries, BATCH * sizes.batches)))
        progress(f"{CALLERS} callers")
        callers = QueryCallers(NAME, CALLERS)
        graphs = list(islice(queries, sizes.singles))
        self._many("one at a time", Sample((callers.run(graphs, 1) / len(graphs),)), ())
        graphs = list(islice(queries, BATCH * CALLERS))
        per_query = Sample((callers.run(graphs, BATCH) / len(graphs),))
        self._many(f"batches of {BATCH}", per_query, self._throughput_goal(per_query, self._redis_many))
        callers.close()

    def _in_process(self, graphs: Sequence[ModelGraph]) -> None:
        hashing_s, asked = timed(lambda: [PrefixQuery.of(graph) for graph in graphs])
        self._index_times = Sample(tuple(timed(lambda query=query: self._index.match(query))[0] for query in asked))
        microseconds = self._index_times.median * 1e6
        self._report.add(
            Row(
                f"{INDEX}, without hashing the graph",
                self._index_times,
                self._size,
                PEER,
                self._redis_one,
                goals=(Goal("median in microseconds", microseconds, at_most=100),),
                facts={"hashing_us": hashing_s / len(graphs) * 1e6},
            )
        )

    def _one_at_a_time(self, graphs: Sequence[ModelGraph]) -> None:
        """Alternate a query and an empty round trip."""
        trip = RoundTrip()
        trip.measure(50)
        query_times: list[float] = []
        trip_times: list[float] = []
        for graph in graphs:
            took, match = timed(lambda graph=graph: self._repo.longest_prefix(graph))
            query_times.append(took)
            release_all([match])
            trip_times.append(timed(trip)[0])
        trip.close()
        ours, floor = Sample(tuple(query_times)), Sample(tuple(trip_times))
        round_trips = ours.median / floor.median
        self._report.add(
            Row(
                "one caller, one at a time",
                ours,
                self._size,
                PEER,
                self._redis_one,
                ROUND_TRIP,
                floor.median,
                (Goal("actor round trips", round_trips, at_most=3),),
            )
        )

    def _batches(self, graphs: Sequence[ModelGraph]) -> None:
        times: list[float] = []
        for start in range(0, len(graphs), BATCH):
            batch = graphs[start : start + BATCH]
            took, matches = timed(lambda batch=batch: query_in_batches(self._repo, batch, BATCH))
            times.append(took / len(batch))
            release_all(matches)
        ours = Sample(tuple(times))
        self._report.add(
            Row(
                f"one caller, batches of {BATCH}",
                ours,
                self._size,
                PEER,
                self._redis_one,
                INDEX,
                self._index_times.median,
                self._throughput_goal(ours, self._redis_one),
            ),
            headline=True,
        )

    def _many(self, way: str, ours: Sample, goals: tuple[Goal, ...]) -> None:
        self._report.add(
            Row(
                f"{CALLERS} callers, {way}",
                ours,
                self._size,
                f"{PEER}, {CALLERS} callers",
                self._redis_many,
                INDEX,
                self._index_times.median,
                goals,
                {"queries_per_s": 1 / ours.median},
            )
        )

    def _throughput_goal(self, ours: Sample, theirs: Sample) -> tuple[Goal, ...]:
        """Hold the throughput against its bound, which is one for as many graphs as the paper has."""
        if len(self._index) < PAPER_GRAPHS:
            return ()
        return (Goal(f"times {PEER}' throughput", theirs.median / ours.median, at_least=1000),)
