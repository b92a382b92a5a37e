"""A shard's rules as a plain state machine: what to keep, what to free, what to answer. No engine, no clock.

Rules
- A version exists from `publish` until `retire`; both are single steps. Version numbers are never used twice.
- The home of a name (`planner.placement`) keeps its manifests, graphs, lineage and leases. Segments may live on
  any shard. Whoever names a slot holds it there, under its reference or, before the commit, its save's id.
- A commit first takes holds on every shard that it needs (`begin_commit`, then the shell's messages), and only
  then publishes: an inherited tensor cannot go in between, because the parent is pinned until then.
- A retired version that is still pinned becomes a ghost: nobody sees it but the clients that pinned it, and its
  holds stay until the last pin goes.
- Pins belong to a client's session, and a session is a lease: not renewed in time, all its pins go.
- What must be told to other shards is put into `outbox`; the shell takes it after each call, as it takes what
  `segments.SegmentTable` leaves.
- A shard that starts again learns from the manifests on disk what is still there, and from the planner's census what
  it held: versions that were only in its memory are answered as lost, by name, until they are saved anew under a
  higher version.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import (
    GraphError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    TensorVineError,
)
from .graph import ModelGraph
from .index import PrefixIndex, PrefixQuery, Rank, rank_of
from .manifest import Header
from .manifestfile import Manifest
from .pattern import PatternIndex
from .refs import ModelRef, check_name
from .retention import Candidate, Retention
from .segment import SegmentId
from .segments import SegmentTable


@dataclass(frozen=True, slots=True)
class Draft:
    """A version that wants to exist: all of its manifest but the version number."""

    name: str
    save_id: str
    """Holds the segments that this save staged; released when the commit is done."""
    parent: ModelRef | None
    quality: float | None
    metadata: str
    graph_key: bytes
    architecture: tuple[str, str | None] | None
    """The graph's JSON and the framework's recipe; None when the shard keeps them: the pinned parent has the key."""
    body: bytes
    holds: dict[SegmentId, list[int]]
    bytes_owned: int
    bytes_total: int
    codec: str | None = None

    def header(self, ref: ModelRef, created_ns: int) -> Header:
        """Give the header of the version that this becomes."""
        return Header(
            ref,
            self.parent,
            self.quality,
            self.metadata,
            created_ns,
            self.graph_key,
            self.bytes_owned,
            self.bytes_total,
            self.codec,
        )


@dataclass(slots=True)
class Record:
    """A version that this shard is home to."""

    header: Header
    body: bytes
    segments: tuple[SegmentId, ...]
    pins: dict[str, str] = field(default_factory=dict[str, str])
    """Lease id -> client."""


@dataclass(frozen=True, slots=True)
class Match:
    """This shard's best answer to a prefix query."""

    ref: ModelRef
    size: int
    """Layers of the query that the model has."""
    quality: float | None
    created_ns: int
    graph_key: bytes
    lease: str
    """Pins the model until it is released or the client's session ends."""

    @property
    def rank(self) -> tuple[int, Rank]:
        """Orders the answers of several shards as the index orders its own: the greatest is the best."""
        return (self.size, rank_of(self.quality, self.created_ns, self.ref))


@dataclass(frozen=True, slots=True)
class ShardStats:
    """What one shard holds."""

    shard: int
    models: int
    """Live versions whose home this shard is."""
    tensors: int
    """Tensors stored here, each once however many versions share it."""
    bytes_memory: int
    """Bytes of those tensors that are in memory."""
    bytes_allocated: int
    """Bytes of the blocks that hold them, with padding and what awaits compaction."""
    bytes_disk: int
    """Bytes of the segments' files."""
    bytes_metadata: int
    """Bytes of manifests and graphs."""
    pins: int
    """Leases on versions."""
    bytes_staged: int = 0
    """Bytes of memory that savers are filling."""
    versions_behind: int = 0
    """Versions that wait to be written to disk."""
    bytes_behind: int = 0
    """Bytes of these versions' own tensors."""


@dataclass(slots=True)
class _Name:
    next_version: int = 1
    live: dict[int, None] = field(default_factory=dict[int, None])
    warm: dict[int, None] = field(default_factory=dict[int, None])
    """Live versions that retention has not let go from memory."""
    lost: dict[int, None] = field(default_factory=dict[int, None])


