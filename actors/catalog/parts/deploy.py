"""What the planner, and who starts or stops a repository, ask the catalog: which shards there are.

Rules
- A topology is recorded in the registry before anybody goes by it (`CatalogContext.decide_on`).
- One change is decided at a time; drains of several shards go on beside each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ....planner.topology import Topology
from ....store.catalog.orders import Drain, Leave
from ....store.errors import ShardUnavailableError
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.catalog_calls import DeployCalls
from ..context import CatalogContext, Change
from ..lines import Lines
from ..placement import Placement

log = logging.getLogger(__name__)

EMPTY_S = 5.0
"""How long a shard that has nothing any more may still say that saves are under way there."""


class Deploy:
    """Changes of the shards.

    Args:
        context: the catalog's.
        lines: to the shards.
        placement: has segments moved.
    """

    def __init__(self, context: CatalogContext, lines: Lines, placement: Placement) -> None:
        self._context = context
        self._lines = lines
        self._placement = placement
        self._turn = asyncio.Lock()
        self._empty: dict[int, Deadline] = {}
        """Shards that drain and where nothing is placed any more."""
        self._left: set[int] = set()
        """Shards that have acknowledged that they leave."""
        self._leaving: dict[int, int] = {}
        """Shard that was ordered to leave -> its incarnation then."""

    @answers(DeployCalls.topology)
    async def topology(self) -> Topology:
        self._context.lease.check()
        return self._context.topology

    @answers(DeployCalls.grow)
    async def grow(self, count: int) -> Topology:
        return await self._change(lambda topology: topology.grown(count))

    @answers(DeployCalls.drain)
    async def drain(self, shards: Sequence[int]) -> Topology:
        topology = await self._change(lambda known: known.draining([*known.leaving, *shards]))
        self.order_drains()
        return topology

    @answers(DeployCalls.stay)
    async def stay(self, shards: Sequence[int]) -> Topology:
        def staying(known: Topology) -> Topology:
            return known.draining([shard for shard in known.leaving if shard not in shards or shard in self._leaving])

        return await self._change(staying)

    @answers(DeployCalls.drained)
    async def drained(self, shards: Sequence[int], timeout: float) -> list[int]:
        def look() -> bool | None:
            return all(shard not in self._context.topology.shards for shard in shards) or None

        await self._context.notifier.until(Change.SHARDS, look, Deadline.after(timeout))
        return [shard for shard in shards if shard not in self._context.topology.shards]

    @answers(DeployCalls.forget)
    async def forget(self, shards: Sequence[int]) -> Topology:
        gone = [shard for shard in shards if shard in self._context.topology.shards]
        if not gone:
            return self._context.topology
        topology = await self._change(lambda known: known.left(gone))
        with self._context.lock:
            for shard in gone:
                self._placement.gone(shard)
        return topology

    @answers(DeployCalls.end)
    async def end(self) -> None:
        self._context.lease.end()
        await asyncio.to_thread(self._context.journal.forget)

    async def _change(self, change: Callable[[Topology], Topology]) -> Topology:
        async with self._turn:
            topology = change(self._context.topology)
            await asyncio.to_thread(self._context.decide_on, topology)
            return topology

    # ---- drains ---------------------------------------------------------------------------------------

    def order_drains(self) -> None:
        """Have shards that drain grant nothing any more: those that were told so, too."""
        with self._context.lock:
            for shard in self._context.topology.leaving:
                self._lines.order(shard, Drain())

    def step(self) -> None:
        """Go on with drains. Call it without the lock, from one thread."""
        for shard in self._context.topology.leaving:
            if shard in self._left:
                self._end(shard)
            else:
                self._move(shard)

    def _move(self, shard: int) -> None:
        with self._context.lock:
            line = self._lines.get(shard)
            if not self._context.lease.holds or line is None or self._leaving.get(shard) == line.incarnation:
                return
            if self._placement.drain(shard):
                self._empty.pop(shard, None)
                return
            since = self._empty.setdefault(shard, Deadline.after(EMPTY_S))
            if (line.allocated == 0 or since.passed) and not line.orders:
                self._lines.order(shard, Leave())
                self._leaving[shard] = line.incarnation

    def acknowledged(self, shard: int) -> None:
        """Note that a shard has acknowledged orders: it may have been the last one."""
        with self._context.lock:
            line = self._lines.get(shard)
            if line is not None and self._leaving.get(shard) == line.incarnation and not line.orders:
                self._left.add(shard)
        self._context.notifier.tell(Change.ORDERS)

    def _end(self, shard: int) -> None:
        """Take a shard out that has left."""
        try:
            self._context.decide_on(self._context.topology.left([shard]))
        except ShardUnavailableError as exc:
            log.warning("catalog: shard %d has left, which cannot be recorded yet: %s", shard, exc)
            return
        with self._context.lock:
            self._placement.gone(shard)
            self._left.discard(shard)
            self._leaving.pop(shard, None)
            self._empty.pop(shard, None)
        self._context.notifier.tell(Change.SHARDS)
        log.info("catalog: shard %d has left", shard)
