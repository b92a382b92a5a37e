"""A client's caches of what never changes: tables of tensors and architectures (DStore, section 3).

Rules
- Both are immutable under their key, so no entry is ever stale; the caches only bound memory, dropping what was
  used least recently. So are segments: where one lies is a hint, its content hashes stay.
- Which version of a name was met last is a guess that the catalog checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from cachetools import LRUCache

from ...store.errors import CorruptDataError
from ...store.graphs.graph import ModelGraph
from ...store.graphs.index import PrefixQuery
from ...store.refs import ModelRef, Which, text_of
from ...store.segments.segment import Block, SegmentId
from ...store.versions.architectures import Architecture, packed
from ...store.versions.manifest import Header, TensorEntry, decode_body
from ..rpc.catalog_calls import CatalogCalls
from .session import Session

TABLES = 256
ARCHITECTURES = 1024
SEGMENTS = 4096
SMALL_BYTES = 16 << 20
"""Bytes of small segments, which travel in messages, that are kept to compare with."""

K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """The `size` entries used last, or as many of the last as have `size` bytes; safe between threads."""

    def __init__(self, size: int, nbytes: Callable[[V], int] | None = None) -> None:
        self._entries: LRUCache[K, V] = LRUCache(size, nbytes)
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value


class Catalog:
    """What one client knows of versions, architectures and segments."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tables: _Recent[ModelRef, Mapping[str, TensorEntry]] = _Recent(TABLES)
        self._bodies: _Recent[ModelRef, bytes] = _Recent(TABLES)
        self._keys: _Recent[ModelRef, bytes] = _Recent(TABLES)
        self._latest: _Recent[str, ModelRef] = _Recent(TABLES)
        """The latest version by name, and that of an alias by `name@alias`."""
        self._graphs: _Recent[bytes, ModelGraph] = _Recent(ARCHITECTURES)
        self._packed: _Recent[bytes, tuple[bytes, PrefixQuery]] = _Recent(ARCHITECTURES)
        self._blocks: _Recent[SegmentId, Block] = _Recent(SEGMENTS)
        self._small: _Recent[SegmentId, Block] = _Recent(SMALL_BYTES, _nbytes)
        self._digests: _Recent[SegmentId, Mapping[int, str]] = _Recent(SEGMENTS)

    def known(self, name: str, which: Which) -> ModelRef | None:
        """Return the version whose table is here: the one asked for, or the one that was met last in its place."""
        ref = ModelRef(name, which) if isinstance(which, int) else self._latest.get(text_of(name, which))
        if ref is None or (self._tables.get(ref) is None and self._bodies.get(ref) is None):
            return None
        return ref

    def table(self, ref: ModelRef, body: bytes | None) -> Mapping[str, TensorEntry]:
        """Return a version's table: from `body`, or where that is None from the cache or the catalog.

        Raises:
            ModelNotFoundError: the version was retired meanwhile.
        """
        table = self._tables.get(ref)
        if table is None:
            table = decode_body(body or self._bodies.get(ref) or self._fetch(ref), ref)
            self._tables.put(ref, table)
        return table

    def graph(self, ref: ModelRef, key: bytes) -> ModelGraph:
        """Return the graph of key `key`, which `ref` has or had."""
        graph = self._graphs.get(key)
        if graph is None:
            text, _ = self.architecture(ref, key)
            graph = self.graph_from(key, text)
        return graph

    def graph_of(self, ref: ModelRef) -> ModelGraph:
        """Return a version's graph."""
        key = self._keys.get(ref)
        if key is None:
            key = self._session.ask(CatalogCalls.header(self._session.client, ref.name, ref.version)).graph_key
            self._keys.put(ref, key)
        return self.graph(ref, key)

    def graph_from(self, key: bytes, text: str) -> ModelGraph:
        """Return the graph of key `key`, reading `text` if it was never met."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = ModelGraph.from_json(text)
            self._graphs.put(key, graph)
        return graph

    def architecture(self, ref: ModelRef, key: bytes) -> Architecture:
        """Fetch a graph's JSON and the recipe stored with it."""
        return self._session.ask(CatalogCalls.architecture(self._session.client, ref, key))

    def brought(self, key: bytes, architecture: Architecture, graph: ModelGraph) -> tuple[bytes, PrefixQuery]:
        """Return a graph and its recipe as a commit brings them."""
        found = self._packed.get(key)
        if found is None:
            found = packed(architecture), PrefixQuery.of(graph)
            self._packed.put(key, found)
        return found

    # ---- what this client has met ---------------------------------------------------------------------

    def meet(self, header: Header, body: bytes | None, which: Which) -> None:
        """Learn what the catalog said of a version that was asked for by its number, as the latest or by an alias."""
        ref = header.ref
        if body is not None:
            self._bodies.put(ref, body)
        self._keys.put(ref, header.graph_key)
        met = self._latest.get(ref.name)
        if which is None or met is None or met.version < ref.version:
            self._latest.put(ref.name, ref)
        if isinstance(which, str):
            self._latest.put(text_of(ref.name, which), ref)

    def learn(self, ref: ModelRef, body: bytes, graph: ModelGraph, key: bytes) -> None:
        """Keep what this client has just saved; the table is read when it is asked for."""
        self._bodies.put(ref, body)
        self._keys.put(ref, key)
        self._latest.put(ref.name, ref)
        self._graphs.put(key, graph)

    def key_of(self, ref: ModelRef) -> bytes | None:
        """Return the key of a version's graph, if it was met."""
        return self._keys.get(ref)

    def block(self, segment: SegmentId) -> Block | None:
        """Return where a segment lay when it was met, or its bytes."""
        return self._small.get(segment) or self._blocks.get(segment)

    def put_block(self, segment: SegmentId, block: Block) -> None:
        """Note where a segment lies, or its bytes."""
        (self._small if isinstance(block.handle, bytes) else self._blocks).put(segment, block)

    def digests(self, segment: SegmentId) -> Mapping[int, str]:
        """Return the content hashes of a segment's slots, as far as they are known."""
        return self._digests.get(segment) or {}

    def put_digests(self, segment: SegmentId, digests: Mapping[int, str]) -> None:
        """Note content hashes of a segment's slots."""
        self._digests.put(segment, digests)

    def _fetch(self, ref: ModelRef) -> bytes:
        located = self._session.ask(CatalogCalls.locate(self._session.client, ref.name, ref.version, None))
        if located.body is None:
            raise CorruptDataError(f"{ref}: expected its table from the catalog; found none")
        return located.body


def _nbytes(block: Block) -> int:
    return len(block.handle)
