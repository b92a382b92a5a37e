"""Save, load and query times as the repository grows.

Models are candidates of a search with a few KiB of tensors. A client that just connected loads models that
it has not seen, so that no metadata is cached. A row's peer is the same repository when it was small: a ratio
of 1 means that size does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorvine.store import ModelGraph

from .architectures import nas_graphs, small_tensors
from .callers import RoundTrip, release_all, timed
from .measure import GIB, ROUND_TRIP, Effort, Goal, Report, Row, Sample, progress, total_bytes
from .session import NAME, Names, fill, repository

if TYPE_CHECKING:
    from tensorvine.actors import Repository
    from tensorvine.store import ModelRef

ROUNDS = 100
WARMUP = 10
GROWTH_GOAL = {"save": 2.0, "query": 2.0}


def run(effort: Effort) -> Report:
    """Measure at three sizes of one repository."""
    sizes = (100, 1_000, 3_000) if effort is Effort.QUICK else (1_000, 10_000, 100_000)
    report = Report("growth")
    graphs = nas_graphs(sizes[-1] + 10 * ROUNDS, tensors=True)
    names = Names("nas")
    stored: list[ModelRef] = []
    first: dict[str, Sample] = {}
    with repository((1 if effort is Effort.QUICK else 4) * GIB) as repo:
        trip = RoundTrip()
        for size in sizes:
            progress(f"growing to {size} models")
            stored += fill(_take(graphs, size - len(stored)), names, tensors=True)
            floor_s = trip.measure().median
            found, model_bytes = _measure(repo, graphs, names, stored)
            first = first or found
            for case, sample in found.items():
                row = _row(case, size, sizes, sample, first[case], model_bytes, floor_s)
                report.add(row, headline=case == "query" and size == sizes[-1])
        trip.close()
    return report


def _take(graphs: Iterator[ModelGraph], count: int) -> Iterator[ModelGraph]:
    for _ in range(count):
        yield next(graphs)


def _row(
    case: str,
    size: int,
    sizes: tuple[int, ...],
    sample: Sample,
    first: Sample,
    model_bytes: int,
    floor_s: float,
) -> Row:
    growth = sample.median / first.median
    goals: tuple[Goal, ...] = ()
    if size == sizes[-1] and case in GROWTH_GOAL:
        goals = (Goal(f"times as long as at {sizes[0]} models", growth, at_most=GROWTH_GOAL[case]),)
    return Row(
        f"{case} at {size} models",
        sample,
        model_bytes,
        f"at {sizes[0]} models",
        first,
        ROUND_TRIP,
        floor_s,
        goals,
    )


def _measure(
    repo: Repository,
    graphs: Iterator[ModelGraph],
    names: Names,
    stored: list[ModelRef],
) -> tuple[dict[str, Sample], int]:
    """Time single saves, loads and queries in turn; the saved models stay."""
    from tensorvine.actors import Repository

    reader = Repository.connect(NAME)
    chosen = random.Random(len(stored)).sample(stored, min(len(stored), WARMUP + ROUNDS))  # noqa: S311 - no secret
    found: dict[str, list[float]] = {"save": [], "load": [], "query": []}
    model_bytes = 0
    for turn, ref in enumerate(chosen):
        graph = next(graphs)
        tensors = small_tensors(graph, seed=turn)
        model_bytes = max(model_bytes, total_bytes(tensors))
        took, saved = timed(lambda graph=graph, tensors=tensors: repo.save(names.fresh(), tensors, graph=graph))
        found["save"].append(took)
        stored.append(saved.ref)
        found["load"].append(timed(lambda ref=ref: reader.load(ref))[0])
        query = next(graphs)
        took, match = timed(lambda query=query: reader.longest_prefix(query))
        found["query"].append(took)
        release_all([match])
    reader.close()
    return {case: Sample(tuple(times[WARMUP:])) for case, times in found.items()}, model_bytes
