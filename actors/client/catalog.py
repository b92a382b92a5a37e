"""A client's caches of what never changes: tables of tensors and architectures (DStore, section 3).

Rules
- Both are immutable under their key, so no entry is ever stale; the caches only bound memory, dropping what was
  used least recently.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Generic, TypeVar

from cachetools import LRUCache

from ...store.graphs.graph import ModelGraph
from ...store.refs import ModelRef
from ...store.versions.manifest import TensorEntry, decode_body
from ..shard.calls import ShardCalls
from .session import Session

TABLES = 256
ARCHITECTURES = 1024

K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """The `size` entries used last; safe between threads."""

    def __init__(self, size: int) -> None:
        self._entries: LRUCache[K, V] = LRUCache(size)
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value


class Catalog:
    """What one client knows of manifests and architectures."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tables: _Recent[ModelRef, Mapping[str, TensorEntry]] = _Recent(TABLES)
        self._bodies: _Recent[ModelRef, bytes] = _Recent(TABLES)
        self._keys: _Recent[ModelRef, bytes] = _Recent(TABLES)
        self._latest: _Recent[str, ModelRef] = _Recent(TABLES)
        self._graphs: _Recent[bytes, ModelGraph] = _Recent(ARCHITECTURES)

    def known(self, name: str, version: int | None) -> ModelRef | None:
        """Return the version whose table is here: the one asked for, or for None the newest that was met."""
        ref = ModelRef(name, version) if version is not None else self._latest.get(name)
        if ref is None or (self._tables.get(ref) is None and self._bodies.get(ref) is None):
            return None
        return ref

    def table(self, ref: ModelRef, body: bytes | None) -> Mapping[str, TensorEntry]:
        """Return a version's table: from `body`, or where that is None from the cache or the version's home.

        Raises:
            ModelNotFoundError: the version was retired meanwhile.
        """
        table = self._tables.get(ref)
        if table is None:
            table = decode_body(body or self._bodies.get(ref) or self._fetch(ref), ref)
            self._tables.put(ref, table)
        self._latest.put(ref.name, ref)
        return table

    def graph(self, ref: ModelRef, key: bytes) -> ModelGraph:
        """Return the graph of key `key`, which the home of `ref` keeps."""
        graph = self._graphs.get(key)
        if graph is None:
            text, _ = self.architecture(ref, key)
            graph = self.graph_from(key, text)
        return graph

    def meet(self, ref: ModelRef, key: bytes) -> None:
        """Learn the key of a version's graph."""
        self._keys.put(ref, key)

    def graph_of(self, ref: ModelRef) -> ModelGraph:
        """Return a version's graph."""
        key = self._keys.get(ref)
        if key is None:
            request = ShardCalls.header(self._session.client, ref.name, ref.version)
            key = self._session.at_home(ref.name, request).graph_key
            self._keys.put(ref, key)
        return self.graph(ref, key)

    def graph_from(self, key: bytes, text: str) -> ModelGraph:
        """Return the graph of key `key`, reading `text` if it was never met."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = ModelGraph.from_json(text)
            self._graphs.put(key, graph)
        return graph

    def architecture(self, ref: ModelRef, key: bytes) -> tuple[str, str | None]:
        """Fetch a graph's JSON and the recipe stored with it."""
        return self._session.at_home(ref.name, ShardCalls.architecture(self._session.client, ref, key))

    def learn(self, ref: ModelRef, body: bytes, graph: ModelGraph, key: bytes) -> None:
        """Keep what this client has just saved; the table is read when it is asked for."""
        self._bodies.put(ref, body)
        self._keys.put(ref, key)
        self._latest.put(ref.name, ref)
        self._graphs.put(key, graph)

    def _fetch(self, ref: ModelRef) -> bytes:
        return self._session.at_home(ref.name, ShardCalls.body(self._session.client, ref))
