"""A shard's rules as a plain state machine: what to keep, what to free, what to answer. No engine, no clock.

Rules
- The home of a name (`planner.placement`) keeps its manifests, graphs, lineage and leases (`versions.table`). Segments
  may live on any shard (`segments`). Whoever names a slot holds it there (`holders`): a version or, before the commit,
  its save.
- What must be told to other shards is put into `outbox`; the shell takes it after each call, as it takes what
  `segments.SegmentTable` leaves.
- A shard that starts again learns from the manifests on disk what is still there, if not now then later, and from the
  ledger what it held: versions that were only in its memory are answered as lost, by name, until they are saved anew
  under a higher version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .archive.manifestfile import Manifest, manifest_name
from .counting import Counted
from .errors import CorruptDataError, Unreadable
from .graphs.index import PrefixQuery
from .holders import Lease, Query
from .refs import LAST_VERSION, ModelRef, check_name
from .segments.segment import SegmentId
from .versions.handover import Bundle, MovedName, MovedVersion
from .versions.ledger import Fact
from .versions.table import VersionTable
from .versions.version import Draft, Match, Record

COMPARED = 16
"""How many versions of its graph a new root version is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """Statistics of one shard: memory, disk use and load. `RepositoryStats.shards` has one such object per shard."""

    shard: int
    """Number of the shard, as in `Repository.shards`."""
    models: int
    """Number of versions whose metadata this shard stores. Retired versions do not count."""
    tensors: int
    """Number of tensors stored by this shard, in memory or on disk. A tensor shared by several versions counts once."""
    bytes_memory: int
    """Size of the tensors in memory, in bytes, without padding."""
    bytes_allocated: int
    """Memory allocated for tensors, in bytes, including padding and deleted tensors whose memory is not freed yet."""
    bytes_disk: int
    """Size of this shard's segment files on the repository's path, in bytes."""
    bytes_metadata: int
    """Size of the manifests (including the users' metadata) and of the model graphs, in bytes."""
    pins: int
    """Number of pins on versions of this shard. A pin keeps a version's tensors even if the version is retired."""
    bytes_staged: int = 0
    """Memory allocated for operations in progress, in bytes: saves, loads from the path, copies between shards, and
    compactions. Includes the memory reserved by clients for their next saves."""
    bytes_resident: int = 0
    """Size of the part of the shard's shared memory that is in physical memory (resident pages), in bytes."""
    versions_unwritten: int = 0
    """Number of versions that the background writer has not written to the path yet."""
    bytes_unwritten: int = 0
    """Size of the tensors that the background writer has not written yet, in bytes."""
    capacity: int = 0
    """Maximum memory for tensors, in bytes. Set by the argument `store_bytes` of `Repository.start`."""
    requests: int = 0
    """Number of requests received since the shard started: saves, loads and prefix queries."""
    bytes_saved: int = 0
    """Bytes of tensors saved into this shard since the shard started."""
    bytes_sent: int = 0
    """Bytes of tensors sent to readers and other shards since the shard started. Tensors that readers map from the
    shard's memory do not count. A copy in the engine's object store counts once, however many readers it has."""
    patches_made: int = 0
    """Number of patches computed since the shard started. Several readers with the same base share a patch."""
    bytes_patches: int = 0
    """Size of the patches that the shard keeps for further readers, in bytes."""
    bytes_replicated: int = 0
    """Memory used by replicas of other shards' tensors, in bytes, including padding."""
    replicas_missing: int = 0
    """Number of missing replicas of this shard: the required number (`replicas` of `Repository.start`, minus 1) minus
    the number of nodes with a complete replica. The shard's own node does not count as a node with a replica."""
    manifests_unread: int = 0
    """Number of manifest files that the shard could not read at its start and has not read since."""
    files_orphaned: int = 0
    """Number of segment files that were unused at the last check of the path. The shard deletes a file that is also
    unused at the next check."""
    waiting_for_memory: int = 0
    """Number of requests waiting for memory: saves, loads from the path, and replicas of other shards."""
    waiting_for_disk: int = 0
    """Number of saves waiting because the background writer's queue is full. The queue is full if it contains 1,024
    versions, or if its size exceeds `lag_bytes` (see `Repository.start`)."""
    counted: Counted = field(default_factory=dict[str, list[float]], repr=False)
    """Counters and histograms since the shard started, as `tensorvine metrics` exports them."""


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file of the path that a start could not read; what it may name is kept."""

    file: str
    """Its name, from the path on."""
    ref: ModelRef | None
    """The version whose manifest stands there; None: it is no version's by its name."""
    reason: str
    """Where, what was expected, what was found."""


