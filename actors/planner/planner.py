"""The planner actor: how many shards there are to be, and the plans of all trainings.

Rules
- Which shards there are, the catalog decides. Commits, loads and updates go on without a planner.
- A planner that starts again finishes what its former process had begun. Trainings tell it of themselves again.
- It asks for changes only while the head of the cluster says that it is the planner still (`rpc.lease`).
- When to update and by which way is `streams`' part.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from ...planner.scaling import ScalePolicy
from ...planner.topology import Topology
from ...store.counting import Counted
from ...store.errors import RepositoryNotFoundError, ShardUnavailableError
from ...store.waiting import Backoff
from ..engine.engine import Engine
from ..engine.room import outlast_workers
from ..rpc.calls import answers
from ..rpc.channel import Channel
from ..rpc.lease import Lease
from ..rpc.messages import ShardPlan, catalog_name
from ..rpc.registry import Registry
from ..rpc.shard_channels import ShardChannels
from .calls import PlannerCalls
from .counting import ClientCounts, PlannerStats
from .following import Following, able_nodes
from .reservations import Reservations
from .resizing import Resizing, ScaleReport
from .rollouts import Rollouts
from .streams import Advice, Delivered, Observed, Streams, TrainingStatus

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

log = logging.getLogger(__name__)

CHANGES = 8
"""Changes of the number of shards that may wait for one another."""
BEGIN_S = 5.0
"""How soon a planner that cannot begin tries again."""


class Planner:
    """The planner of one repository, as an actor.

    Args:
        engine: runs the repository.
        topology: of its start.
        plan: how a shard is started.
        scaling: when the number of shards changes by itself; None: when somebody asks for another.
        count: how many shards there are to be; None: one on each node.
    """

    def __init__(
        self,
        engine: Engine,
        topology: Topology,
        plan: ShardPlan,
        scaling: ScalePolicy | None = None,
        count: int | None = None,
    ) -> None:
        outlast_workers()
        self._engine = engine
        self._start = topology
        self._plan = plan
        self._scaling = scaling
        self._count = count
        self._streams = Streams()
        self._rollouts = Rollouts()
        self._counts = ClientCounts()
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-plan")
        self._planning.submit(importlib.import_module, "scipy.optimize")  # half a second that no training waits for
        self._changing = ThreadPoolExecutor(CHANGES, thread_name_prefix="tensorvine-scale")
        self._registry = Registry(engine, topology.repository, topology.started_by)
        self._shards = ShardChannels(engine, topology.repository, missing=RepositoryNotFoundError)
        self._reservations = Reservations(engine, topology.repository, topology.started_by)
        self._resizing = Resizing(
            engine,
            Channel(engine, catalog_name(topology.repository), missing=RepositoryNotFoundError),
            self._shards,
            self._reservations,
            start=topology,
            plan=plan,
            nodes=lambda: able_nodes(engine.nodes(), topology.nodes),
            check=self._check,
        )
        self._lease: Lease | None = None
        """Until when this is the planner; None: a former one may be."""
        self._following: Future[Following] = Future()
        self._following.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        again = engine.restarted()
        if not again:
            self._registry.want(count)
        threading.Thread(target=self._begin, args=(again,), name="tensorvine-begin", daemon=True).start()

    @answers(PlannerCalls.reserve)
    async def reserve(self, places: Mapping[int, str]) -> dict[int, int]:
        return await asyncio.to_thread(self._reserve, places)

    def _reserve(self, places: Mapping[int, str]) -> dict[int, int]:
        known = {node.id: node for node in self._engine.nodes()}
        chosen = {shard: known[node] for shard, node in places.items() if node in known}
        if chosen.keys() != places.keys():
            raise ShardUnavailableError("reserve: expected running nodes; some have ended")
        return self._reservations.take(chosen, self._plan.store_bytes)

    @answers(PlannerCalls.scale)
    async def scale(self, shards: int | None, timeout: float) -> ScaleReport:
        following = await asyncio.wrap_future(self._following)
        return await asyncio.get_running_loop().run_in_executor(self._changing, following.scale, shards, timeout)

    @answers(PlannerCalls.rest)
    async def rest(self, started_by: str, timeout: float) -> None:
        if started_by == self._start.started_by:
            await asyncio.to_thread(self._resizing.rest, timeout)

    @answers(PlannerCalls.observed)
    async def observed(self, name: str, told: Observed) -> Advice:
        return await self._aside(self._streams.observed, name, told)

    @answers(PlannerCalls.delivered)
    async def delivered(self, name: str, told: Delivered) -> str:
        return await self._aside(self._streams.delivered, name, told)

    @answers(PlannerCalls.turn)
    async def turn(self, name: str, consumer: str, most: int) -> bool:
        return self._rollouts.turn(name, consumer, most)

    @answers(PlannerCalls.turn_ended)
    async def turn_ended(self, name: str, consumer: str) -> None:
        self._rollouts.ended(name, consumer)

    @answers(PlannerCalls.streams)
    async def streams(self) -> dict[str, TrainingStatus]:
        return await self._aside(self._streams.statuses)

    @answers(PlannerCalls.counted)
    async def counted(self, client: str, serial: int, counted: Counted, gauges: Mapping[str, float] | None) -> None:
        self._counts.report(client, serial, counted, gauges)

    @answers(PlannerCalls.stats)
    async def stats(self) -> PlannerStats:
        restarts = await asyncio.to_thread(self._registry.restarts)
        topology = await asyncio.to_thread(self._registry.topology) or self._start
        return PlannerStats(
            shards=len(topology.shards),
            draining=len(topology.leaving),
            trainings=self._streams.running(),
            clients=self._counts.live(),
            restarts=self._lease.number - 1 if self._lease is not None else 0,
            shard_restarts={shard: restarts.get(shard, 0) for shard in topology.shards},
            counted=dict(self._counts.total),
            gauges=self._counts.gauges(),
        )

    async def _aside(self, work: Callable[[*_Args], _T], *arguments: *_Args) -> _T:
        """Plan in a thread of its own, one thing at a time, so that no other call waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._planning, work, *arguments)

    def _check(self) -> None:
        """Refuse to change anything unless this is the planner."""
        if self._lease is None:
            raise ShardUnavailableError("planner: expected to be the only planner; an earlier one may still be running")
        self._lease.check()

    def _begin(self, again: bool) -> None:
        """Become the planner, and follow the nodes, however long it takes."""
        pauses = Backoff(BEGIN_S, BEGIN_S)
        while True:
            try:
                self._lease = self._lease or Lease(self._registry, "planner", self._engine.this_node())
                following = Following(
                    self._engine,
                    self._shards,
                    self._resizing,
                    self._reservations,
                    registry=self._registry,
                    start=self._start,
                    count=self._registry.wanted() if again else self._count,
                    policy=self._scaling,
                )
                break
            except Exception:
                log.exception("planner: it cannot follow the nodes yet, retrying in %s s", BEGIN_S)
            pauses.wait()
        self._following.set_result(following)
