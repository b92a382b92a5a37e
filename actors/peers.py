"""What one shard says to the other shards of its repository and to the planner.

Rules
- Every call has a timeout. What a shard need not hear if it died, it is told gently: a failure is a log line.
- Coroutines are for the actor's own loops; `ask` and `send` are for its threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..store.errors import TensorVineError
from ..store.refs import ModelRef
from ..store.segment import Holds, SegmentId
from .engine import Actor, Engine
from .messages import PEER_TIMEOUT_S, ShardConfig, actor_name, planner_name
from .planner import Census

log = logging.getLogger(__name__)


class Peers:
    """The other actors of a repository, as one shard sees them."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        self._engine = engine
        self._config = config
        self._planner = engine.find(planner_name(config.repository))
        self._shards: dict[int, Actor] = {}

    @property
    def others(self) -> list[int]:
        """The other shards."""
        return [shard for shard in self._config.shards if shard != self._config.index]

    async def tell(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a shard and wait for its answer."""
        future = self._engine.call(self._actor(shard), method, *arguments)
        return await self._engine.awaitable(future, PEER_TIMEOUT_S, f"shard {shard}")

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
            if segment[0] != self._config.index:
                by_shard.setdefault(segment[0], {})[segment] = slots
        await asyncio.gather(*(self.tell(shard, "hold", holder, part) for shard, part in by_shard.items()))

    async def release(self, holder: str, shards: set[int]) -> None:
        """Have other shards forget a holder."""
        for shard in shards - {self._config.index}:
            await self.tell_gently(shard, "release", holder)

    async def note(self, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Tell the planner what was committed: version -> its parent, and whether it lives."""
        future = self._engine.call(self._planner, "note", self._config.index, dict(news))
        await self._engine.awaitable(future, PEER_TIMEOUT_S, "planner")

    async def note_gently(self, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Tell the planner what is over: if it does not hear, the worst is that a loss is reported that was none."""
        try:
            await self.note(news)
        except TensorVineError as exc:
            log.warning("the planner did not hear of %s: %s", list(news), exc)

    def send(self, shard: int, method: str, *arguments: Any) -> None:
        """Call a shard and do not wait."""
        self._engine.call(self._actor(shard), method, *arguments)

    def ask(self, shard: int, method: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Call a shard from a thread and wait for its answer."""
        future = self._engine.call(self._actor(shard), method, *arguments)
        return self._engine.result(future, timeout, f"shard {shard}")

    def census(self) -> Census:
        """Ask the planner what an earlier life of this shard held."""
        future = self._engine.call(self._planner, "census_of", self._config.index)
        return self._engine.result(future, PEER_TIMEOUT_S, "planner")

    def _actor(self, shard: int) -> Actor:
        if shard not in self._shards:
            self._shards[shard] = self._engine.find(actor_name(self._config.repository, shard))
        return self._shards[shard]
