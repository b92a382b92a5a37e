"""Prefix queries by 1 to 16 callers at 1 to 8 shards (EvoStore, section 5.5), beside Redis-Queries.

One repository is filled once, with one shard; then shards join it (`Repository.scale`), and at each number of shards
all callers ask, one query at a time, in processes of their own. A query asks all shards at once, and each answers for
the models that it is home to. Times are per query, over all callers; queries are fresh graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from tensorvine.store import ModelGraph

from .architectures import nas_graphs
from .callers import QueryCallers, RoundTrip
from .measure import GIB, ROUND_TRIP, Effort, Report, Row, Sample, progress
from .redis_queries import RedisQueries, RedisServer, concurrent_queries
from .session import NAME, Names, fill, quality_of, repository

if TYPE_CHECKING:
    from tensorvine.actors import Repository

PEER = "Redis-Queries"
SCALE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    graphs: int
    queries: int
    """By all callers together."""
    callers: tuple[int, ...]
    shards: tuple[int, ...]


SIZES = {
    Effort.QUICK: Sizes(2_000, 200, (1, 4), (1, 2)),
    Effort.NORMAL: Sizes(60_000, 10_000, (1, 4, 16), (1, 2, 4, 8)),
    Effort.FULL: Sizes(60_000, 10_000, (1, 4, 16), (1, 2, 4, 8)),
}


def run(effort: Effort) -> Report:
    """Fill a repository and the peer with the same graphs, then ask at each number of shards and callers."""
    sizes = SIZES[effort]
    report = Report("query_scaling")
    graphs = nas_graphs(sizes.graphs + sizes.queries * len(sizes.callers) * len(sizes.shards) + 100)
    with RedisServer() as server, repository(GIB, shards=1) as repo:
        progress(f"{sizes.graphs} graphs into the repository and into Redis")
        size = _fill(server.socket, graphs, sizes.graphs)
        theirs = {count: _ask_redis(server.socket, graphs, count) for count in sizes.callers}
        for shards in sizes.shards:
            _measure(report, repo, graphs, sizes, shards, theirs, size)
    return report


def _fill(socket: str, graphs: Iterator[ModelGraph], count: int) -> int:
    """Give the same graphs to both; return their bytes as JSON."""
    redis, names, size = RedisQueries(socket), Names("nas"), 0
    for first in range(0, count, 1000):
        chunk = list(islice(graphs, min(1000, count - first)))
        redis.add_all([(graph, quality_of(first + place)) for place, graph in enumerate(chunk)])
        fill(chunk, names)
        size += sum(len(graph.to_json()) for graph in chunk)
    redis.close()
    return size


def _ask_redis(socket: str, graphs: Iterator[ModelGraph], callers: int) -> Sample:
    progress(f"{callers} callers of {PEER}")
    return Sample((concurrent_queries(socket, list(islice(graphs, callers)), callers) / callers,))


def _measure(
    report: Report,
    repo: Repository,
    graphs: Iterator[ModelGraph],
    sizes: Sizes,
    shards: int,
    theirs: dict[int, Sample],
    size: int,
) -> None:
    if shards > 1:
        progress(f"scaling to {shards} shards")
        repo.scale(shards, timeout=SCALE_TIMEOUT_S)
    trip = RoundTrip()
    floor_s = trip.measure().median
    trip.close()
    for count in sizes.callers:
        progress(f"{shards} shards, {count} callers")
        callers = QueryCallers(NAME, count)
        took = callers.run(list(islice(graphs, sizes.queries)), 1)
        callers.close()
        per_query = took / sizes.queries
        report.add(
            Row(
                f"{count} callers, {shards} shards",
                Sample((per_query,)),
                size,
                f"{PEER}, {count} callers",
                theirs[count],
                ROUND_TRIP,
                floor_s / count,
                facts={"queries_per_s": 1 / per_query, "shards": shards, "callers": count},
            ),
            headline=shards == 1 and count == sizes.callers[-1],
        )
