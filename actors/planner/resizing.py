"""The planner's part in a change of the topology: shards join or drain while the repository works.

Rules
- A change has one step at which it is decided: the topology is recorded where it outlives all actors (`registry`),
  before any of them goes by it. Before that, whatever fails undoes all; after it, every call is repeated until it has
  succeeded, by the planner's next incarnation too, however long it takes.
- Every shard goes by the new topology before the first name moves, and one that joined has the whole ledger. One
  shard at a time hands over.
- Who asked waits as long as its timeout says; the change goes on without it. One change at a time.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ...planner.membership import JOIN_MOST, Move, spread
from ...planner.topology import TAG_BITS, Topology
from ...store.errors import (
    OperationTimeoutError,
    OptionError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorVineError,
)
from ...store.shard import ShardStats
from ...store.versions.ledger import Told
from ...store.waiting import NEVER, Backoff, Deadline
from ..engine.engine import Engine, Node
from ..rpc.calls import Request
from ..rpc.messages import PEER_TIMEOUT_S, Moved, ShardPlan, actor_name
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from .reservations import Reservations

log = logging.getLogger(__name__)

RETRY_S = 0.1
LONG_S = 3600.0
"""How long one call may hand over names, or copy segments: it is called again after that."""
RESUME_S = 120.0
"""How long the copying of a drain may take that the planner's next incarnation goes on with."""
START_S = 2.0
"""How long one call waits for a shard that starts, before it is looked whether it is wanted still."""
REST_S = 60.0
"""How long no change begins, where whoever was about to stop the repository does not."""
LINGER_S = 30.0
"""How long a drained shard stays for saves that began there."""


_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """The result of `Repository.scale`: the old and new number of shards, the moved data, and the duration."""

    shards_before: int
    """Number of shards before the change."""
    shards_after: int
    """Number of shards after the change."""
    names_moved: int
    """Number of model names whose metadata moved to another shard."""
    metadata_bytes_moved: int
    """Bytes of metadata (manifests and graphs) that moved to other shards."""
    metadata_bytes_total: int
    """Bytes of metadata (manifests and graphs) on all shards before the change."""
    tensor_bytes_moved: int
    """Bytes of tensors that moved to other shards. Tensors move only from shards that are removed."""
    seconds: float
    """Duration of the change in seconds."""


@dataclass(slots=True)
class _Done:
    """What a change has done so far."""

    names: int = 0
    metadata: int = 0
    tensors: int = 0

    def count(self, moved: Moved) -> None:
        self.names += moved.names
        self.metadata += moved.metadata_bytes


