"""What a shard consists of, how it comes to life, and what follows from every change of its state.

Rules
- The parts have one lock. What serves those who ask (`shard_*`) is based on this, and nothing here knows of it.
- A shard that starts again goes by the planner's standing, which has heard all others, takes back what disk and
  mirrors have, and answers the rest as lost.
- After each change `_settle` carries out what the state left; `_wake` shows it to readers and to those who wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence, Set
from functools import partial

from ...store.errors import StorageError
from ...store.refs import ModelRef
from ...store.segments.segment import SegmentId
from ...store.shard import ShardState
from ...store.versions.ledger import Told
from ...store.versions.overtaken import Overtaken
from ..engine.engine import Engine
from ..rpc.calls import Request
from ..rpc.messages import Disk, ShardConfig, Standing
from ..rpc.waiters import Busy, Waiters
from ..transport.desk import Desk
from .calls import ShardCalls
from .disk.history import History
from .disk.persister import Job
from .handoff.claims import Claims
from .handoff.elastic import Elastic, Outlets
from .handoff.estate import Estate
from .handoff.strays import Strays
from .holdings import Holdings
from .local_clients import LocalClients
from .peers import Peers
from .replicas.mirrors import Mirrors
from .replicas.restore import Restored, restore
from .replicas.shelf import Shelf
from .room import ROOM, Room
from .serving.outlet import Outlet
from .serving.redis_board import RedisBoard
from .serving.senders import Senders

log = logging.getLogger(__name__)

DISK_PAUSE_S = 2.0


class ShardParts:
    """The parts of one shard."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        self._engine = engine
        self._config = config
        self._lock = threading.RLock()
        again = engine.restarted()
        self._peers = Peers(engine, config)
        standing = self._standing() if again else None
        self._state = ShardState(config.index, lambda name: self._peers.topology.home(name), config.session_s)
        self._state.where = self._peers.topology.where
        self._state.writes_files = not again or config.index not in self._peers.topology.leaving
        if standing is not None:
            self._state.ledger.merge(standing.ledger)
        self._whole = standing is not None or not self._peers.topology.former
        """It has heard of every commit; one that joins has not."""
        self._state.generations = secrets.randbits(62)
        self._holdings = Holdings(self._state, self._lock, engine, config.capacity, config.preallocate_bytes)
        self._estate = Estate(self._state, self._lock, self._holdings, self._peers)
        self._settling = Busy()
        """With what other shards are told."""
        self._waiters = Waiters(self._lock)
        self._history = self._open_history(config.disk, standing) if config.disk is not None else None
        persister = self._history.persister if self._history is not None else None
        self._local = LocalClients()
        self._room = Room(self._lock, self._holdings, self._local, self._waiters, persister)
        recovered = self._history.recovered if self._history is not None else []
        self._claims = Claims(self._state, self._lock, self._peers, recovered) if again else None
        """What other homes name here, where they must still be asked."""
        self._strays = Strays(self._state, self._lock, self._peers, self._knows_claims)
        restored = self._recover(standing) if standing is not None else Restored()
        if standing is None and self._history is not None:
            self._peers.tell_planner(self._state.ledger.told())  # what the disk brought back
        self._board = self._open_board(config.redis) if config.redis is not None else None
        self._outlet = self._open_outlet()
        self._desk = Desk()
        self._senders = Senders(self._config, self._outlet, self._desk)
        if self._board is not None and self._outlet is not None:
            self._board.shard_at(*self._outlet.address)
        outlets = Outlets(self._history, self._board)
        self._elastic = Elastic(
            self._state, self._lock, self._peers, self._waiters, outlets, self._names_moved, standing
        )
        self._overtaken = Overtaken()
        self._restarts_heard = self._peers.restarts()
        """Shard -> the last restart of it at which its earlier life's holders went."""
        self._committing = Busy()
        """With commits, and with what comes after them."""
        self._requests = 0
        """Saves begun, versions fetched and prefix queries answered."""
        self._shelf = self._open_shelf()
        self._mirrors = self._open_mirrors(restored) if config.replicas > 1 else None
        if self._history is not None:
            self._history.care.start(self._knows_claims)

    # ---- after a change ---------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Carry out what the state left: free memory, start compactions, tell other shards."""
        with self._settling:
            for shard, holder in self._settle_here():
                await self._peers.release(holder, [shard])

    def _forget(self, holder: str) -> None:
        """Forget a holder, and with the next `_settle`, if this shard drains, at those that have its segments now."""
        with self._lock:
            self._state.release(holder)
            self._state.outbox += [(heir, holder) for heir in self._estate.heirs]

    def _settle_here(self) -> list[tuple[int, str]]:
        """Do of it what concerns this shard only; give what is for others."""
        with self._lock:
            outbox: list[tuple[int, str]] = []
            if not self._estate.is_telling:  # else it would overtake who holds what, and that would stay
                outbox, self._state.outbox = self._state.outbox, []
            self._holdings.settle()
            if self._history is not None:
                self._history.tidy()
        self._wake(ROOM)
        return outbox

    def _settle_from_thread(self) -> None:
        """Do what `_settle` does, without waiting for other shards."""
        for shard, holder in self._settle_here():
            self._peers.post(shard, ShardCalls.release(holder))

    async def _pass_on(self, request: Request[None]) -> None:
        """Tell the shards that have this one's segments now, if it drains."""
        with self._lock:
            moved = self._estate.moved
        if moved:
            await self._estate.pass_on(request)

    def _names_moved(self, names: Iterable[str]) -> None:
        """Show it, and have those look again who wait for a version of these names."""
        self._wake(None)
        if self._mirrors is not None:
            self._mirrors.news()
        for name in names:
            self._waiters.wake(name)

    def _wake(self, topic: str | None) -> None:
        """Show the epoch, and let those who wait on `topic` look again."""
        with self._lock:
            self._holdings.publish()
        if topic is not None:
            self._waiters.wake(topic)

    # ---- how things are ---------------------------------------------------------------------------------

    def _is_leaving(self) -> bool:
        """Tell whether this shard drains. Call it with the lock held."""
        topology = self._peers.topology
        return self._config.index in topology.leaving or self._config.index in topology.gone

    def _only_in_memory(self) -> Set[ModelRef]:
        """Return the live versions that are not on disk. Call it with the lock held."""
        if self._history is None:
            return self._state.live
        return self._state.live & self._history.persister.waiting()

    def _knows_claims(self) -> bool:
        """Tell whether all others have said what they name here. Call it with the lock held."""
        return self._claims is None or not self._claims.open

    async def _copy_leaving(self, holder: str, segments: Sequence[SegmentId], timeout: float) -> None:
        """Have copies on other nodes of what only a version's manifest tells of, which is about to go.

        What of it is on disk only is read for that: after a restart the file would be nobody's.
        """
        if self._mirrors is None:
            return
        with self._lock:
            self._state.leaves(holder)
            needed = [segment for segment in segments if not self._state.rests(segment)]
            awaited = self._state.awaited(needed)
        if not needed:
            return
        deadline = time.monotonic() + timeout
        views = await self._history.load(holder, awaited, self._room.taken) if awaited and self._history else []
        try:
            await self._mirrors.secure(needed, {}, deadline)
        finally:
            views.clear()

    def _disk(self) -> History:
        if self._history is None:
            raise StorageError(f"shard {self._config.index}: expected a repository with path=; it has none")
        return self._history

    # ---- an earlier life --------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        """Learn how things stand, and go by it."""
        standing = self._peers.standing()
        if self._config.index in standing.topology.alive:  # else it was to join, and does not yet
            self._peers.topology = standing.topology
        return standing

    def _recover(self, standing: Standing) -> Restored:
        """Take back what mirrors have, and learn what else an earlier life held: it is answered as lost by name."""
        restored = Restored()
        if self._config.replicas > 1:
            restored = restore(self._config.index, self._peers, self._state, self._lock, self._holdings, standing.home)
            for kept in map(self._state.kept, restored.refs):
                if self._history is not None:
                    self._history.persister.add(Job(kept.header, kept.body, urgent=False))
        names = [name for name in self._state.ledger.names() if standing.home(name) == self._config.index]
        self._state.claim(names)
        kept = {str(ref) for ref in (*self._state.models(), *self._state.unread)}
        buried = self._buried(standing.ledger, names)
        gone = [ref for ref in dict.fromkeys(map(str, (*self._state.census(), *buried))) if ref not in kept]
        if not self._peers.topology.former:  # else names that are to be at home here may be elsewhere still
            self._peers.forget_earlier(kept)
        for shard in self._peers.others if gone else ():  # also where they go by another topology already
            if buried:
                self._peers.post(shard, ShardCalls.note(dict.fromkeys(buried, (None, False))))
            self._peers.post(shard, ShardCalls.release_all(gone))
        self._peers.tell_planner(self._state.ledger.told())
        used = {ModelRef(name, self._state.ledger.highest(name)): (None, False) for name in names}
        self._peers.owe(used | self._state.census())
        if self._config.replicas == 1:
            log.warning("shard %d started again: what was only in its memory is lost", self._config.index)
        return restored

    def _buried(self, told: Told, names: Iterable[str]) -> list[ModelRef]:
        """Name the versions that the disk says are retired, and that others know as existing: they were not told."""
        living = (
            ModelRef(name, version) for name in names if name in told.names for version in told.names[name].living
        )
        return [ref for ref in living if self._state.ledger.retired(ref)]

    # ---- parts ------------------------------------------------------------------------------------------

    def _open_history(self, disk: Disk, standing: Standing | None) -> History:
        """Bring back what is on disk. A shard that starts again waits for a disk that is not there just now."""
        again = standing is not None
        pause = threading.Event()
        while True:
            try:
                return History(
                    self._config,
                    disk,
                    state=self._state,
                    lock=self._lock,
                    holdings=self._holdings,
                    peers=self._peers,
                    settle=self._settle_from_thread,
                    standing=standing,
                )
            except StorageError as exc:
                if not again:
                    raise
                log.error("shard %d starts again and waits for its path: %s", self._config.index, exc)
                pause.wait(DISK_PAUSE_S)

    def _open_outlet(self) -> Outlet | None:
        """Serve those who cannot map the memory; without it, the engine's object store does."""

        try:
            return Outlet(
                self._engine.address(),
                self._state,
                self._lock,
                self._holdings,
                partial(self._peers.call, self._config.index),
            )
        except OSError as exc:
            log.warning("shard %d: no wire: %s", self._config.index, exc)
            return None

    def _open_shelf(self) -> Shelf:
        """Keep mirrors for other shards."""
        host, node = self._engine.address(), self._engine.this_node()
        return Shelf(node, host, self._state, self._lock, self._holdings, self._room.granted, self._settle_from_thread)

    def _open_mirrors(self, restored: Restored) -> Mirrors:
        """Have other shards keep mirrors of this one."""
        return Mirrors(
            index=self._config.index,
            copies=self._config.replicas - 1,
            node=self._engine.this_node(),
            address=self._outlet.address if self._outlet is not None else None,
            restored=restored,
            state=self._state,
            lock=self._lock,
            holdings=self._holdings,
            peers=self._peers,
            waiters=self._waiters,
            wanted=self._only_in_memory,
        )

    def _open_board(self, redis: str) -> RedisBoard:
        """Post what lives here in Redis, from now on."""

        def graph_of(key: bytes) -> str:
            with self._lock:
                return self._state.graphs.architecture(key)[0]

        board = RedisBoard(redis, self._config, graph_of, lambda name: self._peers.topology.home(name))
        records = [self._state.record(ref.name, ref.version, "") for ref in self._state.models()]
        board.announce((record.header, record.body) for record in records)
        return board
