"""The planner follows the nodes of the cluster, and what its shards carry: shards join and drain by themselves.

Rules
- What is to change is decided by `planner.membership`, the number by who started the repository, who scaled it last,
  or `planner.scaling`; a change is made by `resizing`.
- One change at a time, whoever wants it. Who asks for a number gets it; that number outlives the planner.
- What fails is logged, once for as long as it lasts, and tried again: a repository works with any number of shards.
  While a shard starts, nothing is changed; that is said when it takes long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ...planner.membership import SETTLE_S, Membership, Move, NodeRule, selects
from ...planner.scaling import ScalePolicy, Scaler, ShardLoad
from ...planner.topology import Topology
from ...store.errors import OperationTimeoutError, OptionError, TensorVineError
from ...store.waiting import NEVER, Backoff, Deadline
from ..engine.engine import Engine, Node
from ..rpc.messages import PEER_TIMEOUT_S
from ..rpc.registry import Registry
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from .reservations import Reservations
from .resizing import Resizing, ScaleReport

log = logging.getLogger(__name__)

TICK_S = 1.0
JOIN_S = 60.0
"""How long shards that join may take to start."""
DRAIN_S = 3600.0
"""How long the bytes of a shard that drains may take to be copied."""
LATE_S = 15.0
"""How long it may not be known where shards are before that is said."""
PLACES_S = 15.0
"""How long it is believed where shards are, while no node comes or goes."""


def able_nodes(living: Sequence[Node], rule: NodeRule) -> list[Node]:
    """Return the nodes that may hold a shard, and stay."""
    return [node for node in living if not node.leaving and selects(rule, node.resources, node.labels)]


class Following:
    """A thread that follows the nodes and the load of one repository.

    Args:
        engine: runs the shards.
        shards: channels to them.
        resizing: makes the changes.
        reservations: of the shards' memory, which follow the shards.
        registry: keeps the number that was asked for.
        start: the topology of the repository's start.
        count: how many shards there are to be; None: one on each node.
        policy: when the number changes by itself; None: only when somebody asks for another.
    """

    def __init__(
        self,
        engine: Engine,
        shards: ShardChannels,
        resizing: Resizing,
        reservations: Reservations,
        registry: Registry,
        start: Topology,
        count: int | None,
        policy: ScalePolicy | None,
    ) -> None:
        self._engine = engine
        self._shards = shards
        self._resizing = resizing
        self._reservations = reservations
        self._registry = registry
        self._start = start
        self._membership = Membership(start.replicas)
        self._scaler = Scaler(policy) if policy is not None else None
        self._count = count
        self._turn = threading.Lock()
        self._known: tuple[tuple[int, frozenset[str]], float, dict[int, str]] = ((-1, frozenset()), 0.0, {})
        """What the places of the shards depend on (the topology's version, and the nodes that may hold them), when they
        were asked for, and the places."""
        self._blind = Deadline.after(LATE_S)
        """By when the shards should have said where they are."""
        threading.Thread(target=self._follow, name="tensorvine-follow", daemon=True).start()

    def scale(self, shards: int | None, timeout: float) -> ScaleReport:
        """Have so many shards from now on; None: one on each node.

        Raises:
            OptionError: less than one is asked for, or fewer than the repository has replicas; None where the load
                decides.
            OperationTimeoutError: it took longer: nothing has changed.
        """
        if shards is not None:
            self._resizing.check(shards)
        elif self._scaler is not None:
            raise OptionError(
                "scale: shards: expected a number, as the repository was started with scaling=; found None"
            )
        deadline = Deadline.after(timeout)
        if not self._turn.acquire(timeout=deadline.left()):
            raise OperationTimeoutError(
                f"scale: expected to begin within {timeout} s; another change of the shards is still in progress"
            )
        try:
            with self._wanting(shards):
                if shards is not None:
                    return self._resizing.scale(shards, deadline.left())
                return self._spread_out(deadline)
        finally:
            self._turn.release()

    @contextmanager
    def _wanting(self, count: int | None) -> Generator[None]:
        """Keep the number that is asked for; where that fails, the one that was."""
        former = self._count
        self._registry.want(count)  # a planner that dies meanwhile goes on to it in its next life
        self._count = count
        try:
            yield
        except BaseException:
            self._count = former
            try:
                self._registry.want(former)
            except TensorVineError as exc:
                log.error("scale failed, but the planner would continue it after a restart: %s", exc)
            raise

    def _spread_out(self, deadline: Deadline) -> ScaleReport:
        """Have one shard on each node now."""
        before = len(self._resizing.topology(deadline).shards)
        done = ScaleReport(before, before, 0, 0.0)
        began, pauses = time.monotonic(), Backoff(0.1, 1.0)
        while True:
            move, version = self._next(settle_s=0.0)
            if not move:
                break
            report = self._make(move, version, deadline.left())
            if report is None and not pauses.wait(deadline):
                raise OperationTimeoutError("scale: expected to finish in time; other changes of the shards delayed it")
            if report is not None:
                moved = done.tensor_bytes_moved + report.tensor_bytes_moved
                done = replace(done, shards_after=report.shards_after, tensor_bytes_moved=moved)
        return replace(done, seconds=time.monotonic() - began)

    # ---- the thread -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(TICK_S):  # runs as long as the process
            if not self._turn.acquire(blocking=False):
                continue  # somebody scales it
            try:
                self._once()
            except Exception:
                log.exception("following the nodes failed, retrying in %s s", TICK_S)
            finally:
                self._turn.release()

    def _once(self) -> None:
        try:
            move, version = self._next(SETTLE_S)
        except TensorVineError as exc:  # a shard is not there yet, or is being restarted
            late, self._blind = self._blind.passed, NEVER if self._blind.passed else self._blind
            log.log(logging.WARNING if late else logging.DEBUG, "the number of shards cannot be adapted yet: %s", exc)
            self._tidy()
            return
        self._blind = Deadline.after(LATE_S)
        if not move:
            return
        try:
            report = self._make(move, version, JOIN_S if move.join else DRAIN_S)
        except TensorVineError as exc:
            again = self._membership.failed(time.monotonic(), move)
            log.log(logging.DEBUG if again else logging.WARNING, "%s: failed, retrying: %s", move, exc)
            return
        except Exception:
            self._membership.failed(time.monotonic(), move)
            raise
        if report is not None:
            log.info("repository %r: %s; %s", self._start.repository, move, report)

    def _tidy(self) -> None:
        """Shards that a former planner had decided on may never have been started."""
        try:
            self._resizing.tidy()
        except TensorVineError as exc:
            log.debug("an earlier change of the shards cannot be finished yet: %s", exc)

    def _next(self, settle_s: float) -> tuple[Move, int]:
        """Return what is to change, as things stand, and the version of the topology by which they do."""
        topology = self._resizing.topology(Deadline.after(PEER_TIMEOUT_S))
        able = [node.id for node in able_nodes(self._engine.nodes(), topology.nodes)]
        places = self._places(topology, able)
        if self._scaler is not None and self._count is None:
            self._count = len(topology.shards)
        if self._scaler is not None and able and set(places.values()) <= set(able):  # else shards are about to drain
            self._count = self._scaler.observe(time.monotonic(), len(able), self._loads(topology))
        return self._membership.observe(time.monotonic(), able, places, self._count, settle_s), topology.version

    def _make(self, move: Move, version: int, timeout: float) -> ScaleReport | None:
        report = self._resizing.make(move, version, timeout)
        if report is not None:
            self._membership.succeeded(move)
        return report

    def _places(self, topology: Topology, able: list[str]) -> dict[int, str]:
        """Return the node of each shard."""
        now, depends = time.monotonic(), (topology.version, frozenset(able))
        known, asked, places = self._known
        if known != depends or now - asked > PLACES_S:
            places = self._resizing.places(topology)
            self._reservations.follow(places, self._capacity)
            self._known = depends, now, places
        return places

    def _capacity(self, shard: int) -> int:
        return self._shards[shard].call(ShardCalls.stats(), PEER_TIMEOUT_S).capacity

    def _loads(self, topology: Topology) -> dict[int, ShardLoad]:
        asked = {shard: self._shards[shard].send(ShardCalls.stats()) for shard in topology.shards}
        deadline, loads = Deadline.after(PEER_TIMEOUT_S), dict[int, ShardLoad]()
        for shard, answer in asked.items():
            stats = answer.result(deadline.left())
            held = stats.bytes_allocated + stats.bytes_staged + stats.bytes_replicated
            loads[shard] = ShardLoad(held, stats.capacity, stats.requests)
        return loads
