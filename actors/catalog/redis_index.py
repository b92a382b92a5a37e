"""What the catalog posts in Redis for consumers outside the cluster (Viper, sections 4.2 and 4.4).

Rules
- No save waits for Redis. What is live the catalog knows; a thread brings Redis in line with it, one transaction for a
  version's manifest, its architecture, its number and its message.
- The thread compares what Redis has with what is live, and corrects the difference: after each connect, every
  `COMPARE_S`, and when the id of the start is missing or a consumer has asked for it, which it looks at every `PING_S`.
  So it makes no difference whether Redis was away, lost its data or came back with old data, and only the references
  of changes are queued.
- Nothing is posted before a shard has reported. Shards are started after the starter has seen that no repository of
  another cluster has the place in Redis, and has entered this start there.
- A message is a hint. What counts is the number under the name. Where segments are is a hint, too: a consumer asks the
  other shards for what one has no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...store.errors import CorruptDataError, ModelNotFoundError, StorageError
from ...store.refs import ModelRef, check_name
from ...store.segments.segment import SegmentId
from ...store.versions.manifest import Header
from ...store.waiting import Backoff
from ..rpc.redis_connection import BATCH, TIMEOUT_S, Command, RedisConnection
from ..rpc.redis_keys import Address, Keys, manifest_text

log = logging.getLogger(__name__)

PING_S = 2.0
"""How long Redis may be away, or without the id of the start, without being missed."""
COMPARE_S = 60.0
"""How long a difference between Redis and what is live may last."""
RETRY_S = (0.05, 2.0)
"""Shortest and longest pause between two tries to reach it."""
VERSIONS = 64
"""Versions in one transaction."""

Live = tuple[Header, bytes, Mapping[SegmentId, int]]
"""A version: header, table, and the shard of each segment."""


class RedisIndex:
    """What one catalog posts.

    Args:
        url: of the Redis server.
        repository: its name.
        start: id of its start.
        live: gives a live version; None: it is none.
        refs: gives all live versions.
        graph_of: key of an architecture -> its JSON text; raises ModelNotFoundError when its last version is retired.

    Raises:
        ValueError: `url` is none.
        CodecUnavailableError: the package `redis` is not installed.
    """

    def __init__(
        self,
        url: str,
        repository: str,
        start: str,
        *,
        live: Callable[[ModelRef], Live | None],
        refs: Callable[[], list[ModelRef]],
        graph_of: Callable[[bytes], str],
    ) -> None:
        self._redis = RedisConnection(url, "catalog")
        self._start = start
        self._live = live
        self._refs = refs
        self._graph_of = graph_of
        self._channel = Keys(repository)
        self._keys = self._channel.of(start)
        self._changed = threading.Condition()
        self._pending: dict[ModelRef, None] = {}
        """What has to be looked at since Redis was last in line, oldest first."""
        self._addresses: dict[int, Address | None] = {}
        """Shard -> where its TCP server is; None: it has left."""
        self._moved: set[int] = set()
        """Shards whose addresses are not posted yet."""
        self._closing = threading.Event()
        self._there: dict[str, set[int]] = {}
        """What Redis has; the thread's own, like what follows."""
        self._graphs_there: dict[bytes, int] = {}
        """Key of an architecture that stands there -> versions there that have it."""
        self._key_of: dict[ModelRef, bytes] = {}
        self._away = False
        self._incarnation = -1
        """Which connection is known not to have another start's id."""
        self._compared = 0.0
        """When Redis was compared last, by `time.monotonic`."""
        self._question: bytes | None = None
        """What stood under the consumers' question then."""
        self._thread: threading.Thread | None = None

    # ---- what the catalog says ------------------------------------------------------------------------

    def begin(self) -> None:
        """Post from now on; a second call does nothing."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tensorvine-redis", daemon=True)
                self._thread.start()

    def changed(self, refs: Iterable[ModelRef]) -> None:
        """Post versions that exist from now on, and take down those that exist no more."""
        with self._changed:
            self._pending |= dict.fromkeys(refs)
            self._changed.notify_all()

    def shard_at(self, shard: int, address: tuple[str, int, str] | None) -> None:
        """Post where a shard's TCP server is; None: the shard has left."""
        with self._changed:
            self._addresses[shard] = Address(*address) if address is not None else None
            self._moved.add(shard)
            self._changed.notify_all()
        self.begin()

    def close(self) -> None:
        """End the thread and disconnect. What is posted stays."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(2 * TIMEOUT_S)
        self._redis.close()

    # ---- the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        pauses = Backoff(*RETRY_S, closing=self._closing)
        while not self._closing.is_set():
            try:
                self._compare()
                pauses.reset()
                self._keep_up()
            except (StorageError, CorruptDataError) as exc:
                if not self._away:
                    log.warning("%s; consumers outside the cluster get no updates until Redis answers", exc)
                self._away = True
            except Exception:
                log.exception("catalog: publishing to Redis failed, starting again")
            pauses.wait()

    def _compare(self) -> None:
        """Look what Redis has, and note what has to change."""
        is_new = self._redis.connected != self._incarnation  # Redis may have the data of an earlier start
        enter: Command = ("SET", self._channel.start, self._start, *(() if is_new else ("NX",)))
        _, self._question, named, graphs = self._redis.run(
            [enter, ("GET", self._channel.question), ("HKEYS", self._keys.newest), ("HKEYS", self._keys.graphs)]
        )
        if is_new:
            self._incarnation = self._redis.connected
        self._compared = time.monotonic()
        try:
            names = [check_name(name) for name in map(bytes.decode, named)]
        except ValueError as exc:
            raise self._redis.corrupt(self._keys.newest, f"{exc}") from None
        try:
            self._graphs_there = {bytes.fromhex(key.decode()): 0 for key in graphs}
        except ValueError as exc:
            raise self._redis.corrupt(self._keys.graphs, f"{exc}") from None
        self._there, self._key_of = {}, {}
        for begin in range(0, len(names), BATCH):
            self._there |= self._versions_of(names[begin : begin + BATCH])
        there = {ModelRef(name, version) for name, versions in self._there.items() for version in versions}
        live = set(self._refs())
        for ref in live & there:
            found = self._live(ref)
            if found is not None:
                self._use_graph(ref, found[0].graph_key)
        with self._changed:
            self._moved = set(self._addresses)
            self._pending = {**dict.fromkeys(sorted(live ^ there)), **self._pending}

    def _keep_up(self) -> None:
        """Post each change, until Redis has to be looked at again."""
        while not self._closing.is_set():
            with self._changed:
                if not self._pending and not self._away and not self._moved:
                    self._changed.wait(PING_S)
                moved, self._moved = self._moved, set()
                place = [self._place(shard) for shard in sorted(moved)]
                refs, self._pending = list(self._pending), {}
            is_due = time.monotonic() > self._compared + COMPARE_S
            is_lost = False
            if place or not refs or is_due:
                start, question = self._redis.run(
                    [*place, ("GET", self._channel.start), ("GET", self._channel.question)]
                )[-2:]
                is_own = start == self._start.encode()  # else another start is posted there now
                is_lost = start is None or (is_own and (is_due or question != self._question))
            for begin in range(0, len(refs), VERSIONS):
                self._redis.run(self._commands(refs[begin : begin + VERSIONS]))
            if self._redis.connected != self._incarnation or is_lost:
                return
            if self._away:
                self._away = False
                log.warning("Redis at %s answers again; all live versions are published there", self._redis.where)

    def _place(self, shard: int) -> Command:
        """Return what says where a shard is."""
        address = self._addresses.get(shard)
        if address is None:
            return ("HDEL", self._keys.shards, shard)
        return ("HSET", self._keys.shards, shard, address.to_json())

    def _versions_of(self, names: Sequence[str]) -> dict[str, set[int]]:
        """Return the versions of names that Redis has."""
        found = self._redis.run([("HKEYS", self._keys.model(name)) for name in names])
        there: dict[str, set[int]] = {}
        for name, versions in zip(names, found, strict=True):
            try:
                there[name] = {ModelRef(name, int(version)).version for version in versions}
            except ValueError as exc:
                raise self._redis.corrupt(self._keys.model(name), f"{exc}") from None
        return there

    def _commands(self, refs: Iterable[ModelRef]) -> list[Command]:
        """Return what brings Redis in line as to these versions."""
        commands: list[Command] = []
        entered: dict[str, None] = {}
        left: dict[str, None] = {}
        for ref in refs:
            there = self._there.setdefault(ref.name, set())
            live = self._live(ref)
            if live is not None and ref.version not in there:
                try:
                    commands += self._entry(ref, live)
                except ModelNotFoundError:
                    continue  # it was retired just now, which comes next
                there.add(ref.version)
                entered[ref.name] = None
            elif live is None and ref.version in there:
                commands.append(("HDEL", self._keys.model(ref.name), ref.version))
                there.remove(ref.version)
                self._leave_graph(ref)
                left[ref.name] = None
        if left:
            commands += self._unused_graphs()
        newest = {name: max(self._there[name], default=0) for name in entered | left}
        for name, version in newest.items():
            number: Command = ("HSET", self._keys.newest, name, version)
            commands.append(number if version else ("HDEL", self._keys.newest, name))
        return commands + [("PUBLISH", self._channel.updates(name), newest[name]) for name in entered]

    def _entry(self, ref: ModelRef, live: Live) -> list[Command]:
        header, body, places = live
        entry: list[Command] = [("HSET", self._keys.model(ref.name), ref.version, manifest_text(header, body, places))]
        if header.graph_key not in self._graphs_there:
            text = self._graph_of(header.graph_key)
            entry.append(("HSET", self._keys.graphs, header.graph_key.hex(), text))
        self._use_graph(ref, header.graph_key)
        return entry

    def _use_graph(self, ref: ModelRef, key: bytes) -> None:
        self._key_of[ref] = key
        self._graphs_there[key] = self._graphs_there.get(key, 0) + 1

    def _leave_graph(self, ref: ModelRef) -> None:
        key = self._key_of.pop(ref, None)
        if key is not None:
            self._graphs_there[key] -= 1

    def _unused_graphs(self) -> list[Command]:
        unused = [key for key, users in self._graphs_there.items() if not users]
        for key in unused:
            del self._graphs_there[key]
        return [("HDEL", self._keys.graphs, *(key.hex() for key in unused))] if unused else []
