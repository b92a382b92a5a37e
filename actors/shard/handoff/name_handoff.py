"""A shard's part in a change of the topology: what it answers for, and how names leave it and arrive.

Rules
- A shard answers for a name from the moment it took it until the moment it hands it over; in between, nobody does, and
  clients ask again. What it does not answer for it refuses with `MovedError`, before anything has changed.
- Names go in chunks. Nobody may write a name of a chunk from when it is chosen; then what is being written ends, then
  the chunk goes. It is sent until it has arrived: a shard that takes it twice takes it once.
- Leases move with their names. A shard that handed one over passes on that it is let go.
- The shard that takes a name tells the planner first, and the one that gave it remembers that it arrived: when the
  planner and one of the two die, the name still has a home.
- What `tag` gives changes with every chunk that leaves or arrives: a client that asks all shards sees whether all were
  asked at one time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterable, Sequence

from ....planner.topology import Topology
from ....store.errors import MovedError, OperationTimeoutError, TensorVineError
from ....store.holders import Lease, Query, Save
from ....store.versions.handover import Bundle
from ....store.waiting import Backoff, Deadline
from ...rpc.messages import PEER_TIMEOUT_S, Moved, Sender, Tag, Unwritten
from ..calls import ShardCalls
from ..context import Change, ShardContext
from ..disk.history import History
from ..disk.persister import Job
from ..replicas.securing import Securing
from ..serving.redis_index import RedisIndex

log = logging.getLogger(__name__)

CHUNK_NAMES = 128
CHUNK_BYTES = 1 << 20
"""A chunk is full when it has so many names, or so many bytes of tables."""
RETRY_S = (0.2, 1.0)
"""Shortest and longest pause between two tries to reach a shard."""
PAUSE_S, WINDOW_S = 0.005, 0.05
"""Between two chunks: so that what is asked of all shards finds a moment at which none is on its way."""


class NameHandoff:
    """One shard in a topology that changes.

    Args:
        context: the shard's.
        history: writes the names' versions to the disk, if there is one.
        redis_index: posts them in Redis, if there is one.
        securing: tells copies of them elsewhere.
    """

    def __init__(
        self, context: ShardContext, history: History | None, redis_index: RedisIndex | None, securing: Securing
    ) -> None:
        recovery_info = context.recovery_info
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._notifier = context.notifier
        self._history = history
        self._redis_index = redis_index
        self._securing = securing
        self._again = recovery_info is not None
        """What an earlier incarnation handed over is not known here: only names that are here are answered for."""
        self._finished: set[int] = set(recovery_info.finished) if recovery_info is not None else set()
        """Shards of before that have handed over all that they had to."""
        self._done = False
        self._handed: set[str] = set()
        self._delivered: set[str] = set(recovery_info.arrived) if recovery_info is not None else set()
        """Names that have arrived, as far as is known here; `delivered` picks those that went from here."""
        self._frozen: set[str] = set()
        self._writing: Counter[str] = Counter()
        self._incarnation = uuid.uuid4().hex[:8]
        self._began = time.monotonic()
        self._revision = 0
        self._asked = 0.0
        """When somebody last asked all shards something: on the monotonic clock."""
        self._sending: Bundle | None = None
        self._late: list[Lease] = []
        """Leases that were let go while they were on their way."""
        self._onward: dict[Lease, int] = {}
        """Lease -> the shard that it was handed to."""
        self._turn = asyncio.Lock()

    # ---- what is answered for -------------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Refuse what is asked of a name that this shard does not answer for. Call it with the lock held.

        Raises:
            MovedError: it does not (any more, or yet).
            ShardUnavailableError: this incarnation does not (any more, or for now).
        """
        self._context.tenure.check()
        if not self._answers(name):
            topology = self._peers.topology
            raise MovedError(
                f"shard {self._state.index}: expected a name whose home it is; the home of {name!r} is shard "
                f"{topology.home(name)} by topology {topology.version}",
                topology.version,
            )

    @contextlib.contextmanager
    def writing(self, name: str) -> Generator[None]:
        """Write a version of a name, which does not move meanwhile.

        Raises:
            MovedError: it is at home elsewhere, or is about to be.
        """
        with self._lock:
            self.check(name)
            if name in self._frozen:
                raise MovedError(f"shard {self._state.index}: {name!r} is being moved", self._peers.topology.version)
            self._writing[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing[name] -= 1
                if not self._writing[name]:
                    del self._writing[name]
            if name in self._frozen:
                self._notifier.tell(Change.WRITES)

    @property
    def delivered(self) -> dict[str, int]:
        """Names that went from here in the change that is under way, and have arrived -> their home.

        Read it with the lock held.
        """
        topology, here = self._peers.topology, self._state.index
        return {name: topology.home(name) for name in self._delivered if topology.former_home(name) == here}

    def tag(self) -> Tag:
        """Tell how things stand."""
        with self._lock:
            self._asked = now = time.monotonic()
            revision, sending = f"{self._incarnation}.{self._revision}", self._sending is not None
            return Tag(
                self._peers.topology.version,
                revision,
                sending,
                self._state.index,
                self._incarnation,
                self._again,
                now - self._began,
            )

    def _answers(self, name: str) -> bool:
        topology = self._peers.topology
        if not topology.version:
            return True
        here, home = self._state.index, topology.home(name)
        former = topology.former_home(name)
        if home == former or not topology.former:
            return home == here
        if here == former:
            return not self._done and name not in self._handed and (not self._again or self._state.knows(name))
        return here == home and (former in self._finished or self._state.knows(name))

    # ---- leases ---------------------------------------------------------------------------------------

    def leases_of(self, operation: Save | Query) -> list[Lease]:
        """Return the pins of an operation that are here, on their way from here, or were handed over.

        Call it with the lock held.
        """
        leaving = self._sending.leases if self._sending is not None else []
        gone = [lease for lease in (*leaving, *self._onward) if lease.operation == operation]
        return [*self._state.pinned_by(operation), *gone]

    async def unpin(self, leases: Sequence[Lease]) -> None:
        """Remove pins, also those that were handed over.

        Raises:
            TensorVineError: a shard that has some did not answer; asked again, this one asks it again.
        """
        onward: dict[int, list[Lease]] = {}
        with self._lock:
            self._state.unpin(leases)
            leaving = set(self._sending.leases) if self._sending is not None else set[Lease]()
            self._late += [lease for lease in leases if lease in leaving]
            for lease in leases:
                shard = self._onward.pop(lease, None)
                if shard is not None:
                    onward.setdefault(shard, []).append(lease)
        alive = self._peers.topology.alive
        for shard, part in onward.items():
            try:
                for successor in (shard,) if shard in alive else self._peers.others:  # drained: others have them
                    await self._peers.ask(successor, ShardCalls.unpin(part))
            except TensorVineError:
                with self._lock:
                    self._onward |= dict.fromkeys(part, shard)
                raise

    # ---- a change -------------------------------------------------------------------------------------

    def learn(self, topology: Topology) -> None:
        """Go by a new topology; one that is not newer than the known one changes nothing."""
        with self._lock:
            known = self._peers.topology
            if topology.version <= known.version:
                return
            if topology.former != known.former:
                self._handed.clear()
                self._delivered.clear()
                self._frozen.clear()
                self._finished.clear()
                self._done = self._again = False
            self._peers.topology = topology
            if self._state.index not in topology.leaving:  # else its segments may be elsewhere already
                self._peers.topology_after = topology
                self._state.where = topology.where
                self._state.writes_files = True
            self._state.changes += 1
            self._revision += 1
            if self._redis_index is not None:
                self._redis_index.learn(topology)

    async def hand_over(self) -> Moved:
        """Hand all names over that are at home elsewhere now; called again, it goes on where it was."""
        async with self._turn:
            names = nbytes = 0
            while True:
                with self._lock:
                    topology = self._peers.topology
                    parts = self._leaving(topology)
                    if not parts:
                        self._done = True
                        self._revision += 1
                        break
                for home, chunk in parts:
                    nbytes += await self._hand_chunk(home, chunk)
                    names += len(chunk)
                    await asyncio.sleep(WINDOW_S if time.monotonic() - self._asked < WINDOW_S else PAUSE_S)
            self._notifier.tell_all()  # also those who wait for a name that never was
            for shard in set(topology.shards) - {self._state.index}:
                await self._peers.ask(shard, ShardCalls.arrived(self._state.index, topology.version))
            return Moved(names, nbytes)

    def arrived(self, former: int, version: int) -> None:
        """Learn that a shard has handed over all that it had to: what is not here now does not exist."""
        with self._lock:
            if version == self._peers.topology.version:
                self._finished.add(former)

    async def announce(self, names: Sequence[str], sender: Sender) -> None:
        """Tell the planner that names come here, again and again until it has answered.

        Raises:
            MovedError: who sent them has started again since.
        """
        pauses = Backoff(*RETRY_S)
        while True:
            try:
                return await self._peers.arrives(names, sender)
            except MovedError:
                raise
            except TensorVineError as exc:
                log.warning(
                    "shard %d: notifying the planner of %d names failed, retrying: %s",
                    self._state.index,
                    len(names),
                    exc,
                )
            await pauses.wait_async()

    def take(self, bundle: Bundle, unwritten: Sequence[Unwritten]) -> int:
        """Become home to names; gives the bytes by which the metadata here grew."""
        with self._lock:
            fresh = [v for v in bundle.versions if not v.retired and self._state.known(v.header.ref) is None]
            grown = self._state.take_over(bundle, time.monotonic())
            self._revision += 1
            if self._redis_index is not None:
                self._redis_index.announce([(version.header, version.body) for version in fresh])
                self._redis_index.arrived(bundle.names)
            if self._history is not None:
                taken = {version.header.ref for version in fresh}
                for header, body in unwritten:
                    if header.ref in taken:
                        self._history.persister.add(Job(header, body, urgent=False))
        self._show_moved(bundle.names)
        return grown

    def _show_moved(self, names: Iterable[str]) -> None:
        """Show that names have left or arrived, and have those look again who wait for a version of one."""
        self._context.show()
        self._securing.news()
        for name in names:
            self._notifier.tell(name)

    def _leaving(self, topology: Topology) -> list[tuple[int, list[str]]]:
        """Cut the names that are at home elsewhere into chunks. Call it with the lock held.

        A name whose first version is being written is one of them.
        """
        by_home: dict[int, list[str]] = {}
        new = [name for name in self._writing if not self._state.knows(name)]
        for name in [*self._state.names(), *new]:
            home = topology.home(name)
            if home != self._state.index:
                by_home.setdefault(home, []).append(name)
        chunks: list[tuple[int, list[str]]] = []
        for home, names in by_home.items():
            size = CHUNK_BYTES
            for name in names:
                if size >= CHUNK_BYTES or len(chunks[-1][1]) >= CHUNK_NAMES:
                    chunks.append((home, []))
                    size = 0
                chunks[-1][1].append(name)
                size += self._state.table_bytes(name) if self._state.knows(name) else 0
        return chunks

    async def _hand_chunk(self, home: int, chunk: Sequence[str]) -> int:
        await self._freeze(chunk)
        unwritten = await self._unwritten(chunk)
        with self._lock:
            bundle = self._sending = self._state.hand_over(chunk)
            self._handed.update(chunk)
            self._frozen.difference_update(chunk)
            self._revision += 1
            if self._redis_index is not None:
                self._redis_index.moved_away(chunk)
        self._show_moved(chunk)
        grown = await self._sent(home, bundle, unwritten)
        with self._lock:
            self._sending, self._state.departing = None, frozenset()
            self._delivered.update(chunk)
            self._revision += 1
            late, self._late = self._late, []
            self._onward |= dict.fromkeys(set(bundle.leases) - set(late), home)
        if late:
            await self._peers.tell_gently(home, ShardCalls.unpin(late))
        return grown

    async def _freeze(self, chunk: Sequence[str]) -> None:
        """Let no more writes of these names begin, and wait until those that have end."""

        def look() -> bool | None:
            return None if any(name in self._writing for name in chunk) else True

        with self._lock:
            self._frozen.update(chunk)
        if not await self._notifier.until(Change.WRITES, look, Deadline.after(PEER_TIMEOUT_S)):
            with self._lock:
                self._frozen.difference_update(chunk)
            raise OperationTimeoutError(
                f"shard {self._state.index}: expected the saves in progress to end within {PEER_TIMEOUT_S} s; "
                f"{sorted(set(chunk) & set(self._writing))} are still being written"
            )

    async def _unwritten(self, chunk: Sequence[str]) -> list[Unwritten]:
        """Take the versions out of the queue that waits for the disk: their new home writes them."""
        if self._history is None:
            return []
        jobs = await asyncio.to_thread(self._history.persister.surrender, frozenset(chunk))
        return [(job.header, job.body) for job in jobs]

    async def _sent(self, home: int, bundle: Bundle, unwritten: Sequence[Unwritten]) -> int:
        """Send a bundle until it has arrived: there is no other copy of it."""
        pauses = Backoff(*RETRY_S)
        while True:
            try:
                return await self._peers.ask(home, ShardCalls.take(bundle, list(unwritten), self._peers.sender))
            except TensorVineError as exc:
                here, count = self._state.index, len(bundle.names)
                log.warning("shard %d: shard %d could not take over %d names, retrying: %s", here, home, count, exc)
            await pauses.wait_async()