@dataclass(slots=True)
class _Graph:
    packed: bytes
    query: PrefixQuery
    refs: dict[ModelRef, None] = field(default_factory=dict[ModelRef, None])
    users: int = 0
    """Live versions, ghosts and commits on their way; `refs` are the live versions."""


@dataclass(slots=True)
class _Session:
    expires: float
    leases: dict[str, ModelRef] = field(default_factory=dict[str, ModelRef])


class ShardState(SegmentTable):
    """All that one shard knows.

    Args:
        index: this shard's number.
        home_of: name -> number of the shard that is its home.
        session_s: seconds that a client's session lasts without being renewed.

    >>> state = ShardState(0, lambda name: 0)
    >>> state.open("client", now=0.0)
    >>> state.adopt("client/1", (0, 1), b"abcd", [4])
    >>> graph = ModelGraph(())
    >>> draft = Draft("m", "client/1", None, None, "{}", b"key", (graph.to_json(), None), b"", {(0, 1): [0]}, 4, 4)
    >>> ref = state.publish(state.begin_commit(draft), draft, created_ns=1)
    >>> str(ref), state.stats().bytes_memory
    ('m@1', 4)
    >>> state.retire(ref)
    >>> state.stats().bytes_memory
    0
    """

    def __init__(self, index: int, home_of: Callable[[str], int], session_s: float = 60.0) -> None:
        super().__init__(index)
        self.session_s = session_s
        self._home_of = home_of
        self._life = uuid.uuid4().hex[:8]
        """Part of every lease: one of an earlier life of this shard must not release another's pin."""
        self._lease_serial = 0
        self._names: dict[str, _Name] = {}
        self._records: dict[ModelRef, Record] = {}
        self._ghosts: dict[ModelRef, Record] = {}
        self._parents: dict[ModelRef, ModelRef | None] = {}
        self._children: dict[ModelRef, dict[ModelRef, None]] = {}
        self._begun: dict[ModelRef, bytes] = {}
        """Commit on its way -> key of its graph, which stays even if the parent goes meanwhile."""
        self._graphs: dict[bytes, _Graph] = {}
        self._sessions: dict[str, _Session] = {}
        self._index = PrefixIndex()
        self._patterns: PatternIndex[bytes] = PatternIndex()
        self._metadata_bytes = 0

    # ---- bytes ------------------------------------------------------------------------------------------

    def adopt(self, holder: str, segment_id: SegmentId, handle: Any, sizes: Sequence[int]) -> None:
        """Take a block of a save into this shard's care, all its slots held by `holder`.

        Raises:
            OperationTimeoutError: the saver's session ended meanwhile.
            CorruptDataError: the id is taken; savers choose ids at random from 2**60.
        """
        if holder.partition("/")[0] not in self._sessions:
            raise OperationTimeoutError(f"shard {self.index}: expected save {holder} to be open; its session ended")
        super().adopt(holder, segment_id, handle, sizes)

    def release_homes(self, home: int, keep: Iterable[str] = ()) -> None:
        """Forget the versions of a home that lost its memory, all but `keep`."""
        kept = set(keep)
        for holder in self.version_holders():
            if holder not in kept and self._home_of(ModelRef.parse(holder).name) == home:
                self.release(holder)

    # ---- versions ---------------------------------------------------------------------------------------

    def begin_commit(self, draft: Draft) -> ModelRef:
        """Choose the version number and hold this shard's own part of what the draft names.

        The shell must then hold the other shards' parts under `str(ref)`, and call `publish` or `abandon`.

        Raises:
            ModelLostError: a segment that the draft names is gone.
            GraphError: the draft brings no graph and the shard keeps none of that key.
        """
        check_name(draft.name)
        self._use_graph(draft.graph_key, draft.architecture, f"save of {draft.name!r}")
        name = self._names.setdefault(draft.name, _Name())
        ref = ModelRef(draft.name, name.next_version)
        self._begun[ref] = draft.graph_key
        try:
            self.hold(str(ref), {s: slots for s, slots in draft.holds.items() if s[0] == self.index})
        except TensorVineError:
            self.abandon(ref)
            raise
        name.next_version += 1
        return ref

    def abandon(self, ref: ModelRef) -> None:
        """Undo `begin_commit`; the version number stays unused."""
        self.release(str(ref))
        self._leave_graph(self._begun.pop(ref))

    def publish(self, ref: ModelRef, draft: Draft, created_ns: int) -> ModelRef:
        """Make the version exist."""
        key = self._begun.pop(ref)
        entry = self._graphs[key]
        self._enter(draft.header(ref, created_ns), draft.body, tuple(draft.holds), entry)
        self.release(draft.save_id)
        self.epoch += 1
        return ref

    def restore_version(self, manifest: Manifest, body: bytes) -> None:
        """Learn of a version of this home that is on disk. Its segments are restored, and held, apart from this.

        Args:
            manifest: what is on disk; of a retired version, its header.
            body: its table of tensors, as `encode_body` writes it.
        """
        header = manifest.header
        name = self._names.setdefault(header.ref.name, _Name())
        name.next_version = max(name.next_version, header.ref.version + 1)
        if manifest.retired:
            self._remember(header.ref, header.parent)
            return
        self._use_graph(header.graph_key, manifest.architecture, str(header.ref))
        segments = tuple(dict.fromkeys(entry.segment for entry in manifest.entries.values()))
        self._enter(header, body, segments, self._graphs[header.graph_key])
        self.epoch += 1

    def retain(self, policy: Retention, name: str) -> list[tuple[ModelRef, set[int]]]:
        """Ask a policy which versions of `name` stay in memory; give the others, each once, and their shards.

        Those that it let go before are not shown to it again: their number would grow without end.
        """
        known = self._names.get(name)
        records = [self._records[ModelRef(name, version)] for version in (known.warm if known else ())]
        headers = [record.header for record in records]
        kept = policy.keep([Candidate(h.ref, h.quality, h.created_ns, h.bytes_owned) for h in headers])
        cold = [record for record in records if record.header.ref not in kept]
        for record in cold:
            del self._names[name].warm[record.header.ref.version]
        return [(record.header.ref, {shard for shard, _ in record.segments}) for record in cold]

    def retire(self, ref: ModelRef) -> None:
        """Make a version cease to exist. Its tensors go when nothing else holds them.

        Raises:
            ModelNotFoundError, ModelLostError: there is no such live version.
        """
        record = self._live(ref)
        del self._records[ref]
        del self._names[ref.name].live[ref.version]
        self._names[ref.name].warm.pop(ref.version, None)
        graph = self._graphs[record.header.graph_key]
        del graph.refs[ref]
        self._index.remove(ref)
        self._metadata_bytes -= len(record.body)
        if record.pins:
            self._ghosts[ref] = record
        else:
            self._let_go(ref, record)
        self.epoch += 1

    def resolve(self, name: str, version: int | None) -> ModelRef:
        """Give the reference that `name` or `name@version` means now.

        Raises:
            ModelNotFoundError: never saved, or retired.
            ModelLostError: it was here before this shard died.
        """
        known = self._names.get(name)
        if version is not None:
            ref = ModelRef(name, version)
            self._live(ref)
            return ref
        if known and known.live:
            return ModelRef(name, max(known.live))
        if known and known.lost:
            raise self._lost(ModelRef(name, max(known.lost)))
        raise ModelNotFoundError(f"shard {self.index}: expected a model named {name!r}; found no live version of it")

    def record(self, name: str, version: int | None, client: str) -> Record:
        """Give the record that `client` may read: a live version, or a ghost that it has pinned."""
        if version is not None:
            ghost = self._ghosts.get(ModelRef(name, version))
            if ghost is not None and client in ghost.pins.values():
                return ghost
        return self._records[self.resolve(name, version)]

    def known(self, ref: ModelRef) -> Record | None:
        """Give the record of a live version or a ghost."""
        return self._records.get(ref) or self._ghosts.get(ref)

    def records(self) -> list[Record]:
        """List the records of live versions and ghosts."""
        return [*self._records.values(), *self._ghosts.values()]

    def begun(self) -> list[ModelRef]:
        """List the commits on their way."""
        return list(self._begun)

    def architecture(self, key: bytes) -> tuple[str, str | None]:
        """Give a stored graph's JSON text and the framework's recipe for it."""
        graph = self._graphs.get(key)
        if graph is None:
            raise ModelNotFoundError(f"shard {self.index}: expected graph {key.hex()}; its last version was retired")
        text, recipe = json.loads(zlib.decompress(graph.packed))
        return text, recipe

    def newer(self, name: str, after: int) -> ModelRef | None:
        """Give the newest live version of `name` above `after`, if there is one."""
        known = self._names.get(name)
        newest = max(known.live) if known and known.live else 0
        return ModelRef(name, newest) if newest > after else None

    def models(self, prefix: str = "") -> list[ModelRef]:
        """List live versions, sorted."""
        return sorted(ref for ref in self._records if ref.name.startswith(prefix))

    # ---- lineage ----------------------------------------------------------------------------------------

    def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Give `ref` and its ancestors as far as this shard is their home; the last one's parent may go on."""
        chain: list[ModelRef] = []
        current: ModelRef | None = ref
        while current is not None and current in self._parents:
            chain.append(current)
            current = self._parents[current]
        if current is not None:
            chain.append(current)
        return chain

    def offspring(self, refs: Iterable[ModelRef]) -> list[tuple[ModelRef, bool]]:
        """Give all descendants of `refs` that can be reached through this shard's versions, and whether each lives."""
        found: dict[ModelRef, bool] = {}
        frontier = list(refs)
        while frontier:
            for child in self._children.get(frontier.pop(), {}):
                if child not in found:
                    found[child] = child in self._records
                    frontier.append(child)
        return list(found.items())

    # ---- queries ----------------------------------------------------------------------------------------

    def match(self, queries: Sequence[PrefixQuery], client: str, now: float) -> list[Match | None]:
        """Find, for each query, the model here with the longest common prefix, and pin it for `client`."""
        answers: list[Match | None] = []
        for query in queries:
            best = self._index.match(query)
            if best is None:
                answers.append(None)
                continue
            record = self._records[best.ref]
            lease = self._pin(record, client, now)
            key = record.header.graph_key
            answers.append(Match(best.ref, best.size, record.header.quality, record.header.created_ns, key, lease))
        return answers

    def find(self, pattern: Sequence[Mapping[str, Any]], exact: bool) -> list[ModelRef]:
        """List live versions whose graph has a path that fits `pattern`, sorted."""
        return sorted(ref for key in self._patterns.find(pattern, exact) for ref in self._graphs[key].refs)

    # ---- leases -----------------------------------------------------------------------------------------

    def pin(self, name: str, version: int | None, client: str, now: float) -> tuple[Record, str]:
        """Keep a version's tensors, for `client`, until `unpin` or the end of the client's session."""
        record = self.record(name, version, client)
        return record, self._pin(record, client, now)

    def unpin(self, leases: Iterable[str]) -> None:
        """Let pins go; unknown ones are no error: they may have expired."""
        for lease in leases:
            session = self._sessions.get(lease.partition("/")[0])
            ref = session.leases.pop(lease, None) if session else None
            record = self.known(ref) if ref else None
            if ref is None or record is None:
                continue
            record.pins.pop(lease, None)
            if ref in self._ghosts:
                self.epoch += 1  # one client fewer sees the ghost
            if not record.pins and self._ghosts.pop(ref, None):
                self._let_go(ref, record)

    def renew(self, client: str, now: float) -> bool:
        """Keep a session alive; False when it has none here (any more)."""
        if client not in self._sessions:
            return False
        self.open(client, now)
        return True

    def sweep(self, now: float) -> list[str]:
        """End sessions that were not renewed; name their clients."""
        ended = [client for client, session in self._sessions.items() if session.expires <= now]
        for client in ended:
            self.end(client)
        return ended

    def open(self, client: str, now: float) -> None:
        """Start or renew a client's session."""
        self._sessions.setdefault(client, _Session(0.0)).expires = now + self.session_s

    def end(self, client: str) -> None:
        """End a client's session: its pins go, and so does what its unfinished saves brought."""
        session = self._sessions.get(client)
        if session is not None:
            self.unpin(list(session.leases))
            del self._sessions[client]
        for holder in [h for h in self._held if h.startswith(f"{client}/") and "@" not in h]:
            self.release(holder)

    # ---- the whole shard --------------------------------------------------------------------------------

    def census(self) -> dict[ModelRef, tuple[ModelRef | None, bool]]:
        """Give every version this shard was ever home to: its parent, and whether it lives or is lost."""
        return {
            ref: (parent, ref in self._records or ref.version in self._names[ref.name].lost)
            for ref, parent in self._parents.items()
        }

    def restore(self, census: Mapping[ModelRef, tuple[ModelRef | None, bool]]) -> None:
        """Learn, after a restart, what an earlier life held: names stay; what is not on disk counts as lost."""
        for ref, (parent, live) in census.items():
            name = self._names.setdefault(ref.name, _Name())
            name.next_version = max(name.next_version, ref.version + 1)
            if live and ref not in self._parents:  # else the disk knows what became of it
                name.lost[ref.version] = None
            self._remember(ref, parent)

    def stats(self) -> ShardStats:
        """Sum up what is here."""
        return ShardStats(
            self.index,
            len(self._records),
            self._tensors,
            self._live_bytes,
            self._allocated,
            self._file_bytes,
            self._metadata_bytes,
            sum(len(session.leases) for session in self._sessions.values()),
        )

    def _live(self, ref: ModelRef) -> Record:
        record = self._records.get(ref)
        if record is not None:
            return record
        known = self._names.get(ref.name)
        if known and ref.version in known.lost:
            raise self._lost(ref)
        if ref in self._parents:
            raise ModelNotFoundError(f"shard {self.index}: expected a live model; {ref} was retired")
        live = f"its live versions are {sorted(known.live)}" if known and known.live else "no version of it lives"
        raise ModelNotFoundError(f"shard {self.index}: expected a live model; found no {ref}: {live}")

    def _lost(self, ref: ModelRef) -> ModelLostError:
        return ModelLostError(
            f"{ref} is lost: it was held only in the memory of shard {self.index}, which died and started again"
        )

    def _let_go(self, ref: ModelRef, record: Record) -> None:
        """Let a version's holds go, here and elsewhere, and its graph when no other version has it."""
        self.release(str(ref))
        self.outbox += [(shard, str(ref)) for shard in {s for s, _ in record.segments} - {self.index}]
        self._leave_graph(record.header.graph_key)

    def _enter(self, header: Header, body: bytes, segments: tuple[SegmentId, ...], graph: _Graph) -> None:
        ref = header.ref
        self._records[ref] = Record(header, body, segments)
        self._names[ref.name].live[ref.version] = None
        self._names[ref.name].warm[ref.version] = None
        self._remember(ref, header.parent)
        graph.refs[ref] = None
        self._index.add(ref, graph.query, header.quality, header.created_ns)
        self._metadata_bytes += len(body)

    def _use_graph(self, key: bytes, architecture: tuple[str, str | None] | None, what: str) -> None:
        if key not in self._graphs:
            if architecture is None:
                raise GraphError(f"{what}: expected a graph that shard {self.index} keeps; found no such key")
            graph = ModelGraph.from_json(architecture[0])
            packed = zlib.compress(json.dumps(architecture).encode(), 1)
            self._graphs[key] = _Graph(packed, PrefixQuery.of(graph))
            self._patterns.add(key, graph)
            self._metadata_bytes += len(packed)
        self._graphs[key].users += 1

    def _leave_graph(self, key: bytes) -> None:
        graph = self._graphs[key]
        graph.users -= 1
        if not graph.users:
            self._metadata_bytes -= len(graph.packed)
            self._patterns.remove(key)
            del self._graphs[key]

    def _pin(self, record: Record, client: str, now: float) -> str:
        self.open(client, now)
        session = self._sessions[client]
        self._lease_serial += 1
        lease = f"{client}/{self.index}.{self._life}.{self._lease_serial}"
        session.leases[lease] = record.header.ref
        record.pins[lease] = client
        return lease

    def _remember(self, ref: ModelRef, parent: ModelRef | None) -> None:
        self._parents[ref] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[ref] = None
