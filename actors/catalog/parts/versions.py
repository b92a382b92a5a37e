"""What clients ask the catalog about versions: where they are, what they derive from, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from ....store.catalog.references import Known
from ....store.catalog.state import Entry
from ....store.errors import ModelLostError, StorageError, TensorVineError
from ....store.graphs.index import PrefixQuery
from ....store.holders import Lease, Request
from ....store.refs import ModelRef, Which, text_of
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import Header, HeaderRow
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.catalog_calls import ClientCalls
from ...rpc.catalog_messages import Beginning, Begun, Committed, Located, Location, Matches
from ..context import CatalogContext, Change
from ..durable import ManifestWriter
from ..placement import Placement

BRING_S = 20.0
"""How long a load waits for segments that are being brought back."""


class Versions:
    """What the catalog answers about versions.

    Args:
        context: the catalog's.
        placement: knows what is being brought back.
        writer: writes manifests; None: there is no path.
    """

    def __init__(self, context: CatalogContext, placement: Placement, writer: ManifestWriter | None) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._placement = placement
        self._writer = writer
        self._aliasing = asyncio.Lock()
        """Aliases move one after the other: the path is written first."""

    # ---- reading --------------------------------------------------------------------------------------

    @answers(ClientCalls.locate)
    async def locate(self, client: str, name: str, version: Which, known: ModelRef | None) -> Located:
        deadline = Deadline.after(BRING_S)
        while True:
            with self._lock:
                self._context.lease.check()
                self._context.requests += 1
                entry = self._state.entry(name, version, client)
                segments = self._state.holds_of(entry)
                if not self._placement.bringing or self._placement.bringing.isdisjoint(segments):
                    return self.located(entry, known, segments, version)
            await self._brought(entry.header.ref, segments, deadline)

    async def _brought(self, ref: ModelRef, segments: Mapping[SegmentId, object], deadline: Deadline) -> None:
        def look() -> bool | None:
            return self._placement.bringing.isdisjoint(segments) or None

        if not await self._context.notifier.until(Change.FILES, look, deadline):
            raise StorageError(f"{ref}: expected a shard to read its files on the path; it has not done so yet")

    def located(
        self,
        entry: Entry,
        known: ModelRef | None,
        segments: Mapping[SegmentId, object] | None = None,
        which: Which = None,
    ) -> Located:
        """Return a version's table, unless it is `known`, and where its segments are. Call it with the lock held."""
        ref = entry.header.ref
        segments = segments if segments is not None else self._state.holds_of(entry)
        body = self._state.body_of(entry) if ref != known else None
        asked = text_of(ref.name, which if isinstance(which, str) else None)
        return Located(entry.header, body, self._places(segments), self._context.page.value_of(asked), asked)

    def in_use(self, asked: str) -> Located | None:
        """Return the latest version of a name, or the one of `name@alias`; None: there is none. With the lock held."""
        name, _, alias = asked.partition("@")
        ref = self._state.named(name, alias) if alias else self._state.newest(name)
        entry = self._state.live(ref) if ref is not None else None
        return self.located(entry, None, which=alias or None) if entry is not None else None

    def _places(self, segments: Mapping[SegmentId, object]) -> dict[SegmentId, Location]:
        """Return where segments are, of those that are somewhere."""
        found = ((segment, self._state.references.get(segment)) for segment in segments)
        return {segment: _place(known) for segment, known in found if known is not None and _is_somewhere(known)}

    @answers(ClientCalls.header)
    async def header(self, client: str, name: str, version: Which) -> Header:
        with self._lock:
            self._context.lease.check()
            return self._state.entry(name, version, client).header

    @answers(ClientCalls.architecture)
    async def architecture(self, client: str, ref: ModelRef, key: bytes) -> tuple[str, str | None]:
        with self._lock:
            self._context.lease.check()
            return self._state.architecture(ref, key, client)

    @answers(ClientCalls.chain)
    async def chain(self, ref: ModelRef) -> list[ModelRef]:
        with self._lock:
            self._context.lease.check()
            return self._state.chain(ref)

    @answers(ClientCalls.offspring)
    async def offspring(self, ref: ModelRef) -> list[ModelRef]:
        with self._lock:
            self._context.lease.check()
            return self._state.offspring(ref)

    @answers(ClientCalls.qualities)
    async def qualities(self, refs: Sequence[ModelRef]) -> dict[ModelRef, float]:
        with self._lock:
            self._context.lease.check()
            return self._state.lineage.qualities(refs)

    @answers(ClientCalls.models)
    async def models(self, prefix: str) -> list[ModelRef]:
        with self._lock:
            self._context.lease.check()
            return self._state.models(prefix)

    @answers(ClientCalls.headers)
    async def headers(self, prefix: str, after_ns: int) -> list[HeaderRow]:
        with self._lock:
            self._context.lease.check()
            found = self._state.headers(prefix, after_ns)
        return [header.row() for header in found]

    @answers(ClientCalls.find)
    async def find(self, pattern: Sequence[Mapping[str, object]], exact: bool) -> list[ModelRef]:
        with self._lock:
            self._context.lease.check()
            return self._state.graphs.find(pattern, exact)

    @answers(ClientCalls.alike)
    async def alike(self, query: PrefixQuery) -> list[ModelRef]:
        with self._lock:
            self._context.lease.check()
            return self._state.graphs.alike(query)

    # ---- pinning --------------------------------------------------------------------------------------

    @answers(ClientCalls.begin)
    async def begin(self, asked: Beginning) -> Begun:
        deadline = Deadline.after(BRING_S)
        while True:
            with self._lock:
                self._context.lease.check()
                self._context.requests += 1
                self._state.requests.check(asked.save)
                self._state.requests.open(asked.save.client, time.monotonic())
                has_graph = asked.graph_key is not None and asked.graph_key in self._state.graphs
                newest, version = self._state.newest(asked.name), asked.version
                if asked.optional and newest is None:
                    return Begun(header=None, body=None, lease=None, places={}, has_graph=has_graph)
                if asked.optional and newest is not None and version is None:
                    version = newest.version  # also where a later one cannot be read now
                lease = Lease(asked.save)
                entry = self._state.pin(asked.name, version, lease, time.monotonic())
                holds = self._state.holds_of(entry)
                if not asked.waits or self._placement.bringing.isdisjoint(holds):
                    body = self._state.body_of(entry) if entry.header.ref != asked.known else None
                    whole = {s: slots for s, slots in holds.items() if self._state.references.has(s, slots)}
                    return Begun(
                        header=entry.header, body=body, lease=lease, places=self._places(whole), has_graph=has_graph
                    )
            await self._brought(entry.header.ref, holds, deadline)

    @answers(ClientCalls.match)
    async def match(self, query: Request, graphs: Sequence[PrefixQuery], places: bool) -> Matches:
        with self._lock:
            self._context.lease.check()
            self._context.requests += 1
            found = self._state.match(graphs, query, time.monotonic())
            matches = [match for match in found if match is not None]
            texts = {key: self._state.graphs.architecture(key)[0] for key in {match.graph_key for match in matches}}
            located: dict[ModelRef, Located] = {}
            for match in matches if places else ():
                entry = self._state.entry(match.ref.name, match.ref.version, query.client)
                located[match.ref] = self.located(entry, None)
            return Matches(found, texts, located)

    @answers(ClientCalls.pin)
    async def pin(self, pins: Mapping[Lease, ModelRef]) -> dict[Lease, str]:
        failed: dict[Lease, str] = {}
        with self._lock:
            self._context.lease.check()
            for lease, ref in pins.items():
                try:
                    self._state.pin_again(lease, ref, time.monotonic())
                except TensorVineError as exc:
                    failed[lease] = str(exc)
        return failed

    @answers(ClientCalls.unpin)
    async def unpin(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            self._context.lease.check()
            self._state.pins.remove(leases)
        self._placement.settle()

    @answers(ClientCalls.abort)
    async def abort(self, request: Request) -> Committed | None:
        with self._lock:
            self._context.lease.check()
            self._state.end_request(request)
            answered = self._state.answer(request)
        self._placement.settle()
        return Committed(*answered) if answered is not None else None

    # ---- ending ---------------------------------------------------------------------------------------

    @answers(ClientCalls.retire)
    async def retire(self, request: Request, name: str, version: Which) -> ModelRef:
        with self._lock:
            self._context.lease.check()
            answered = self._state.answer(request)
            if answered is not None:
                return answered[0]
            self._state.requests.check(request)
            entry = self._first_buried(name, version)
        if entry is not None and self._writer is not None:
            version = entry.header.ref.version
            await self._writer.bury(entry.header)
        with self._lock:
            answered = self._state.answer(request)
            if answered is None:
                self._context.decide(lambda: self._state.decide_retire(request, name, version))
                answered = self._state.answer(request)
        self._placement.settle()
        return answered[0] if answered is not None else self._state.resolve(name, version)

    @answers(ClientCalls.alias)
    async def alias(self, request: Request, name: str, alias: str, version: Which, ends: bool) -> ModelRef | None:
        async with self._aliasing:
            with self._lock:
                self._context.lease.check()
                answered = self._state.answer(request)
                if answered is not None:
                    return answered[0]
                self._state.requests.check(request)
                records = self._state.decide_alias(request, name, alias, version, ends)
                aliases = self._state.aliases_after(records)
            if not records:
                return None
            if self._writer is not None:
                await self._writer.write_aliases(aliases)
            with self._lock:
                self._context.decide(lambda: records)
                answered = self._state.answer(request)
        return answered[0] if answered is not None else None

    @answers(ClientCalls.aliases)
    async def aliases(self, prefix: str) -> dict[str, dict[str, int]]:
        with self._lock:
            self._context.lease.check()
            return self._state.aliases(prefix)

    def _first_buried(self, name: str, version: Which) -> Entry | None:
        """Return the version that is to be retired, if its manifest must say so first: the journal is not on the path.

        Call it with the lock held.
        """
        if self._writer is None or self._context.journal.on_path:
            return None
        with contextlib.suppress(ModelLostError):  # nothing of it is to be read any more
            entry = self._state.live(self._state.resolve(name, version))
            return entry if entry is not None and entry.written else None
        return None


def _place(known: Known) -> Location:
    place = known.place if known.place is not None and known.place.shard == known.keeper else None
    return known.keeper, place


def _is_somewhere(known: Known) -> bool:
    return known.keeper >= 0 and (bool(known.copies) or known.file is not None)
