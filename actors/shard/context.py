"""What all parts of a shard share.

Rules
- There is one lock. It guards the state, the memory, and what the parts say of themselves that they guard by it.
- Whatever changes the state has `Settling` carry out what follows, without the lock.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from ...store.catalog.reports import Sender
from ...store.counting import Counts
from ...store.shard import ShardState
from ..engine.engine import Engine
from ..rpc.channel import Channel
from ..rpc.lease import Lease
from ..rpc.messages import ShardConfig, catalog_name
from ..rpc.notifier import Notifier
from ..rpc.registry import Registry
from ..rpc.shard_channels import ShardChannels
from .calls.copies import Address
from .segment_memory import SegmentMemory


class Change(Enum):
    """What a shard tells those who wait for it."""

    ROOM = auto()
    """There may be memory, or a place in the queue for the disk."""
    TERM = auto()
    """The catalog has answered a report."""


Topic: TypeAlias = Change | str
"""A change, or the name of a model of which a version was committed."""


@dataclass(slots=True, eq=False)
class ShardContext:
    """One shard's state and memory, the lock that guards them, and the other actors."""

    engine: Engine
    config: ShardConfig
    catalog: Channel
    shards: ShardChannels
    state: ShardState
    lock: threading.RLock
    segment_memory: SegmentMemory
    """The shard's memory."""
    lease: Lease
    """Until when this shard may send commits and change files."""
    notifier: Notifier[Topic]
    """Where those wait who are told of changes."""
    tcp_address: Address | None = field(default=None, init=False)
    """Where the shard's blocks are served to those that cannot map its memory; None: nowhere."""
    counts: Counts = field(default_factory=Counts, init=False)
    """Counts of the shard, for `stats`."""
    requests: int = field(default=0, init=False)
    """Commits and reads."""
    bytes_sent: int = field(default=0, init=False)
    """Of tensors, to readers and to other shards. Count with the lock held."""

    @property
    def index(self) -> int:
        """The shard's number."""
        return self.config.index

    @property
    def sender(self) -> Sender:
        """This shard, as it asks the present term of the catalog. Read it with the lock held."""
        return Sender(self.index, self.state.incarnation, self.state.term, self.state.totals.allocated)


def open_context(engine: Engine, config: ShardConfig) -> ShardContext:
    """Make what the parts share. Waits until the lease of the shard's former process is over."""
    lock = threading.RLock()
    registry = Registry(engine, config.repository, config.start)
    lease = Lease(registry, f"shard-{config.index}", engine.this_node())
    state = ShardState(config.index, lease.number, config.session_s)
    state.generations = secrets.randbits(62)
    return ShardContext(
        engine=engine,
        config=config,
        catalog=Channel(engine, catalog_name(config.repository)),
        shards=ShardChannels(engine, config.repository),
        state=state,
        lock=lock,
        segment_memory=SegmentMemory(state, lock, config.capacity, config.preallocate_bytes),
        lease=lease,
        notifier=Notifier(lock),
    )
