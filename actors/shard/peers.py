"""What one shard says to the other shards of its repository and to the planner.

Rules
- A commit is noted by the planner and by every other shard before the version exists. A shard that does not hear it is
  not waited for: that it is owed something is recorded first (`registry`), and it is told until it has heard.
- A shard that starts again holds nothing at another before that has let go of what an earlier life held there: a
  message that says so and comes late counts for nothing (`release_homes`).
- Every call has a timeout. What a shard need not hear if it died, it is told gently: a failure is a log line.
- What goes wrong is an error of the one tree, also where a shard is not there any more.
- Coroutines are for the actor's own loops; `ask` and `send` are for its threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...planner.topology import Topology
from ...store.errors import OperationTimeoutError, RepositoryNotFoundError, ShardUnavailableError, TensorVineError
from ...store.refs import ModelRef
from ...store.segments.segment import Holds, SegmentId
from ...store.versions.ledger import Fact, Told
from ..engine.engine import Actor, Engine
from ..rpc.link import Link
from ..rpc.messages import PEER_TIMEOUT_S, ShardConfig, Standing, actor_name, planner_name
from ..rpc.registry import Registry

log = logging.getLogger(__name__)

STANDING_PAUSE_S = 0.5
NOTE_S = 2.0
"""How long a commit waits for a shard to note it."""
OWED_PAUSE_S = 0.2

Sender = tuple[int, int]
"""A shard that hands names over: its number, and how often it has started again."""
LONG_TIMEOUT_S = 120.0
"""How long a shard may take for what has many bytes."""


class Peers:
    """The other actors of a repository, as one shard sees them."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        self._engine = engine
        self._config = config
        try:
            self._planner = engine.find(planner_name(config.repository))
        except LookupError as exc:
            raise RepositoryNotFoundError(
                f"shard {config.index} of {config.repository!r}: expected its planner to run; it was stopped"
            ) from exc
        self._to_planner = Link(engine, self._planner, "planner")
        self._shards: dict[int, Actor] = {}
        self._links: dict[int, Link] = {}
        self._registry = Registry(engine, config.repository, config.start)
        self._owed: dict[int, dict[ModelRef, Fact]] = {}
        """Shard -> what it has not heard of."""
        self._paying: dict[int, asyncio.Task[None]] = {}
        self._recording = asyncio.Lock()
        self._recorded = config.index in self._registry.owing() if engine.restarted() else False
        """It stands in the registry that some are owed something; an earlier life's word stays until all is paid."""
        self._restarts = self._registry.count_restart(config.index) if engine.restarted() else 0
        self._stale: dict[int, tuple[list[str], int]] = {}
        """Shard that may hold what an earlier life had there -> what it is to keep, and the topology's version."""
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

    def restarts(self) -> dict[int, int]:
        """Return how often each shard has started again, as far as that counts here: not, before this one has."""
        return self._registry.restarts() if self._restarts else {}

    def forget_earlier(self, kept: Iterable[str]) -> None:
        """Have the other shards let go of what an earlier life held there, but for some versions; does not wait."""
        self._stale = {shard: (list(kept), self.topology.version) for shard in self.others}
        for shard, told in self._stale.items():
            self.send(shard, "release_homes", self._config.index, *told, self._restarts)

    async def _hold_at(self, shard: int, holder: str, part: Holds) -> None:
        link, stale = self._link(shard), self._stale.get(shard)
        if stale is not None:  # whether it has heard of that is not known
            await link.call(PEER_TIMEOUT_S, "release_homes", self._config.index, *stale, self._restarts)
            self._stale.pop(shard, None)
        await link.call(PEER_TIMEOUT_S, "hold", holder, part)

    async def hold(self, holder: str, holds: Holds) -> None:
        """Have the other shards hold their part of what a version names."""
        by_shard: dict[int, dict[SegmentId, Sequence[int]]] = {}
        for segment, slots in holds.items():
            if (shard := self.topology_after.where(segment)) != self._config.index:
                by_shard.setdefault(shard, {})[segment] = slots
        await asyncio.gather(*(self._hold_at(shard, holder, part) for shard, part in by_shard.items()))

    def keepers(self, holds: Holds) -> set[int]:
        """Name the other shards that `hold` would ask."""
        return set(map(self.topology_after.where, holds)) - {self._config.index}

    async def release(self, holder: str, shards: Iterable[int]) -> None:
        """Have shards forget a holder, all at once; where one has drained and is gone, those that have its segments."""
        await asyncio.gather(*(self._release_at(shard, holder) for shard in shards))

    async def _release_at(self, shard: int, holder: str) -> None:
        try:
            await self.tell(shard, "release", holder)
        except TensorVineError as exc:
            heirs = self.topology.gone.get(shard, ())
            if not heirs:  # if it died, it forgot all of it anyway
                log.warning("shard %d did not hear release%s: %s", shard, (holder,), exc)
            await self.release(holder, heirs)

    async def note(self, news: Mapping[ModelRef, Fact]) -> None:
        """Tell the planner and the other shards what was committed: version -> its parent, and whether it exists."""
        told = dict(news)
        planner = self._to_planner.call(PEER_TIMEOUT_S, "note", told)
        others = [self._note_at(shard, told) for shard in self.others]
        await (asyncio.gather(planner, *others) if others else planner)  # a task of its own takes 30 us

    async def note_gently(self, news: Mapping[ModelRef, Fact]) -> None:
        """Tell them what is over: if the planner does not hear, the worst is that a loss is reported that was none."""
        try:
            await self.note(news)
        except TensorVineError as exc:
            log.warning("the planner did not hear of %s: %s", list(news), exc)

    async def arrives(self, names: Sequence[str], sender: Sender) -> None:
        """Tell the planner what names come here in the change that is under way.

        Raises:
            MovedError: who sent them has started again since.
        """
        await self._to_planner.call(PEER_TIMEOUT_S, "arrives", self._config.index, list(names), *sender)

    @property
    def sender(self) -> Sender:
        """This shard, as it tells those to whom it hands names."""
        return self._config.index, self._restarts

    def owe(self, news: Mapping[ModelRef, Fact]) -> None:
        """Have the other shards be told, with the next commit, what an earlier life owed them, if it did."""
        for shard in self.others if self._recorded else ():
            self._owed.setdefault(shard, {}).update(news)

    def tell_planner(self, told: Told) -> None:
        """Tell the planner, which may have been lost as well, all that is known here; does not wait."""
        self._engine.call(self._planner, "merge", told)

    async def _note_at(self, shard: int, news: Mapping[ModelRef, Fact]) -> None:
        if shard not in self._owed:
            try:
                await self._link(shard).call(NOTE_S, "note", news)
                return
            except (LookupError, TensorVineError) as exc:
                log.info("shard %d does not hear of %s yet: %s", shard, list(news), exc)
        self._owed.setdefault(shard, {}).update(news)
        if shard not in self._paying:
            self._paying[shard] = asyncio.create_task(self._pay(shard))
        await self._record_owing()

    async def _pay(self, shard: int) -> None:
        """Tell a shard what it is owed until it has heard all, or has left."""
        while (owed := self._owed.get(shard)) and shard in self.others:
            told = dict(owed)
            try:
                await self._link(shard).call(PEER_TIMEOUT_S, "note", told)
            except (LookupError, TensorVineError):
                await asyncio.sleep(OWED_PAUSE_S)
                continue
            for ref in [ref for ref, fact in told.items() if owed[ref] == fact]:
                del owed[ref]
        del self._owed[shard], self._paying[shard]
        await self._record_owing()

    async def _record_owing(self) -> None:
        async with self._recording:
            if bool(self._owed) != self._recorded:
                self._recorded = bool(self._owed)
                await asyncio.to_thread(self._registry.owes, self._config.index, self._recorded)

    def send(self, shard: int, method: str, *arguments: Any) -> None:
        """Tell a shard something that it need not hear if it is not there any more; does not wait."""
        try:
            self._engine.call(self._actor(shard), method, *arguments)
        except TensorVineError as exc:
            log.warning("shard %d is not told %s%s: %s", shard, method, arguments, exc)

    def ask(self, shard: int, method: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Call a shard from a thread and wait for its answer."""
        future = self._engine.call(self._actor(shard), method, *arguments)
        return self._engine.result(future, timeout, f"shard {shard}")

    def standing(self) -> Standing:
        """Ask the planner how things stand, which tells it that this shard starts again.

        Waits for one that was lost as well, until it has heard all: without it this shard could not start.
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
            name = actor_name(self._config.repository, shard)
            try:
                self._shards[shard] = self._engine.find(name)
            except LookupError as exc:
                raise ShardUnavailableError(f"{name}: expected it to run; it has drained, or was stopped") from exc
        return self._shards[shard]
