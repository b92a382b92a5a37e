"""What one shard says to the other shards of its repository and to the planner.

Rules
- A commit is noted by the planner and by every other shard before the version exists. A shard that does not hear it is
  not waited for: that it is owed something is recorded first (`registry`), and it is told until it has heard.
- A shard that starts again holds nothing at another before that has let go of what an earlier incarnation held there: a
  message that says so and comes late counts for nothing (`release_homes`).
- Every call has a timeout. What a shard need not hear if it died, it is told gently: a failure is a log line.
- `hold` is repeated while a shard has no lease or is being restarted: the next try may reach its next process. `secure`
  is repeated only while it has no lease: after a restart it has no segments of a save.
- What goes wrong is an error of the one tree, also where a shard is not there any more.
- Coroutines are for the actor's own loops, `call` is for its threads; `post` is for both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ...planner.topology import Topology
from ...store.errors import OperationTimeoutError, RepositoryNotFoundError, ShardUnavailableError, TensorVineError
from ...store.holders import Holder
from ...store.refs import ModelRef
from ...store.segments.segment import Holds, SegmentId
from ...store.versions.ledger import Fact, Told
from ...store.waiting import Backoff, Deadline
from ..engine.engine import Engine
from ..rpc.calls import Request
from ..rpc.channel import Channel
from ..rpc.ledger_calls import LedgerCalls
from ..rpc.messages import PEER_TIMEOUT_S, RecoveryInfo, Sender, ShardConfig, planner_name
from ..rpc.registry import Registry
from ..rpc.shard_channels import ShardChannels
from .calls import ShardCalls
from .tenure import LapsedError

log = logging.getLogger(__name__)

RECOVERY_PAUSE_S = 0.5
NOTE_S = 2.0
"""How long a commit waits for a shard to note it."""
RESTART_PAUSE_S = (0.1, 1.0)
"""Shortest and longest pause between two tries to reach a shard that is being restarted, or has no lease."""
OWED_PAUSE_S = (0.2, 1.0)
"""Shortest and longest pause between two tries to tell a shard what it is owed."""

LONG_TIMEOUT_S = 120.0
"""How long a shard may take for what has many bytes."""

_R = TypeVar("_R")


class Peers:
    """The other actors of a repository, as one shard sees them."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        self._engine = engine
        self._config = config
        name = planner_name(config.repository)
        self._planner = Channel(engine, name, missing=RepositoryNotFoundError)
        self._shards = ShardChannels(engine, config.repository)
        self._registry = Registry(engine, config.repository, config.start)
        self._owed: dict[int, dict[ModelRef, Fact]] = {}
        """Shard -> what it has not heard of."""
        self._paying: dict[int, asyncio.Task[None]] = {}
        self._recording = asyncio.Lock()
        self._recorded = config.index in self._registry.owing() if engine.restarted() else False
        """It stands in the registry that some are owed something; an earlier incarnation's word stays until all is
        paid."""
        self._restarts = self._registry.count_restart(config.index) if engine.restarted() else 0
        self._stale: dict[int, tuple[list[ModelRef], int]] = {}
        """Shard that may hold what an earlier incarnation had there -> what it is to keep, and the topology's
        version."""
        self.topology = config.topology or Topology(config.repository, config.shards, config.start)
        """By which this shard goes."""
        self.topology_after = self.topology
        """By which its segments go: while it drains, the topology to come."""

    @property
    def others(self) -> list[int]:
        """The other shards."""
        return [shard for shard in self.topology.alive if shard != self._config.index]

    async def ask(self, shard: int, request: Request[_R], timeout: float = PEER_TIMEOUT_S) -> _R:
        """Call a shard from a loop, and await its answer."""
        return await self._shards[shard].ask(request, timeout)

    async def repeat(
        self, shard: int, request: Request[_R], deadline: Deadline, kind: type[TensorVineError] = ShardUnavailableError
    ) -> _R:
        """Call a shard as `ask` does, and repeat the call after errors of a kind, while the shard starts again."""
        pauses, again = Backoff(*RESTART_PAUSE_S), False
        while True:
            try:
                return await self.ask(shard, request, deadline.left())
            except ShardUnavailableError as exc:  # after a refusal also because the former process ends meanwhile
                again = (again or isinstance(exc, kind)) and shard in self.topology.alive
                if not again or not await pauses.wait_async(deadline):
                    raise

    def call(self, shard: int, request: Request[_R], timeout: float) -> _R:
        """Call a shard from a thread, and wait for its answer."""
        return self._shards[shard].call(request, timeout)

    def post(self, shard: int, request: Request[object]) -> None:
        """Tell a shard something that it need not hear if it is not there any more; does not wait."""
        try:
            self._shards[shard].post(request)
        except TensorVineError as exc:
            log.warning("shard %d: sending %s failed: %s", shard, request, exc)

    async def tell_gently(self, shard: int, request: Request[object]) -> None:
        """Tell a shard something that it need not hear if it died: then it forgot all of it anyway."""
        try:
            await self.ask(shard, request)
        except TensorVineError as exc:
            log.warning("shard %d: sending %s failed: %s", shard, request, exc)

    def restarts(self) -> dict[int, int]:
        """Return how often each shard has started again, as far as that counts here: not, before this one has."""
        return self._registry.restarts() if self._restarts else {}

    def forget_earlier(self, kept: Iterable[ModelRef]) -> None:
        """Have the other shards let go of what an earlier incarnation held there, but for some versions; does not
        wait."""
        self._stale = {shard: (list(kept), self.topology.version) for shard in self.others}
        for shard, told in self._stale.items():
            self.post(shard, ShardCalls.release_homes(self._config.index, *told, self._restarts))

    async def _hold_at(self, shard: int, ref: ModelRef, part: Holds, deadline: Deadline) -> None:
        stale = self._stale.get(shard)
        if stale is not None:  # whether it has heard of that is not known
            release = ShardCalls.release_homes(self._config.index, *stale, self._restarts)
            await self.repeat(shard, release, deadline)
            self._stale.pop(shard, None)
        await self.repeat(shard, ShardCalls.hold(ref, part), deadline)

    async def hold(self, ref: ModelRef, holds: Holds, deadline: Deadline) -> None:
        """Have the other shards hold their part of what a version names."""
        by_shard: dict[int, dict[SegmentId, Sequence[int]]] = {}
        for segment, slots in holds.items():
            if (shard := self.topology_after.where(segment)) != self._config.index:
                by_shard.setdefault(shard, {})[segment] = slots
        asked = [asyncio.ensure_future(self._hold_at(shard, ref, part, deadline)) for shard, part in by_shard.items()]
        try:
            await asyncio.gather(*asked)
        finally:  # after an error none is repeated: it would come after the release
            for one in asked:
                one.cancel()

    def keepers(self, holds: Holds) -> set[int]:
        """Name the other shards that `hold` would ask."""
        return set(map(self.topology_after.where, holds)) - {self._config.index}

    async def release(self, holder: Holder, shards: Iterable[int]) -> None:
        """Have shards forget a holder, all at once; where one has drained and is gone, those that have its segments."""
        await asyncio.gather(*(self._release_at(shard, holder) for shard in shards))

    async def _release_at(self, shard: int, holder: Holder) -> None:
        try:  # a refusal comes from an incarnation without a lease; the next one may have asked for its holders before
            await self.repeat(shard, ShardCalls.release(holder), Deadline.after(PEER_TIMEOUT_S), LapsedError)
        except TensorVineError as exc:
            successors = self.topology.gone.get(shard, ())
            if not successors:  # if it died, it forgot all of it anyway
                log.warning("shard %d could not be notified to release %s: %s", shard, holder, exc)
            await self.release(holder, successors)

    async def note(self, news: Mapping[ModelRef, Fact]) -> None:
        """Tell the planner and the other shards what was committed: version -> its parent, and whether it exists."""
        told = dict(news)
        planner = self._planner.ask(LedgerCalls.note(told), PEER_TIMEOUT_S)
        others = [self._note_at(shard, told) for shard in self.others]
        await (asyncio.gather(planner, *others) if others else planner)  # a task of its own takes 30 us

    async def note_gently(self, news: Mapping[ModelRef, Fact]) -> None:
        """Tell them what is over: if the planner does not hear, the worst is that a loss is reported that was none."""
        try:
            await self.note(news)
        except TensorVineError as exc:
            log.warning("the planner could not be notified of %s: %s", list(news), exc)

    async def arrives(self, names: Sequence[str], sender: Sender) -> None:
        """Tell the planner what names come here in the change that is under way.

        Raises:
            MovedError: who sent them has started again since.
        """
        await self._planner.ask(LedgerCalls.arrives(self._config.index, list(names), *sender), PEER_TIMEOUT_S)

    @property
    def sender(self) -> Sender:
        """This shard, as it tells those to whom it hands names."""
        return self._config.index, self._restarts

    def owe(self, news: Mapping[ModelRef, Fact]) -> None:
        """Have the other shards be told, with the next commit, what an earlier incarnation owed them, if it did."""
        for shard in self.others if self._recorded else ():
            self._owed.setdefault(shard, {}).update(news)

    def tell_planner(self, told: Told) -> None:
        """Tell the planner, which may have been lost as well, all that is known here; does not wait."""
        self._planner.post(LedgerCalls.merge(told))

    async def _note_at(self, shard: int, news: Mapping[ModelRef, Fact]) -> None:
        if shard not in self._owed:
            try:
                await self.ask(shard, ShardCalls.note(news), NOTE_S)
                return
            except TensorVineError as exc:
                log.info("notifying shard %d of %s failed, retrying: %s", shard, list(news), exc)
        self._owed.setdefault(shard, {}).update(news)
        if shard not in self._paying:
            self._paying[shard] = asyncio.create_task(self._pay(shard))
        await self._record_owing()

    async def _pay(self, shard: int) -> None:
        """Tell a shard what it is owed until it has heard all, or has left."""
        pauses = Backoff(*OWED_PAUSE_S)
        while (owed := self._owed.get(shard)) and shard in self.others:
            told = dict(owed)
            try:
                await self.ask(shard, ShardCalls.note(told))
            except TensorVineError:
                await pauses.wait_async()
                continue
            pauses.reset()
            for ref in [ref for ref, fact in told.items() if owed[ref] == fact]:
                del owed[ref]
        del self._owed[shard], self._paying[shard]
        await self._record_owing()

    async def _record_owing(self) -> None:
        async with self._recording:
            if bool(self._owed) != self._recorded:
                self._recorded = bool(self._owed)
                await asyncio.to_thread(self._registry.owes, self._config.index, self._recorded)

    def recovery_info(self) -> RecoveryInfo:
        """Ask the planner how things stand, which tells it that this shard starts again.

        Waits for one that was lost as well, until it has heard all: without it this shard could not start.
        """
        pauses = Backoff(RECOVERY_PAUSE_S, RECOVERY_PAUSE_S)
        while True:
            try:
                return self._planner.call(LedgerCalls.recovery_info(self._config.index), PEER_TIMEOUT_S)
            except (ShardUnavailableError, OperationTimeoutError) as exc:
                log.warning("shard %d restarts and is waiting for the planner: %s", self._config.index, exc)
                pauses.wait()
