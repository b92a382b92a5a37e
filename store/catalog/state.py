"""The catalog as a state machine: what exists, what is decided about it, and what follows. No engine, no clock, no I/O.

Rules
- `decide_...` methods check, and return records; they change nothing. `apply` is the only way by which what exists
  changes, and the same for a decision and for a replay. Between the two the shell writes the records to the journal.
- Pins, sessions and what retention cooled are not in records: they end with a term.
- A version exists from its record until it is retired. Numbers of a name count up and are never used twice.
- A retired version keeps its tensors while it is pinned, and while its manifest on the path does not say so (`ending`).
- What follows from applied records is gathered (`effects`, `references.freed`); the shell takes it.
- Nothing here grows on a commit with the number of versions or parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import islice

from ..archive.manifestfile import Manifest, manifest_name
from ..errors import (
    CorruptDataError,
    GraphError,
    ModelLostError,
    ModelNotFoundError,
    OptionError,
    StorageError,
    StoreFullError,
    Unreadable,
)
from ..graphs.graph import ModelGraph
from ..graphs.index import PrefixQuery
from ..holders import Lease, Request
from ..refs import LAST_VERSION, ModelRef, Which, check_alias, check_name, text_of
from ..requests import Requests
from ..segments.segment import SegmentId
from ..sizes import size
from ..versions.architectures import Architecture, Architectures, packed
from ..versions.lineage import Lineage
from ..versions.manifest import Header, encode_body, slots_of
from ..versions.retention import Candidate, Retention, kept_by
from ..versions.slots import packed_slots, segment_bytes, segment_from, unpacked_slots
from ..versions.version import Draft, Match
from .pins import Pins
from .placing import keeper_of
from .records import (
    Aliased,
    Answers,
    Began,
    End,
    FileRecord,
    Freed,
    Graph,
    Lost,
    Name,
    Placed,
    Record,
    Ref,
    Retired,
    Version,
    Written,
    decoded,
    done,
    encoded,
)
from .references import Holds, References
from .reports import Staged

LATEST_NS = (1 << 63) - 1
"""The latest time that a manifest may have."""
COMPARED_NAMES = 1000
"""How many names an unknown name is compared with, for its error message."""
ANSWERS = 32_768
"""Answers to requests that are kept: a request that is repeated after so many others has an owner that gave it up."""
RECORD_BYTES = 1536
"""What a version takes besides its record: header, counts, entries of indexes."""
NAME_BYTES = 512
"""What a name takes."""
ALIAS_BYTES = 256
"""What an alias takes."""


@dataclass(slots=True)
class Entry:
    """A version: one that exists, or a retired one whose tensors are not freed."""

    header: Header
    packed: bytes
    """Its `Version` record."""
    written: bool = False
    """Its manifest is on the path, or may be: it is being written."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.packed) + RECORD_BYTES


@dataclass(slots=True)
class _Name:
    next_version: int = 1
    live: dict[int, None] = field(default_factory=dict[int, None])
    """Ascending."""
    warm: dict[int, None] = field(default_factory=dict[int, None])
    """Live versions that retention keeps in memory."""
    lost: dict[int, ModelRef | None] = field(default_factory=dict["int", "ModelRef | None"])
    """Lost versions -> their parents."""
    newest_ns: int = 0
    """When its latest version was created."""
    aliases: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def newest(self) -> int:
        """The latest live version; 0: none."""
        return next(reversed(self.live), 0)


@dataclass(slots=True)
class Effects:
    """What follows from records that were applied."""

    changed: list[str] = field(default_factory=list[str])
    """Names of which another version is the latest now, or one is no more; and aliases, as `name@alias`, that moved."""
    published: list[ModelRef] = field(default_factory=list[ModelRef])
    """New versions."""
    ended: list[ModelRef] = field(default_factory=list[ModelRef])
    """Versions that were retired or lost."""


