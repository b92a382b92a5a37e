"""Messages between clients and shards, and the names of actors.

Rules
- Logs and errors show messages as they are: no `repr` has a secret, nor a URI or URL that may hold one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...planner.topology import Topology
from ...store.segments.arena import Part
from ...store.segments.segment import Label, SegmentId
from ...store.versions.retention import Retention
from ...store.versions.version import Draft
from .redis_keys import Address

TRANSPORTS = ("auto", "shared", "socket", "object_store", "gloo", "nccl", "files")
"""How a version's bytes may be asked to come (see `client.fetch.transports`)."""
PREALLOCATE_MOST = 256 << 20
METADATA_BYTES = 1 << 20
"""How many bytes of metadata a version may have, unless the repository is started with another limit."""
PEER_TIMEOUT_S = 30.0
"""How long one actor of a repository waits for another."""


@dataclass(frozen=True, slots=True)
class Disk:
    """How a repository keeps its history."""

    uri: str = field(repr=False)
    """May hold a secret."""
    codec: str | None
    """What `store.codecs.codec.from_spec` reads; None: bytes as they are."""
    bytes_unwritten: int | None
    """Bytes that may wait in each shard to be written before savers wait; None: half of its memory."""
    keep: Retention | None
    """Which versions stay in memory; None: all, until room is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """What a shard is told when it starts."""

    repository: str
    index: int
    capacity: int
    """Bytes of memory for segments."""
    preallocate_bytes: int
    """How much of it to touch at the start."""
    session_s: float
    """How long a client's session lasts without a sign of life."""
    disk: Disk | None = None
    """None: memory only."""
    redis: str | None = field(default=None, repr=False)
    """URL, perhaps with a password, of the Redis server for consumers outside the cluster; None: there are none."""
    start: str = ""
    """Id of this start of the repository."""
    replicas: int = 1
    """Nodes that must have a version's bytes before it is committed."""
    metadata_bytes: int = METADATA_BYTES
    """How many bytes of metadata a version may have."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How the shards of a repository are started."""

    store_bytes: int | None
    """Capacity of each; None: its share of the memory that its node has left (`planner.reservations`)."""
    preallocate_bytes: int | None
    """How much of it each touches at the start; None: 256 MiB, or its capacity where that is less."""
    session_s: float
    disk: Disk | None
    redis: str | None = field(repr=False)
    """As of `ShardConfig`."""
    metadata_bytes: int = METADATA_BYTES
    """As of `ShardConfig`."""

    def config(self, topology: Topology, index: int, capacity: int) -> ShardConfig:
        """Say how a shard is started that may fill so many bytes."""
        touched = self.preallocate_bytes if self.preallocate_bytes is not None else min(capacity, PREALLOCATE_MOST)
        return ShardConfig(
            repository=topology.repository,
            index=index,
            capacity=capacity,
            preallocate_bytes=touched,
            session_s=self.session_s,
            disk=self.disk,
            redis=self.redis,
            start=topology.started_by,
            replicas=topology.replicas,
            metadata_bytes=self.metadata_bytes,
        )


@dataclass(frozen=True, slots=True)
class Filled:
    """A segment that a save brings."""

    id: SegmentId
    place: Part | bytes | None
    """Where its bytes are: in memory that was granted, or here. None: the shard has fetched them (`pull`)."""
    sizes: tuple[int, ...]
    """Bytes of its tensors."""
    labels: tuple[Label, ...] = ()
    """For its file; empty where the repository has no path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a client hands to the shard of its node with `commit`."""

    draft: Draft
    """Has the save."""
    default_parent: bool
    """Nobody named the parent: it must be the latest version of the name."""
    incarnation: int
    """Process id of the shard that granted the memory, as `Hello` named it."""
    blocks: Sequence[Filled]
    """All segments that the save brings."""
    durable: bool
    """Files and manifest are to be written before the version exists."""
    timeout: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client must know of a shard."""

    index: int
    node: str
    pid: int
    memory_fd: int
    memory_file: tuple[int, int]
    """Device and inode of what is behind that descriptor."""
    capacity: int
    """Bytes of memory for segments."""
    tcp_address: Address | None = None
    """Of its TCP server; None: it has none."""
    metadata_bytes: int = METADATA_BYTES
    """How many bytes of metadata it takes with a version."""


def actor_name(repository: str, index: int) -> str:
    """Name of a shard's actor.

    >>> actor_name("default", 0)
    'default/shard-0'
    """
    return f"{repository}/shard-{index}"


def catalog_name(repository: str) -> str:
    """Name of the catalog's actor.

    >>> catalog_name("default")
    'default/catalog'
    """
    return f"{repository}/catalog"


def planner_name(repository: str) -> str:
    """Name of the planner's actor.

    >>> planner_name("default")
    'default/planner'
    """
    return f"{repository}/planner"


def repositories(actors: Iterable[str]) -> dict[str, int]:
    """Return the repositories that run, each with its number of shards, from the names of all actors.

    >>> repositories(["default/catalog", "default/shard-0", "default/shard-1", "a/consumer"])
    {'default': 2}
    """
    parts = [name.rpartition("/") for name in actors]
    shards = Counter(name for name, _, role in parts if role.startswith("shard-"))
    return {name: shards[name] for name, _, role in sorted(parts) if role == "catalog"}


def check_transport(transport: str, where: str) -> str:
    """Return `transport` if it is one.

    Raises:
        ValueError: it is not; `where` begins the message.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"{where}: transport: expected one of {', '.join(TRANSPORTS)}; found {transport!r}")
    return transport
