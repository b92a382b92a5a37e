"""The shard actor: `store.shard.ShardState` brought to life.

Rules
- The state decides, this file acts: it takes the lock, asks the state, and carries out what the state left. What
  concerns bytes is in `holdings`. No rule of what is kept or freed stands here.
- Concurrency groups run in threads of their own: `ctl` for short answers, `data` for bytes, `watch` for long polls.
  Copies run in worker threads, so that no group's loop ever waits for memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..planner.placement import home_of
from ..store.arena import Part
from ..store.errors import TensorVineError
from ..store.index import PrefixQuery
from ..store.manifest import Header
from ..store.refs import ModelRef
from ..store.segment import SegmentId
from ..store.shard import Block, Draft, Holds, Match, ShardState, ShardStats
from .engine import Engine, group
from .holdings import Counters, Filled, Holdings
from .memory import process_watch
from .messages import PEER_TIMEOUT_S, Begun, Fetched, Hello, ShardConfig, actor_name, planner_name

log = logging.getLogger(__name__)

_ROOM = "/"  # no model's name starts with a slash
SWEEP_S = 0.5


class Shard:
    """One shard of a repository, as an actor."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        self._engine = engine
        self._config = config
        self._lock = threading.RLock()
        self._state = ShardState(config.index, lambda name: home_of(name, config.shards), config.session_s)
        self._holdings = Holdings(self._state, self._lock, engine, config.capacity, config.preallocate_bytes)
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._processes: dict[str, tuple[int, Any]] = {}
        self._peers: dict[int, Any] = {}
        self._planner = engine.find(planner_name(config.repository))
        if engine.restarted():
            self._recover()
        self._sweeper = threading.Thread(target=self._sweep, name="tensorvine-sweep", daemon=True)
        self._sweeper.start()

    # ---- clients ----------------------------------------------------------------------------------------

    @group("ctl")
    async def hello(self, client: str, node: str, pid: int) -> Hello:
        """Introduce a client; one on this node is watched by its process."""
        here = self._engine.this_node()
        with self._lock:
            self._state.open(client, time.monotonic())
            if node == here and client not in self._processes:
                try:
                    pidfd = os.pidfd_open(pid)
                    self._processes[client] = (pidfd, process_watch(pidfd))
                except OSError as exc:
                    log.warning("client %s cannot be watched, its session must expire: %s", client, exc)
        return Hello(self._config.index, here, os.getpid(), self._holdings.memory.fd, self._holdings.memory.capacity)

    @group("ctl")
    async def goodbye(self, client: str) -> None:
        """End a client's session at once."""
        self._end(client)
        await self._settle()

    @group("ctl")
    async def renew(self, client: str) -> bool:
        """Keep a client's session alive."""
        with self._lock:
            return self._state.renew(client, time.monotonic())

    # ---- saving -----------------------------------------------------------------------------------------

    @group("ctl")
    async def begin(
        self,
        client: str,
        name: str,
        version: int | None,
        optional: bool,
        known: ModelRef | None,
        digests: bool,
        save_id: str,
        sizes: Sequence[int],
    ) -> Begun:
        """Start a save: pin the parent, unless it is `optional` and there is none.

        Grants memory for blocks of `sizes`, as far as there is some, unless `digests` can make them needless.
        """
        with self._lock:
            self._state.open(client, time.monotonic())
            absent = optional and self._state.newer(name, 0) is None
            offsets = self._holdings.grant(save_id, sizes) if absent or not digests else []
            if absent:
                return Begun(None, None, None, {}, offsets)
            record, lease = self._state.pin(name, version, client, time.monotonic())
        hashes = await self.digests([s for s in record.segments if s[0] == self._config.index]) if digests else {}
        return Begun(record.header, None if record.header.ref == known else record.body, lease, hashes, offsets)

    @group("ctl")
    async def digests(self, segments: Sequence[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        """Give the content hashes of segments, waiting for those that are being computed."""
        for future in self._holdings.hashing(segments):
            await asyncio.wrap_future(future)
        with self._lock:
            return self._state.digests(segments)

    @group("ctl")
    async def grant(self, client: str, save_id: str, sizes: Sequence[int], timeout: float) -> list[int]:
        """Grant memory for at least the first of `sizes`, waiting while what others hold may become free.

        Raises:
            StoreFullError: there is no room, and none can be expected in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                self._state.open(client, time.monotonic())
                offsets = self._holdings.grant(save_id, sizes)
                waiter = self._waiter(_ROOM) if not offsets and self._holdings.room_may_come(save_id) else None
            if offsets:
                return offsets
            if waiter is None or not await self._woken(_ROOM, waiter, deadline):
                raise self._holdings.full(save_id, sizes[0])

    @group("ctl")
    async def adopt(self, save_id: str, life: int, blocks: Sequence[Filled]) -> None:
        """Take what a client filled, in this `life` of the shard, for a version whose home is elsewhere."""
        with self._lock:
            self._holdings.adopt(save_id, life, blocks)

    @group("data")
    async def adopt_block(
        self, save_id: str, segment: SegmentId, block: np.ndarray, sizes: Sequence[int], timeout: float
    ) -> None:
        """Copy a block that a client of another node put into this shard's memory, and take that."""
        (offset,) = await self.grant(save_id.partition("/")[0], save_id, [block.nbytes], timeout)
        part = Part(offset, block.nbytes)
        try:
            await self._holdings.in_thread(np.copyto, self._holdings.memory.part(part), block)
            with self._lock:
                self._holdings.adopt(save_id, os.getpid(), [(segment, part, sizes)])
        except BaseException:
            with self._lock:
                self._holdings.give_back(part, save_id)
            raise

    @group("ctl")
    async def commit(
        self,
        draft: Draft,
        client: str,
        life: int,
        blocks: Sequence[Filled],
        leases: Sequence[str],
    ) -> tuple[ModelRef, int]:
        """Take what a client filled in this `life` of the shard, and make a version exist, on every shard it needs.

        Gives its reference and its time (UTC, ns).
        """
        with self._lock:
            self._state.open(client, time.monotonic())
            self._holdings.adopt(draft.save_id, life, blocks)
            ref = self._state.begin_commit(draft)
        try:
            await self._hold_elsewhere(str(ref), draft.holds)
            created_ns = time.time_ns()
            await self._tell_planner({ref: (draft.parent, True)})
        except BaseException:
            with self._lock:
                self._state.abandon(ref)
            await self._tell_planner_gently({ref: (draft.parent, False)})
            await self._release_elsewhere(str(ref), {s for s, _ in draft.holds})
            raise
        with self._lock:
            self._state.publish(ref, draft, created_ns)
            self._state.unpin(leases)
            self._holdings.drop_save(draft.save_id)
        self._wake(ref.name)
        await self._settle()
        return ref, created_ns

    @group("ctl")
    async def abort(self, save_id: str, leases: Sequence[str]) -> None:
        """Forget what an unfinished save brought."""
        with self._lock:
            self._state.release(save_id)
            self._holdings.drop_save(save_id)
            self._state.unpin(leases)
        await self._settle()

    # ---- reading ----------------------------------------------------------------------------------------

    @group("ctl")
    async def fetch(
        self,
        client: str,
        name: str,
        version: int | None,
        known: ModelRef | None,
        wanted: Mapping[SegmentId, int] | None,
        local: bool,
    ) -> Fetched:
        """Give a version's manifest, unless `known`, and blocks: those `wanted`, or all that lie here when None.

        A client that is not `local`, one that cannot map this shard's memory, gets blocks that the engine carries.
        """
        with self._lock:
            record = self._state.record(name, version, client)
            if wanted is None:
                wanted = {segment: -1 for segment in record.segments if segment[0] == self._config.index}
            blocks = self._state.blocks(wanted)
            body = None if record.header.ref == known else record.body
            counters = self._holdings.counters
            views = {} if local else self._holdings.views(blocks)
        if not local:
            blocks = await self._holdings.in_thread(self._holdings.exported, blocks, views)
        return Fetched(record.header, body, blocks, counters)

    @group("ctl")
    async def blocks(self, wanted: Mapping[SegmentId, int], local: bool) -> tuple[dict[SegmentId, Block], Counters]:
        """Give blocks of this shard's segments, and the counters at which the answer holds."""
        with self._lock:
            blocks, counters = self._state.blocks(wanted), self._holdings.counters
            views = {} if local else self._holdings.views(blocks)
        if not local:
            blocks = await self._holdings.in_thread(self._holdings.exported, blocks, views)
        return blocks, counters

    @group("ctl")
    async def header(self, client: str, name: str, version: int | None) -> Header:
        """Give what is known of a version without its table."""
        with self._lock:
            return self._state.record(name, version, client).header

    @group("ctl")
    async def body(self, client: str, ref: ModelRef) -> bytes:
        """Give a version's table of tensors."""
        with self._lock:
            return self._state.record(ref.name, ref.version, client).body

    @group("ctl")
    async def architecture(self, key: bytes) -> tuple[str, str | None]:
        """Give a stored graph's JSON text and the framework's recipe for it."""
        with self._lock:
            return self._state.architecture(key)

    @group("ctl")
    async def match(self, client: str, queries: Sequence[PrefixQuery]) -> tuple[list[Match | None], dict[bytes, str]]:
        """Answer prefix queries, each with a pin, and the graphs, as JSON, of the models found."""
        with self._lock:
            found = self._state.match(queries, client, time.monotonic())
            keys = {match.graph_key for match in found if match is not None}
            return found, {key: self._state.architecture(key)[0] for key in keys}

    @group("ctl")
    async def unpin(self, leases: Sequence[str]) -> None:
        """Let pins go."""
        with self._lock:
            self._state.unpin(leases)
        await self._settle()

    @group("ctl")
    async def find(self, pattern: Sequence[Mapping[str, Any]], exact: bool) -> list[ModelRef]:
        """List versions whose architecture fits a pattern."""
        with self._lock:
            return self._state.find(pattern, exact)

    @group("ctl")
    async def models(self, prefix: str) -> list[ModelRef]:
        """List live versions."""
        with self._lock:
            return self._state.models(prefix)

    @group("ctl")
    async def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Give a version and its ancestors, as far as this shard knows."""
        with self._lock:
            return self._state.chain(ref)

    @group("ctl")
    async def offspring(self, refs: Sequence[ModelRef]) -> list[tuple[ModelRef, bool]]:
        """Give descendants, as far as this shard knows, and whether each lives."""
        with self._lock:
            return self._state.offspring(refs)

    @group("ctl")
    async def stats(self) -> ShardStats:
        """Sum up what is here."""
        with self._lock:
            return replace(self._state.stats(), bytes_staged=self._holdings.bytes_filling)

    @group("ctl")
    async def check(self) -> None:
        """Derive all counts anew and compare."""
        with self._lock:
            self._state.check()

    @group("watch")
    async def wait_newer(self, name: str, after: int, timeout: float) -> ModelRef | None:
        """Answer as soon as `name` has a version above `after`; None when none came in time."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                newest = self._state.newer(name, after)
                waiter = self._waiter(name) if newest is None else None
            if waiter is None:
                return newest
            if not await self._woken(name, waiter, deadline):
                return None

    # ---- retiring ---------------------------------------------------------------------------------------

    @group("ctl")
    async def retire(self, name: str, version: int | None) -> ModelRef:
        """Make a version cease to exist."""
        with self._lock:
            ref = self._state.resolve(name, version)
            self._state.retire(ref)
        self._wake(None)
        await self._tell_planner_gently({ref: (None, False)})
        await self._settle()
        return ref

    # ---- between shards ---------------------------------------------------------------------------------

    @group("ctl")
    async def hold(self, holder: str, holds: Holds) -> None:
        """Hold slots here for a version whose home is elsewhere."""
        with self._lock:
            self._state.hold(holder, holds)

    @group("ctl")
    async def release(self, holder: str) -> None:
        """Forget a holder whose home is elsewhere."""
        with self._lock:
            self._state.release(holder)
        await self._settle()

    @group("ctl")
    async def release_homes(self, home: int) -> None:
        """Forget what a shard that lost its memory held here."""
        with self._lock:
            self._state.release_homes(home)
        await self._settle()

    @group("ctl")
    async def census(self) -> dict[ModelRef, tuple[ModelRef | None, bool]]:
        """Tell the planner, which lost it, what this shard was ever home to."""
        with self._lock:
            return self._state.census()

    # ---- within -----------------------------------------------------------------------------------------

    async def _hold_elsewhere(self, holder: str, holds: Holds) -> None:
        by_shard: dict[int, dict[SegmentId, Sequence[int]]] = {}
        for segment, slots in holds.items():
            if segment[0] != self._config.index:
                by_shard.setdefault(segment[0], {})[segment] = slots
        await asyncio.gather(*(self._tell(shard, "hold", holder, part) for shard, part in by_shard.items()))

    async def _release_elsewhere(self, holder: str, shards: set[int]) -> None:
        for shard in shards - {self._config.index}:
            await self._tell_gently(shard, "release", holder)

    async def _settle(self) -> None:
        """Carry out what the state left: free memory, start compactions, tell other shards."""
        for shard, holder in self._settle_here():
            await self._tell_gently(shard, "release", holder)

    def _settle_here(self) -> list[tuple[int, str]]:
        """Do of it what concerns this shard only; give what is for others."""
        with self._lock:
            outbox, self._state.outbox = self._state.outbox, []
            self._holdings.settle()
        self._wake(_ROOM)
        return outbox

    def _sweep(self) -> None:
        """End the sessions of clients that died or fell silent. Runs as long as the process."""
        pause = threading.Event()
        while not pause.wait(SWEEP_S):
            try:
                self._sweep_once()
            except Exception:
                log.exception("shard %d: a sweep failed; the next comes in %s s", self._config.index, SWEEP_S)

    def _sweep_once(self) -> None:
        self._holdings.start_hashing()
        with self._lock:
            ended = self._state.sweep(time.monotonic())
            died = [client for client, (_, alive) in self._processes.items() if not alive()]
        for client in {*ended, *died}:
            log.info("client %s is gone: its pins and unfinished saves are dropped", client)
            self._end(client, parts_too=client in died)
        self._holdings.drop_idle_exports()
        for shard, holder in self._settle_here():
            self._engine.call(self._peer(shard), "release", holder)

    def _end(self, client: str, parts_too: bool = True) -> None:
        with self._lock:
            self._state.end(client)
            if parts_too:
                self._holdings.drop_client(client)
                watched = self._processes.pop(client, None)
                if watched is not None:
                    os.close(watched[0])

    def _recover(self) -> None:
        """Learn what an earlier life held, so that it is answered as lost by name and no version is used twice."""
        index = self._config.index
        census = self._engine.call(self._planner, "census_of", index)
        self._state.restore(self._engine.result(census, PEER_TIMEOUT_S, "planner"))
        for shard in self._config.shards:
            if shard != index:
                self._engine.call(self._peer(shard), "release_homes", index)
        log.warning("shard %d started again: what was only in its memory is lost", index)

    def _waiter(self, topic: str) -> asyncio.Event:
        """Join those who are woken when `topic` changes: a name, or the room in the memory."""
        event = asyncio.Event()
        self._waiting.setdefault(topic, []).append((asyncio.get_running_loop(), event))
        return event

    async def _woken(self, topic: str, event: asyncio.Event, deadline: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            return False
        finally:
            with self._lock:
                left = [waiter for waiter in self._waiting.pop(topic, []) if waiter[1] is not event]
                if left:
                    self._waiting[topic] = left
        return True

    def _wake(self, topic: str | None) -> None:
        """Show the epoch, and let those who wait on `topic` look again. Loops differ: each group has its own."""
        with self._lock:
            self._holdings.publish()
            waiting = self._waiting.pop(topic, []) if topic is not None else []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    def _peer(self, shard: int) -> Any:
        if shard not in self._peers:
            self._peers[shard] = self._engine.find(actor_name(self._config.repository, shard))
        return self._peers[shard]

    async def _tell(self, shard: int, method: str, *arguments: Any) -> Any:
        future = self._engine.call(self._peer(shard), method, *arguments)
        return await self._engine.awaitable(future, PEER_TIMEOUT_S, f"shard {shard}")

    async def _tell_gently(self, shard: int, method: str, *arguments: Any) -> None:
        """Tell a shard something that it need not hear if it died: then it forgot all of it anyway."""
        try:
            await self._tell(shard, method, *arguments)
        except TensorVineError as exc:
            log.warning("shard %d did not hear %s%s: %s", shard, method, arguments, exc)

    async def _tell_planner_gently(self, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Tell the planner what is over: if it does not hear, the worst is that a loss is reported that was none."""
        try:
            await self._tell_planner(news)
        except TensorVineError as exc:
            log.warning("the planner did not hear of %s: %s", list(news), exc)

    async def _tell_planner(self, news: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        future = self._engine.call(self._planner, "note", self._config.index, dict(news))
        await self._engine.awaitable(future, PEER_TIMEOUT_S, "planner")
