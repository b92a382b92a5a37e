"""The planner actor: which shards there are, which versions there ever were, and the plans of all trainings.

Rules (docs/design/ledger.md)
- The ledger outlives a shard: it is how a shard that starts again can name what it lost, and never uses a version
  number twice. A commit counts only after it was noted here.
- A planner that starts again answers at once, but tells nobody how things stand before it has heard every shard of the
  newest topology: its ledger, or that it starts again as well. It never goes by an older topology, it waits, and says
  so. Trainings tell it of themselves again.
- It decides on a topology only while the head of the cluster says that it is the planner still (`shard.tenure`).
- Where all that knew of some commits may have died, numbers begin anew above all that were used (`Registry`).
- When to update and by which way is `streams`' part.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from ...planner.scaling import ScalePolicy
from ...planner.topology import Topology
from ...store.archive.archive import LOCK_NAME, Archive
from ...store.counting import Counted
from ...store.errors import (
    MovedError,
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    StorageError,
    TensorVineError,
)
from ...store.refs import ModelRef
from ...store.versions.ledger import Fact, Ledger, Told
from ...store.waiting import Backoff, Deadline
from ..engine.engine import Engine
from ..engine.room import outlast_workers
from ..rpc.calls import answers
from ..rpc.messages import Account, RecoveryInfo, ShardPlan
from ..rpc.registry import Registry
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from ..shard.tenure import LEASE_S, Tenure
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
HEAR_S, HEAR_PAUSE_S = 5.0, 0.2
"""How long a planner that starts again waits for a shard's answer before it asks again, and pauses in between."""
SAY_S = 5.0
"""How often it says whom it waits for."""
CLAIM_S = 3.0
"""How long a repository that starts waits for another one to leave its path."""


