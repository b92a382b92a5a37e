"""The sessions of clients at the catalog, and what they ask about the whole."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

from ....store.archive.manifestfile import manifest_name
from ....store.catalog.orders import Ended
from ....store.errors import StorageError, TensorVineError
from ....store.refs import ModelRef
from ....store.versions.manifest import Header, decode_body
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.catalog_calls import ClientCalls
from ...rpc.catalog_messages import CatalogStats, Declared, Page, Renewed, UnreadFile, Welcome
from ..context import CatalogContext, Change
from ..durable import ManifestWriter
from ..lines import Lines
from ..placement import Placement

ORDERS_S = 0.5
"""How long the figures wait for shards to acknowledge orders: until then memory of retired versions counts."""


class Clients:
    """What the catalog does for clients that come, stay and go.

    Args:
        context: the catalog's.
        lines: to the shards.
        placement: waits for clients to renew before it frees anything.
        writer: writes manifests; None: there is no path.
    """

    def __init__(
        self, context: CatalogContext, lines: Lines, *, placement: Placement, writer: ManifestWriter | None
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._lines = lines
        self._placement = placement
        self._writer = writer
        self._node = context.engine.this_node()

    # ---- sessions -------------------------------------------------------------------------------------

    @answers(ClientCalls.hello)
    async def hello(self, client: str, node: str) -> Welcome:
        with self._lock:
            self._context.lease.check()
            page = Page(os.getpid(), self._context.page.fd, self._context.page.file)
            return Welcome(
                term=self._context.lease.number,
                topology=self._context.topology,
                nodes=self._lines.nodes,
                node=self._node,
                page=page,
                metadata_bytes=self._context.config.metadata_bytes,
            )

    @answers(ClientCalls.renew)
    async def renew(self, client: str, declared: Declared) -> Renewed:
        with self._lock:
            self._context.lease.check()
            known = self._state.declare(client, declared.open, declared.highest, time.monotonic())
            if declared.pinned_in == self._context.lease.number:
                self._placement.renewed(client)
            renewed = Renewed(self._context.lease.number, self._context.topology.version, known)
        self._placement.settle()
        return renewed

    @answers(ClientCalls.goodbye)
    async def goodbye(self, client: str) -> None:
        with self._lock:
            self._context.lease.check()
            self._state.end_client(client)
            self._placement.renewed(client)
            self._lines.order_all(Ended((client,)))
        self._placement.settle()

    def end_expired(self) -> None:
        """Drop the pins of clients whose sessions have run out."""
        with self._lock:
            expired = self._state.sweep(time.monotonic())
        if expired:
            self._placement.settle()

    # ---- the whole ------------------------------------------------------------------------------------

    @answers(ClientCalls.flush)
    async def flush(self, timeout: float) -> None:
        await self._required().flush(Deadline.after(timeout))

    @answers(ClientCalls.stats)
    async def stats(self) -> CatalogStats:
        with self._lock:
            self._context.lease.check()
            obeyed = self._lines.obeyed()
        await self._context.notifier.until(Change.ORDERS, obeyed, Deadline.after(ORDERS_S))
        with self._lock:
            self._context.lease.check()
            unwritten = [self._state.live(ref) for ref in self._state.unwritten]
            return CatalogStats(
                term=self._context.lease.number,
                models=self._state.models_count,
                pins=len(self._state.pins),
                bytes_metadata=self._state.bytes_metadata,
                capacity=self._state.capacity,
                versions_unwritten=len(unwritten),
                bytes_unwritten=sum(entry.header.bytes_owned for entry in unwritten if entry is not None),
                manifests_unread=len(self._state.unread) + len(self._state.hidden),
                files_orphaned=self._placement.orphans,
                replicas_missing=self._placement.missing_copies(),
                sequence=self._state.sequence,
                requests=self._context.requests,
                counted=self._context.counts.copy(),
            )

    @answers(ClientCalls.unreadable)
    async def unreadable(self) -> list[UnreadFile]:
        with self._lock:
            self._context.lease.check()
            known = [UnreadFile(manifest_name(ref), ref, str(why)) for ref, why in self._state.unread.items()]
            return known + [UnreadFile(name, None, str(why)) for name, why in self._state.hidden.items()]

    @answers(ClientCalls.check_manifest)
    async def check_manifest(self, client: str, ref: ModelRef) -> list[str]:
        with self._lock:
            self._context.lease.check()
            self._required()
            entry = self._state.entry(ref.name, ref.version, client)
            if ref in self._state.unwritten:
                return []
            header, body = entry.header, self._state.body_of(entry)
        return await asyncio.to_thread(self._differences, header, body)

    def _differences(self, header: Header, body: bytes) -> list[str]:
        archive = self._context.archive
        if archive is None:
            return []
        try:
            manifest = archive.read_manifest(header.ref)
        except TensorVineError as exc:
            return [str(exc)]
        expected = decode_body(body, header.ref)
        found = {name: replace(entry, owner=entry.owner or header.ref) for name, entry in manifest.entries.items()}
        if repr(manifest.header) != repr(header):  # a quality may be NaN, which equals nothing
            return [f"manifest on disk: expected {header}; found {manifest.header}"]
        return [
            f"manifest on disk: tensor {name!r}: expected {expected.get(name)}; found {found.get(name)}"
            for name in expected.keys() | found.keys()
            if expected.get(name) != found.get(name)
        ]

    @answers(ClientCalls.check)
    async def check(self) -> None:
        with self._lock:
            self._context.lease.check()
            self._state.check()

    def _required(self) -> ManifestWriter:
        if self._writer is None:
            raise StorageError("catalog: expected a repository with path=; found one without")
        return self._writer
