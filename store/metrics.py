"""The metrics of a repository: names, meanings and buckets. No other file lists them.

Rules
- Names have base units (seconds, bytes) and the prefix `tensorvine_`; those of counters end in `_total`.
- No label holds the name of a model or a version: the number of series does not grow with the repository. The values of
  a label are fixed words, names of classes of errors, and numbers of shards.
- `field` names the attribute of `ShardStats`, `CatalogStats` or `PlannerStats` that has the value. Metrics without a
  field are counted (`counting.Counts`), or known to the process that answers the scrape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "tensorvine_"

SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Upper bounds of the buckets of durations, in seconds."""


class Kind(StrEnum):
    """Types of metrics, as Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Source(StrEnum):
    """Where the value of a metric is counted."""

    SHARD = "shard"
    """In a shard; the label `shard` holds its number."""
    CATALOG = "catalog"
    """In the catalog."""
    PLANNER = "planner"
    CLIENT = "client"
    """In the processes that use the repository; the planner adds their values up."""
    SCRAPE = "scrape"
    """In the process that answers the scrape."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    source: Source
    kind: Kind
    stem: str
    """The name without the prefix and `_total`. Counts are kept under it."""
    about: str
    """One sentence for the docs and for the scrape."""
    labels: tuple[str, ...] = ()
    field: str = ""
    greatest: bool = False
    """The value is the greatest one of all clients, not the sum."""

    @property
    def name(self) -> str:
        """The name of the series, as a query has it.

        >>> ERRORS.name, SAVE.name
        ('tensorvine_errors_total', 'tensorvine_save_seconds')
        """
        ends = {Kind.COUNTER: "_total", Kind.INFO: "_info"}
        return f"{PREFIX}{self.stem}{ends.get(self.kind, '')}"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels of the series: a metric of a shard also has the label `shard`."""
        return ("shard", *self.labels) if self.source is Source.SHARD else self.labels


def _shard(kind: Kind, stem: str, about: str, field: str = "", *labels: str) -> Metric:
    return Metric(Source.SHARD, kind, f"shard_{stem}", about, labels, field)


def _catalog(kind: Kind, stem: str, about: str, field: str = "") -> Metric:
    return Metric(Source.CATALOG, kind, f"catalog_{stem}", about, (), field)


def _client(kind: Kind, stem: str, about: str, *labels: str, greatest: bool = False) -> Metric:
    return Metric(Source.CLIENT, kind, stem, about, labels, greatest=greatest)


# ---- clients ------------------------------------------------------------------------------------------

SAVE = _client(Kind.HISTOGRAM, "save_seconds", "Time from the call of a save to its commit.")
SAVED_BYTES = _client(
    Kind.COUNTER, "saved_bytes", "Bytes of the tensors of committed versions: written, or inherited.", "kind"
)
LOAD = _client(Kind.HISTOGRAM, "load_seconds", "Duration of a load.")
LOADED_BYTES = _client(
    Kind.COUNTER, "loaded_bytes", "Bytes of loaded tensors, by transport; shared means mapped memory.", "transport"
)
LOOKUPS = _client(
    Kind.COUNTER, "load_lookups", "Loads that found the tensors without a message (hit), or asked (miss).", "result"
)
FALLBACKS = _client(
    Kind.COUNTER, "transport_fallbacks", "Reads for which a transport failed and another one was tried.", "transport"
)
QUERY = _client(Kind.HISTOGRAM, "query_seconds", "Duration of a longest-prefix query.")
QUERIES = _client(
    Kind.COUNTER, "queries", "Architectures in longest-prefix queries, by result: found or none.", "result"
)
ERRORS = _client(
    Kind.COUNTER,
    "errors",
    "Failed saves, loads, queries, published updates (publish) and updates of consumers (update), by class of error.",
    "operation",
    "kind",
)
PAUSE = _client(Kind.HISTOGRAM, "update_pause_seconds", "Time for which an update blocks its training.")
COMMIT = _client(Kind.HISTOGRAM, "update_commit_seconds", "Time from the end of this pause to the update's commit.")
PUSH = _client(
    Kind.HISTOGRAM,
    "push_seconds",
    "Time from the commit of an update to its arrival at a consumer, by the clocks of two machines.",
)
FETCH = _client(Kind.HISTOGRAM, "fetch_seconds", "Time in which a consumer fetches an update.")
SWAP = _client(Kind.HISTOGRAM, "swap_seconds", "Time in which a consumer loads a fetched update into its model.")
ANSWER = _client(Kind.HISTOGRAM, "answer_seconds", "Duration of an inference of a consumer.")
SUPERSEDED = _client(
    Kind.COUNTER, "versions_superseded", "Versions that a consumer skipped because a newer one existed."
)
REFUSED = _client(Kind.COUNTER, "versions_refused", "Versions that did not fit the model of a consumer.")
CONSUMERS = _client(Kind.GAUGE, "consumers", "Running consumers that reported within the last minute.")
LAG = _client(
    Kind.GAUGE,
    "consumer_lag_versions",
    "Difference between the newest announced version and the version in use; the greatest of all consumers.",
    greatest=True,
)
STALENESS = _client(
    Kind.GAUGE,
    "consumer_staleness_seconds",
    "Time since a newer version was announced that is not in use yet; the greatest of all consumers.",
    greatest=True,
)

# ---- shards -------------------------------------------------------------------------------------------

SHARD_COMMIT = _shard(Kind.HISTOGRAM, "commit_seconds", "Duration of a commit at its shard.")
SHARD_READS = _shard(Kind.COUNTER, "reads", "Reads of tensors, by where these were: memory, or the path.", "", "source")
SHARD_WRITE = _shard(Kind.HISTOGRAM, "write_seconds", "Duration of writing a segment file to the path.")
SHARD_WRITE_FAILURES = _shard(Kind.COUNTER, "write_failures", "Failed attempts to write a segment file to the path.")

# ---- the catalog --------------------------------------------------------------------------------------

CATALOG_COMMIT = _catalog(Kind.HISTOGRAM, "commit_seconds", "Duration of a commit at the catalog.")
CATALOG_WRITE = _catalog(Kind.HISTOGRAM, "write_seconds", "Duration of writing a manifest to the path.")
CATALOG_WRITE_FAILURES = _catalog(Kind.COUNTER, "write_failures", "Failed attempts to write a manifest to the path.")

METRICS: tuple[Metric, ...] = (
    Metric(
        Source.SCRAPE,
        Kind.INFO,
        "repository",
        "Name of the repository, its engine, and the release of TensorVine.",
        ("repository", "engine", "version"),
    ),
    Metric(Source.SCRAPE, Kind.GAUGE, "up", "1 if the actor answered this scrape, else 0.", ("actor",)),
    Metric(Source.PLANNER, Kind.GAUGE, "shards", "Shards, including those that drain.", (), "shards"),
    Metric(Source.PLANNER, Kind.GAUGE, "shards_draining", "Shards that drain.", (), "draining"),
    Metric(Source.PLANNER, Kind.GAUGE, "trainings", "Training runs that publish updates.", (), "trainings"),
    Metric(Source.PLANNER, Kind.GAUGE, "clients", "Clients that reported within the last minute.", (), "clients"),
    Metric(Source.PLANNER, Kind.COUNTER, "shard_restarts", "Restarts, by shard.", ("shard",), "shard_restarts"),
    Metric(Source.PLANNER, Kind.COUNTER, "planner_restarts", "Restarts of the planner.", (), "restarts"),
    *(SAVE, SAVED_BYTES, LOAD, LOADED_BYTES, LOOKUPS, FALLBACKS, QUERY, QUERIES, ERRORS),
    *(PAUSE, COMMIT, PUSH, FETCH, SWAP, ANSWER, SUPERSEDED, REFUSED, CONSUMERS, LAG, STALENESS),
    _catalog(Kind.GAUGE, "term", "Processes of the catalog since the repository was started.", "term"),
    _catalog(Kind.GAUGE, "models", "Versions.", "models"),
    _catalog(Kind.GAUGE, "pins", "Pins on versions.", "pins"),
    _catalog(Kind.GAUGE, "metadata_bytes", "Metadata in memory: tables, user metadata and graphs.", "bytes_metadata"),
    _catalog(Kind.GAUGE, "capacity_bytes", "Memory that the catalog may use for metadata.", "capacity"),
    _catalog(Kind.GAUGE, "unwritten_versions", "Versions that are not on the path yet.", "versions_unwritten"),
    _catalog(Kind.GAUGE, "unwritten_bytes", "Tensors that these versions wrote.", "bytes_unwritten"),
    _catalog(Kind.GAUGE, "replicas_missing", "Segments with too few copies.", "replicas_missing"),
    _catalog(Kind.GAUGE, "manifests_unread", "Files on the path that cannot be read.", "manifests_unread"),
    _catalog(Kind.GAUGE, "files_orphaned", "Unused segment files on the path.", "files_orphaned"),
    _catalog(Kind.COUNTER, "requests", "Saves, loads and prefix queries that the catalog received.", "requests"),
    *(CATALOG_COMMIT, CATALOG_WRITE, CATALOG_WRITE_FAILURES),
    _shard(Kind.GAUGE, "tensors", "Tensors in the shard.", "tensors"),
    _shard(Kind.GAUGE, "capacity_bytes", "Memory that the shard may use for tensors.", "capacity"),
    _shard(Kind.GAUGE, "memory_bytes", "Tensors in memory, without padding.", "bytes_memory"),
    _shard(Kind.GAUGE, "allocated_bytes", "Memory allocated for tensors, with padding.", "bytes_allocated"),
    _shard(Kind.GAUGE, "staged_bytes", "Memory of saves, loads and copies in progress.", "bytes_staged"),
    _shard(Kind.GAUGE, "resident_bytes", "Resident pages of the shard's memory.", "bytes_resident"),
    _shard(Kind.GAUGE, "replicated_bytes", "Memory of replicas of other shards.", "bytes_replicated"),
    _shard(Kind.COUNTER, "patches", "Patches computed for readers that hold another version.", "patches_made"),
    _shard(Kind.GAUGE, "patch_bytes", "Patches that the shard keeps for further readers.", "bytes_patches"),
    _shard(Kind.GAUGE, "disk_bytes", "Segment files on the path.", "bytes_disk"),
    _shard(Kind.GAUGE, "unwritten_bytes", "Bytes in the queue of the background writer.", "bytes_unwritten"),
    _shard(Kind.GAUGE, "waiting_for_memory", "Requests in the queue for memory.", "waiting_for_memory"),
    _shard(Kind.GAUGE, "waiting_for_disk", "Saves that wait because the writer's queue is full.", "waiting_for_disk"),
    _shard(Kind.COUNTER, "requests", "Saves and reads that the shard received.", "requests"),
    _shard(Kind.COUNTER, "saved_bytes", "Bytes of tensors that were saved into the shard.", "bytes_saved"),
    _shard(Kind.COUNTER, "sent_bytes", "Bytes of tensors sent to readers and other shards.", "bytes_sent"),
    *(SHARD_COMMIT, SHARD_READS, SHARD_WRITE, SHARD_WRITE_FAILURES),
)
"""All metrics, in the order of the docs."""

SHOWN = (
    "bytes_allocated",
    "capacity",
    "bytes_disk",
    "tensors",
    "bytes_unwritten",
    "waiting_for_memory",
    "waiting_for_disk",
)
"""Fields of `ShardStats` that the engine's own dashboard shows too: ten gauges at most."""