class ShardState(VersionTable):
    """All that one shard knows.

    Args:
        index: this shard's number.
        home_of: name -> number of the shard that is its home.
        session_s: seconds that a client's session lasts without being renewed.

    >>> from tensorvine.store.graphs.graph import ModelGraph
    >>> from tensorvine.store.holders import Save
    >>> from tensorvine.store.versions.version import Draft
    >>> state = ShardState(0, lambda name: 0)
    >>> state.open("client", now=0.0)
    >>> state.adopt(Save("client", 1), (0, 1), b"abcd", [4])
    >>> graph = ModelGraph(())
    >>> draft = Draft(
    ...     name="m", save=Save("client", 1), parent=None, quality=None, metadata="{}", graph_key=b"key", body=b"",
    ...     architecture=(graph.to_json(), None), holds={(0, 1): [0]}, bytes_owned=4, bytes_total=4
    ... )
    >>> ref = state.publish(state.begin_commit(draft), draft, created_ns=1)
    >>> str(ref), state.stats().bytes_memory
    ('m@1', 4)
    >>> state.retire(ref)
    >>> state.stats().bytes_memory
    0
    """

    def __init__(self, index: int, home_of: Callable[[str], int], session_s: float = 60.0) -> None:
        super().__init__(index, session_s)
        self.home_of = home_of
        self.departing: frozenset[ModelRef] = frozenset()
        """Live versions that were handed over and have not arrived yet: replicas keep them until then."""
        self.arriving: set[ModelRef] = set()
        """Live versions whose names are about to be at home here: replicas have them before."""
        self.hidden: dict[str, Unreadable] = {}
        """What stands among the manifests and is none, by its file: manifests may have stood in its place."""

    @property
    def is_blind(self) -> bool:
        """Tell whether there may be versions on disk of which it is not known what they name."""
        return bool(self.unread or self.hidden)

    def unreadable(self) -> list[UnreadFile]:
        """List what could not be read when this shard started, and cannot be now."""
        known = [UnreadFile(manifest_name(ref), ref, str(why)) for ref, why in self.unread.items()]
        return known + [UnreadFile(name, None, str(why)) for name, why in self.hidden.items()]

    def stats(self) -> ShardStats:
        """Sum up what is here."""
        return ShardStats(
            shard=self.index,
            models=len(self._records),
            tensors=self.totals.tensors,
            bytes_memory=self.totals.live_bytes,
            bytes_allocated=self.totals.allocated,
            bytes_disk=self.totals.file_bytes,
            bytes_metadata=self.bytes_metadata,
            pins=sum(len(session.leases) for session in self._sessions.values()),
            manifests_unread=len(self.unread) + len(self.hidden),
        )

    def version_facts(self) -> dict[ModelRef, Fact]:
        """Return this home's versions that live, are lost, or stand in a lineage: the parent, and whether it exists."""
        return {
            ref: (parent, ref in self._records or ref in self.unread or ref.version in known.lost)
            for name, known in self._names.items()
            for ref, parent in self.lineage.known(name)
        }

    def begin_commit(self, draft: Draft) -> ModelRef:
        """Choose the version number, as `VersionTable.begin_commit` does.

        Raises:
            CorruptDataError: the name's highest version has the last number that there is; the message names its file.
        """
        if self._name(check_name(draft.name)).next_version > LAST_VERSION:
            last = ModelRef(draft.name, LAST_VERSION)
            raise CorruptDataError(
                f"save of {draft.name!r}: expected a version number up to {LAST_VERSION}; {last} exists, by its "
                f"manifest {manifest_name(last)} or a line of a log in numbers/: remove the forged one, and restart"
            )
        return super().begin_commit(draft)

    # ---- queries --------------------------------------------------------------------------------------

    def match(self, graphs: Sequence[PrefixQuery], query: Query, now: float) -> list[Match | None]:
        """Find, for each graph, the model here with the longest common prefix, and pin it.

        A query that is repeated gets its first answers, whose pins it has.

        Raises:
            OperationTimeoutError: the query was aborted.
        """
        self.ended.check(query)
        answers: list[Match | None] = []
        for position, graph in enumerate(graphs):
            lease = Lease(query, self.index, position)
            answers.append(self._matched(lease) or self._match(graph, lease, now))
        return answers

    def _matched(self, lease: Lease) -> Match | None:
        session = self._sessions.get(lease.client)
        return session.matches.get(lease) if session is not None else None

    def _match(self, graph: PrefixQuery, lease: Lease, now: float) -> Match | None:
        best = self.graphs.match(graph)
        if best is None:
            return None
        record = self._records[best.ref]
        self._pin(record, lease, now)
        header = record.header
        match = Match(best.ref, best.size, header.quality, header.created_ns, header.graph_key, lease)
        self._sessions[lease.client].matches[lease] = match
        return match

    def offspring(self, refs: Iterable[ModelRef]) -> list[tuple[ModelRef, bool]]:
        """Return all descendants of `refs` that this shard's versions lead to, and whether each lives."""
        return [(ref, ref in self._records) for ref in self.lineage.offspring(refs)]

    def unshared(self, segment_id: SegmentId) -> list[tuple[ModelRef, ModelRef]]:
        """Pair root versions that wrote this segment with an older version of the same graph and the same tensors.

        Tensors are compared by content hash; a version is left out while a hash is unknown here.
        """
        segment = self.segment(segment_id)
        written = [ref for ref in segment.holders if isinstance(ref, ModelRef)] if segment is not None else []
        return [(ref, twin) for ref in written if (twin := self._twin(ref)) is not None]

    def _twin(self, ref: ModelRef) -> ModelRef | None:
        record = self._records.get(ref)
        if record is None or record.header.parent is not None or not (contents := self._contents(ref)):
            return None
        alike = self.graphs.refs(record.header.graph_key)
        older = (one for one in alike if self._records[one].header.created_ns < record.header.created_ns)
        return next((one for one in islice(older, COMPARED) if self._contents(one) == contents), None)

    def _contents(self, ref: ModelRef) -> list[str]:
        """Return the content hashes of a version's tensors, sorted; none while one is unknown here."""
        held = self.held(ref)
        known = self.digests(held)
        if len(known) < len(self._records[ref].segments):
            return []
        return sorted(known[segment][slot] for segment, slots in held.items() for slot in slots)

    # ---- an earlier incarnation -----------------------------------------------------------------------

    def restore_version(self, manifest: Manifest, body: bytes) -> None:
        """Learn of a version of this home that is on disk. Its segments are restored, and held, apart from this.

        Args:
            manifest: what is on disk; of a retired version, its header.
            body: its table of tensors, as `encode_body` writes it.

        Raises:
            GraphError: its architecture is none.
        """
        header = manifest.header
        self._name(header.ref.name, header.ref.version + 1)
        if manifest.retired:
            self.ledger.note({header.ref: (header.parent, False)})
            return
        self.graphs.use(header.graph_key, manifest.architecture, str(header.ref))
        segments = tuple(dict.fromkeys(entry.segment for entry in manifest.entries.values()))
        self._enter(header, body, segments)
        self.changes += 1

    def miss(self, ref: ModelRef, why: Unreadable, mine: bool) -> None:
        """Learn of a version, at home here if it is `mine`, whose manifest cannot be read now."""
        self.unread[ref] = why
        if mine:
            self._name(ref.name, ref.version + 1)
            self.ledger.note({ref: (None, True)})

    def found(self, ref: ModelRef, manifest: Manifest | None, body: bytes) -> None:
        """Learn what a manifest says that could not be read before; None: it is not there any more.

        Raises:
            GraphError: its architecture is none; it stays as it was.
        """
        if ref.name in self._names and manifest is not None:
            self.restore_version(manifest, body)
        elif ref.name in self._names:
            self._names[ref.name].lost[ref.version] = None
        del self.unread[ref]
        self.changes += 1

    def restore(self, version_facts: Mapping[ModelRef, Fact]) -> None:
        """Learn, after a restart, what an earlier incarnation held: what exists and is not on disk counts as lost."""
        for ref, (parent, exists) in version_facts.items():
            name = self._name(ref.name, ref.version + 1)
            self.ledger.note({ref: (parent, exists)})
            here = ref in self._records or ref in self.unread
            if exists and not here and not self.ledger.retired(ref):
                name.lost[ref.version] = None

    def claim(self, names: Iterable[str]) -> None:
        """Become home, after a restart, to names in the ledger: what is not here by now is lost."""
        for name in names:
            self._name(name, self.ledger.highest(name) + 1)
            self.restore({ModelRef(name, v): (p, True) for v, p in self.lineage.living(name).items()})

    def held_by(self, home: int) -> list[ModelRef]:
        """List the versions of a home that hold something here."""
        return [ref for ref in self.version_holders() if self.home_of(ref.name) == home]

    # ---- moving to another home -----------------------------------------------------------------------

    def names(self) -> list[str]:
        """List all names that this shard ever was home to, those that share an architecture beside one another."""
        newest = {ref.name: record.header.graph_key for ref, record in self._records.items()}
        return sorted(self._names, key=lambda name: (newest.get(name, b""), name))

    def knows(self, name: str) -> bool:
        """Tell whether this shard ever was home to a version of `name`."""
        return name in self._names

    def table_bytes(self, name: str) -> int:
        """Return the bytes of the tables of a name's live versions."""
        known = self._names[name]
        return sum(len(self._records[ModelRef(name, version)].body) for version in known.live)

    def hand_over(self, names: Iterable[str]) -> Bundle:
        """Give all that is known of names to another home, and forget it; what they hold stays held.

        Raises:
            ValueError: a commit of one of them is on its way.
        """
        moved = {name: self._names[name] for name in names if name in self._names}
        if any(ref.name in moved for ref in self._begun):
            raise ValueError(
                f"shard {self.index}: expected no commit in progress; found {sorted(map(str, self._begun))}"
            )
        facts = {name: MovedName(n.next_version, tuple(n.warm), tuple(n.lost)) for name, n in moved.items()}
        ledger = self.ledger.told(moved)
        refs = [ref for name in moved for ref, _ in self.lineage.known(name)]
        versions: list[MovedVersion] = []
        graphs: dict[bytes, tuple[str, str | None]] = {}
        live = [ModelRef(name, version) for name, known in moved.items() for version in known.live]
        for ref in [*live, *(ref for ref in self._retired_pinned if ref.name in moved)]:
            retired = ref in self._retired_pinned
            record = self._retired_pinned.pop(ref) if retired else self._records[ref]
            key = record.header.graph_key
            graphs[key] = self.graphs.architecture(key)
            versions.append(MovedVersion(record.header, record.body, record.segments, tuple(record.pins), retired))
            if not retired:
                self._remove(ref, record)
            self.graphs.leave(key)
            for lease in record.pins:
                self._sessions[lease.client].leases.pop(lease, None)
                self._sessions[lease.client].matches.pop(lease, None)
        unread = {ref: why for ref, why in self.unread.items() if ref.name in moved}
        for name in moved:
            del self._names[name]
        self.departing = frozenset(live)
        self.changes += 1
        return Bundle(facts, tuple(versions), ledger, self.lineage.qualities(refs), graphs, unread)

    def take_over(self, bundle: Bundle, now: float) -> int:
        """Become home to what another shard handed over; what is known here already stays as it is.

        Returns:
            Bytes by which the metadata here grew.
        """
        before = self.bytes_metadata
        self.ledger.merge(bundle.ledger)
        self.unread |= {ref: why for ref, why in bundle.unread.items() if ref not in self._records}
        fresh = bundle.names.keys() - self._names.keys()
        for ref, quality in bundle.qualities.items():
            if ref in self.lineage:
                self.lineage.set_quality(ref, quality)
        for name in fresh:
            moved = bundle.names[name]
            self._name(name, moved.next_version).lost = dict.fromkeys(moved.lost)
        for version in [version for version in bundle.versions if version.header.ref.name in fresh]:
            ref, key = version.header.ref, version.header.graph_key
            self.graphs.use(key, bundle.graphs[key], str(ref))
            if version.retired:
                self._retired_pinned[ref] = Record(version.header, version.body, version.segments)
                self.ledger.enter(ref, version.header.parent, version.header.quality)
            else:
                self._enter(version.header, version.body, version.segments)
                if ref.version not in bundle.names[ref.name].warm:
                    del self._names[ref.name].warm[ref.version]
            self._take_pins(ref, version.pins, now)
        self.changes += 1
        return self.bytes_metadata - before

    def _take_pins(self, ref: ModelRef, pins: Iterable[Lease], now: float) -> None:
        record = self._retired_pinned.get(ref) or self._records[ref]
        for lease in pins:
            self.open(lease.client, now)
            self._sessions[lease.client].leases[lease] = ref
            record.pins[lease] = None
