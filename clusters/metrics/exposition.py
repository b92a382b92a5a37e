"""Readings as Prometheus reads them: families of samples, made by prometheus-client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...store.errors import CodecUnavailableError
from ...store.lazy import to_install
from ...store.metrics import METRICS, SHORT_S, Kind, Metric, Source
from .readings import Readings, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

    from ...actors.client.repository import Repository

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `collect` returns."""


def collect(repo: Repository) -> bytes:
    """Return the metrics of a repository in the text format of Prometheus.

    An actor that does not answer is reported as `tensorvine_up 0`, and its metrics are left out.

    Args:
        repo: a client of the repository.

    Raises:
        CodecUnavailableError: if prometheus-client is not installed.
        ClosedError: if the client is closed.
        EngineStoppedError: if the engine was shut down in this process.

    >>> collect(repo).splitlines()[2]                                            # doctest: +SKIP
    b'tensorvine_repository_info{engine="ray",repository="default",version="0.1.0"} 1.0'
    """
    return text_of(lambda: read(repo))


def text_of(readings: Callable[[], Readings]) -> bytes:
    """Return readings in the text format of Prometheus."""
    registry = registry_of(readings)
    from prometheus_client import generate_latest

    return generate_latest(registry)


def registry_of(readings: Callable[[], Readings]) -> CollectorRegistry:
    """Return a registry of prometheus-client whose metrics are read at each scrape.

    Raises:
        CodecUnavailableError: if prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as exc:
        raise CodecUnavailableError(f"metrics: expected prometheus-client; found {exc}: {to_install('web')}") from exc
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(readings))  # pyright: ignore[reportArgumentType]  # needs no more than `collect`
    return registry


class _Collector:
    """Makes families when a registry asks for them."""

    def __init__(self, readings: Callable[[], Readings]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Family]:
        """Read all metrics. Leave those without a value out, except counts of clients, which are zero then."""
        found = self._readings()
        heard = "shards" in found  # the planner answered
        for metric in METRICS:
            rows = found.get(metric.stem, {})
            if not rows and heard and metric.source is Source.CLIENT and not metric.labels:
                rows = {(): [0.0] * (len(SHORT_S) + 2 if metric.kind is Kind.HISTOGRAM else 1)}
            if rows:
                family = _family(metric)
                for labels, values in rows.items():
                    _add(family, metric, labels, values)
                yield family


def _family(metric: Metric) -> Any:
    from prometheus_client import core

    made = {
        Kind.COUNTER: core.CounterMetricFamily,
        Kind.GAUGE: core.GaugeMetricFamily,
        Kind.HISTOGRAM: core.HistogramMetricFamily,
        Kind.INFO: core.InfoMetricFamily,
    }
    labels = () if metric.kind is Kind.INFO else metric.all_labels
    return made[metric.kind](metric.name.removesuffix("_total").removesuffix("_info"), metric.about, labels=labels)


def _add(family: Any, metric: Metric, labels: tuple[str, ...], values: list[float]) -> None:
    if metric.kind is Kind.INFO:
        family.add_metric((), dict(zip(metric.labels, labels, strict=True)))
    elif metric.kind is Kind.HISTOGRAM:
        *cells, total = values
        count, buckets = 0.0, list[tuple[str, float]]()
        for bound, cell in zip((*map(str, SHORT_S), "+Inf"), cells, strict=True):
            count += cell
            buckets.append((bound, count))
        family.add_metric(labels, buckets, sum_value=total)
    else:
        family.add_metric(labels, values[0])
