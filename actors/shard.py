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
from ..store.errors import StorageError
from ..store.index import PrefixQuery
from ..store.manifest import Header
from ..store.refs import ModelRef
from ..store.segment import Block, Holds, SegmentId, Stored
from ..store.shard import Draft, Match, ShardState, ShardStats
from .engine import Engine, group
from .history import History, claims_on
from .holdings import Counters, Filled, Holdings
from .memory import process_watch
from .messages import (
    PEER_TIMEOUT_S,
    Begun,
    Chains,
    Disk,
    Fetched,
    Hello,
    Places,
    ShardConfig,
    ToStore,
)
from .peers import Peers
from .persister import Job
from .waiters import Waiters

log = logging.getLogger(__name__)

_ROOM = "/"  # no model's name starts with a slash
SWEEP_S = 0.5
DISK_PAUSE_S = 2.0
LOCK_S = 0.25
READ_ROUNDS = 32
"""How often a read may find that others pushed out again what it had brought into the memory."""


class Shard:
    """One shard of a repository, as an actor."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        self._engine = engine
        self._config = config
        self._lock = threading.RLock()
        self._state = ShardState(config.index, lambda name: home_of(name, config.shards), config.session_s)
        self._holdings = Holdings(self._state, self._lock, engine, config.capacity, config.preallocate_bytes)
        self._waiters = Waiters(self._lock)
        self._processes: dict[str, tuple[int, Any]] = {}
        self._peers = Peers(engine, config)
        again = engine.restarted()
        self._history = self._open_history(config.disk, again) if config.disk is not None else None
        if again:
            self._recover()
        self._stale = again and self._history is not None
        """What other homes name here must still be asked."""
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
        timeout: float,
    ) -> Begun:
        """Start a save: pin the parent, unless it is `optional` and there is none.

        Waits first for as long as too much waits to be written to disk. Grants memory for blocks of `sizes`, as far
        as there is some, unless `digests` can make them needless.

        Raises:
            OperationTimeoutError, StorageError: the disk is slower than the savers, or does not take anything.
        """
        await self._keep_pace(f"save of {name!r}", time.monotonic() + timeout)
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
        if self._history is not None:
            await self._history.digests(segments, self._granted)
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
        with self._lock:
            self._state.open(client, time.monotonic())
        return await self._granted(save_id, sizes, timeout)

    async def _granted(self, owner: str, sizes: Sequence[int], timeout: float = PEER_TIMEOUT_S) -> list[int]:
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                offsets = self._holdings.grant(owner, sizes)
                behind = self._history is not None and self._history.persister.behind()[0] > 0
                hope = not offsets and (behind or self._holdings.room_may_come(owner))  # the sweep wakes us, too
                waiter = self._waiters.join(_ROOM) if hope else None
            if offsets:
                return offsets
            if waiter is None or not await self._waiters.woken(_ROOM, waiter, deadline):
                raise self._holdings.full(owner, sizes[0])

    async def _keep_pace(self, what: str, deadline: float) -> None:
        """Wait while too much waits to be written to disk."""
        while self._history is not None and self._history.persister.is_full():
            with self._lock:
                waiter = self._waiters.join(_ROOM)
            if self._history.persister.is_full() and not await self._waiters.woken(_ROOM, waiter, deadline):
                raise self._history.persister.late(what)

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
        durable: bool,
        timeout: float,
    ) -> tuple[ModelRef, int]:
        """Take what a client filled in this `life` of the shard, and make a version exist, on every shard it needs.

        A `durable` one is written to disk first. Gives its reference and its time (UTC, ns).
        """
        deadline = time.monotonic() + timeout
        await self._keep_pace(f"save of {draft.name!r}", deadline)  # `begin` may have asked another shard
        with self._lock:
            self._state.open(client, time.monotonic())
            draft = self._history.drafted(draft) if self._history is not None else draft
            self._holdings.adopt(draft.save_id, life, blocks)
            ref = self._state.begin_commit(draft)
        created_ns = time.time_ns()
        try:
            await self._peers.hold(str(ref), draft.holds)
            await self._peers.note({ref: (draft.parent, True)})
            if durable:
                await self._write_now(draft, draft.header(ref, created_ns), deadline)
        except BaseException:
            with self._lock:
                self._state.abandon(ref)
            await self._peers.note_gently({ref: (draft.parent, False)})
            await self._peers.release(str(ref), {s for s, _ in draft.holds})
            raise
        with self._lock:
            self._state.publish(ref, draft, created_ns)
            self._state.unpin(leases)
            self._holdings.drop_save(draft.save_id)
            others: list[tuple[int, ModelRef]] = []
            if self._history is not None:
                if not durable:
                    self._history.persister.add(Job(draft.header(ref, created_ns), draft.body, urgent=False))
                others = self._history.retain(ref.name)
        self._wake(ref.name)
        await self._settle()
        for shard, cold in others:
            await self._peers.tell_gently(shard, "cool", cold)
        return ref, created_ns

    async def _write_now(self, draft: Draft, header: Header, deadline: float) -> None:
        """Write a version to disk before it exists in memory."""
        if self._history is None:
            raise StorageError(
                f"save of {draft.name!r}: durability 'disk': expected a repository with path=; it has none"
            )
        job = Job(header, draft.body, urgent=True)
        self._history.persister.add(job)
        await self._history.written(job, deadline - time.monotonic())

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
        wanted: Places | None,
        local: bool,
    ) -> Fetched:
        """Give a version's manifest, unless `known`, and blocks: those `wanted`, or all that lie here when None.

        What is on disk only is read first. A client that is not `local`, one that cannot map this shard's memory,
        gets blocks that the engine carries.
        """
        kept: list[np.ndarray] = []
        for _ in range(READ_ROUNDS):
            with self._lock:
                record = self._state.record(name, version, client)
                places = wanted
                if places is None:
                    places = {segment: (-1, slots) for segment, slots in self._state.held(record.header.ref).items()}
                found = self._found(places, local)
            if found is not None:
                break
            kept += await self._load(places)
        else:
            raise self._holdings.crowded(name)
        blocks, counters, views = found
        _let_go_soon(kept)
        body = None if record.header.ref == known else record.body
        if not local:
            blocks = await self._holdings.in_thread(self._holdings.exported, blocks, views)
        return Fetched(record.header, body, blocks, counters)

    @group("ctl")
    async def blocks(self, wanted: Places, local: bool) -> tuple[dict[SegmentId, Block], Counters]:
        """Give blocks of this shard's segments, read from disk where need be, and the counters at which this holds."""
        kept: list[np.ndarray] = []
        for _ in range(READ_ROUNDS):
            with self._lock:
                found = self._found(wanted, local)
            if found is not None:
                break
            kept += await self._load(wanted)
        else:
            raise self._holdings.crowded("blocks for another shard's version")
        blocks, counters, views = found
        _let_go_soon(kept)
        if not local:
            blocks = await self._holdings.in_thread(self._holdings.exported, blocks, views)
        return blocks, counters

    def _found(
        self, wanted: Places, local: bool
    ) -> tuple[dict[SegmentId, Block], Counters, dict[SegmentId, np.ndarray]] | None:
        """Give what is wanted if all of it is in memory. Call it with the lock held."""
        if self._state.absent({segment: slots for segment, (_, slots) in wanted.items()}):
            return None
        blocks = self._state.blocks({segment: generation for segment, (generation, _) in wanted.items()})
        return blocks, self._holdings.counters, {} if local else self._holdings.views(blocks)

    async def _load(self, wanted: Places) -> list[np.ndarray]:
        """Read into the memory what is wanted and on disk only.

        All of it stays there as long as what is given back lives.
        """
        slots = {segment: slots for segment, (_, slots) in wanted.items()}
        with self._lock:
            absent = self._state.absent(slots)
            kept = self._holdings.kept(slots)
        return kept + await self._disk().load(absent, self._granted)

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
            versions, nbytes = self._history.persister.behind() if self._history is not None else (0, 0)
            filling = self._holdings.bytes_filling
            return replace(self._state.stats(), bytes_staged=filling, versions_behind=versions, bytes_behind=nbytes)

    @group("watch")
    async def flush(self, timeout: float) -> None:
        """Wait until all that waits now is on disk."""
        await self._disk().flush(timeout)

    @group("data")
    async def check_manifest(self, client: str, ref: ModelRef) -> list[str]:
        """Hold a version's manifest on disk against what is answered here."""
        with self._lock:
            record = self._state.record(ref.name, ref.version, client)
        return await self._disk().check_manifest(record.header, record.body)

    @group("data")
    async def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        """Read tensors of this shard's segments, in memory and from disk, and say what is wrong with them."""
        problems: list[str] = []
        for segment, slots in names.items():
            problems += await self._holdings.in_thread(self._holdings.check, segment, slots)
        return problems + (await self._history.check_tensors(names) if self._history is not None else [])

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
                waiter = self._waiters.join(name) if newest is None else None
            if waiter is None:
                return newest
            if not await self._waiters.woken(name, waiter, deadline):
                return None

    # ---- retiring ---------------------------------------------------------------------------------------

    @group("ctl")
    async def retire(self, name: str, version: int | None) -> ModelRef:
        """Make a version cease to exist."""
        with self._lock:
            ref = self._state.resolve(name, version)
            header = self._state.record(ref.name, ref.version, "").header
        if self._history is not None:
            await self._history.bury(header)
        with self._lock:
            self._state.retire(ref)
        self._wake(None)
        await self._peers.note_gently({ref: (None, False)})
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
    async def release_homes(self, home: int, keep: Sequence[str]) -> None:
        """Forget what a shard that lost its memory held here, but for the versions that are on disk."""
        with self._lock:
            self._state.release_homes(home, keep)
        await self._settle()

    @group("ctl")
    async def cool(self, ref: ModelRef) -> None:
        """Let a version whose home is elsewhere go from memory."""
        with self._lock:
            self._state.cool(str(ref))
        await self._settle()

    @group("data")
    async def store(self, wanted: ToStore) -> Chains:
        """Write segments for a version whose home is elsewhere."""
        return await self._disk().store(wanted)

    @group("ctl")
    async def stored(self, segment: SegmentId) -> Stored:
        """Give the file of a segment of this shard."""
        return self._disk().stored(segment)

    @group("ctl")
    async def claims(self, shard: int) -> dict[str, dict[SegmentId, list[int]]]:
        """Tell a shard that started again what this home's versions name there."""
        with self._lock:
            return claims_on(self._state, shard)

    @group("ctl")
    async def census(self) -> dict[ModelRef, tuple[ModelRef | None, bool]]:
        """Tell the planner, which lost it, what this shard was ever home to."""
        with self._lock:
            return self._state.census()

    # ---- within -----------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Carry out what the state left: free memory, start compactions, tell other shards."""
        for shard, holder in self._settle_here():
            await self._peers.tell_gently(shard, "release", holder)

    def _settle_here(self) -> list[tuple[int, str]]:
        """Do of it what concerns this shard only; give what is for others."""
        with self._lock:
            outbox, self._state.outbox = self._state.outbox, []
            self._holdings.settle()
            if self._history is not None:
                self._history.tidy()
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
        if self._stale and self._history is not None:
            self._stale = False
            self._history.reconcile()
        self._holdings.start_hashing()
        with self._lock:
            ended = self._state.sweep(time.monotonic())
            died = [client for client, (_, alive) in self._processes.items() if not alive()]
        for client in {*ended, *died}:
            log.info("client %s is gone: its pins and unfinished saves are dropped", client)
            self._end(client, parts_too=client in died)
        self._holdings.drop_idle_exports()
        self._settle_from_thread()

    def _settle_from_thread(self) -> None:
        """Do what `_settle` does, without waiting for other shards."""
        for shard, holder in self._settle_here():
            self._peers.send(shard, "release", holder)

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
        self._state.restore(self._peers.census())
        kept = [str(ref) for ref in self._state.models()]
        for shard in self._peers.others:
            self._peers.send(shard, "release_homes", self._config.index, kept)
        log.warning("shard %d started again: what was only in its memory is lost", self._config.index)

    def _open_history(self, disk: Disk, again: bool) -> History:
        """Bring back what is on disk. A shard that starts again waits for a disk that is not there just now."""
        pause = threading.Event()
        while True:
            try:
                return History(
                    self._config,
                    disk,
                    self._state,
                    self._lock,
                    self._holdings,
                    self._peers.ask,
                    self._settle_from_thread,
                    again,
                )
            except StorageError as exc:
                if not again:
                    raise
                log.error("shard %d starts again and waits for its path: %s", self._config.index, exc)
                pause.wait(DISK_PAUSE_S)

    def _disk(self) -> History:
        if self._history is None:
            raise StorageError(f"shard {self._config.index}: expected a repository with path=; it has none")
        return self._history

    def _wake(self, topic: str | None) -> None:
        """Show the epoch, and let those who wait on `topic` look again."""
        with self._lock:
            self._holdings.publish()
        if topic is not None:
            self._waiters.wake(topic)


def _let_go_soon(kept: list[np.ndarray]) -> None:
    """Drop what keeps segments in the memory, once the reader had the time to lock them."""
    if kept:
        asyncio.get_running_loop().call_later(LOCK_S, kept.clear)
