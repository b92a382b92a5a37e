"""What shards tell each other of their mirrors (see `mirrors` and `shelf`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.versions.mirror import Kept, Stamp

Address = tuple[str, int, str]
"""(host, port, token) of an end of the wire."""


@dataclass(frozen=True, slots=True)
class Where:
    """Asks a shard for its node."""


@dataclass(frozen=True, slots=True)
class Open:
    """Begins a life of a shard at one that is to mirror it."""

    source: int
    life: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to `Open`."""

    shelf: str
    """Names the life of the shard that answers: in another one it has nothing of before."""
    node: str
    life: int
    """The latest of the source that it heard of."""


@dataclass(frozen=True, slots=True)
class Original:
    """A segment that is to be copied."""

    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    """Those that are there."""
    data: bytes | None
    """The bytes of these, where they are few; None: they are at the source's address."""


@dataclass(frozen=True, slots=True)
class Put:
    """Asks to keep copies."""

    source: int
    life: int
    shelf: str
    segments: Mapping[SegmentId, Original]
    records: Mapping[ModelRef, Kept]
    address: Address | None
    timeout: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Tells what is not needed any more."""

    source: int
    life: int
    shelf: str
    segments: tuple[SegmentId, ...]
    refs: tuple[ModelRef, ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """Tells all that is needed, and asks what of it is missing: (segments, versions)."""

    source: int
    life: int
    shelf: str
    segments: set[SegmentId]
    refs: set[ModelRef]


@dataclass(frozen=True, slots=True)
class Mark:
    """Tells that a mirror is complete, and sees that it is there; gives the numbers of its segments and versions."""

    source: int
    life: int
    shelf: str
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Leave:
    """Tells that another shard keeps the mirror now."""

    source: int
    life: int


@dataclass(frozen=True, slots=True)
class Look:
    """Asks how good a mirror of a shard is: (latest life, stamp at which it was complete)."""

    source: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Asks for all that is kept of a shard; `Offer` answers."""

    source: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What is kept of a shard."""

    segments: Mapping[SegmentId, Original]
    """Their bytes are at the address."""
    records: Mapping[ModelRef, Kept]
    address: Address


Message = Where | Open | Put | Drop | Sync | Mark | Leave | Look | Claim
