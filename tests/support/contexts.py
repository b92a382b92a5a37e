"""What the parts of a shard share, for tests of single parts: without Ray, other shards, a catalog or clients."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from tensorvine.actors.rpc.messages import ShardConfig
from tensorvine.actors.rpc.notifier import Notifier
from tensorvine.actors.shard.context import ShardContext
from tensorvine.actors.shard.segment_memory import SegmentMemory
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.shard import ShardState
from tensorvine.store.waiting import Deadline

CAPACITY = 1 << 20


def engine_at(node: str) -> Any:
    """An engine that knows where it is, and nothing else."""
    return SimpleNamespace(this_node=lambda: node, address=lambda: "127.0.0.1")


class HeldLease:
    """A lease that does not end by itself."""

    holds = True
    number = 1

    @property
    def is_over(self) -> bool:
        return not self.holds

    def end(self) -> None:
        self.holds = False

    def check(self) -> None:
        if not self.holds:
            raise ShardUnavailableError("there is no lease")

    async def held(self, deadline: Deadline) -> None:
        self.check()


def context_of(state: ShardState, *, engine: Any = None, capacity: int = CAPACITY) -> ShardContext:
    """The context of a shard with this state and real memory; no other actor can be called."""
    lock = threading.RLock()
    nobody: Any = None
    lease: Any = HeldLease()
    config = ShardConfig(repository="alone", index=state.index, capacity=capacity, preallocate_bytes=0, session_s=60.0)
    return ShardContext(
        engine=engine or engine_at(f"node {state.index}"),
        config=config,
        catalog=nobody,
        shards=nobody,
        state=state,
        lock=lock,
        segment_memory=SegmentMemory(state, lock, capacity, 0),
        lease=lease,
        notifier=Notifier(lock),
    )
