"""The planner's part in a change of the shards: they join or drain while the repository works.

Rules
- The catalog decides which shards there are. A change asks it first, and then starts or ends processes.
- What fails before all shards that join answer, or before one that drains has left, is undone. One that has left is
  ended, by the planner's next process if need be.
- Each change begins with what was left of the one before (`_finish`): shards that were decided on and not started are
  forgotten, drains are finished or given up, processes of shards that have left are ended.
- Who asked waits as long as its timeout says. One change at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ...planner.membership import JOIN_MOST, Move, spread
from ...planner.topology import Topology
from ...store.errors import (
    OperationTimeoutError,
    OptionError,
    ShardUnavailableError,
    StoreFullError,
    TensorVineError,
)
from ...store.shard import ShardStats
from ...store.sizes import size
from ...store.waiting import Backoff, Deadline
from ..engine.engine import Engine, Node
from ..rpc.calls import Request
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.channel import Channel
from ..rpc.messages import PEER_TIMEOUT_S, ShardPlan, actor_name
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from .reservations import Reservations

log = logging.getLogger(__name__)

RETRY_S = (0.05, 1.0)
"""Shortest and longest pause before the catalog is asked again."""
STEP_S = 2.0
"""How long one call waits for a shard that starts or drains, before it is looked whether that is wanted still."""
RESUME_S = 120.0
"""How long the drain may take that a former process of the planner began."""
REST_S = 60.0
"""How long no change begins, where whoever was about to stop the repository does not."""
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """The result of `Repository.scale`: the old and new number of shards, the moved data, and the duration."""

    shards_before: int
    """Number of shards before the change."""
    shards_after: int
    """Number of shards after the change."""
    tensor_bytes_moved: int
    """Bytes of tensors that moved to other shards, because a shard that was removed held them only in its memory."""
    seconds: float
    """Duration of the change in seconds."""


class Resizing:
    """Changes the number of shards of one repository.

    Args:
        engine: runs the shards.
        catalog: channel to the catalog.
        shards: channels to the shards; a missing one is a `RepositoryNotFoundError`.
        reservations: of their memory.
        start: the topology of the repository's start.
        plan: how a shard is started.
        nodes: lists the nodes where one may join, the preferred first.
        check: raises unless this is the planner.
    """

    def __init__(
        self,
        engine: Engine,
        catalog: Channel,
        shards: ShardChannels,
        reservations: Reservations,
        *,
        start: Topology,
        plan: ShardPlan,
        nodes: Callable[[], list[Node]],
        check: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._shards = shards
        self._reservations = reservations
        self._start = start
        self._plan = plan
        self._nodes = nodes
        self._check = check
        self._turn = threading.Lock()
        self._rest = Deadline(0.0)
        """Until when no change begins: the repository is being stopped."""

    def check(self, shards: int) -> None:
        """Refuse a number that there cannot be.

        Raises:
            OptionError: it is less than one, or than the repository has replicas.
        """
        least = self._start.replicas
        if shards < least:
            raise OptionError(f"scale: shards: expected at least {least}, one per replica; found {shards}")

    def topology(self, deadline: Deadline) -> Topology:
        """Ask for the present topology; errors as in `_ask`."""
        return self._ask(CatalogCalls.topology(), deadline.sooner(PEER_TIMEOUT_S))

    def scale(self, shards: int, timeout: float) -> ScaleReport:
        """Change the number of shards to `shards`; a change that is under way ends first.

        Raises:
            OperationTimeoutError: it took longer: the step that was under way is undone.
        """
        with self._in_turn(f"scale to {shards} shards", timeout) as deadline:
            began, moved = time.monotonic(), 0
            topology = self.topology(deadline)
            before = len(topology.shards)
            while (present := len(topology.shards)) != shards:
                if shards > present:
                    self._join(self._spread(min(shards - present, JOIN_MOST), topology), topology, deadline)
                else:
                    moved += self._drain(self._dispensable(topology), topology, deadline)
                topology = self.topology(deadline)
            return ScaleReport(before, shards, moved, time.monotonic() - began)

    def make(self, move: Move, version: int, timeout: float) -> ScaleReport | None:
        """Make one change of `membership`, after one that is under way; None where that has changed how things stand,
        or a shard does not answer just now: nothing has been done then.

        Args:
            move: the change.
            version: of the topology that it was drawn from.
            timeout: seconds, as of `scale`; errors, too.
        """
        with self._in_turn(f"{move}", timeout) as deadline:
            began, moved = time.monotonic(), 0
            topology = self.topology(deadline)
            if topology.version != version:
                return None
            try:
                self._stats(topology.shards, deadline)
            except TensorVineError as exc:
                log.debug("%s: not now: %s", move, exc)
                return None
            known = {node.id: node for node in self._nodes()}
            if nodes := [known[node] for node in move.join if node in known]:  # else all of them have gone
                self._join(nodes, topology, deadline)
            elif not move.join:
                moved = self._drain(move.drain, topology, deadline)
            after = self.topology(deadline)
            return ScaleReport(len(topology.shards), len(after.shards), moved, time.monotonic() - began)

    def tidy(self) -> None:
        """Finish what an earlier change has left; errors as of `scale`."""
        with self._in_turn("end of an earlier change of the shards", RESUME_S):
            return

    def rest(self, timeout: float) -> None:
        """Let no change begin for now, and wait for the one that is under way.

        Raises:
            OperationTimeoutError: it has not ended by then.
        """
        self._rest = Deadline.after(REST_S)
        if not self._turn.acquire(timeout=timeout):
            raise OperationTimeoutError(
                f"change of the shards: expected it to end within {timeout} s; it is still in progress"
            )
        self._turn.release()

    def places(self, topology: Topology) -> dict[int, str]:
        """Return the node of each shard.

        Raises:
            ShardUnavailableError: one is not there, as it is being started, the head does not answer, or the repository
                is being stopped.
        """
        self._check_wanted("places of the shards")
        actors = self._engine.actors()
        found: dict[int, str] = {}
        for shard in topology.shards:
            name = actor_name(topology.repository, shard)
            node = actors.get(name)
            if node is None:
                raise ShardUnavailableError(f"{name}: expected it to run; it is being started")
            found[shard] = node
        return found

    @contextmanager
    def _in_turn(self, what: str, timeout: float) -> Generator[Deadline]:
        """Begin a change when the others have ended, and finish what they left.

        Raises:
            OperationTimeoutError: that took longer than the timeout.
            ShardUnavailableError: the repository is being stopped, or this is no longer its planner.
        """
        deadline = Deadline.after(timeout)
        if not self._turn.acquire(timeout=deadline.left()):
            raise OperationTimeoutError(
                f"{what}: expected to begin within {timeout} s; another change of the shards is still in progress"
            )
        try:
            self._check_wanted(what)
            self._finish(deadline)
            yield deadline
        finally:
            self._turn.release()

    def _check_wanted(self, what: str) -> None:
        self._check()
        if not self._rest.passed:
            raise ShardUnavailableError(f"{what}: expected a running repository; it is being stopped")

    # ---- what was left --------------------------------------------------------------------------------

    def _finish(self, deadline: Deadline) -> None:
        """Finish what an earlier change, or a former process of the planner, has left."""
        topology = self.topology(deadline)
        for shard in topology.leaving:
            self._await_left(shard, deadline.sooner(RESUME_S))
            topology = self.topology(deadline)
        actors, prefix = self._engine.actors(), actor_name(topology.repository, 0)[:-1]
        running = {int(name.removeprefix(prefix)) for name in actors if name.startswith(prefix)}
        if never := [s for s in topology.shards if s not in running and s not in self._start.shards]:
            self._ask(CatalogCalls.forget(never), deadline)
        for shard in {*running, *never} - set(self.topology(deadline).shards):
            self._end(shard)

    def _end(self, shard: int) -> None:
        """End the process of a shard for good."""
        self._engine.kill(actor_name(self._start.repository, shard))
        self._reservations.release(shard)
        self._shards.forget(shard)

    # ---- joining --------------------------------------------------------------------------------------

    def _join(self, nodes: Sequence[Node], before: Topology, deadline: Deadline) -> None:
        """Have a shard more on each of these nodes."""
        after = self._catalog.call(CatalogCalls.grow(len(nodes)), deadline.left(PEER_TIMEOUT_S))
        fresh = [shard for shard in after.shards if shard not in before.shards]
        try:
            self._spawn(after, dict(zip(fresh, nodes, strict=True)), deadline)
        except BaseException:
            for shard in fresh:
                self._end(shard)
            self._ask(CatalogCalls.forget(fresh), Deadline.after(PEER_TIMEOUT_S))
            raise

    def _spread(self, count: int, topology: Topology) -> list[Node]:
        """Choose nodes for so many shards: those that have the fewest.

        Raises:
            ShardUnavailableError: there is no node where one may join.
        """
        able = {node.id: node for node in self._nodes()}
        if not able:
            raise ShardUnavailableError("scale: expected a node that may run a shard and is not leaving; found none")
        return [able[node] for node in spread(list(able), Counter(self.places(topology).values()), count)]

    def _spawn(self, topology: Topology, chosen: Mapping[int, Node], deadline: Deadline) -> None:
        from ..shard.shard import Shard  # it imports what imports this

        rooms = self._reservations.take(chosen, self._plan.store_bytes)
        for shard, node in chosen.items():
            config = self._plan.config(topology, shard, rooms[shard])
            name = actor_name(topology.repository, shard)
            self._engine.spawn(Shard, name, {"engine": self._engine, "config": config}, node.id)
        for shard in chosen:
            self._await_start(shard, deadline)

    def _await_start(self, shard: int, deadline: Deadline) -> None:
        """Wait until a shard answers, in steps: the repository may be stopped meanwhile."""
        while True:
            self._check_wanted(f"shard {shard} joins")
            try:
                self._shards[shard].call(ShardCalls.stats(), deadline.left(STEP_S))
                return
            except OperationTimeoutError:
                if deadline.passed:
                    raise

    # ---- draining -------------------------------------------------------------------------------------

    def _dispensable(self, topology: Topology) -> Sequence[int]:
        """Return the shards that drain first: those whose node leaves; where none does, all."""
        staying = {node.id for node in self._nodes()}
        leaving = [shard for shard, node in self.places(topology).items() if node not in staying]
        return leaving or topology.shards

    def _drain(self, shards: Sequence[int], topology: Topology, deadline: Deadline) -> int:
        """Have the one of these shards leave that has the fewest bytes, of several the one that joined last.

        Returns:
            The bytes that only its memory had.

        Raises:
            StoreFullError: the others have no room for them.
        """
        stats = self._stats(topology.shards, deadline)
        chosen = min((s for s in stats if s.shard in shards), key=lambda s: (s.bytes_memory + s.bytes_disk, -s.shard))
        nbytes = chosen.bytes_memory if topology.path is None else chosen.bytes_unwritten
        free = sum(max(_free(s), 0) for s in stats if s.shard != chosen.shard)
        if nbytes > free:
            raise StoreFullError(
                f"drain of shard {chosen.shard}: expected {size(nbytes)} of free memory in the other shards; found "
                f"{size(free)}"
            )
        self._ask(CatalogCalls.drain([chosen.shard]), deadline.sooner(PEER_TIMEOUT_S))
        try:
            self._await_left(chosen.shard, deadline)
        finally:
            if chosen.shard not in self.topology(Deadline.after(PEER_TIMEOUT_S)).shards:
                self._end(chosen.shard)
        return nbytes

    def _await_left(self, shard: int, deadline: Deadline) -> None:
        """Wait until a shard that drains has left; where that fails, it stays.

        Raises:
            OperationTimeoutError: it takes longer.
        """
        try:
            while not self._ask(CatalogCalls.drained([shard], deadline.left(STEP_S)), Deadline.after(PEER_TIMEOUT_S)):
                self._check_wanted(f"shard {shard} drains")
                deadline.left_for(f"drain of shard {shard}")
        except BaseException:
            if shard in self._ask(CatalogCalls.stay([shard]), Deadline.after(PEER_TIMEOUT_S)).shards:
                raise

    # ---- within ---------------------------------------------------------------------------------------

    def _ask(self, request: Request[_R], deadline: Deadline) -> _R:
        """Ask the catalog, again while it restarts.

        Raises:
            RepositoryNotFoundError: the repository was stopped.
            ShardUnavailableError, OperationTimeoutError: it did not answer in time.
        """
        pauses = Backoff(*RETRY_S)
        while True:
            try:
                return self._catalog.call(request, deadline.left())
            except ShardUnavailableError as exc:
                log.info("change of the shards: the catalog does not answer %s: %s", request.remote.name, exc)
                if not pauses.wait(deadline):
                    raise

    def _stats(self, shards: Sequence[int], deadline: Deadline) -> list[ShardStats]:
        asked = [self._shards[shard].send(ShardCalls.stats()) for shard in shards]
        return [answer.result(deadline.left(PEER_TIMEOUT_S)) for answer in asked]


def _free(stats: ShardStats) -> int:
    return stats.capacity - stats.bytes_allocated - stats.bytes_staged - stats.bytes_replicated
