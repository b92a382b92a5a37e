"""What the catalog is asked and what it answers.

Rules
- A client numbers its requests (saves, queries, retirements) from 1, with one counter. Pins and granted memory are
  kept under such a number. `Declared` says which numbers are open and the highest that was used: all others up to it
  are over, drop what they had, and are refused for good.
- Places of bytes are hints. The header check at the place decides; where it fails, the shard that is named is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...planner.topology import Topology
from ...store.catalog.reports import Place, Staged
from ...store.counting import Counted
from ...store.holders import Lease, Request
from ...store.refs import ModelRef, Which
from ...store.segments.segment import SegmentId
from ...store.versions.manifest import Header
from ...store.versions.version import Draft, Match
from .messages import METADATA_BYTES, Disk

Location = tuple[int, Place | None]
"""Number of the shard that answers for a segment, and where its block lay last; None: in no memory that is known, or on
disk only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig:
    """What the catalog is told when it is started."""

    topology: Topology
    """Of the start; a later one stands in the registry."""
    session_s: float
    """How long a client's session lasts without a sign of life."""
    disk: Disk | None = None
    """None: memory only."""
    redis: str | None = field(default=None, repr=False)
    """URL of the Redis server for consumers outside the cluster, perhaps with a password; None: there are none."""
    metadata_bytes: int = METADATA_BYTES
    """How many bytes of metadata a version may have."""
    capacity: int = 1 << 30
    """Bytes of records and graphs that the catalog keeps in memory. A save beyond that is refused."""


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the catalog."""

    number: int
    token: bytes = field(repr=False)
    """Drawn by its process: tells it from another one that took the same number."""


@dataclass(frozen=True, slots=True)
class Page:
    """The catalog's version page, for clients of its node: 4,096 counters and the end of its lease (`catalog.page`)."""

    pid: int
    fd: int
    file: tuple[int, int]
    """Device and inode of what is behind that descriptor."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to `hello`: what a client must know of a repository."""

    term: int
    topology: Topology
    nodes: Mapping[int, str]
    """Shard that has reported -> its node."""
    node: str
    """The catalog's."""
    page: Page
    metadata_bytes: int = METADATA_BYTES
    """How many bytes of metadata a version may have."""


@dataclass(frozen=True, slots=True)
class Declared:
    """The requests of a client that are open."""

    open: tuple[int, ...]
    highest: int
    """The highest number that it has used."""
    pinned_in: int = field(default=0, repr=False)
    """The term of the catalog that knows all pins of the client; 0: none is known to. A new term frees nothing before
    its clients say that."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to `renew`."""

    term: int
    topology_version: int
    known: bool
    """The session existed. If not, it does now, without pins: the client pins again what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What is asked with `begin`."""

    save: Request
    """Its number keeps the parent pinned."""
    name: str
    """Of the parent."""
    version: Which
    """The parent's."""
    optional: bool
    """There need not be a parent."""
    known: ModelRef | None
    """The version whose table the client has."""
    graph_key: bytes | None = None
    """Key of the graph that the commit will name; None: not known yet."""
    waits: bool = False
    """Wait for tensors of the parent that shards still look for on the path: they must be inherited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Answer to `begin`."""

    header: Header | None
    """The parent's; None: the name is new."""
    body: bytes | None
    """The parent's table; None: the client has it."""
    lease: Lease | None
    """Pins the parent."""
    places: Mapping[SegmentId, Location]
    """Of the parent's segments, without those of which it has tensors that are lost or looked for."""
    has_graph: bool
    """The catalog has the graph of that key: the commit need not bring it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A version that a shard asks the catalog to make exist."""

    save: Request
    draft: Draft
    default_parent: bool
    """The parent is the latest version of the name because nobody named another one: it must be the latest still."""
    staged: Mapping[SegmentId, Staged]
    """The segments that the save brings."""
    kept: Mapping[int, int]
    """Shard that keeps copies of these -> its incarnation that has them."""
    durable: bool
    """Files and manifest are written first."""
    timeout: float
    """Seconds, of a durable one."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A version exists; also the answer to a commit that is repeated."""

    ref: ModelRef
    created_ns: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A commit was refused, and nothing has changed: its client begins again."""

    missing: str
    """"parent": another version is the latest now, or the parent is no more; "slots": some that it names are gone;
    "graph": the catalog has no graph of its key."""
    reason: str
    """For errors and logs."""


@dataclass(frozen=True, slots=True)
class Located:
    """Answer to `locate`, and what is pushed."""

    header: Header
    body: bytes | None
    """The table; None: the client has it."""
    places: Mapping[SegmentId, Location]
    """Of all segments that the version names; empty where the client knows the version and asked for none."""
    counter: int
    """Of what was asked, on the version page: while that shows it, this is the answer."""
    asked: str
    """The name, or `name@alias`."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Answer to `match`."""

    found: Sequence[Match | None]
    """By query; each is pinned."""
    graphs: Mapping[bytes, str]
    """Key -> the graph as JSON, of those found."""
    places: Mapping[ModelRef, Located]
    """Of those found, what `locate` would answer, if that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogStats:
    """Statistics of the catalog (the actor that keeps all metadata). See `RepositoryStats.catalog`."""

    term: int
    """Counts the processes of the catalog since the repository was started."""
    models: int
    """Number of versions. Retired versions do not count."""
    pins: int
    """Number of pins: of matches, and of saves in progress."""
    bytes_metadata: int
    """Size of the metadata in memory, in bytes: tables of tensors, user metadata and graphs."""
    capacity: int
    """Maximum size of the metadata, in bytes. A larger save raises `StoreFullError`."""
    versions_unwritten: int = 0
    """Number of versions that are not on the repository's path yet."""
    bytes_unwritten: int = 0
    """Size of the tensors that these versions wrote, in bytes."""
    manifests_unread: int = 0
    """Number of files on the path that could not be read at the start, and cannot be read now."""
    files_orphaned: int = 0
    """Number of segment files on the path that no version uses. They are deleted after a minute."""
    replicas_missing: int = 0
    """Number of segments (blocks of tensors) that fewer nodes hold than `replicas`."""
    sequence: int = 0
    """Number of the last record in the journal."""
    requests: int = 0
    """Number of requests since the catalog started: saves, loads and prefix queries."""
    counted: Counted = field(default_factory=dict[str, list[float]], repr=False)
    """Counters and histograms since the catalog started, as `tensorvine metrics` exports them."""


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file of the path that a start could not read; what it may name is kept."""

    file: str
    """Its name, from the path on."""
    ref: ModelRef | None
    """The version whose manifest stands there; None: it is no version's by its name."""
    reason: str
    """Where, what was expected, what was found."""
