"""What shards are told and what they answer, and what actors are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..store.manifest import Header
from ..store.retention import Retention
from ..store.segment import Block, SegmentId
from ..store.segmentfile import Slot
from .holdings import Counters

PEER_TIMEOUT_S = 30.0
"""How long one actor of a repository waits for another."""


@dataclass(frozen=True, slots=True)
class Disk:
    """How a repository keeps its history."""

    uri: str
    codec: str | None
    """What `store.codec.from_spec` reads; None: bytes as they are."""
    bytes_behind: int
    """Bytes that may wait in each shard to be written before savers wait."""
    keep: Retention | None
    """Which versions stay in memory; None: all, until room is needed."""


@dataclass(frozen=True, slots=True)
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
Places = Mapping[SegmentId, tuple[int, Sequence[int]]]
"""What a reader wants: segment -> the generation of the block that it has, or -1, and the slots."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client must know of a shard."""

    index: int
    node: str
    pid: int
    memory_fd: int
    capacity: int
    """Bytes of memory for segments."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Answer to `begin`."""

    header: Header | None
    """The parent's; None when the name is new."""
    body: bytes | None
    """The parent's table; None when the client has it."""
    lease: str | None
    """Pins the parent."""
    digests: dict[SegmentId, tuple[str, ...]]
    """Content hashes of the parent's segments that lie here, if they were asked for."""
    offsets: list[int]
    """Memory for the first few of the blocks that were announced."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to `fetch`."""

    header: Header
    body: bytes | None
    blocks: dict[SegmentId, Block]
    counters: Counters
    """The answer holds while the shard's board shows the same epoch; its places, while it shows the same freeings."""


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
