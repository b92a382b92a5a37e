"""What one shard says to the other shards of its repository and to the planner.

Rules
- Every call has a timeout. What a shard need not hear if it died, it is told gently: a failure is a log line.
- Coroutines are for the actor's own loops; `ask` and `send` are for its threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ..planner.topology import Topology
from ..store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ..store.refs import ModelRef
from ..store.segment import Holds, SegmentId
from .engine import Actor, Engine
from .link import Link
from .messages import PEER_TIMEOUT_S, Census, ShardConfig, Standing, actor_name, planner_name

log = logging.getLogger(__name__)

STANDING_PAUSE_S = 0.5

LONG_TIMEOUT_S = 120.0
"""How long a shard may take for what has many bytes."""


class Peers:
    """The other actors of a repository, as one shard sees them."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        self._engine = engine
        self._config = config
        self._planner = engine.find(planner_name(config.repository))
        self._to_planner = Link(engine, self._planner, "planner")
        self._shards: dict[int, Actor] = {}
        self._links: dict[int, Link] = {}
        self.topology = config.topology or Topology(config.repository, config.shards, config.start)
        """By which this shard goes."""
        self.topology_after = self.topology
        """By which its segments go: while it drains, the topology to come."""

    @property
    def others(self) -> list[int]:
        """The other shards."""
        return [shard for shard in self.topology.alive if shard != self._config.index]

    async def tell(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a shard and wait for its answer."""
        return await self.tell_within(PEER_TIMEOUT_S, shard, method, *arguments)

    async def tell_within(self, timeout: float, shard: int, method: str, *arguments: Any) -> Any:
        """Call a shard and wait for its answer so many seconds."""
        future = self._engine.call(self._actor(shard), method, *arguments)
        return await self._engine.awaitable(future, timeout, f"shard {shard}")

    async def tell_long(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a shard with many bytes and wait for its answer."""
        return await self.tell_within(LONG_TIMEOUT_S, shard, method, *arguments)

    async def tell_gently(self, shard: int, method: str, *arguments: Any) -> None:
        """Tell a shard something that it need not hear if it died: then it forgot all of it anyway."""
        try:
            await self.tell(shard, method, *arguments)
        except TensorVineError as exc:
            log.warning("shard %d did not hear %s%s: %s", shard, method, arguments, exc)

    async def hold(self, holder: str, holds: Holds) -> None:
        """Have the other shards hold their part of what a version names."""
        by_shard: dict[int, dict[SegmentId, Sequence[int]]] = {}
        for segment, slots in holds.items():
            if (shard := self.topology_after.where(segment)) != self._config.index:
                by_shard.setdefault(shard, {})[segment] = slots
        timeout = PEER_TIMEOUT_S
        await asyncio.gather(
            *(self._link(shard).call(timeout, "hold", holder, part) for shard, part in by_shard.items())
        )

    async def release(self, holder: str, shards: set[int]) -> None:
        """Have other shards forget a holder."""
        for shard in shards - {self._config.index}:
            await self.tell_gently(shard, "release", holder)

    async def note(self, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Tell the planner what was committed: version -> its parent, and whether it lives."""
        await self._to_planner.call(PEER_TIMEOUT_S, "note", self._config.index, dict(news))

    async def note_gently(self, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Tell the planner what is over: if it does not hear, the worst is that a loss is reported that was none."""
        try:
            await self.note(news)
        except TensorVineError as exc:
            log.warning("the planner did not hear of %s: %s", list(news), exc)

    def tell_planner(self, census: Census) -> None:
        """Tell the planner, which may have been lost as well, all that is known here; does not wait."""
        self._engine.call(self._planner, "note", self._config.index, census)

    def send(self, shard: int, method: str, *arguments: Any) -> None:
        """Call a shard and do not wait."""
        self._engine.call(self._actor(shard), method, *arguments)

    def ask(self, shard: int, method: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Call a shard from a thread and wait for its answer."""
        future = self._engine.call(self._actor(shard), method, *arguments)
        return self._engine.result(future, timeout, f"shard {shard}")

    def standing(self) -> Standing:
        """Ask the planner what an earlier life of this shard held, and by what topology to go.

        Waits for one that was lost as well and is being started: without it this shard could not start.
        """
        pause = threading.Event()
        while True:
            try:
                future = self._engine.call(self._planner, "standing", self._config.index)
                return self._engine.result(future, PEER_TIMEOUT_S, "planner")
            except (ShardUnavailableError, OperationTimeoutError) as exc:
                log.warning("shard %d starts again and waits for the planner: %s", self._config.index, exc)
                pause.wait(STANDING_PAUSE_S)

    def _link(self, shard: int) -> Link:
        if shard not in self._links:
            self._links[shard] = Link(self._engine, self._actor(shard), f"shard {shard}")
        return self._links[shard]

    def _actor(self, shard: int) -> Actor:
        if shard not in self._shards:
            self._shards[shard] = self._engine.find(actor_name(self._config.repository, shard))
        return self._shards[shard]