class Planner:
    """The planner of one repository, as an actor."""

    def __init__(
        self,
        engine: Engine,
        topology: Topology,
        plan: ShardPlan | None = None,
        scaling: ScalePolicy | None = None,
        count: int | None = None,
    ) -> None:
        outlast_workers()
        self._engine = engine
        self._topology = topology
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._streams = Streams()
        self._rollouts = Rollouts()
        self._counts = ClientCounts()
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-plan")
        self._planning.submit(importlib.import_module, "scipy.optimize")  # half a second that no training waits for
        self._changing = ThreadPoolExecutor(CHANGES, thread_name_prefix="tensorvine-scale")
        self._finished: set[int] = set()
        """Shards that have handed over all that they had to in the change that is under way."""
        self._arrived: dict[str, int] = {}
        """Names that are at their new home in it."""
        self._registry = Registry(engine, topology.repository, topology.started_by)
        self._shards = ShardChannels(engine, topology.repository, missing=RepositoryNotFoundError)
        self._reservations = Reservations(engine, topology.repository, topology.started_by)
        self._resizing = Resizing(
            engine,
            self._shards,
            self._reservations,
            plan=plan,
            nodes=lambda: able_nodes(self._engine.nodes(), self._topology.nodes),
            topology=lambda: self._topology,
            record=self._record,
            decide=self._decide,
            finished=self._note_finished,
            ledger=self._told,
        )
        self._plan = plan
        self._scaling = scaling
        self._count = count
        self._following: Following | None = None
        self._claim: int | None = None
        """Keeps other repositories off the path for as long as this process lives."""
        self._again: set[int] = set()
        """Shards that have started again and asked how things stand."""
        self._ready: Future[None] = Future()
        """Done when it is known how things stand."""
        self._ready.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        self._tenure: Tenure | None = None
        """Until when this is the planner; None: a former one may be."""
        self._restarts = 0
        if engine.restarted():
            threading.Thread(target=self._start_again, name="tensorvine-recover", daemon=True).start()
        else:
            self._registry.clear()
            self._tenure = self._enter()
            self._registry.want(count)
            self._record(topology)
            self._begin()

    @answers(PlannerCalls.topology)
    async def topology(self) -> Topology:
        await asyncio.wrap_future(self._ready)
        return self._topology

    @answers(PlannerCalls.shards_on)
    async def shards_on(self, node: str, version: int) -> tuple[int, ...] | None:
        return self._following.shards_on(node, version) if self._following is not None else None

    @answers(PlannerCalls.claim)
    async def claim(self) -> None:
        deadline, pauses = Deadline.after(CLAIM_S), Backoff(0.1, 0.1)
        while True:
            try:
                return self._take_path(sweep=True)
            except StorageError:
                if not await pauses.wait_async(deadline):  # the one that was stopped just now may not have ended yet
                    raise

    @answers(PlannerCalls.reserve)
    async def reserve(self, places: Mapping[int, str]) -> dict[int, int]:
        return await asyncio.to_thread(self._reserve, places)

    def _reserve(self, places: Mapping[int, str]) -> dict[int, int]:
        known = {node.id: node for node in self._engine.nodes()}
        chosen = {shard: known[node] for shard, node in places.items() if node in known}
        if self._plan is None or chosen.keys() != places.keys():
            raise ShardUnavailableError("reserve: expected running nodes, and a repository that can start shards there")
        return self._reservations.take(chosen, self._plan.store_bytes)

    @answers(PlannerCalls.note)
    async def note(self, news: Mapping[ModelRef, Fact]) -> None:
        with self._lock:
            self._ledger.note(news)

    @answers(PlannerCalls.merge)
    async def merge(self, told: Told) -> None:
        with self._lock:
            self._ledger.merge(told)

    @answers(PlannerCalls.arrives)
    async def arrives(self, shard: int, names: Sequence[str], former: int, restarts: int) -> None:
        await asyncio.to_thread(self._note_arrival, shard, names, former, restarts)

    def _note_arrival(self, shard: int, names: Sequence[str], former: int, restarts: int) -> None:
        with self._lock:  # who starts again is counted first, and asks for its standing then
            if self._registry.restarts().get(former, 0) != restarts:
                raise MovedError(
                    f"names moving to shard {shard}: expected the process of shard {former} that sent them; it has "
                    "restarted",
                    self._topology.version,
                )
            self._arrived |= dict.fromkeys(names, shard)

    @answers(PlannerCalls.recovery_info)
    async def recovery_info(self, shard: int) -> RecoveryInfo:
        with self._lock:
            self._again.add(shard)
        await asyncio.wrap_future(self._ready)
        with self._lock:
            return RecoveryInfo(self._topology, tuple(self._finished), self._ledger.told(), dict(self._arrived))

    @answers(PlannerCalls.scale)
    async def scale(self, shards: int | None, timeout: float) -> ScaleReport:
        await asyncio.wrap_future(self._ready)
        following = self._following
        if following is None:
            raise ShardUnavailableError("scale: expected a repository that can start shards")
        return await asyncio.get_running_loop().run_in_executor(self._changing, following.scale, shards, timeout)

    @answers(PlannerCalls.rest)
    async def rest(self, started_by: str, timeout: float) -> Topology:
        await asyncio.wrap_future(self._ready)
        if started_by == self._topology.started_by:
            await asyncio.to_thread(self._resizing.rest, timeout)
        return self._topology

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
        topology = self._topology
        return PlannerStats(
            shards=len(topology.alive),
            draining=len(topology.leaving),
            trainings=self._streams.running(),
            clients=self._counts.live(),
            restarts=self._restarts,
            shard_restarts={shard: restarts.get(shard, 0) for shard in topology.alive},
            counted=dict(self._counts.total),
            gauges=self._counts.gauges(),
        )

    async def _aside(self, work: Callable[[*_Args], _T], *arguments: *_Args) -> _T:
        """Plan in a thread of its own, one thing at a time, so that no commit waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._planning, work, *arguments)

    def _enter(self) -> Tenure:
        return Tenure(self._registry, "planner", self._engine.this_node())

    def _record(self, topology: Topology) -> None:
        """Have a topology outlive all actors, if this is the planner: after a machine stood still it soon is again."""
        if self._tenure is None:
            raise ShardUnavailableError("planner: expected to be the only planner; an earlier one may still be running")
        with contextlib.suppress(OperationTimeoutError):
            self._tenure.wait(Deadline.after(LEASE_S))
        self._tenure.check()
        self._registry.decide(topology)

    def _decide(self, topology: Topology) -> None:
        with self._lock:
            self._topology = topology
            if not topology.former:
                self._arrived.clear()

    def _note_finished(self, shard: int | None) -> None:
        with self._lock:
            if shard is None:
                self._finished.clear()
            else:
                self._finished.add(shard)

    def _take_path(self, sweep: bool) -> None:
        if self._topology.path is not None and self._claim is None:
            archive = Archive(self._topology.path, len(self._topology.shards))
            self._claim = archive.directory.claim(LOCK_NAME)
            if sweep:
                archive.sweep()
                archive.gather_numbers()

    def _told(self) -> Told:
        with self._lock:
            return self._ledger.told()

    def _begin(self) -> None:
        """Answer all, now that it is known how things stand."""
        if self._plan is not None:
            self._following = Following(
                self._engine,
                self._shards,
                self._resizing,
                self._reservations,
                registry=self._registry,
                topology=lambda: self._topology,
                count=self._count,
                policy=self._scaling,
            )
        self._ready.set_result(None)

    # ---- an earlier incarnation -----------------------------------------------------------------------

    def _start_again(self) -> None:
        """Learn how things stand, however long it takes."""
        pauses = Backoff(SAY_S, SAY_S)
        while True:
            try:
                self._tenure = self._tenure or self._enter()
                self._restarts = self._restarts or self._registry.count_planner_restart()
                self._take_path_again()
                self._topology = self._registry.topology() or self._topology
                self._count = self._registry.wanted()
                self._gather()
                break
            except Exception:
                log.exception("planner restarted: it cannot read the state of the repository yet, retrying")
            pauses.wait()
        self._resizing.resume_first()
        self._changing.submit(self._resume)
        self._begin()

    def _take_path_again(self) -> None:
        try:
            self._take_path(sweep=False)  # shards may be writing
        except TensorVineError as exc:
            log.error("planner restarted: %s", exc)

    def _gather(self) -> None:
        """Hear every shard of the newest topology that anybody goes by."""
        heard: dict[int, Account | None] = {}
        say, pauses = Deadline.after(SAY_S), Backoff(HEAR_PAUSE_S, HEAR_PAUSE_S)
        while missing := [shard for shard in self._topology.alive if shard not in heard]:
            heard |= self._hear(missing)
            for account in filter(None, heard.values()):
                self._topology = max(self._topology, account.topology, key=lambda known: known.version)
            if say.passed:
                say = Deadline.after(SAY_S)
                log.warning("planner restarted: waiting for shards %s", [s for s in missing if s not in heard])
            pauses.wait()
        accounts = {shard: account for shard, account in heard.items() if account is not None}
        lost = self._again & heard.keys() - accounts.keys()
        whole = any(account.whole for account in accounts.values()) and not lost & self._registry.owing()
        floor = self._registry.raise_floor() if lost and not whole else 0
        with self._lock:
            self._ledger.floor = floor
            for shard, account in accounts.items():
                self._ledger.merge(account.ledger)
                self._arrived |= account.delivered  # who has them may have died as well
                self._arrived |= dict.fromkeys(account.arrived, shard)
            told = self._ledger.told()
        for shard in accounts:
            self._shards[shard].post(ShardCalls.merge(told))
        if floor:
            log.error(
                "planner restarted: the versions of shards %s are unknown, so new version numbers are used",
                sorted(lost),
            )

    def _hear(self, shards: Sequence[int]) -> dict[int, Account | None]:
        """Ask shards; None for those that started again as well, or were ended."""
        heard: dict[int, Account | None] = {}
        asked = {shard: self._shards[shard].send(ShardCalls.account()) for shard in shards}
        deadline = Deadline.after(HEAR_S)
        for shard, answer in asked.items():
            try:
                heard[shard] = answer.result(deadline.left())
            except RepositoryNotFoundError as exc:
                log.error("planner restarted: shard %d no longer exists: %s", shard, exc)
                heard[shard] = None
            except TensorVineError as exc:
                log.info("planner restarted: shard %d does not answer yet: %s", shard, exc)
                with self._lock:
                    if shard in self._again:
                        heard[shard] = None
        return heard

    def _resume(self) -> None:
        try:
            self._resizing.resume()
        except RepositoryNotFoundError as exc:
            log.info("planner restarted: no change of the shards is completed: %s", exc)
        except Exception:
            log.exception("planner restarted: a change of the shards could not be completed")