class Resizing:
    """Changes the number of shards of one repository.

    Args:
        engine: runs the shards.
        shards: channels to them; a missing one is a `RepositoryNotFoundError`.
        reservations: of their memory.
        plan: how a shard is started; None: this repository cannot start any.
        nodes: lists the nodes where one may join, the preferred first.
        topology: gives the present one.
        record: has a topology outlive all actors.
        decide: makes it the present one.
        finished: told which shards have handed over all they had to; with None, that a change begins.
        ledger: gives what is known of all versions.
    """

    def __init__(
        self,
        engine: Engine,
        shards: ShardChannels,
        reservations: Reservations,
        *,
        plan: ShardPlan | None,
        nodes: Callable[[], list[Node]],
        topology: Callable[[], Topology],
        record: Callable[[Topology], None],
        decide: Callable[[Topology], None],
        finished: Callable[[int | None], None],
        ledger: Callable[[], Told],
    ) -> None:
        self._engine = engine
        self._shards = shards
        self._reservations = reservations
        self._plan = plan
        self._nodes = nodes
        self._topology = topology
        self._record = record
        self._decide = decide
        self._finished = finished
        self._ledger = ledger
        self._turn = threading.Lock()
        self._resumed = threading.Event()
        """No change of an earlier incarnation of the planner is to be finished first."""
        self._resumed.set()
        self._rest = Deadline(0.0)
        """Until when no change begins: the repository is being stopped."""

    def check(self, shards: int) -> None:
        """Refuse a number that there cannot be.

        Raises:
            OptionError: it is less than one, or than the repository has replicas.
        """
        least = self._topology().replicas
        if shards < least:
            raise OptionError(f"scale: shards: expected at least {least}, one per replica; found {shards}")

    def scale(self, shards: int, timeout: float) -> ScaleReport:
        """Change the number of shards to `shards`; a change that is under way ends first.

        Raises:
            OperationTimeoutError: it took longer: nothing has changed.
        """
        with self._in_turn(f"scale to {shards} shards", timeout) as deadline:
            return self._changed(lambda done: self._scale(shards, deadline, done), deadline)

    def make(self, move: Move, version: int, timeout: float) -> ScaleReport | None:
        """Make one change of `membership`, after one that is under way; None where that has changed how things stand,
        or a shard does not answer just now: nothing has been done then.

        Args:
            move: the change.
            version: of the topology that it was drawn from.
            timeout: seconds, as of `scale`; errors, too.
        """
        with self._in_turn(f"{move}", timeout) as deadline:
            if self._topology().version != version:
                return None
            try:
                self._stats(self._topology(), deadline)
            except TensorVineError as exc:
                log.debug("%s: not now: %s", move, exc)
                return None
            return self._changed(lambda done: self._make(move, deadline, done), deadline)

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

    def resume_first(self) -> None:
        """Have callers that ask for another change wait until `resume` has ended."""
        self._resumed.clear()

    def resume(self) -> None:
        """Bring a change to its end that an earlier incarnation of the planner began."""
        try:
            with self._turn:
                topology = self._topology()
                self._tell(topology.alive, ShardCalls.learn(topology))  # it was recorded, and perhaps not told to all
                self._finish()
                for shard in {*self._topology().gone, *range(topology.next, topology.next + JOIN_MOST)}:
                    self._end(shard)  # it had drained, or was about to join
        finally:
            self._resumed.set()

    def _finish(self) -> None:
        """Finish the change that is under way: the next one would forget whose names have not arrived yet."""
        for shard in self._topology().leaving:
            self._drain(shard, Deadline.after(RESUME_S))
        if self._topology().former:
            self._complete()

    @contextmanager
    def _in_turn(self, what: str, timeout: float) -> Generator[Deadline]:
        """Begin a change when the others have ended, and finish what `resume` could not.

        Raises:
            OperationTimeoutError: that took longer than the timeout.
            ShardUnavailableError: the repository is being stopped.
        """
        deadline = Deadline.after(timeout)
        if not self._resumed.wait(deadline.left()) or not self._turn.acquire(timeout=deadline.left()):
            raise OperationTimeoutError(
                f"{what}: expected to begin within {timeout} s; another change of the shards is still in progress"
            )
        try:
            self._check_wanted(what)
            self._finish()
            yield deadline
        finally:
            self._turn.release()

    def _check_wanted(self, what: str) -> None:
        if not self._rest.passed:
            raise ShardUnavailableError(f"{what}: expected a running repository; it is being stopped")

    def _changed(self, change: Callable[[_Done], None], deadline: Deadline) -> ScaleReport:
        """Make a change, and say what it did."""
        began, before, done = time.monotonic(), self._topology(), _Done()
        total = sum(stats.bytes_metadata for stats in self._stats(before, deadline))
        change(done)
        after = len(self._topology().shards)
        seconds = time.monotonic() - began
        return ScaleReport(len(before.shards), after, done.names, done.metadata, total, done.tensors, seconds)

    def _scale(self, shards: int, deadline: Deadline, done: _Done) -> None:
        while (present := len(self._topology().shards)) != shards:
            if shards > present:
                self._join(self._spread(min(shards - present, JOIN_MOST), deadline), deadline)
            else:
                done.tensors += self._drain(self._emptiest(self._dispensable(deadline), deadline), deadline)
            done.count(self._complete())

    def _make(self, move: Move, deadline: Deadline, done: _Done) -> None:
        if move.join:
            known = {node.id: node for node in self._nodes()}
            nodes = [known[node] for node in move.join if node in known]
            if not nodes:
                return  # all of them have gone
            self._join(nodes, deadline)
        else:
            done.tensors += self._drain(self._emptiest(move.drain, deadline), deadline)
        done.count(self._complete())

    # ---- joining --------------------------------------------------------------------------------------

    def _join(self, nodes: Sequence[Node], deadline: Deadline) -> None:
        """Start a shard on each of these nodes, and decide that they belong to the repository when all answer."""
        if self._plan is None:
            raise ShardUnavailableError("scale: expected a repository that can start shards")
        before = self._topology()
        after = before.grown([1 + secrets.randbelow((1 << TAG_BITS) - 1) for _ in nodes])
        fresh = after.shards[len(before.shards) :]
        try:
            self._spawn(self._plan, after, dict(zip(fresh, nodes, strict=True)), deadline)
        except BaseException:
            for shard in fresh:
                self._end(shard)
            raise
        self._announce(after)

    def _announce(self, topology: Topology) -> None:
        """Decide: from now on, there is no way back."""
        self._finished(None)
        self._recorded(topology)
        self._tell(topology.former, ShardCalls.learn(topology))
        self._decide(topology)

    def _spread(self, count: int, deadline: Deadline) -> list[Node]:
        """Choose nodes for so many shards: those that have the fewest.

        Raises:
            ShardUnavailableError: there is no node where one may join.
        """
        able = {node.id: node for node in self._nodes()}
        if not able:
            raise ShardUnavailableError("scale: expected a node that may run a shard and is not leaving; found none")
        return [able[node] for node in spread(list(able), Counter(self.places(deadline).values()), count)]

    def _spawn(self, plan: ShardPlan, topology: Topology, chosen: Mapping[int, Node], deadline: Deadline) -> None:
        from ..shard.shard import Shard  # it imports what imports this

        rooms = self._reservations.take(chosen, plan.store_bytes)
        for shard, node in chosen.items():
            config = plan.config(topology, shard, rooms[shard])
            name = actor_name(topology.repository, shard)
            self._engine.spawn(Shard, name, {"engine": self._engine, "config": config}, node.id)
        for shard in chosen:
            self._await_start(shard, deadline)

    def _await_start(self, shard: int, deadline: Deadline) -> None:
        """Wait until a shard answers, in steps: the repository may be stopped meanwhile."""
        while True:
            self._check_wanted(f"shard {shard} joins")
            try:
                self._shards[shard].call(ShardCalls.stats(), deadline.left(START_S))
                return
            except OperationTimeoutError:
                if deadline.passed:
                    raise

    def places(self, deadline: Deadline) -> dict[int, str]:
        """Return the node of each shard.

        Raises:
            ShardUnavailableError, OperationTimeoutError: one does not answer, as it is being restarted.
        """
        asked = {shard: self._shards[shard].send(ShardCalls.node()) for shard in self._topology().shards}
        return {shard: answer.result(deadline.left(PEER_TIMEOUT_S)) for shard, answer in asked.items()}

    # ---- draining -------------------------------------------------------------------------------------

    def _dispensable(self, deadline: Deadline) -> Sequence[int]:
        """Return the shards that drain first: those whose node leaves; where none does, all."""
        staying = {node.id for node in self._nodes()}
        leaving = [shard for shard, node in self.places(deadline).items() if node not in staying]
        return leaving or self._topology().shards

    def _emptiest(self, shards: Sequence[int], deadline: Deadline) -> int:
        """Choose, of these, the shard with the fewest bytes; of several, the one that joined last."""
        stats = self._stats(self._topology(), deadline)
        return min(
            (s for s in stats if s.shard in shards), key=lambda s: (s.bytes_memory + s.bytes_disk, -s.shard)
        ).shard

    def _drain(self, shard: int, deadline: Deadline) -> int:
        """Have a shard's segments copied to its successors, and decide that these hold them; gives the bytes."""
        warned = self._topology().warned([shard])
        after = warned.shrunk([shard])
        self._recorded(warned)
        self._decide(warned)
        try:
            self._tell(warned.alive, ShardCalls.learn(warned), deadline)
            self._shards[shard].call(ShardCalls.copy_out(after), deadline.left())
        except BaseException:
            # it has, where an earlier incarnation of the planner had it do so
            if not self._until_done(shard, ShardCalls.has_moved()):
                self._stay()
                raise
        nbytes = self._until_done(shard, ShardCalls.move_segments(after), longest=LONG_S)
        self._announce(after)
        return nbytes

    def _stay(self) -> None:
        """Undo what was prepared for a drain."""
        calm = self._topology().warned(())
        self._recorded(calm)
        self._decide(calm)
        self._tell(calm.alive, ShardCalls.learn(calm))

    def _dismiss(self, shard: int) -> None:
        """End a shard that has drained, when the saves that began there are done."""
        deadline, pauses = Deadline.after(LINGER_S), Backoff(RETRY_S, RETRY_S)
        try:
            while self._shards[shard].call(ShardCalls.is_needed(), PEER_TIMEOUT_S) and pauses.wait(deadline):
                self._check_wanted(f"shard {shard} drains")
        except TensorVineError as exc:
            log.warning("drained shard %d does not answer: %s", shard, exc)
        self._end(shard)

    # ---- after the decision ---------------------------------------------------------------------------

    def _complete(self) -> Moved:
        """Have all shards go by the topology that was decided on, have names move, and say that all have arrived."""
        topology = self._topology()
        self._tell(topology.alive, ShardCalls.learn(topology))
        for shard in set(topology.shards) - set(topology.former):
            self._until_done(shard, ShardCalls.catch_up(self._ledger()))
        names = nbytes = 0
        for shard in topology.former:
            moved = self._until_done(shard, ShardCalls.hand_over(), longest=LONG_S)
            names, nbytes = names + moved.names, nbytes + moved.metadata_bytes
            self._finished(shard)
        settled = topology.settled()
        self._recorded(settled)
        self._decide(settled)
        self._tell(settled.alive, ShardCalls.learn(settled))
        for shard in set(topology.former) - set(topology.shards):
            self._dismiss(shard)
        return Moved(names, nbytes)

    def _tell(self, shards: Sequence[int], request: Request[None], deadline: Deadline = NEVER) -> None:
        for shard in shards:
            self._until_done(shard, request, deadline)

    def _until_done(
        self, shard: int, request: Request[_R], deadline: Deadline = NEVER, longest: float = PEER_TIMEOUT_S
    ) -> _R:
        """Call a shard until it has answered, `longest` seconds each time; without a `deadline` there is no way back.

        Raises:
            OperationTimeoutError: it did not by then.
        """
        what, pauses = request.remote.name, Backoff(RETRY_S, RETRY_S)
        while True:
            timeout = deadline.left(longest)
            if not timeout:
                raise OperationTimeoutError(f"change of the shards: expected shard {shard} to answer {what} in time")
            try:
                return self._shards[shard].call(request, timeout)
            except RepositoryNotFoundError:
                raise  # the repository was closed meanwhile
            except TensorVineError as exc:
                log.warning("change of the shards: shard %d: %s failed, retrying: %s", shard, what, exc)
            pauses.wait(deadline)

    def _recorded(self, topology: Topology) -> None:
        """Record a topology: where it cannot be said whether it is, it must be."""
        pauses = Backoff(RETRY_S, RETRY_S)
        while True:
            try:
                return self._record(topology)
            except TensorVineError as exc:
                log.warning(
                    "change of the shards: topology %d could not be recorded, retrying: %s", topology.version, exc
                )
            pauses.wait()

    # ---- within ---------------------------------------------------------------------------------------

    def _end(self, shard: int) -> None:
        """End a shard for good. One that was never decided on leaves its number to another."""
        self._engine.kill(actor_name(self._topology().repository, shard))
        self._reservations.release(shard)
        self._shards.forget(shard)

    def _stats(self, topology: Topology, deadline: Deadline) -> list[ShardStats]:
        return [self._shards[shard].call(ShardCalls.stats(), deadline.left()) for shard in topology.shards]
