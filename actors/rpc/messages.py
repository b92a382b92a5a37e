"""What shards are told and what they answer, and what actors are called.

Rules
- Logs and errors show messages as they are: no `repr` has a secret, nor a URI or URL that may hold one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...planner.topology import Topology
from ...store.archive.segmentfile import Slot
from ...store.holders import Lease, Save
from ...store.refs import ModelRef
from ...store.segments.arena import Part
from ...store.segments.segment import Block, SegmentId
from ...store.versions.architectures import Architecture
from ...store.versions.ledger import Told
from ...store.versions.manifest import Header
from ...store.versions.retention import Retention
from ...store.versions.version import Match
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
    shards: tuple[int, ...]
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
    topology: Topology | None = None
    """By which it starts; None: the one of `shards`."""
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
            shards=topology.shards,
            capacity=capacity,
            preallocate_bytes=touched,
            session_s=self.session_s,
            disk=self.disk,
            redis=self.redis,
            start=topology.started_by,
            replicas=topology.replicas,
            topology=topology,
            metadata_bytes=self.metadata_bytes,
        )


@dataclass(frozen=True, slots=True)
class RecoveryInfo:
    """What a shard that starts again must know of what went before."""

    topology: Topology
    finished: tuple[int, ...]
    """Shards that have handed over all that they had to, where a change is under way."""
    ledger: Told
    """All versions; what lived on the shard alone counts as lost from now on."""
    arrived: Mapping[str, int]
    """Names that have arrived at their new home, where a change is under way."""

    def home(self, name: str) -> int:
        """Return the shard that answers for a name now."""
        former = self.topology.former_home(name)
        return self.topology.home(name) if former in self.finished else self.arrived.get(name, former)


@dataclass(frozen=True, slots=True)
class Account:
    """What a shard tells a planner that starts again."""

    topology: Topology
    """By which it goes."""
    ledger: Told
    whole: bool
    """It has heard of every commit of the repository, but for those of shards that owe it to somebody."""
    arrived: tuple[str, ...]
    """Names that came here in the change that is under way."""
    delivered: Mapping[str, int]
    """Names that went from here in that change -> their home, which has them, or had."""


@dataclass(frozen=True, slots=True)
class Tag:
    """How things stand on a shard when it answers."""

    version: int
    """Of its topology."""
    revision: str
    """Another one after every name that left or arrived."""
    sending: bool
    """Names are on their way from it."""
    shard: int
    incarnation: str
    """Of the shard: another one after each restart."""
    again: bool
    """It is not the shard's first incarnation."""
    age_s: float = field(compare=False)
    """How long this incarnation has been there."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a shard handed over."""

    names: int
    metadata_bytes: int
    tensor_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that must be on disk."""

    slot: int
    name: str
    layer: str | None
    dtype: str
    shape: tuple[int, ...]
    base: Slot | None
    """The parent version's tensor of that name, which it may be encoded against."""


ToStore = Mapping[SegmentId, Sequence[Wanted]]
"""What must be on disk, by segment."""
Chains = dict[Slot, tuple[Slot, ...]]
"""Tensors that are encoded against others -> these, the nearest first, up to one that stands alone."""
Filled = tuple[SegmentId, "Part | bytes", Sequence[int]]
"""A segment to be, where its bytes are, and its tensors' sizes."""
Unwritten = tuple[Header, bytes]
"""A version that is not on disk yet: header and table."""
Sender = tuple[int, int]
"""A shard that hands names over: its number, and how often it has started again."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What is asked with `begin`."""

    client: str
    name: str
    """Of the parent."""
    version: int | None
    """The parent's; None: the latest."""
    optional: bool
    """There need not be a parent."""
    known: ModelRef | None
    """The version whose table the client has."""
    inherits: bool
    """It learns what is unchanged from the parent's content hashes, or compares with the parent's bytes."""
    compares: bool
    """It can compare with bytes that are in memory here."""
    save: Save
    sizes: Sequence[int]
    """Of blocks that it would fill."""
    timeout: float
    """Seconds."""
    graph: tuple[bytes, Architecture] | None = None
    """Key and text of the graph that its commit will name, so that it is read before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Answer to `begin`."""

    header: Header | None
    """The parent's; None when the name is new."""
    body: bytes | None
    """The parent's table; None when the client has it."""
    lease: Lease | None
    """Pins the parent."""
    digests: dict[SegmentId, tuple[str, ...]]
    """Content hashes of the parent's segments that lie here, if they were asked for."""
    blocks: dict[SegmentId, Block] | None
    """Where the parent's bytes are, if all of them are in the memory here and the client can compare with them."""
    offsets: list[int]
    """Memory for the first few of the blocks that were announced."""
    shard: int
    """Which answers."""
    incarnation: int
    """Its process id."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to `fetch`."""

    header: Header
    body: bytes | None
    blocks: dict[SegmentId, Block]
    epoch: int
    """The answer holds while the shard's version page shows the same. Its places need not: see `memory`."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Answer to `match`."""

    found: list[Match | None]
    """By query."""
    graphs: dict[bytes, str]
    """Key -> the graph as JSON, of those found."""
    places: dict[ModelRef, Fetched]
    """Of those found, what answers a load of them, if that was asked for."""


def actor_name(repository: str, index: int) -> str:
    """Name of a shard's actor.

    >>> actor_name("default", 0)
    'default/shard-0'
    """
    return f"{repository}/shard-{index}"


def planner_name(repository: str) -> str:
    """Name of the planner's actor.

    >>> planner_name("default")
    'default/planner'
    """
    return f"{repository}/planner"


def repositories(actors: Iterable[str]) -> dict[str, int]:
    """Return the repositories that run, each with its number of shards, from the names of all actors.

    >>> repositories(["default/planner", "default/shard-0", "default/shard-1", "a/consumer"])
    {'default': 2}
    """
    parts = [name.rpartition("/") for name in actors]
    shards = Counter(name for name, _, role in parts if role.startswith("shard-"))
    return {name: shards[name] for name, _, role in sorted(parts) if role == "planner"}


def check_transport(transport: str, where: str) -> str:
    """Return `transport` if it is one.

    Raises:
        ValueError: it is not; `where` begins the message.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"{where}: transport: expected one of {', '.join(TRANSPORTS)}; found {transport!r}")
    return transport
