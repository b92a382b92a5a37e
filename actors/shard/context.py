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

from ...store.counting import Counts
from ...store.shard import ShardState
from ..engine.engine import Engine
from ..rpc.messages import RecoveryInfo, ShardConfig
from ..rpc.notifier import Notifier
from ..rpc.registry import Registry
from .calls.copies import Address
from .peers import Peers
from .segment_memory import SegmentMemory
from .tenure import Tenure


class Change(Enum):
    """What a shard tells those who wait for it."""

    ROOM = auto()
    """There may be memory, or a place in the queue for the disk."""
    WRITES = auto()
    """The last save of a name that is being moved has ended."""
    REPLICAS = auto()
    """The replicas hold what they are to hold, or are other ones."""


Topic: TypeAlias = Change | str
"""A change, or the name of a model of which a version was committed."""


@dataclass(slots=True, eq=False)
class ShardContext:
    """One shard's state and memory, the lock that guards them, and the other actors."""

    engine: Engine
    config: ShardConfig
    peers: Peers
    """The other actors; has the topology."""
    state: ShardState
    lock: threading.RLock
    segment_memory: SegmentMemory
    """The shard's memory."""
    tenure: Tenure
    """Until when this shard may answer."""
    notifier: Notifier[Topic]
    """Where those wait who are told of changes."""
    recovery_info: RecoveryInfo | None = None
    """How things stood when the shard started again in a repository that runs; None: it had no earlier incarnation
    there."""
    tcp_address: Address | None = field(default=None, init=False)
    """Where the shard's blocks are served to those that cannot map its memory; None: nowhere."""
    counts: Counts = field(default_factory=Counts, init=False)
    """Counts of the shard, for `stats`."""
    requests: int = field(default=0, init=False)
    """Saves begun, versions fetched and prefix queries answered."""
    bytes_sent: int = field(default=0, init=False)
    """Of tensors, to readers and to other shards. Count with the lock held."""

    @property
    def index(self) -> int:
        """The shard's number."""
        return self.config.index

    @property
    def is_leaving(self) -> bool:
        """Whether this shard drains. Read it with the lock held."""
        topology = self.peers.topology
        return self.index in topology.leaving or self.index in topology.gone

    def show(self) -> None:
        """Show the epoch to the readers of this node."""
        with self.lock:
            self.segment_memory.publish()


def open_context(engine: Engine, config: ShardConfig) -> ShardContext:
    """Make what the parts share. A shard that starts again waits for its former incarnation's lease to be over, then
    for the planner, and goes by its standing."""
    lock = threading.RLock()
    state = ShardState(config.index, lambda name: peers.topology.home(name), config.session_s)
    segment_memory = SegmentMemory(state, lock, config.capacity, config.preallocate_bytes)
    registry = Registry(engine, config.repository, config.start)
    tenure = Tenure(registry, f"shard {config.index}", engine.this_node(), segment_memory.memory.lease)
    peers = Peers(engine, config)
    recovery_info = peers.recovery_info() if engine.restarted() else None
    if (
        recovery_info is not None and config.index in recovery_info.topology.alive
    ):  # else it was to join, and does not yet
        peers.topology = recovery_info.topology
    state.where = peers.topology.where
    state.writes_files = recovery_info is None or config.index not in peers.topology.leaving
    if recovery_info is not None:
        state.ledger.merge(recovery_info.ledger)
    state.generations = secrets.randbits(62)
    return ShardContext(
        engine=engine,
        config=config,
        peers=peers,
        state=state,
        lock=lock,
        segment_memory=segment_memory,
        tenure=tenure,
        notifier=Notifier(lock),
        recovery_info=recovery_info,
    )
