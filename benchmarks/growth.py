"""Times of saves, loads and queries at 1,000 to 100,000 models, compared with the smallest size.

Models are candidates of a search with a few KiB of tensors. A client that just connected loads models that it has not
loaded before, so that no metadata is cached. A row's peer is the same repository when it was small: a ratio of 1 means
that the size does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tensorvine.store import ModelGraph

from .core.clusters import NAME, Names, fill, repository
from .core.fleet import round_trip
from .core.measure import GIB, ROUND_TRIP, Sample, progress, sample, timed, total_bytes
from .core.models import nas_graphs, small_tensors
from .core.report import Goal, Report

WARMUP = 10
GROWTH_GOAL = {"save": 2.0, "query": 2.0}


def run(report: Report) -> None:
    """Measure at three sizes of one repository."""
    sizes = report.pick(quick=(20, 40), normal=(1_000, 10_000, 100_000))
    rounds = report.pick(quick=3, normal=100)
    graphs, names = nas_graphs(sizes[-1] + 10 * (rounds + WARMUP), tensors=True), Names("nas")
    stored: list[Any] = []
    first: dict[str, Sample] = {}
    with repository(report.pick(quick=1, normal=4) * GIB) as repo, round_trip() as trip:
        for size in sizes:
            progress(f"growing to {size} models")
            stored += fill(islice(graphs, size - len(stored)), names, tensors=True)
            floor = sample([timed(trip)[0] for _ in range(300)])
            found, nbytes = _measure(repo, graphs, names, stored, rounds)
            first = first or found
            for case, ours in found.items():
                growth = ours.median / first[case].median
                bound = GROWTH_GOAL.get(case) if size == sizes[-1] else None
                what = f"times as long as at {sizes[0]} models"
                report.add(
                    f"{case} at {size} models",
                    ours,
                    nbytes,
                    peer=(f"at {sizes[0]} models", first[case]),
                    floor=(ROUND_TRIP, floor),
                    goals=[Goal(what, growth, at_most=bound)] if bound else [],
                    headline=case == "query" and size == sizes[-1],
                )


def _measure(
    repo: Any, graphs: Iterator[ModelGraph], names: Names, stored: list[Any], rounds: int
) -> tuple[dict[str, Sample], int]:
    """Time single saves, loads and queries in turn; the saved models stay."""
    from tensorvine.actors import Repository

    chosen = random.Random(len(stored)).sample(stored, min(len(stored), WARMUP + rounds))  # noqa: S311 - no secret
    found: dict[str, list[float]] = {"save": [], "load": [], "query": []}
    nbytes = 0
    with Repository.connect(NAME) as reader:
        for turn, ref in enumerate(chosen):
            graph, query = next(graphs), next(graphs)
            tensors = small_tensors(graph, seed=turn)
            nbytes = max(nbytes, total_bytes(tensors))
            took, saved = timed(lambda graph=graph, tensors=tensors: repo.save(names.fresh(), tensors, graph=graph))
            found["save"].append(took)
            stored.append(saved.ref)
            found["load"].append(timed(lambda ref=ref: reader.load(ref))[0])
            took, match = timed(lambda query=query: reader.longest_prefix(query))
            found["query"].append(took)
            if match is not None:
                match.release()
    return {case: sample(times[WARMUP:]) for case, times in found.items()}, nbytes