class CatalogState:
    """All that the catalog knows.

    Args:
        start: id of the start of the repository.
        session_s: seconds that a client's session lasts without being renewed.
        capacity: bytes of records and graphs in memory.
        codec: of the files; None: tensors as they are, or no path.
        on_path: the repository has a path.

    >>> state = CatalogState("start")
    >>> graph = ModelGraph(())
    >>> draft = Draft(
    ...     name="m", save=Request("client", 1), parent=None, quality=None, metadata="{}", graph_key=b"key",
    ...     architecture=packed((graph.to_json(), None)), fingerprints=PrefixQuery.of(graph), body=b"",
    ...     slots=packed_slots({(0, 5): [0]}), bytes_owned=4, bytes_total=4
    ... )
    >>> state.apply_all(state.decide_commit(draft, {(0, 5): Staged(1, (0,))}, now_ns=7))
    >>> str(state.resolve("m", None)), state.answer(Request("client", 1))
    ('m@1', (ModelRef('m@1'), 7))
    >>> state.apply_all(state.decide_retire(Request("client", 2), "m", None))
    >>> state.apply_all(state.decide_free())
    >>> state.references.freed[0].segment, state.bytes_metadata < 1024
    ((0, 5), True)
    """

    def __init__(
        self,
        start: str,
        session_s: float = 60.0,
        capacity: int = 1 << 30,
        codec: str | None = None,
        on_path: bool = False,
    ) -> None:
        self.start = start
        self.capacity = capacity
        self.codec = codec
        self.on_path = on_path
        self.term = 0
        self.floor = 0
        """No name gets a number up to this that it has not used."""
        self.sequence = 0
        """Number of the last record that was applied."""
        self.requests = Requests(session_s)
        self.pins = Pins()
        self.graphs = Architectures()
        self.lineage = Lineage()
        self.references = References()
        self.effects = Effects()
        self.unread: dict[ModelRef, Unreadable] = {}
        """Versions whose manifests cannot be read now -> why."""
        self.hidden: dict[str, Unreadable] = {}
        """What stands among the manifests and is none, by its file: manifests may have stood in its place."""
        self.ending: dict[ModelRef, Entry] = {}
        """Retired versions whose tensors are not freed."""
        self.unwritten: dict[ModelRef, None] = {}
        """Live versions without a manifest on the path, in the order of their commits; none without a path."""
        self._names: dict[str, _Name] = {}
        self._entries: dict[ModelRef, Entry] = {}
        self._answers: OrderedDict[Request, tuple[ModelRef, int]] = OrderedDict()
        self._record_bytes = 0
        self._aliases = 0
        """How many there are."""
        self._restoring = False
        """Within a snapshot: versions can be found by their graphs when it ends."""
        self._past: list[tuple[ModelRef, ModelRef | None, float | None]] = []
        """Retired versions of a snapshot, with parent and quality."""
        self.same_start = True
        """The stream that was replayed is of this start of the repository: its shards may run."""

    @property
    def bytes_metadata(self) -> int:
        """Bytes of records, names and graphs."""
        names = NAME_BYTES * len(self._names) + ALIAS_BYTES * self._aliases
        return self._record_bytes + self.graphs.nbytes + names

    @property
    def is_blind(self) -> bool:
        """Whether there may be versions on the path of which it is not known what they name."""
        return bool(self.unread or self.hidden)

    # ---- decisions ------------------------------------------------------------------------------------

    def decide_commit(
        self, draft: Draft, staged: Mapping[SegmentId, Staged], now_ns: int, version: int | None = None
    ) -> list[Record]:
        """Return the records that make a version exist. The caller has asked `refusal` and `answer` before.

        Args:
            draft: the version.
            staged: segments that the save brings.
            now_ns: the time, UTC, in ns.
            version: number that `reserve` gave; None: the next one.

        Raises:
            StoreFullError: there is no memory for the record.
            CorruptDataError: the name's highest version has the last number that there is; names its file.
            InvalidNameError: the name is malformed.
        """
        holds = unpacked_slots(draft.slots)
        ref = ModelRef(draft.name, version if version is not None else self.next_version(draft.name))
        record = Version(
            ref=(ref.name, ref.version),
            parent=_pair(draft.parent),
            quality=draft.quality,
            metadata=draft.metadata,
            created_ns=self.dated(draft.name, now_ns),
            graph_key=draft.graph_key,
            bytes_owned=draft.bytes_owned,
            bytes_total=draft.bytes_total,
            codec=self.codec,
            body=draft.body,
            slots=draft.slots,
            save=done(draft.save),
            placed=tuple((segment_bytes(s), one.slots, one.shards) for s, one in staged.items() if holds.get(s)),
        )
        records: list[Record] = []
        if draft.graph_key not in self.graphs and draft.architecture is not None and draft.fingerprints is not None:
            query = draft.fingerprints
            records.append(Graph(draft.graph_key, draft.architecture, query.fingerprints, query.inputs))
        records.append(record)
        needed = len(draft.body) + len(draft.metadata) + RECORD_BYTES + len(draft.architecture or b"")
        self._check_room(f"save of {draft.name!r}", needed)
        return records

    def _check_room(self, what: str, nbytes: int) -> None:
        if self.bytes_metadata + nbytes > self.capacity:
            raise StoreFullError(
                f"{what}: expected at most {size(self.capacity)} of records and graphs in the catalog; found "
                f"{size(self.bytes_metadata)} and {size(nbytes)} more: retire versions"
            )

    def refusal(self, draft: Draft, default_parent: bool, staged: Set[SegmentId]) -> tuple[str, str] | None:
        """Return why a draft cannot be committed as it is: what is missing, and a reason; None: it can.

        Args:
            draft: the version.
            default_parent: its parent is to be the latest version of its name.
            staged: segments that the save brings.
        """
        if default_parent:
            known = self._names.get(check_name(draft.name))
            newest = known.newest if known is not None else 0
            if (ModelRef(draft.name, newest) if newest else None) != draft.parent:
                return "parent", f"{draft.name}: the latest version is {newest or 'none'}, not {draft.parent or 'none'}"
        elif draft.parent is not None and not self._reads(draft.parent, draft.save.client):
            return "parent", f"{draft.parent} exists no more"
        if draft.architecture is None and draft.graph_key not in self.graphs:
            return "graph", f"no graph of key {draft.graph_key.hex()}"
        return self.missing(draft, staged)

    def missing(self, draft: Draft, staged: Set[SegmentId]) -> tuple[str, str] | None:
        """Return which tensors that a draft inherits are not available, as `refusal` does; None: all are."""
        for segment, slots in unpacked_slots(draft.slots).items():
            if segment not in staged and not self.references.has(segment, slots):
                return "slots", f"some slots of segment {segment[1]:x} are not available"
        return None

    def with_graph(self, draft: Draft) -> Draft:
        """Return a draft that was not refused with its graph: that may go before the draft is decided on."""
        if draft.architecture is not None:
            return draft
        key = draft.graph_key
        return replace(draft, architecture=self.graphs.packed(key), fingerprints=self.graphs.query(key))

    def next_version(self, name: str) -> int:
        """Return the number of the next version of a name; errors as in `decide_commit`."""
        known = self._names.get(check_name(name))
        number = max(known.next_version if known is not None else 1, self.floor + 1)
        if number > LAST_VERSION:
            last = ModelRef(name, LAST_VERSION)
            raise CorruptDataError(
                f"save of {name!r}: expected a version number up to {LAST_VERSION}; {last} exists, by its manifest "
                f"{manifest_name(last)}: remove the forged one, and restart"
            )
        return number

    def reserve(self, name: str) -> int:
        """Give a version number to a save that is written to the path before its commit; it is not given again."""
        number = self.next_version(name)
        self._name(name).next_version = number + 1
        return number

    def dated(self, name: str, now_ns: int) -> int:
        """Return when a version is created: now, but later than those of its name: clocks may be set back."""
        known = self._names.get(name)
        return min(max(now_ns, known.newest_ns + 1 if known is not None else 0), LATEST_NS)

    def answer(self, request: Request) -> tuple[ModelRef, int] | None:
        """Return what a request was answered, a commit or a retirement: the version and a time."""
        return self._answers.get(request)

    def brought(self, segments: Iterable[SegmentId]) -> tuple[ModelRef, int] | None:
        """Return the version that has segments which a save is about to bring, and its time; None: none has.

        A durable save has its manifest before its record: the next term may have read that.
        """
        known = {segment for segment in segments if segment in self.references}
        for entry in self.entries() if known else ():
            if not known.isdisjoint(self.holds_of(entry)):
                return entry.header.ref, entry.header.created_ns
        return None

    def decide_retire(self, request: Request, name: str, which: Which) -> list[Record]:
        """Return the record that ends a version. The caller has asked `answer` before.

        Raises:
            ModelNotFoundError, StorageError, CorruptDataError: there is no such version, or it cannot be read now.
            OptionError: an alias names it.
        """
        known = self._names.get(name)
        version = self._version_of(name, which)
        if known is not None and version is not None and version in known.lost:
            ref = ModelRef(name, version)
        else:
            ref = self.resolve(name, version)
        aliases = [alias for alias, named in known.aliases.items() if named == ref.version] if known is not None else []
        if aliases:
            raise OptionError(
                f"retire of {ref}: expected a version that no alias names; found {', '.join(map(repr, aliases))}: "
                "move or remove the alias first"
            )
        return [Retired((ref.name, ref.version), done(request))]

    def decide_alias(self, request: Request, name: str, alias: str, which: Which, ends: bool) -> list[Record]:
        """Return the record that has an alias name a live version, or `ends` it: none where there is no such alias.

        The caller has asked `answer` before.

        Raises:
            ModelNotFoundError, ModelLostError, StorageError, CorruptDataError: there is no such version.
            InvalidNameError: the alias is malformed.
            StoreFullError: there is no memory for another alias.
        """
        known = self._names.get(name)
        before = known.aliases.get(check_alias(alias)) if known is not None else None
        if ends:
            return [Aliased(name, alias, 0, done(request))] if before is not None else []
        version = self.resolve(name, which).version
        if before is None:
            self._check_room(f"alias {text_of(name, alias)}", ALIAS_BYTES)
        return [Aliased(name, alias, version, done(request))]

    def decide_free(self) -> list[Record]:
        """Return the record that frees the tensors of retired versions that nobody needs."""
        if self.on_path and self.is_blind:
            return []
        refs = [ref for ref, entry in self.ending.items() if not entry.written and not self.pins.holds(ref)]
        return [Freed(tuple((ref.name, ref.version) for ref in refs))] if refs else []

    def decide_lost(self, segments: Iterable[SegmentId]) -> list[Record]:
        """Return the record that names versions lost of which no tensor is available.

        Args:
            segments: those that may be missing; all others are there.
        """
        missing: dict[SegmentId, set[int]] = {}
        for segment in segments:
            known = self.references.get(segment)
            slots = known.missing() if known is not None else []
            if slots:
                missing[segment] = set(slots)
        lost: list[Ref] = []
        for ref, entry in self._entries.items() if missing else ():
            holds = self.holds_of(entry)
            if holds and all(s in missing and missing[s].issuperset(slots) for s, slots in holds.items()):
                lost.append((ref.name, ref.version))
        return [Lost(tuple(lost))] if lost else []

    # ---- applying -------------------------------------------------------------------------------------

    def apply_all(self, records: Iterable[Record]) -> None:
        """Apply records in their order."""
        for record in records:
            self.apply(record)

    def apply(self, record: Record, content: bytes | None = None) -> None:
        """Apply a record.

        Args:
            record: the record.
            content: its bytes, if they are at hand.
        """
        match record:
            case Version():
                self._apply_version(record, content)
            case Retired():
                self._apply_retired(record)
            case Freed(refs):
                self._apply_freed(refs)
            case Placed():
                self.references.placed(record, every=self._restoring)
            case Graph(key, content_, fingerprints, inputs):
                self.graphs.add(key, content_, PrefixQuery(fingerprints, inputs))
            case Written(refs):
                self._apply_written(refs)
            case Lost(refs):
                self._apply_lost(refs)
            case Aliased():
                self._apply_aliased(record)
            case Began(term, _, start, floor):
                self.term, self.floor = term, floor
                self._restoring = True
                self.same_start = start == self.start
            case Name():
                self._apply_name(record)
            case Answers(answers):
                for client, number, ref, at in answers:
                    self._remember(Request(client, number), ModelRef(*ref), at)
            case End(_, sequence):
                self._restoring = False
                self.sequence = sequence
                self.graphs.enter_all([entry.header for entry in self._entries.values()])
                self._apply_past()
                return
        if not self._restoring:
            self.sequence += 1

    def _apply_version(self, record: Version, content: bytes | None) -> None:
        for serial, slots, shards in record.placed:
            self.references.place(segment_from(serial), slots, keeper=shards[0], copies=shards, file=None)
        header = record.header
        entry = Entry(header, content if content is not None else encoded(record))
        self._enter(entry, unpacked_slots(record.slots))
        if self.on_path:
            self.unwritten[header.ref] = None
        self.effects.published.append(header.ref)
        if record.save is not None:
            self._remember(Request(*record.save), header.ref, header.created_ns)

    def _enter(self, entry: Entry, holds: Holds) -> None:
        """Make a version live, whose graph is kept."""
        header = entry.header
        ref = header.ref
        self.graphs.use(header.graph_key)
        self.references.add(holds)
        self.references.warm(holds, +1)
        self._entries[ref] = entry
        self._record_bytes += entry.nbytes
        known = self._name(ref.name)
        above = known.newest > ref.version
        known.live[ref.version] = known.warm[ref.version] = None
        if above:  # one whose manifest could be read later, or that was written to the path first
            known.live = dict.fromkeys(sorted(known.live))
        known.next_version = max(known.next_version, ref.version + 1)
        known.newest_ns = max(known.newest_ns, header.created_ns)
        self.lineage.add(ref, header.parent, header.quality)
        if not self._restoring:
            self.graphs.enter(header)
        self.effects.changed.append(ref.name)

    def _apply_retired(self, record: Retired) -> None:
        ref = ModelRef(*record.ref)
        entry = self._entries.get(ref)
        known = self._name(ref.name)
        if entry is not None:
            self._remove(ref, entry)
            self.ending[ref] = entry
        elif ref.version in known.lost:
            del known.lost[ref.version]
            self.lineage.retire(ref)
        self.unwritten.pop(ref, None)
        if record.request is not None:
            self._remember(Request(*record.request), ref, 0)
        self.effects.changed.append(ref.name)
        self.effects.ended.append(ref)

    def _apply_freed(self, refs: Iterable[Ref]) -> None:
        for name, version in refs:
            ref = ModelRef(name, version)
            entry = self.ending.pop(ref, None)
            if entry is not None:
                self._release(ref, entry)
                self.lineage.retire(ref)

    def _apply_written(self, refs: Iterable[Ref]) -> None:
        for name, version in refs:
            ref = ModelRef(name, version)
            self.unwritten.pop(ref, None)
            if ref in self._entries:
                self._entries[ref].written = True
            elif ref in self.ending:
                self.ending[ref].written = False  # the header is: nothing of the version is on the path any more

    def _apply_lost(self, refs: Iterable[Ref]) -> None:
        for name, version in refs:
            ref = ModelRef(name, version)
            entry = self._entries.get(ref)
            if entry is None:
                continue
            self._remove(ref, entry)
            self._release(ref, entry)
            self._name(name).lost[version] = entry.header.parent
            self.unwritten.pop(ref, None)
            self.effects.changed.append(name)
            self.effects.ended.append(ref)

    def _apply_aliased(self, record: Aliased) -> None:
        aliases = self._name(record.name).aliases
        self._aliases -= len(aliases)
        version = record.version or aliases.pop(record.alias)
        if record.version:
            aliases[record.alias] = version
        self._aliases += len(aliases)
        if record.request is not None:
            self._remember(Request(*record.request), ModelRef(record.name, version), 0)
        self.effects.changed.append(text_of(record.name, record.alias))

    def _apply_name(self, record: Name) -> None:
        known = self._name(record.name)
        known.next_version = max(known.next_version, record.next_version)
        known.newest_ns = max(known.newest_ns, record.newest_ns)
        known.aliases = dict(record.aliases)
        self._aliases += len(known.aliases)
        for version, parent, quality in record.lost:
            ref = ModelRef(record.name, version)
            self.restore_lost(ref, _ref(parent))
            if quality is not None:
                self.lineage.set_quality(ref, quality)
        for version in record.unread:
            self.miss(ModelRef(record.name, version), StorageError("it was not read again yet"))
        self._past += [(ModelRef(record.name, v), _ref(parent), quality) for v, parent, quality in record.past]
        for first, qualities in record.runs:
            for version, quality in enumerate(qualities, first):
                before = ModelRef(record.name, version - 1)
                self._past.append((ModelRef(record.name, version), before, quality))

    def _apply_past(self) -> None:
        """Enter retired versions that something derives from, when all that does is known."""
        past, self._past = self._past, []
        self.lineage.add_retired((ref, parent) for ref, parent, _ in past)
        for ref, _, quality in past:
            if quality is not None and ref in self.lineage:
                self.lineage.set_quality(ref, quality)

    # ---- what was on the path -------------------------------------------------------------------------

    def restore_aliases(self, aliases: Mapping[str, Mapping[str, int]]) -> None:
        """Take the aliases that the path has, in place of those of a stream."""
        for known in self._names.values():
            known.aliases = {}
        for name, named in aliases.items():
            self._name(name).aliases = dict(named)
        self._aliases = sum(map(len, aliases.values()))

    def restore(self, manifest: Manifest) -> None:
        """Take a version from its manifest: no stream knows it. Its segments' files are given by `restore_files`.

        Raises:
            CorruptDataError: its architecture is none.
        """
        header = manifest.header
        known = self._name(header.ref.name)
        known.next_version = max(known.next_version, header.ref.version + 1)
        if header.graph_key not in self.graphs:
            try:
                graph = ModelGraph.from_json(manifest.architecture[0])
            except GraphError as exc:
                raise CorruptDataError(f"{manifest_name(header.ref)}: expected an architecture; found {exc}") from exc
            self.graphs.add(header.graph_key, packed(manifest.architecture), PrefixQuery.of(graph))
        holds = slots_of(manifest.entries.values())
        record = _record_of(header, encode_body(manifest.entries), packed_slots(holds))
        self._enter(Entry(header, encoded(record), written=True), holds)
        self.unread.pop(header.ref, None)

    def restore_retired(self, manifests: Iterable[Manifest]) -> None:
        """Take retired versions from their headers; those that something derives from stay in the lineage.

        Call it when all live versions are known.
        """
        headers = sorted((manifest.header for manifest in manifests), key=lambda header: header.ref)
        for header in headers:
            known = self._name(header.ref.name)
            known.next_version = max(known.next_version, header.ref.version + 1)
            self.unread.pop(header.ref, None)
        self.lineage.add_retired((header.ref, header.parent) for header in headers)
        for header in headers:
            if header.quality is not None and header.ref in self.lineage:
                self.lineage.set_quality(header.ref, header.quality)

    def restore_lost(self, ref: ModelRef, parent: ModelRef | None) -> None:
        """Take note of a version that existed and is lost."""
        known = self._name(ref.name)
        known.next_version = max(known.next_version, ref.version + 1)
        known.lost[ref.version] = parent
        self.lineage.add(ref, parent)

    def miss(self, ref: ModelRef, why: Unreadable) -> None:
        """Take note of a version whose manifest cannot be read now."""
        known = self._name(ref.name)
        known.next_version = max(known.next_version, ref.version + 1)
        self.unread[ref] = why

    def found(self, ref: ModelRef, manifest: Manifest | None) -> None:
        """Take what a manifest says that could not be read before; None: it is not there any more.

        Raises:
            CorruptDataError: its architecture is none; it stays unread.
        """
        if manifest is not None and manifest.retired:
            self.restore_retired([manifest])
            return
        if manifest is not None:
            self.restore(manifest)
            return
        del self.unread[ref]
        self.restore_lost(ref, None)

    def restore_files(
        self,
        files: Mapping[SegmentId, tuple[int, int]],
        bases: Mapping[tuple[SegmentId, int], tuple[SegmentId, int]],
        shards: Sequence[int],
    ) -> None:
        """Give slots that manifests name the files on the path: of segments without a file, or whose file lacks them.

        A file that was found by some manifests has the slots that others name, too, if these are read later. What it
        lacks after all, its keeper reports.

        Args:
            files: of all segments, the highest generation and its length.
            bases: slot -> what its tensor is encoded against, as manifests say.
            shards: those that may keep files.
        """
        waiting = [segment for segment, _ in self.references.items()]
        while waiting:
            segment = waiting.pop()
            known = self.references.get(segment)
            if known is None or segment not in files or (known.file is None and known.copies):
                continue
            generation, nbytes = files[segment]
            before = known.file or FileRecord(generation, nbytes, ())
            wanted = [slot for slot in known.live() if not before.has(slot)]
            if not wanted or before.generation != generation:
                continue
            found = {slot: bases[segment, slot] for slot in wanted if (segment, slot) in bases}
            keeper = known.keeper if known.file is not None else keeper_of(segment, shards)
            after = FileRecord.of(before.file(segment).extended(wanted, found))
            self.references.place(segment, len(known.counts), keeper=keeper, copies=(), file=after)
            waiting += [base for base, _ in found.values()]

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Take all segments to be in no shard's memory: they belonged to shards of an earlier start.

        Args:
            shards: those that may keep files.
        """
        for segment, known in list(self.references.items()):
            self.references.place(
                segment, len(known.counts), keeper=keeper_of(segment, shards), copies=(), file=known.file
            )

    # ---- what there is --------------------------------------------------------------------------------

    def resolve(self, name: str, which: Which) -> ModelRef:
        """Return the live version that `name`, `name@version` or `name@alias` means now.

        Raises:
            ModelNotFoundError: never saved, or retired, or there is no such alias.
            ModelLostError: it existed, and its bytes are lost.
            StorageError: its manifest cannot be read now. Of the latest that is so; one that is damaged is passed over.
            CorruptDataError: its manifest is damaged.
        """
        known, version = self._names.get(name), self._version_of(name, which)
        if version is not None:
            ref = ModelRef(name, version)
            if ref not in self._entries:
                raise self._absent(ref)
            return ref
        newest = known.newest if known is not None else 0
        for unread in sorted((ref for ref in self.unread if ref.name == name), reverse=True) if self.unread else ():
            if not newest or (unread.version > newest and not isinstance(self.unread[unread], CorruptDataError)):
                raise self._unreadable(unread)
        if newest:
            return ModelRef(name, newest)
        if known is not None and known.lost:
            raise _lost(ModelRef(name, max(known.lost)))
        raise ModelNotFoundError(f"expected a model named {name!r}; found no live version of it{self._near(name)}")

    def _version_of(self, name: str, which: Which) -> int | None:
        """Return the number of a version, if it is not the latest that is meant; errors of aliases as in `resolve`."""
        if not isinstance(which, str):
            return which
        known = self._names.get(name)
        aliases = known.aliases if known is not None else {}
        if which not in aliases:
            found = f"its aliases are {', '.join(map(repr, sorted(aliases)[:20]))}" if aliases else "it has no alias"
            raise ModelNotFoundError(f"expected an alias {which!r} of {name!r}; {found}")
        return aliases[which]

    def named(self, name: str, alias: str) -> ModelRef | None:
        """Return the version that an alias names; None: there is no such alias."""
        known = self._names.get(name)
        version = known.aliases.get(alias) if known is not None else None
        return ModelRef(name, version) if version is not None else None

    def aliases_after(self, records: Iterable[Record]) -> dict[str, dict[str, int]]:
        """Return all aliases as they are when records are applied."""
        found = self.aliases()
        for record in records:
            if isinstance(record, Aliased):
                named = found.setdefault(record.name, {})
                named[record.alias] = record.version
                found[record.name] = {alias: version for alias, version in named.items() if version}
        return found

    def aliases(self, prefix: str = "") -> dict[str, dict[str, int]]:
        """Return the aliases of the names that begin with a prefix: name -> alias -> version."""
        found = ((name, known.aliases) for name, known in self._names.items() if known.aliases)
        return {name: dict(sorted(aliases.items())) for name, aliases in sorted(found) if name.startswith(prefix)}

    def entry(self, name: str, which: Which, client: str) -> Entry:
        """Return the version that `client` may read: a live one, or a retired one that it has pinned; as `resolve`."""
        version = self._version_of(name, which)
        if version is not None:
            ref = ModelRef(name, version)
            if ref in self.ending and self.pins.holds(ref, client):
                return self.ending[ref]
        return self._entries[self.resolve(name, version)]

    def newest(self, name: str) -> ModelRef | None:
        """Return the latest live version of a name."""
        known = self._names.get(name)
        return ModelRef(name, known.newest) if known is not None and known.newest else None

    def live(self, ref: ModelRef) -> Entry | None:
        """Return a live version."""
        return self._entries.get(ref)

    def entries(self) -> Iterator[Entry]:
        """Iterate over live versions, and retired ones whose tensors are not freed."""
        yield from self._entries.values()
        yield from self.ending.values()

    @property
    def models_count(self) -> int:
        """How many live versions there are."""
        return len(self._entries)

    def models(self, prefix: str = "") -> list[ModelRef]:
        """List live versions, sorted."""
        return sorted(ref for ref in self._entries if ref.name.startswith(prefix))

    def headers(self, prefix: str, after_ns: int) -> list[Header]:
        """List the headers of the live versions that were created after a time."""
        found = (entry.header for entry in self._entries.values())
        return [header for header in found if header.created_ns > after_ns and header.ref.name.startswith(prefix)]

    @property
    def highest(self) -> int:
        """The highest known version number."""
        return max((known.next_version for known in self._names.values()), default=1) - 1

    def is_used(self, ref: ModelRef) -> bool:
        """Tell whether a number of a name was used, as far as this knows."""
        known = self._names.get(ref.name)
        return known is not None and ref.version < known.next_version

    def body_of(self, entry: Entry) -> bytes:
        """Return a version's table."""
        return _version(entry.packed).body

    def holds_of(self, entry: Entry) -> dict[SegmentId, list[int]]:
        """Return the slots that a version names."""
        return unpacked_slots(_version(entry.packed).slots)

    def architecture(self, ref: ModelRef, key: bytes, client: str) -> Architecture:
        """Return the graph of key `key`, which a version that `client` read has or had.

        Raises:
            ModelNotFoundError, ModelLostError: neither the version is here nor another one with that graph.
        """
        if key not in self.graphs:
            self.entry(ref.name, ref.version, client)  # says what became of it
        return self.graphs.architecture(key)

    def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Return a version, its parent, and so on to the root."""
        return self.lineage.chain(ref)

    def offspring(self, ref: ModelRef) -> list[ModelRef]:
        """Return all live versions that derive from one, sorted."""
        return sorted(one for one in self.lineage.offspring([ref]) if one in self._entries)

    # ---- pins and queries -----------------------------------------------------------------------------

    def pin(self, name: str, which: Which, lease: Lease, now: float) -> Entry:
        """Pin a version. A request that is repeated gets the version that the first one pinned.

        Raises:
            OperationTimeoutError: the request is over.
            ModelNotFoundError, ModelLostError, StorageError, CorruptDataError: as `resolve`.
        """
        self.requests.check(lease.request)
        pinned = self.pins.of(lease)
        entry = self._known(pinned) if pinned is not None else None
        entry = entry or self.entry(name, which, lease.client)
        self.requests.open(lease.client, now)
        self.pins.add(lease, entry.header.ref)
        return entry

    def pin_again(self, lease: Lease, ref: ModelRef, now: float) -> None:
        """Pin a version again whose pin went with a term or a session; also a retired one that is not freed yet."""
        self.requests.check(lease.request)
        if ref not in self.ending and ref not in self._entries:
            raise self._absent(ref)
        self.requests.open(lease.client, now)
        self.pins.add(lease, ref)

    def match(self, graphs: Sequence[PrefixQuery], query: Request, now: float) -> list[Match | None]:
        """Find, for each graph, the model with the longest common prefix, and pin it.

        Raises:
            OperationTimeoutError: the query is over.
        """
        self.requests.check(query)
        answers: list[Match | None] = []
        for position, graph in enumerate(graphs):
            lease = Lease(query, position)
            answers.append(self.pins.matches.get(lease) or self._match(graph, lease, now))
        return answers

    def _match(self, graph: PrefixQuery, lease: Lease, now: float) -> Match | None:
        best = self.graphs.match(graph)
        if best is None:
            return None
        header = self._entries[best.ref].header
        self.requests.open(lease.client, now)
        self.pins.add(lease, best.ref)
        match = Match(best.ref, best.size, header.quality, header.created_ns, header.graph_key, lease)
        self.pins.matches[lease] = match
        return match

    def declare(self, client: str, open_numbers: Sequence[int], highest: int, now: float) -> bool:
        """Take what a client says of its requests, and drop pins of those that are over; return whether it is known."""
        known = self.requests.lives(client)
        self.requests.declare(client, open_numbers, highest, now)
        for request in self.requests.over(self.pins.requests(client)):
            self.pins.remove(self.pins.leases(request))
        return known

    def end_request(self, request: Request) -> None:
        """End a request: its pins go, and it is refused from now on."""
        self.requests.end(request)
        self.pins.remove(self.pins.leases(request))

    def end_client(self, client: str) -> None:
        """End a client for good: its pins go."""
        self.requests.gone(client)
        self._unpin_client(client)

    def sweep(self, now: float) -> list[str]:
        """Drop the pins of clients whose sessions have run out; name them."""
        expired = self.requests.expired(now)
        for client in expired:
            self._unpin_client(client)
        return expired

    def _unpin_client(self, client: str) -> None:
        for request in self.pins.requests(client):
            self.pins.remove(self.pins.leases(request))

    # ---- retention ------------------------------------------------------------------------------------

    def candidates(self, name: str) -> list[Candidate]:
        """Return the versions of a name that a retention policy is asked about: those that it kept so far."""
        known = self._names.get(name)
        headers = [self._entries[ModelRef(name, version)].header for version in (known.warm if known else ())]
        return [Candidate(h.ref, h.quality, h.created_ns, h.bytes_owned) for h in headers]

    def cool(self, refs: Iterable[ModelRef]) -> dict[SegmentId, tuple[int, ...]]:
        """Let versions leave the memory; return the segments that none keeps there any more, and who has copies."""
        cold: dict[SegmentId, tuple[int, ...]] = {}
        for ref in refs:
            known, entry = self._names.get(ref.name), self._entries.get(ref)
            if known is None or entry is None or ref.version not in known.warm:
                continue
            del known.warm[ref.version]
            for segment in self.references.warm(self.holds_of(entry), -1):
                found = self.references.get(segment)
                if found is not None:
                    cold[segment] = found.copies
        return cold

    # ---- the whole ------------------------------------------------------------------------------------

    def snapshot(self, token: bytes) -> Iterator[Record | bytes]:
        """Give the records of this state, from `Began` to `End`; those that are at hand as bytes."""
        count = 0
        for record in self._snapshot(token):
            count += 1
            yield record
        yield End(count, self.sequence)

    def _snapshot(self, token: bytes) -> Iterator[Record | bytes]:
        yield Began(self.term, token, self.start, self.floor)
        for key, content, query in self.graphs.kept():
            yield Graph(key, content, query.fingerprints, query.inputs)
        for name, known in self._names.items():
            yield self._name_record(name, known)
        for entry in self._entries.values():
            yield entry.packed
        for entry in self.ending.values():
            yield entry.packed
        segments = [self.references.record_of(segment, known) for segment, known in self.references.items()]
        for start in range(0, len(segments), 1024):
            yield Placed(tuple(segments[start : start + 1024]))
        written = [_pair_of(ref) for ref in self._entries if self.on_path and ref not in self.unwritten]
        written += [_pair_of(ref) for ref, entry in self.ending.items() if entry.written]
        for start in range(0, len(written), 4096):
            yield Written(tuple(written[start : start + 4096]))
        for ref in self.ending:
            yield Retired(_pair_of(ref), None)
        answers = [(r.client, r.number, _pair_of(ref), at) for r, (ref, at) in self._answers.items()]
        for start in range(0, len(answers), 4096):
            yield Answers(tuple(answers[start : start + 4096]))

    def _name_record(self, name: str, known: _Name) -> Name:
        past = self.lineage.past(name)
        refs = [ModelRef(name, version) for version in past]
        runs = self.lineage.runs(name)
        refs += [ModelRef(name, version) for first, end in runs for version in range(first, end)]
        refs += [ModelRef(name, version) for version in known.lost]
        qualities = self.lineage.qualities(refs)
        return Name(
            name,
            known.next_version,
            known.newest_ns,
            tuple((v, _pair(parent), qualities.get(ModelRef(name, v))) for v, parent in known.lost.items()),
            tuple(ref.version for ref in self.unread if ref.name == name),
            tuple((v, _pair(parent), qualities.get(ModelRef(name, v))) for v, parent in past.items()),
            tuple((a, tuple(qualities.get(ModelRef(name, v)) for v in range(a, b))) for a, b in runs),
            tuple(known.aliases.items()),
        )

    def check(self) -> None:
        """Derive all counts from the records and compare.

        Raises:
            CorruptDataError: they differ.
        """
        self.references.check(self.holds_of(entry) for entry in self.entries())
        nbytes = sum(entry.nbytes for entry in self.entries())
        if nbytes != self._record_bytes:
            raise CorruptDataError(f"catalog: expected {nbytes} bytes of records; found {self._record_bytes}")

    # ---- within ---------------------------------------------------------------------------------------

    def _name(self, name: str) -> _Name:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = _Name()
        return known

    def _known(self, ref: ModelRef) -> Entry | None:
        return self._entries.get(ref) or self.ending.get(ref)

    def _reads(self, ref: ModelRef, client: str) -> bool:
        return ref in self._entries or (ref in self.ending and self.pins.holds(ref, client))

    def _remove(self, ref: ModelRef, entry: Entry) -> None:
        """Take a live version out of all that is asked for live ones."""
        del self._entries[ref]
        known = self._names[ref.name]
        del known.live[ref.version]
        if ref.version in known.warm:
            del known.warm[ref.version]
            self.references.warm(self.holds_of(entry), -1)
        if not self._restoring:
            self.graphs.remove(entry.header)

    def _release(self, ref: ModelRef, entry: Entry) -> None:
        """Free what a version keeps."""
        self.references.drop(self.holds_of(entry))
        self.graphs.leave(entry.header.graph_key)
        self._record_bytes -= entry.nbytes

    def _remember(self, request: Request, ref: ModelRef, at: int) -> None:
        self._answers[request] = ref, at
        if len(self._answers) > ANSWERS:
            self._answers.popitem(last=False)

    def _absent(self, ref: ModelRef) -> Exception:
        """Make the error of a version that does not live."""
        known = self._names.get(ref.name)
        if ref in self.unread:
            return self._unreadable(ref)
        if known is not None and ref.version in known.lost:
            return _lost(ref)
        if known is not None and ref.version < known.next_version:
            return ModelNotFoundError(f"expected a live model; {ref} was retired")
        if known is not None and known.live:
            live = f"its live versions are {list(known.live)[-20:]}"
            return ModelNotFoundError(f"expected a live model; found no {ref}: {live}")
        return ModelNotFoundError(f"expected a live model; found no {ref} and no other version{self._near(ref.name)}")

    def _near(self, name: str) -> str:
        """Return the end of a message about an unknown name: names like it."""
        live = (known for known, versions in self._names.items() if versions.live)
        near = get_close_matches(name, islice(live, COMPARED_NAMES), n=3)
        return f"; names near it: {', '.join(map(repr, near))}" if near else ""

    def _unreadable(self, ref: ModelRef) -> Unreadable:
        why = self.unread[ref]
        if isinstance(why, CorruptDataError):
            return CorruptDataError(f"{ref}: {why}")
        return StorageError(f"{ref} cannot be read now; reading is retried: {why}")


def _pair(ref: ModelRef | None) -> Ref | None:
    return (ref.name, ref.version) if ref is not None else None


def _ref(pair: Ref | None) -> ModelRef | None:
    return ModelRef(*pair) if pair is not None else None


def _pair_of(ref: ModelRef) -> Ref:
    return ref.name, ref.version


def _version(content: bytes) -> Version:
    """Open a `Version` record."""
    record = decoded(content)
    if not isinstance(record, Version):
        raise CorruptDataError(f"catalog: expected the record of a version; found {type(record).__name__}")
    return record


def _record_of(header: Header, body: bytes, slots: bytes) -> Version:
    """Make the record of a version that a manifest on the path describes."""
    return Version(
        ref=(header.ref.name, header.ref.version),
        parent=_pair(header.parent),
        quality=header.quality,
        metadata=header.metadata,
        created_ns=header.created_ns,
        graph_key=header.graph_key,
        bytes_owned=header.bytes_owned,
        bytes_total=header.bytes_total,
        codec=header.codec,
        body=body,
        slots=slots,
        save=None,
        placed=(),
    )


def _lost(ref: ModelRef) -> ModelLostError:
    return ModelLostError(
        f"{ref} is lost: its tensors were only in the memory of a shard that died, or in damaged files"
    )


def ask_policy(policy: Retention, candidates: Sequence[Candidate]) -> list[ModelRef]:
    """Return the versions that a policy does not keep; errors as in `retention.kept_by`."""
    kept = kept_by(policy, candidates)
    return [candidate.ref for candidate in candidates if candidate.ref not in kept]
