"""The versions whose home is one shard, and who has pinned them. No engine, no clock.

Rules
- A version exists from `publish` until `retire`; both are single steps. Version numbers are never used twice.
- A commit first takes holds on every shard that it needs (`begin_commit`, then the shell's messages), and only
  then publishes: an inherited tensor cannot go in between, because the parent is pinned until then.
- A retired version that is still pinned stays for those who pinned it: nobody sees it but the clients that pinned it,
  and its holds and its place in the lineage stay until the last pin goes.
- Pins belong to an operation of a client (`holders.Lease`) and to the client's session: `abort` of the operation
  drops its pins, and a session that is not renewed in time drops all of them. An operation that ended pins nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice

from cachetools import LRUCache

from ..errors import (
    CorruptDataError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    StorageError,
    TensorVineError,
    Unreadable,
)
from ..holders import Holder, Lease, Query, Save
from ..refs import ModelRef, check_name
from ..segments.segment import Holds, SegmentId
from .architectures import Architecture, Architectures
from .ledger import Ledger
from .manifest import Header, metadata_nbytes
from .overtaken import LIMIT, Ended
from .replica import Kept
from .retention import Candidate, Retention, kept_by
from .segments import SegmentTable
from .version import Draft, Match, Record

LATEST_NS = (1 << 63) - 1
"""The latest time that a manifest may have."""
COMPARED_NAMES = 1000
"""How many names an unknown name is compared with, for its error message."""


@dataclass(slots=True)
class _Name:
    next_version: int
    live: dict[int, None] = field(default_factory=dict[int, None])
    warm: dict[int, None] = field(default_factory=dict[int, None])
    """Live versions that retention has not let go from memory."""
    lost: dict[int, None] = field(default_factory=dict[int, None])
    newest_ns: int = 0
    """When the latest of its versions that were here was created."""


@dataclass(slots=True)
class _Session:
    expires: float
    leases: dict[Lease, ModelRef] = field(default_factory=dict[Lease, ModelRef])
    matches: dict[Lease, Match] = field(default_factory=dict[Lease, Match])
    """What a query was answered, for as long as its pin is here."""


class VersionTable(SegmentTable):
    """Versions of one shard, and the segments in its care.

    Args:
        index: the shard's number.
        session_s: seconds that a client's session lasts without being renewed.
    """

    def __init__(self, index: int, session_s: float) -> None:
        super().__init__(index)
        self.session_s = session_s
        self.graphs = Architectures(index)
        self.ledger = Ledger()
        """Of all names, whoever is their home."""
        self.lineage = self.ledger.lineage
        self.ended = Ended()
        """Saves and queries that ask for nothing more."""
        self._names: dict[str, _Name] = {}
        self._records: dict[ModelRef, Record] = {}
        self._retired_pinned: dict[ModelRef, Record] = {}
        self._begun: dict[ModelRef, tuple[bytes, Holds]] = {}
        """Commit on its way -> key of its graph, which stays even if the parent goes meanwhile, and what it names."""
        self._announced: dict[Save, bytes] = {}
        """Save to come -> key of the graph that it is going to bring."""
        self._failed: LRUCache[ModelRef, None] = LRUCache(LIMIT)
        """Versions whose commit failed."""
        self._sessions: dict[str, _Session] = {}
        self._table_bytes = 0

    @property
    def bytes_metadata(self) -> int:
        """Bytes of manifests, with the users' metadata, and graphs."""
        return self._table_bytes + self.graphs.nbytes

    # ---- commits and retirement -----------------------------------------------------------------------

    def adopt(self, save: Save, segment_id: SegmentId, handle: object, sizes: Sequence[int]) -> None:
        """Take a block of a save into this shard's care, which holds all its slots.

        Raises:
            OperationTimeoutError: the saver's session ended meanwhile.
            CorruptDataError: the id is taken; savers choose ids at random from 2**60.
        """
        if save.client not in self._sessions:
            raise OperationTimeoutError(f"shard {self.index}: expected save {save} to be open; its session ended")
        super().adopt(save, segment_id, handle, sizes)

    def announce(self, save: Save, key: bytes, architecture: Architecture) -> None:
        """Read the graph of a save to come, and keep it until the save ends: its commit need not bring it then.

        Raises:
            OperationTimeoutError: the saver's session ended meanwhile.
            GraphError: it is no graph.
        """
        if save.client not in self._sessions:
            raise OperationTimeoutError(f"shard {self.index}: expected save {save} to be open; its session ended")
        if save not in self._announced:
            self.graphs.use(key, architecture, f"save {save}")
            self._announced[save] = key

    def begin_commit(self, draft: Draft) -> ModelRef:
        """Choose the version number and hold this shard's own part of what the draft names.

        The shell must then hold the other shards' parts for it, and call `publish` or `abandon`.

        Raises:
            ModelLostError: a segment that the draft names is gone.
            GraphError: the draft brings no graph and the shard keeps none of that key.
        """
        check_name(draft.name)
        self.graphs.use(draft.graph_key, draft.architecture, f"save of {draft.name!r}")
        name = self._name(draft.name)
        ref = ModelRef(draft.name, name.next_version)
        self._begun[ref] = draft.graph_key, draft.holds
        try:
            self.hold(ref, {s: slots for s, slots in draft.holds.items() if self.where(s) == self.index})
        except TensorVineError:
            self.abandon(ref)
            raise
        name.next_version += 1
        return ref

    def dated(self, ref: ModelRef, now_ns: int) -> int:
        """Return when a version that is being committed is created: now, but later than those of its name before it.

        The clock may have been set back, or the name's home may have been where another one is ahead.
        """
        known = self._names[ref.name]
        known.newest_ns = min(max(now_ns, known.newest_ns + 1), LATEST_NS)
        return known.newest_ns

    def abandon(self, ref: ModelRef) -> None:
        """Undo `begin_commit`; the version number is not given again."""
        self._failed[ref] = None
        self.ledger.note({ref: (None, False)})
        self.release(ref)
        self.graphs.leave(self._begun.pop(ref)[0])

    def publish(self, ref: ModelRef, draft: Draft, created_ns: int) -> ModelRef:
        """Make the version exist."""
        del self._begun[ref]
        self._enter(draft.header(ref, created_ns), draft.body, tuple(draft.holds))
        self.release(draft.save)
        self.changes += 1
        return ref

    def retire(self, ref: ModelRef) -> None:
        """Make a version cease to exist. Its tensors go when nothing else holds them.

        Raises:
            ModelNotFoundError, ModelLostError: there is no such live version.
        """
        record = self._live(ref)
        self._remove(ref, record)
        if record.pins:
            self._retired_pinned[ref] = record
        else:
            self._let_go(ref, record)
        self.changes += 1

    def retain(self, policy: Retention, name: str) -> list[tuple[ModelRef, set[int]]]:
        """Ask a policy which versions of `name` stay in memory; give the others, each once, and their shards.

        Those that it let go before are not shown to it again: their number would grow without end.

        Raises:
            TypeError: the policy gave something else than a set of references; nothing changes, as with whatever it
                raises itself.
        """
        known = self._names.get(name)
        records = [self._records[ModelRef(name, version)] for version in (known.warm if known else ())]
        headers = [record.header for record in records]
        kept = kept_by(policy, [Candidate(h.ref, h.quality, h.created_ns, h.bytes_owned) for h in headers])
        cold = [record for record in records if record.header.ref not in kept]
        for record in cold:
            del self._names[name].warm[record.header.ref.version]
        return [(record.header.ref, set(map(self.where, record.segments))) for record in cold]

    # ---- what there is --------------------------------------------------------------------------------

    def resolve(self, name: str, version: int | None) -> ModelRef:
        """Return the reference that `name` or `name@version` means now.

        Raises:
            ModelNotFoundError: never saved, or retired.
            ModelLostError: it was here before this shard died.
            StorageError: its manifest cannot be read now. Of the latest that is so; one that is damaged is passed over.
            CorruptDataError: its manifest is damaged.
        """
        known = self._names.get(name)
        if version is not None:
            ref = ModelRef(name, version)
            self._live(ref)
            return ref
        newest = max(known.live, default=0) if known else 0
        for unread in sorted((ref for ref in self.unread if ref.name == name), reverse=True):
            if not newest or (unread.version > newest and not isinstance(self.unread[unread], CorruptDataError)):
                raise self._unreadable(unread)
        if newest:
            return ModelRef(name, newest)
        if known and known.lost:
            raise self._lost(ModelRef(name, max(known.lost)))
        raise ModelNotFoundError(f"expected a model named {name!r}; found no live version of it{self._near(name)}")

    def record(self, name: str, version: int | None, client: str) -> Record:
        """Return the record that `client` may read: a live version, or a retired one that it has pinned."""
        if version is not None:
            retired = self._retired_pinned.get(ModelRef(name, version))
            if retired is not None and any(lease.client == client for lease in retired.pins):
                return retired
        return self._records[self.resolve(name, version)]

    def architecture(self, ref: ModelRef, key: bytes, client: str) -> Architecture:
        """Return the graph of key `key`, which a version that `client` read has or had.

        Raises:
            ModelNotFoundError, ModelLostError: neither the version is here nor another one with that graph.
        """
        if key not in self.graphs:
            self.record(ref.name, ref.version, client)  # says what became of it
        return self.graphs.architecture(key)

    def known(self, ref: ModelRef) -> Record | None:
        """Return the record of a live version, or of a retired one that is still pinned."""
        return self._records.get(ref) or self._retired_pinned.get(ref)

    def records(self) -> list[Record]:
        """List the records of live versions and retired versions that are pinned."""
        return [*self._records.values(), *self._retired_pinned.values()]

    @property
    def live(self) -> Set[ModelRef]:
        """The live versions."""
        return self._records.keys()

    def kept(self, ref: ModelRef) -> Kept:
        """Return what a replica keeps of a live version."""
        record = self._records[ref]
        return Kept(record.header, record.body, self.graphs.packed(record.header.graph_key))

    def begun(self) -> dict[ModelRef, Holds]:
        """Return the commits on their way, and what each names."""
        return {ref: holds for ref, (_, holds) in self._begun.items()}

    def newer(self, name: str, after: int) -> ModelRef | None:
        """Return the newest live version of `name` above `after`, if there is one."""
        known = self._names.get(name)
        newest = max(known.live) if known and known.live else 0
        return ModelRef(name, newest) if newest > after else None

    def models(self, prefix: str = "") -> list[ModelRef]:
        """List live versions, sorted."""
        return sorted(ref for ref in self._records if ref.name.startswith(prefix))

    def headers(self, prefix: str, after_ns: int) -> list[Header]:
        """List the headers of the live versions that were created after a time."""
        found = (record.header for record in self._records.values())
        return [header for header in found if header.created_ns > after_ns and header.ref.name.startswith(prefix)]

    # ---- leases ---------------------------------------------------------------------------------------

    def pin(self, name: str, version: int | None, lease: Lease, now: float) -> Record:
        """Pin a version until `unpin`, `abort` or the end of the client's session.

        A request that is repeated gets the version that the first one pinned.

        Raises:
            OperationTimeoutError: the operation has ended.
            ModelNotFoundError, ModelLostError, StorageError, CorruptDataError: as `resolve`.
        """
        self.ended.check(lease.operation)
        session = self._sessions.get(lease.client)
        pinned = self.known(session.leases[lease]) if session is not None and lease in session.leases else None
        record = pinned or self.record(name, version, lease.client)
        self._pin(record, lease, now)
        return record

    def pinned_by(self, operation: Save | Query) -> list[Lease]:
        """Return the pins of an operation that are here."""
        session = self._sessions.get(operation.client)
        return [lease for lease in session.leases if lease.operation == operation] if session is not None else []

    def unpin(self, leases: Iterable[Lease]) -> None:
        """Remove pins; unknown ones are no error: they may have expired."""
        for lease in leases:
            session = self._sessions.get(lease.client)
            if session is None:
                continue
            session.matches.pop(lease, None)
            ref = session.leases.pop(lease, None)
            record = self.known(ref) if ref else None
            if ref is None or record is None:
                continue
            record.pins.pop(lease, None)
            if ref in self._retired_pinned:
                self.changes += 1  # one client fewer sees the retired version
            if not record.pins and self._retired_pinned.pop(ref, None):
                self._let_go(ref, record)

    def renew(self, client: str, leases: Iterable[Lease], now: float) -> list[Lease] | None:
        """Keep a session alive; return which of its pins are here, or None if there is no such session here."""
        session = self._sessions.get(client)
        if session is None:
            return None
        self.open(client, now)
        return [lease for lease in leases if lease in session.leases]

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
        for holder in [h for h in (*self._held, *self._announced) if isinstance(h, Save) and h.client == client]:
            self.release(holder)

    def release(self, holder: Holder) -> None:
        """Forget a holder, and free what only it held; with a save goes the graph that it announced."""
        key = self._announced.pop(holder, None) if isinstance(holder, Save) else None
        if key is not None:
            self.graphs.leave(key)
        super().release(holder)

    # ---- within ---------------------------------------------------------------------------------------

    def _name(self, name: str, next_version: int = 1) -> _Name:
        """Return what is kept of a name whose versions below `next_version` are used."""
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = _Name(self.ledger.next(name))
        known.next_version = max(known.next_version, next_version)
        return known

    def _live(self, ref: ModelRef) -> Record:
        record = self._records.get(ref)
        if record is not None:
            return record
        known = self._names.get(ref.name)
        if ref in self.unread:
            raise self._unreadable(ref)
        if known and ref.version in known.lost:
            raise self._lost(ref)
        if ref in self._failed:
            raise ModelNotFoundError(f"expected a live model; {ref} never existed: its save failed")
        if self.ledger.used(ref):
            raise ModelNotFoundError(f"expected a live model; {ref} was retired")
        if known and known.live:
            live = f"its live versions are {sorted(known.live)}"
            raise ModelNotFoundError(f"expected a live model; found no {ref}: {live}")
        raise ModelNotFoundError(f"expected a live model; found no {ref} and no other version{self._near(ref.name)}")

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

    def _lost(self, ref: ModelRef) -> ModelLostError:
        return ModelLostError(
            f"{ref} is lost: it was held only in the memory of shard {self.index}, which died and was restarted"
        )

    def _let_go(self, ref: ModelRef, record: Record) -> None:
        """Let a retired version's holds go, here and elsewhere, and its graph when no other version has it."""
        self.ledger.note({ref: (None, False)})
        self.release(ref)
        self.outbox += [(shard, ref) for shard in set(map(self.where, record.segments)) - {self.index}]
        self.graphs.leave(record.header.graph_key)

    def _remove(self, ref: ModelRef, record: Record) -> None:
        """Take a live version out of all that is asked for live ones."""
        del self._records[ref]
        del self._names[ref.name].live[ref.version]
        self._names[ref.name].warm.pop(ref.version, None)
        self.graphs.remove(record.header)
        self._table_bytes -= len(record.body) + metadata_nbytes(record.header.metadata)

    def _enter(self, header: Header, body: bytes, segments: tuple[SegmentId, ...]) -> None:
        """Make a version live, whose graph is in use."""
        ref = header.ref
        self._records[ref] = Record(header, body, segments)
        known = self._names[ref.name]
        known.live[ref.version] = known.warm[ref.version] = None
        known.newest_ns = max(known.newest_ns, header.created_ns)
        self.ledger.enter(ref, header.parent, header.quality)
        self.graphs.add(header)
        self._table_bytes += len(body) + metadata_nbytes(header.metadata)

    def _pin(self, record: Record, lease: Lease, now: float) -> None:
        self.open(lease.client, now)
        self._sessions[lease.client].leases[lease] = record.header.ref
        record.pins[lease] = None
