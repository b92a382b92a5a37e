"""What the parts of a shard share, for tests of single parts: without Ray, other shards or clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from tensorvine.actors.rpc.messages import RecoveryInfo, ShardConfig
from tensorvine.actors.rpc.notifier import Notifier
from tensorvine.actors.shard.context import ShardContext
from tensorvine.actors.shard.segment_memory import SegmentMemory
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.holders import Owner, Save
from tensorvine.store.shard import ShardState
from tensorvine.store.waiting import Deadline

CAPACITY = 1 << 20


class QuietSegmentMemory:
    """A memory of which nothing is asked."""

    def publish(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def filling(self, parts: Any, owner: Owner) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def drop_grants(self, owner: Owner) -> None:
        pass

    def end_save(self, save: Save) -> None:
        pass

    def grant(self, owner: Owner, sizes: Any, least: int = 1) -> list[int]:
        return []


def engine_at(node: str) -> Any:
    """An engine that knows where it is, and nothing else."""
    return SimpleNamespace(this_node=lambda: node, address=lambda: "")


class HeldTenure:
    """A lease that does not end by itself."""

    holds = True

    def end(self) -> None:
        self.holds = False

    def check(self) -> None:
        if not self.holds:
            raise ShardUnavailableError("there is no lease")

    def check_running(self) -> None:
        self.check()

    async def during(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def held(self, deadline: Deadline) -> None:
        pass

    def wait(self, deadline: Deadline) -> None:
        pass


def context_of(
    state: ShardState,
    peers: Any = None,
    *,
    segment_memory: Any = None,
    engine: Any = None,
    recovery_info: RecoveryInfo | None = None,
    replicas: int = 1,
    capacity: int = CAPACITY,
) -> ShardContext:
    """The context of a shard with this state; what is left out is asked of nothing."""
    lock = threading.RLock()
    tenure: Any = HeldTenure()
    config = ShardConfig(
        repository="alone",
        index=state.index,
        shards=(state.index,),
        capacity=capacity,
        preallocate_bytes=0,
        session_s=60.0,
        replicas=replicas,
    )
    return ShardContext(
        engine=engine or engine_at(f"node {state.index}"),
        config=config,
        peers=peers,
        state=state,
        lock=lock,
        segment_memory=segment_memory or QuietSegmentMemory(),
        tenure=tenure,
        notifier=Notifier(lock),
        recovery_info=recovery_info,
    )


def with_memory(context: ShardContext) -> ShardContext:
    """Give a shard real memory, as much as its configuration says."""
    context.segment_memory = SegmentMemory(context.state, context.lock, context.config.capacity, 0)
    return context
