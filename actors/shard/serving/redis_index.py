"""The index of a shard in Redis: what it posts in Redis for consumers outside the cluster (Viper, sections 4.2 and
4.4).

Rules
- A shard posts the versions that it is home to, and where its own TCP server is; no other shard writes these.
- No save waits for Redis. What is live is known here; a thread of its own brings Redis in line with it, one
  transaction for a version's manifest, its architecture, its number and its message.
- The thread compares what Redis has with what is live, and corrects the difference: after each connect, every
  `COMPARE_S`, and when the id of the start is missing or a consumer has asked for it, which it looks at every `PING_S`.
  So it makes no difference whether Redis was away, lost its data or came back with old data, and only the names and
  numbers of changes are queued.
- A message is a hint. What counts is the number under the name.
- What Redis has of a name and this shard does not is taken down only where no other shard can have it: of names that
  are known here, and, while nothing moves, of all that are at home here. A shard that joins knows none yet.
- Names that came from another shard are posted over what is there, and once more after a while: by then nothing is
  under way any more that the other one was posting. A shard that starts again does not know which those are: where the
  topology ever changed, all are.
- Architectures of names that left stand there as long. What a shard that drained had stays as long after all names have
  arrived; itself, it says no more where it is.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ....planner.topology import Topology
from ....store.errors import CorruptDataError, ModelNotFoundError, StorageError
from ....store.refs import ModelRef, check_name
from ....store.versions.manifest import Header
from ....store.waiting import Backoff
from ...rpc.messages import ShardConfig
from ...rpc.redis_connection import BATCH, TIMEOUT_S, Command, RedisConnection
from ...rpc.redis_keys import Address, Keys, manifest_text

log = logging.getLogger(__name__)

PING_S = 2.0
"""How long Redis may be away, or without the id of the start, without being missed."""
COMPARE_S = 60.0
"""How long a difference between Redis and what is live may last."""
RETRY_S = (0.05, 2.0)
"""Shortest and longest pause between two tries to reach it."""
VERSIONS = 64
"""Versions in one transaction."""
LATE_S = 2 * TIMEOUT_S
"""After so long, nothing comes any more of what a shard was posting when names left it."""


class RedisIndex:
    """What one shard posts.

    Args:
        url: of the Redis server.
        config: the shard's.
        graph_of: key of an architecture -> its JSON text; raises ModelNotFoundError when its last version is retired.
        topology: by which the shard goes; None: as `config` has it.
        versions: that exist already: header and table of tensors of each.

    Raises:
        ValueError: `url` is none.
        CodecUnavailableError: the package `redis` is not installed.
    """

    def __init__(
        self,
        url: str,
        config: ShardConfig,
        graph_of: Callable[[bytes], str],
        topology: Topology | None = None,
        versions: Iterable[tuple[Header, bytes]] = (),
    ) -> None:
        self._redis = RedisConnection(url, f"shard {config.index}")
        self._config = config
        self._graph_of = graph_of
        self._channel = Keys(config.repository)
        self._keys = self._channel.of(config.start)
        self._changed = threading.Condition()
        self._live: dict[str, dict[int, tuple[Header, bytes]]] = {}
        self._users: dict[bytes, int] = {}
        """Key of an architecture -> live versions that have it."""
        self._pending: dict[ModelRef, None] = {}
        """What has to be looked at since Redis was last in line, oldest first."""
        self._moved: set[str] = set()
        """Names that are another shard's to post."""
        self._arrived: dict[str, float] = {}
        """Name that came from another shard -> when it is posted once more, by `time.monotonic`."""
        self._lent: dict[bytes, float] = {}
        """Key of an architecture of a name that left -> until when it stays, by `time.monotonic`."""
        self._address: Address | None = None
        self._topology = topology or config.topology or Topology(config.repository, config.shards, config.start)
        self._swept: set[int] = set()
        """Shards that drained, of which nothing stands in Redis any more, but for those in `_sweeping`."""
        self._sweeping: dict[int, float] = {}
        """Shard that drained, of which something stands in Redis -> when that goes."""
        self._partly = False
        """When Redis was looked at, names were on their way: not all that are at home here were compared."""
        self._place_posted = True
        """Where this shard is, and which have gone, stands there."""
        self._closing = threading.Event()
        self._there: dict[str, set[int]] = {}
        """What Redis has; the thread's own, like what follows."""
        self._again: set[ModelRef] = set()
        """What is posted although Redis has it: another shard may have posted that."""
        self._graphs_there: set[bytes] = set()
        self._away = False
        self._incarnation = -1
        """Which connection is known not to have another start's id."""
        self._compared = 0.0
        """When Redis was compared last, by `time.monotonic`."""
        self._question: bytes | None = None
        """What stood under the consumers' question then."""
        self.announce(versions)
        if self._topology.version:
            self.arrived(self._live)
        self.learn(self._topology)
        self._thread = threading.Thread(target=self._work, name="tensorvine-redis", daemon=True)
        self._thread.start()

    # ---- what the shard says --------------------------------------------------------------------------

    def announce(self, versions: Iterable[tuple[Header, bytes]]) -> None:
        """Post versions that exist from now on: header and table of tensors of each."""
        with self._changed:
            for header, body in versions:
                self._moved.discard(header.ref.name)
                self._live.setdefault(header.ref.name, {})[header.ref.version] = (header, body)
                self._users[header.graph_key] = self._users.get(header.graph_key, 0) + 1
                self._pending[header.ref] = None
            self._changed.notify_all()

    def arrived(self, names: Iterable[str]) -> None:
        """Post names that another shard was home to, over what that one posted."""
        with self._changed:
            when = time.monotonic() + LATE_S
            for name in names:
                self._moved.discard(name)
                self._arrived[name] = when
            self._changed.notify_all()

    def retired(self, ref: ModelRef) -> None:
        """Take down a version that exists no more."""
        with self._changed:
            header, _ = self._live[ref.name].pop(ref.version)
            if not self._live[ref.name]:
                del self._live[ref.name]
            self._drop_user(header.graph_key)
            self._pending[ref] = None
            self._changed.notify_all()

    def moved_away(self, names: Iterable[str]) -> None:
        """Forget names that another shard is home to now: it posts them, over what is posted."""
        with self._changed:
            for name in names:
                for header, _ in self._live.pop(name, {}).values():
                    self._drop_user(header.graph_key)
                    self._lent[header.graph_key] = time.monotonic() + LATE_S
                self._moved.add(name)
                self._arrived.pop(name, None)
            self._pending = {ref: None for ref in self._pending if ref.name not in self._moved}
            self._changed.notify_all()

    def shard_at(self, host: str, port: int, token: str) -> None:
        """Post where this shard's TCP server is."""
        with self._changed:
            self._address, self._place_posted = Address(host, port, token), False
            self._changed.notify_all()

    def learn(self, topology: Topology) -> None:
        """Go by a topology: post which shards have drained, and who took their segments over."""
        with self._changed:
            self._place_posted = self._place_posted and topology.gone.keys() <= self._topology.gone.keys()
            self._topology = topology
            if not topology.former:
                fresh = topology.gone.keys() - self._swept
                self._swept |= fresh
                self._sweeping |= dict.fromkeys(fresh, time.monotonic() + LATE_S)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and disconnect. What is posted stays."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(2 * TIMEOUT_S)
        self._redis.close()

    # ---- the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        pauses = Backoff(*RETRY_S, closing=self._closing)
        while not self._closing.is_set():
            try:
                self._learn()
                pauses.reset()
                self._keep_up()
            except (StorageError, CorruptDataError) as exc:
                if not self._away:
                    log.warning("%s; consumers outside the cluster get no updates until Redis answers", exc)
                self._away = True
            except Exception:
                log.exception("shard %d: publishing to Redis failed, starting again", self._config.index)
            pauses.wait()

    def _learn(self) -> None:
        """Look what Redis has of this shard's, and note what has to change."""
        index = self._config.index
        is_new = self._redis.connected != self._incarnation  # Redis may have the data of an earlier start
        enter: Command = ("SET", self._channel.start, self._config.start, *(() if is_new else ("NX",)))
        _, self._question, named, graphs = self._redis.run(
            [
                enter,
                ("GET", self._channel.question),
                ("HKEYS", self._keys.newest),
                ("HKEYS", self._keys.graphs(index)),
            ]
        )
        if is_new:
            self._incarnation = self._redis.connected
        self._compared = time.monotonic()
        with self._changed:
            topology, moved, known = self._topology, set(self._moved), {*self._live, *self._arrived}
            self._partly = bool(topology.former)
        calm = not topology.former

        def is_own(name: str) -> bool:
            return name in known or (calm and name not in moved and topology.home(name) == index)

        try:
            names = [name for name in map(bytes.decode, named) if is_own(check_name(name))]
        except ValueError as exc:
            raise self._redis.corrupt(self._keys.newest, f"{exc}") from None
        try:
            self._graphs_there = {bytes.fromhex(key.decode()) for key in graphs}
        except ValueError as exc:
            raise self._redis.corrupt(self._keys.graphs(index), f"{exc}") from None
        self._there = {}
        for begin in range(0, len(names), BATCH):
            part = names[begin : begin + BATCH]
            self._there |= self._versions_of(part)
        with self._changed:
            self._place_posted = self._address is None and not self._topology.gone
            live = {ModelRef(name, version) for name, versions in self._live.items() for version in versions}
            there = {ModelRef(name, version) for name, versions in self._there.items() for version in versions}
            self._again = {ref for ref in live if ref.name in self._arrived}
            self._pending = dict.fromkeys(sorted((live ^ there) | self._again))

    def _keep_up(self) -> None:
        """Post each change, until Redis has to be looked at again: the connection is another one, so it may have other
        data, or all names have arrived."""
        while not self._closing.is_set():
            with self._changed:
                if not (self._pending or self._away or self._is_to_compare) and self._place_posted:
                    self._changed.wait(PING_S)
                place: list[Command] = [] if self._place_posted else self._place()
                self._place_posted = True
                now = time.monotonic()
                late = {name: when for name, when in self._arrived.items() if when <= now}
                over = [shard for shard, when in self._sweeping.items() if when <= now]
            self._look_again(list(late))
            with self._changed:
                refs, self._pending = list(self._pending), {}
            is_due = time.monotonic() > self._compared + COMPARE_S
            is_lost = False
            if place or not refs or is_due:
                start, question = self._redis.run(
                    [*place, ("GET", self._channel.start), ("GET", self._channel.question)]
                )[-2:]
                is_own = start == self._config.start.encode()  # else another start is posted there now
                is_lost = start is None or (is_own and (is_due or question != self._question))
            for begin in range(0, len(refs), VERSIONS):
                self._redis.run(self._commands(refs[begin : begin + VERSIONS]))
            for shard in over:  # only now: what was posted just now may have named it
                self._redis.run([("HDEL", self._keys.shards, shard), ("DEL", self._keys.graphs(shard))])
            with self._changed:
                self._arrived = dict(self._arrived.items() - late.items())
                for shard in over:
                    del self._sweeping[shard]
                anew = self._redis.connected != self._incarnation or self._is_to_compare or is_lost
            if anew:
                return
            if self._away:
                self._away = False
                log.warning("Redis at %s answers again; all live versions are published there", self._redis.where)

    @property
    def _is_to_compare(self) -> bool:
        """Whether names that were on their way at the last comparison have arrived since."""
        return self._partly and not self._topology.former

    def _place(self) -> list[Command]:
        """Return what says where this shard is, unless it has drained, and which have."""
        here: list[Command] = []
        gone = self._topology.gone
        if self._address is not None and self._config.index not in gone:
            here.append(("HSET", self._keys.shards, self._config.index, self._address.to_json()))
        return here + [("HSET", self._keys.gone, shard, json.dumps(heirs)) for shard, heirs in gone.items()]

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

    def _look_again(self, names: Sequence[str]) -> None:
        """Note that all of these names is to be posted, and what Redis has besides is to go."""
        for begin in range(0, len(names), BATCH):
            part = names[begin : begin + BATCH]
            for name, there in self._versions_of(part).items():
                with self._changed:
                    if name in self._moved:
                        continue
                    live = self._live.get(name, {}).keys()
                    self._there[name] = there
                    self._again |= {ModelRef(name, version) for version in live}
                    self._pending |= {ModelRef(name, version): None for version in sorted(live | there)}

    def _commands(self, refs: Iterable[ModelRef]) -> list[Command]:
        """Return what brings Redis in line as to these versions."""
        commands: list[Command] = []
        entered: dict[str, None] = {}
        left: dict[str, None] = {}
        for ref in refs:
            again = ref in self._again
            self._again.discard(ref)
            with self._changed:
                if ref.name in self._moved:
                    self._there.pop(ref.name, None)
                    continue
            there = self._there.setdefault(ref.name, set())
            with self._changed:
                live = self._live.get(ref.name, {}).get(ref.version)
            if live is not None and (again or ref.version not in there):
                try:
                    commands += self._entry(*live)
                except ModelNotFoundError:
                    continue  # it was retired just now, which comes next
                there.add(ref.version)
                entered[ref.name] = None
            elif live is None and ref.version in there:
                commands.append(("HDEL", self._keys.model(ref.name), ref.version))
                there.remove(ref.version)
                left[ref.name] = None
        if left:
            commands += self._unused_graphs()
        newest = {name: max(self._there[name], default=0) for name in entered | left}
        for name, version in newest.items():
            number: Command = ("HSET", self._keys.newest, name, version)
            commands.append(number if version else ("HDEL", self._keys.newest, name))
        return commands + [("PUBLISH", self._channel.updates(name), newest[name]) for name in entered]

    def _entry(self, header: Header, body: bytes) -> list[Command]:
        index, ref = self._config.index, header.ref
        entry: list[Command] = [("HSET", self._keys.model(ref.name), ref.version, manifest_text(header, body, index))]
        if header.graph_key not in self._graphs_there:
            text = self._graph_of(header.graph_key)
            entry.append(("HSET", self._keys.graphs(index), header.graph_key.hex(), text))
            self._graphs_there.add(header.graph_key)
        return entry

    def _unused_graphs(self) -> list[Command]:
        with self._changed:
            now = time.monotonic()
            self._lent = {key: until for key, until in self._lent.items() if until > now}
            unused = self._graphs_there - self._users.keys() - self._lent.keys()
        self._graphs_there -= unused
        index = self._config.index
        return [("HDEL", self._keys.graphs(index), *(key.hex() for key in unused))] if unused else []

    def _drop_user(self, graph_key: bytes) -> None:
        self._users[graph_key] -= 1
        if not self._users[graph_key]:
            del self._users[graph_key]
