"""10,000 prefix queries by 1 to 16 callers at 1 to 8 shards, compared with Redis-Queries (EvoStore, section 5.5).

One repository is filled once, with one shard; then shards join it (`Repository.scale`). At each number of shards all
callers query, one graph at a time, in processes of their own. Times are per query, over all callers.
"""

from __future__ import annotations

from itertools import islice

from .core.clusters import NAME, Names, fill, quality_of, repository
from .core.fleet import Fleet, round_trip_floor
from .core.measure import GIB, ROUND_TRIP, progress, sample
from .core.models import nas_graphs
from .core.redis import RedisQueries, RedisServer, concurrent_queries
from .core.report import Report
from .prefix_query import PEER, Caller, per_query

SCALE_TIMEOUT_S = 300.0


def run(report: Report) -> None:
    """Fill a repository and the peer with the same graphs, then query at each number of shards and callers."""
    count, queries, callers, shards = report.pick(
        quick=(100, 8, (1, 2), (1, 2)), normal=(60_000, 10_000, (1, 4, 16), (1, 2, 4, 8))
    )
    graphs, names, size = nas_graphs(count + queries * len(callers) * len(shards) + 100), Names("nas"), 0
    with RedisServer() as server, repository(GIB, shards=1) as repo:
        progress(f"{count} graphs into the repository and into Redis")
        redis = RedisQueries(server.socket)
        for first in range(0, count, 1000):
            chunk = list(islice(graphs, min(1000, count - first)))
            redis.add_all([(graph, quality_of(first + place)) for place, graph in enumerate(chunk)])
            fill(chunk, names)
            size += sum(len(graph.to_json()) for graph in chunk)
        redis.close()
        progress(f"callers of {PEER}")
        theirs = {
            each: sample(concurrent_queries(server.socket, list(islice(graphs, each)), each) / each) for each in callers
        }
        for number in shards:
            if number > 1:
                repo.scale(number, timeout=SCALE_TIMEOUT_S)
            floor_s = round_trip_floor().median
            for each in callers:
                progress(f"{number} shards, {each} callers")
                with Fleet(Caller, [(NAME,)] * each) as fleet:
                    ours = per_query(fleet, list(islice(graphs, queries)), 1)
                report.add(
                    f"{each} callers, {number} shards",
                    ours,
                    size,
                    peer=(f"{PEER}, {each} callers", theirs[each]),
                    floor=(ROUND_TRIP, floor_s / each),
                    headline=number == 1 and each == callers[-1],
                    queries_per_s=1 / ours.median,
                    shards=number,
                    callers=each,
                )
