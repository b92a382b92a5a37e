"""Saves that are on the path before they exist, and the manifests that are written behind the others.

Rules
- A manifest is written when all slots that its version names are in files, after those of its parent and of earlier
  versions of its name, and never over that of another version. Manifests of different names do not wait for each other.
- A retired version's manifest is replaced by a header that says so; only then are its tensors freed.
- A durable save has its files reported and its manifest written first; the version exists after that.
- A failed write is tried again, ever more slowly; what waits for it is told why.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from cachetools import LRUCache

from ...store.archive.aliases import Aliases, write_aliases
from ...store.archive.archive import Archive
from ...store.archive.encoding import DENSE_EVERY
from ...store.archive.manifestfile import Manifest, manifest_name
from ...store.archive.segmentfile import Slot
from ...store.catalog.records import FileRecord, Placed, Record, Version, Written
from ...store.catalog.reports import Staged
from ...store.catalog.state import Entry
from ...store.errors import OperationTimeoutError, ShardUnavailableError, StorageError, TensorVineError
from ...store.graphs.graph import ModelGraph
from ...store.holders import Lease, Request
from ...store.metrics import CATALOG_WRITE, CATALOG_WRITE_FAILURES
from ...store.refs import ModelRef
from ...store.segments.segment import File, SegmentId
from ...store.versions.architectures import Architecture, unpacked
from ...store.versions.manifest import Header, decode_body
from ...store.versions.slots import segment_bytes, unpacked_slots
from ...store.versions.version import Draft
from ...store.waiting import Backoff, Deadline
from ..memory.workers import Workers
from ..rpc.ticker import Ticker
from .context import CatalogContext, Change
from .lines import Lines

log = logging.getLogger(__name__)

WRITERS = 4
"""Manifests that are written at once."""
RETRY_FIRST_S, RETRY_LAST_S = 0.25, 15.0
LOOK_S = 30.0
"""How often the queue is looked at although nothing was reported."""
GIVE_UP_S = 60.0
"""How long the path may have refused what comes next until a flush does not wait for it any longer."""
NAMED = 10
"""Versions that an error names."""
LAYERS_KEPT = 64


@dataclass(slots=True)
class _Pending:
    """A durable save whose files are awaited."""

    staged: Mapping[SegmentId, Staged]
    files: dict[SegmentId, File] = field(default_factory=dict[SegmentId, File])


class DurableSaves:
    """Durable saves under way: the files of their segments are reported before anything refers to them."""

    def __init__(self) -> None:
        self._pending: dict[Request, _Pending] = {}

    def begin(self, save: Request, staged: Mapping[SegmentId, Staged]) -> None:
        """Await the files of a save, but for those that were taken before, by an earlier term for instance."""
        self._pending[save] = _Pending(staged, {s: one.file for s, one in staged.items() if one.file is not None})

    def end(self, save: Request) -> dict[SegmentId, File]:
        """Await them no more, and return those that were reported."""
        pending = self._pending.pop(save, None)
        return pending.files if pending is not None else {}

    def stored(self, segment: SegmentId, file: File) -> bool:
        """Take a reported file; False: no save awaits it."""
        for pending in self._pending.values():
            if segment in pending.staged:
                pending.files[segment] = file
                return True
        return False

    def needs(self, segment: SegmentId) -> bool:
        """Tell whether a segment is brought by such a save."""
        return any(segment in pending.staged for pending in self._pending.values())

    def files(self, save: Request) -> Mapping[SegmentId, File]:
        """Return the files that were reported for a save."""
        pending = self._pending.get(save)
        return pending.files if pending is not None else {}


class ManifestWriter:
    """Writes the manifests of one term.

    Args:
        context: the catalog's.
        archive: the path's files.
        lines: to the shards, which say why files cannot be written.
        settle: called when headers of retired versions were written: their tensors may be freed.
    """

    def __init__(self, context: CatalogContext, archive: Archive, lines: Lines, settle: Callable[[], None]) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._archive = archive
        self._lines = lines
        self._settle = settle
        self._workers = Workers(WRITERS, thread_name_prefix="tensorvine-manifest")
        self._layers: LRUCache[bytes, dict[str, str]] = LRUCache(LAYERS_KEPT)
        self.error: StorageError | None = None
        """Why the path does not take what waits, while that is so."""
        self._pauses = Backoff(RETRY_FIRST_S, RETRY_LAST_S)
        self._pause = LOOK_S
        context.followers.append(lambda effects: self.soon() if effects.published or effects.ended else None)
        self._ticker = Ticker("manifests", "catalog", lambda: self._pause, self._step)

    def soon(self) -> None:
        """Look at the queue now."""
        self._ticker.soon()

    # ---- behind commits -------------------------------------------------------------------------------

    def _step(self) -> None:
        """Write what can be written, until nothing more can."""
        while True:
            with self._lock:
                if not self._context.lease.holds:
                    self._pause = RETRY_FIRST_S
                    return
                ready = [(ref, entry) for ref in self._ready() if (entry := self._state.live(ref)) is not None]
                for _, entry in ready:
                    entry.written = True  # or may be, from now on
                dead = [entry.header for entry in self._state.ending.values() if entry.written]
            if not ready and not dead:
                self._pause = LOOK_S if self.error is None else self._pauses.next()
                return
            done, failed = self._write_all(ready, dead)
            self._context.decide(lambda done=done, dead=dead: self._written(done, dead))
            self._note(failed)
            self._context.notifier.tell(Change.FILES)
            self._settle()
            if failed is not None:
                self._pause = self._pauses.next()
                return

    def _ready(self) -> list[ModelRef]:
        """Return the versions whose manifests can be written now. Call it with the lock held."""
        ready: list[ModelRef] = []
        names: set[str] = set()
        waiting = self._state.unwritten
        for ref in waiting:
            entry = self._state.live(ref)
            parent = entry.header.parent if entry is not None else None
            if ref.name not in names and entry is not None and parent not in waiting and self._is_stored(entry):
                ready.append(ref)
            names.add(ref.name)
            if len(ready) >= 64:
                break
        return ready

    def _is_stored(self, entry: Entry) -> bool:
        return self._are_stored(self._state.holds_of(entry), {})

    def _are_stored(self, holds: Mapping[SegmentId, Sequence[int]], files: Mapping[SegmentId, File]) -> bool:
        for segment, slots in holds.items():
            own = files.get(segment)
            if own is not None and own.slots.issuperset(slots):
                continue
            known = self._state.references.get(segment)
            if known is None or known.file is None or not all(map(known.file.has, slots)):
                return False
        return True

    def _write_all(
        self, ready: Sequence[tuple[ModelRef, Entry]], dead: Sequence[Header]
    ) -> tuple[list[ModelRef], TensorVineError | None]:
        """Write manifests and headers; return what was written, and the first failure."""
        works = [(header.ref, self._workers.submit(self._write_header, header)) for header in dead]
        works += [(ref, self._workers.submit(self._write_entry, entry)) for ref, entry in ready]
        done: list[ModelRef] = []
        failed: TensorVineError | None = None
        for ref, work in works:
            try:
                work.result()
                done.append(ref)
            except TensorVineError as exc:
                failed = failed or exc
        return done, failed

    def _written(self, done: Sequence[ModelRef], dead: Sequence[Header]) -> list[Record]:
        """Return the record of what was written. A manifest whose version was retired meanwhile needs a header."""
        headers = {header.ref for header in dead}
        refs = [ref for ref in done if ref in headers or self._state.live(ref) is not None]
        return [Written(tuple((ref.name, ref.version) for ref in refs))] if refs else []

    def _write_entry(self, entry: Entry) -> None:
        with self._lock:
            if entry.header.graph_key not in self._state.graphs:
                return  # the version was lost just now
            body = self._state.body_of(entry)
            architecture = self._state.graphs.packed(entry.header.graph_key)
            chains = self._chains(self._state.holds_of(entry), {})
        self._write(entry.header, body, unpacked(architecture), chains)

    def _write(
        self, header: Header, body: bytes, architecture: Architecture, chains: Mapping[Slot, tuple[Slot, ...]]
    ) -> None:
        manifest = Manifest(header, architecture, decode_body(body, header.ref), chains)
        begun, counts = time.perf_counter(), self._context.counts
        try:
            self._archive.write_manifest(manifest, self._layers_of(header.graph_key, architecture[0]))
        except TensorVineError:
            counts.add(CATALOG_WRITE_FAILURES)
            raise
        counts.observe(CATALOG_WRITE, time.perf_counter() - begun)

    def _write_header(self, header: Header) -> None:
        self._archive.write_manifest(Manifest(header, ("", None), {}, {}, retired=True), {})

    def _chains(
        self, holds: Mapping[SegmentId, Sequence[int]], files: Mapping[SegmentId, File]
    ) -> dict[Slot, tuple[Slot, ...]]:
        """Return what the tensors of a version are encoded against. Call it with the lock held."""
        references = self._state.references
        chains: dict[Slot, tuple[Slot, ...]] = {}
        for segment, slots in holds.items():
            own = files.get(segment)
            for slot in slots:
                if own is not None:
                    base = own.bases.get(slot)
                    chain = (base, *references.chain(*base, DENSE_EVERY)) if base is not None else ()
                else:
                    chain = references.chain(segment, slot, DENSE_EVERY)
                if chain:
                    chains[segment, slot] = chain
        return chains

    def _layers_of(self, key: bytes, text: str) -> dict[str, str]:
        layers = self._layers.get(key)
        if layers is None:
            graph = ModelGraph.from_json(text)
            layers = {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}
            self._layers[key] = layers
        return layers

    def _note(self, failed: TensorVineError | None) -> None:
        if failed is None:
            self.error = None
            self._pauses.reset()
            return
        if str(failed) != str(self.error):
            log.warning("catalog: manifests cannot be written, retrying: %s", failed)
        self.error = failed if isinstance(failed, StorageError) else StorageError(str(failed))

    # ---- what callers wait for ------------------------------------------------------------------------

    async def bury(self, header: Header) -> None:
        """Replace a manifest by a header that says that the version is retired.

        Raises:
            StorageError: the path does not take it.
        """
        await self._workers.run(self._write_header, header)

    async def write_aliases(self, aliases: Aliases) -> None:
        """Write the aliases of all names to the path.

        Raises:
            StorageError: the path does not take them.
        """
        await self._workers.run(write_aliases, self._archive.directory, aliases)

    async def flush(self, deadline: Deadline) -> None:
        """Wait until the manifests of all versions that exist now are written, or the versions are retired.

        Raises:
            StorageError: the path refuses them for a minute, or until the deadline.
            OperationTimeoutError: it takes longer.
        """
        with self._lock:
            waiting = list(self._state.unwritten)
        self.soon()
        refused_since = math.inf

        def look() -> bool | None:
            nonlocal refused_since
            left = [ref for ref in waiting if ref in self._state.unwritten]
            refused_since = min(refused_since, time.monotonic()) if left and self.reason() else math.inf
            if time.monotonic() - refused_since >= GIVE_UP_S:
                raise self._late(left)
            return None if left else True

        while not await self._context.notifier.until(Change.FILES, look, deadline.sooner(1.0)):
            if deadline.passed:
                with self._lock:
                    left = [ref for ref in waiting if ref in self._state.unwritten]
                if left:
                    raise self._late(left)

    def _late(self, left: Sequence[ModelRef]) -> TensorVineError:
        names = [str(ref) for ref in left[:NAMED]] + ([f"{len(left) - NAMED} more"] if len(left) > NAMED else [])
        what = f"{len(left)} versions ({', '.join(names)}): expected them to be written to disk"
        reason = self.reason()
        if reason:
            return StorageError(f"{what}; {reason}")
        return OperationTimeoutError(f"{what} in time; the disk is slower than the saves")

    def reason(self, segments: Sequence[SegmentId] = ()) -> str:
        """Say why the path does not take what waits; empty: it does.

        Args:
            segments: those that matter; none: any.
        """
        if self.error is not None:
            return str(self.error)
        for line in self._lines.all():
            for segment, why in line.failing.items():
                if not segments or segment in segments:
                    return f"shard {line.shard}: {why}"
        return ""

    def begin(self, saves: DurableSaves, draft: Draft, staged: Mapping[SegmentId, Staged]) -> Draft:
        """Keep what a durable save needs until `save` has ended: its parent is pinned, its graph goes along.

        Call it with the lock held, in the section that found no reason to refuse it.
        """
        if draft.parent is not None:
            self._state.pins.add(_keeps_parent(draft.save), draft.parent)
        saves.begin(draft.save, staged)
        return self._state.with_graph(draft)

    async def save(
        self, saves: DurableSaves, draft: Draft, staged: Mapping[SegmentId, Staged], deadline: Deadline
    ) -> tuple[str, str] | None:
        """Write a version that `begin` returned to the path, and make it exist then.

        Returns:
            As `CatalogState.refusal`: tensors that it inherits were lost meanwhile; None: it exists.

        Raises:
            StorageError: the path does not take it; nothing of it stays.
            OperationTimeoutError: it takes longer.
            CorruptDataError: the name's highest version has the last number that there is.
        """
        try:
            return await self._save(saves, draft, staged, deadline)
        finally:
            with self._lock:
                saves.end(draft.save)
                self._state.pins.remove([_keeps_parent(draft.save)])
            self._settle()

    async def _save(
        self, saves: DurableSaves, draft: Draft, staged: Mapping[SegmentId, Staged], deadline: Deadline
    ) -> tuple[str, str] | None:
        save, holds = draft.save, unpacked_slots(draft.slots)
        with self._lock:
            number = self._state.reserve(draft.name)
            at = self._state.dated(draft.name, time.time_ns())
        ref = ModelRef(draft.name, number)
        try:
            await self._until_stored(saves, draft, holds, deadline)
            await self._write_first(saves, draft, ref, at, deadline)
            with self._lock:
                files = dict(saves.files(save))
                refusal = self._state.missing(draft, staged.keys())
                if refusal is None:
                    self._context.decide(lambda: self._records(draft, staged, files, number, at))
            if refusal is not None:
                await self._take_back(ref)
            return refusal
        except BaseException:
            if self._state.live(ref) is None:
                await self._take_back(ref)
            raise

    async def _until_stored(
        self, saves: DurableSaves, draft: Draft, holds: Mapping[SegmentId, Sequence[int]], deadline: Deadline
    ) -> None:
        def look() -> bool | None:
            return self._are_stored(holds, saves.files(draft.save)) or None

        if not await self._context.notifier.until(Change.FILES, look, deadline):
            what, why = f"save of {draft.name!r}: expected its tensors to be on disk", self.reason(list(holds))
            if why:
                raise StorageError(f"{what}; {why}")
            raise OperationTimeoutError(f"{what} in time; the disk is slower than the saves")

    async def _write_first(self, saves: DurableSaves, draft: Draft, ref: ModelRef, at: int, deadline: Deadline) -> None:
        header = draft.header(ref, at, self._state.codec)
        with self._lock:
            packed = draft.architecture or self._state.graphs.packed(draft.graph_key)
            chains = self._chains(unpacked_slots(draft.slots), saves.files(draft.save))
        writing = asyncio.ensure_future(self._workers.run(self._write, header, draft.body, unpacked(packed), chains))
        try:
            await asyncio.wait_for(asyncio.shield(writing), max(deadline.left(), 1.0))
        except TimeoutError:
            await asyncio.wait([writing])
            raise OperationTimeoutError(
                f"save of {draft.name!r}: expected its manifest to be written in time"
            ) from None

    def _records(
        self, draft: Draft, staged: Mapping[SegmentId, Staged], files: Mapping[SegmentId, File], number: int, at: int
    ) -> list[Record]:
        """Return the records that make a version exist which is on the path already."""
        records = self._state.decide_commit(draft, staged, at, number)
        records = [replace_time(one, at) if isinstance(one, Version) else one for one in records]
        rows = [
            (segment_bytes(segment), one.slots, one.shards[0], one.shards, FileRecord.of(files[segment]))
            for segment, one in staged.items()
            if segment in files
        ]
        if rows:
            records.append(Placed(tuple(rows)))
        records.append(Written(((draft.name, number),)))
        return records

    async def _take_back(self, ref: ModelRef) -> None:
        """Delete the manifest of a version that does not exist, in case it was written."""

        def delete() -> None:
            try:
                self._archive.directory.delete(manifest_name(ref))
            except (StorageError, ShardUnavailableError) as exc:
                log.warning("catalog: the manifest of %s, which does not exist, could not be deleted: %s", ref, exc)

        await self._workers.run(delete)


def _keeps_parent(save: Request) -> Lease:
    """Return the pin on the parent of a durable save, which stays also when the client gives the save up."""
    return Lease(Request(f"save of {save.client}", save.number))


def replace_time(record: Version, at: int) -> Version:
    """Return a record with another time: a later version may have come while this one was written."""
    return msgspec.structs.replace(record, created_ns=at)
