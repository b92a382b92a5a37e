"""Reads the values of the metrics from the actors of a repository.

Rules
- Actors are asked by the calls that there are: `stats` of the shards, of the catalog and of the planner.
- An actor that does not answer within `ANSWER_S` is reported as down, and its metrics are left out. A scrape does not
  fail while the planner restarts, and takes at most three times as long.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, TypeAlias

from ...actors.planner.calls import PlannerCalls
from ...store.counting import Counted
from ...store.errors import TensorVineError
from ...store.metrics import METRICS, Kind, Source
from ...store.shard import ShardStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...actors.client.repository import Repository
    from ...actors.planner.counting import PlannerStats
    from ...actors.rpc.catalog_messages import CatalogStats

ANSWER_S = 2.0
"""How long the shards together, the catalog, and the planner may take to answer."""

Labels: TypeAlias = tuple[str, ...]
Readings: TypeAlias = "dict[str, dict[Labels, list[float]]]"
"""Stem -> values of labels -> the value, or a histogram as in `store.counting`."""

_ENGINES = {"RayEngine": "ray", "DaskEngine": "dask"}


def read(repo: Repository) -> Readings:
    """Ask all actors of a repository.

    Raises:
        ClosedError, EngineStoppedError: the client can no longer be used.
    """
    found: Readings = {}
    engine = _ENGINES.get(type(repo.engine).__name__, "other")
    found["repository"] = {(repo.name, engine, version("tensorvine")): [1.0]}
    shards = repo.stats_by_shard(ANSWER_S)
    catalog, planner = _catalog(repo), _planner(repo)
    found["up"] = {("catalog",): [float(catalog is not None)], ("planner",): [float(planner is not None)]}
    for shard, stats in sorted(shards.items()):
        found["up"][f"shard-{shard}",] = [float(isinstance(stats, ShardStats))]
    if catalog is not None:
        add_catalog(found, catalog)
    if planner is not None:
        add_planner(found, planner)
    add_shards(found, [stats for stats in shards.values() if isinstance(stats, ShardStats)])
    return found


def add_planner(found: Readings, stats: PlannerStats) -> None:
    """Add the values of the planner and of the clients."""
    for metric in METRICS:
        if metric.source is Source.PLANNER and not metric.labels:
            found[metric.stem] = {(): [float(getattr(stats, metric.field))]}
        elif metric.source is Source.CLIENT and metric.kind is Kind.GAUGE:
            found[metric.stem] = {(): [stats.gauges.get(metric.stem, 0.0)]}
    found["shard_restarts"] = {(str(shard),): [float(count)] for shard, count in stats.shard_restarts.items()}
    _add_counted(found, stats.counted, ())


def add_catalog(found: Readings, stats: CatalogStats) -> None:
    """Add the values of the catalog."""
    for metric in METRICS:
        if metric.source is Source.CATALOG and metric.field:
            found[metric.stem] = {(): [float(getattr(stats, metric.field))]}
    _add_counted(found, stats.counted, ())


def add_shards(found: Readings, shards: Iterable[ShardStats]) -> None:
    """Add the values of shards."""
    for stats in shards:
        label = (str(stats.shard),)
        for metric in METRICS:
            if metric.source is Source.SHARD and metric.field:
                found.setdefault(metric.stem, {})[label] = [float(getattr(stats, metric.field))]
        _add_counted(found, stats.counted, label)


def _add_counted(found: Readings, counted: Mapping[str, list[float]] | Counted, label: Labels) -> None:
    for key, values in counted.items():
        stem, *labels = key.split("|")
        found.setdefault(stem, {})[*label, *labels] = values


def _catalog(repo: Repository) -> CatalogStats | None:
    try:
        return repo.catalog_stats(ANSWER_S)
    except TensorVineError:
        return None


def _planner(repo: Repository) -> PlannerStats | None:
    try:
        return repo._session.planner.call(PlannerCalls.stats(), ANSWER_S)
    except TensorVineError:
        return None
