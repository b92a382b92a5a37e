"""What is asked of a shard about its models, and not about their bytes.

Rules
- An answer is what the state says at one moment, under the lock.
- What concerns one name is answered by its home only (`name_handoff`); the others are asked of all shards. A shard
  whose lease is over answers neither (`tenure`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....store.graphs.index import PrefixQuery
from ....store.holders import Lease, Query
from ....store.refs import ModelRef
from ....store.shard import ShardStats, UnreadFile
from ....store.versions.manifest import Header, HeaderRow
from ....store.waiting import Deadline
from ...rpc.calls import answers
from ...rpc.messages import Fetched, Matches
from ..admission import Admission
from ..calls.queries import QueryCalls
from ..context import ShardContext
from ..disk.history import History
from ..handoff.name_handoff import NameHandoff
from ..replicas.replica_store import ReplicaStore
from ..replicas.securing import Securing
from ..serving.patch_cache import PatchCache
from ..settling import Settling


class Queries:
    """What one shard answers to those who look for models.

    Args:
        context: the shard's.
        settling: carries out what follows.
        names: which names are at home here.
        admission: knows who waits.
        history: the shard's disk, if there is one.
        securing: knows of copies of this shard.
        replica_store: has copies of others.
        patches: made lately.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        names: NameHandoff,
        admission: Admission,
        history: History | None,
        securing: Securing,
        replica_store: ReplicaStore,
        patches: PatchCache,
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._notifier = context.notifier
        self._settling = settling
        self._names = names
        self._admission = admission
        self._history = history
        self._securing = securing
        self._replica_store = replica_store
        self._patches = patches

    # ---- one version ----------------------------------------------------------------------------------

    @answers(QueryCalls.header)
    async def header(self, client: str, name: str, version: int | None) -> Header:
        with self._lock:
            self._names.check(name)
            return self._state.record(name, version, client).header

    @answers(QueryCalls.body)
    async def body(self, client: str, ref: ModelRef) -> bytes:
        with self._lock:
            self._names.check(ref.name)
            return self._state.record(ref.name, ref.version, client).body

    @answers(QueryCalls.architecture)
    async def architecture(self, client: str, ref: ModelRef, key: bytes) -> tuple[str, str | None]:
        with self._lock:
            self._names.check(ref.name)
            return self._state.architecture(ref, key, client)

    @answers(QueryCalls.chain)
    async def chain(self, ref: ModelRef) -> list[ModelRef]:
        with self._lock:
            self._names.check(ref.name)
            return self._state.lineage.chain(ref)

    @answers(QueryCalls.qualities)
    async def qualities(self, name: str, versions: Sequence[int]) -> dict[ModelRef, float]:
        with self._lock:
            self._names.check(name)
            return self._state.lineage.qualities(ModelRef(name, version) for version in versions)

    @answers(QueryCalls.wait_newer)
    async def wait_newer(self, name: str, after: int, timeout: float) -> ModelRef | None:
        def look() -> ModelRef | None:
            self._names.check(name)
            return self._state.newer(name, after)

        return await self._notifier.until(name, look, Deadline.after(timeout))

    # ---- all versions ---------------------------------------------------------------------------------

    @answers(QueryCalls.models)
    async def models(self, prefix: str) -> list[ModelRef]:
        with self._lock:
            self._context.tenure.check()
            return self._state.models(prefix)

    @answers(QueryCalls.headers)
    async def headers(self, prefix: str, after_ns: int) -> list[HeaderRow]:
        with self._lock:
            self._context.tenure.check()
            found = self._state.headers(prefix, after_ns)
        return [header.row() for header in found]

    @answers(QueryCalls.find)
    async def find(self, pattern: Sequence[Mapping[str, object]], exact: bool) -> list[ModelRef]:
        with self._lock:
            self._context.tenure.check()
            return self._state.graphs.find(pattern, exact)

    @answers(QueryCalls.alike)
    async def alike(self, query: PrefixQuery) -> list[ModelRef]:
        with self._lock:
            self._context.tenure.check()
            return self._state.graphs.alike(query)

    @answers(QueryCalls.match)
    async def match(self, query: Query, graphs: Sequence[PrefixQuery], places: bool) -> Matches:
        with self._lock:
            self._context.tenure.check()
            self._context.requests += len(graphs)
            found = self._state.match(graphs, query, time.monotonic())
            models = [match for match in found if match is not None]
            texts = {match.graph_key: self._state.graphs.architecture(match.graph_key)[0] for match in models}
            located = {match.ref: self._in_memory(match.ref, query.client) for match in models if places}
            return Matches(found, texts, located)

    def _in_memory(self, ref: ModelRef, client: str) -> Fetched:
        """Return the manifest of a version that `client` may read, and its blocks in the memory here.

        Call it with the lock held.
        """
        record, held = self._state.record(ref.name, ref.version, client), self._state.held(ref)
        present = held.keys() - self._state.absent(held).keys()
        return Fetched(record.header, record.body, self._state.blocks(present), self._segment_memory.epoch)

    @answers(QueryCalls.pin)
    async def pin(self, lease: Lease, ref: ModelRef) -> None:
        with self._lock:
            self._names.check(ref.name)
            self._state.pin(ref.name, ref.version, lease, time.monotonic())

    @answers(QueryCalls.unpin)
    async def unpin(self, leases: Sequence[Lease]) -> None:
        await self._names.unpin(leases)
        await self._settling.settle()

    @answers(QueryCalls.offspring)
    async def offspring(self, refs: Sequence[ModelRef]) -> list[tuple[ModelRef, bool]]:
        with self._lock:
            return self._state.offspring(refs)

    # ---- the shard ------------------------------------------------------------------------------------

    @answers(QueryCalls.stats)
    async def stats(self) -> ShardStats:
        return self.stats_now()

    def stats_now(self) -> ShardStats:
        """Return the statistics of the shard; for a thread, too."""
        with self._lock:
            versions, nbytes = self._history.persister.behind() if self._history is not None else (0, 0)
            return replace(
                self._state.stats(),
                bytes_staged=self._segment_memory.bytes_filling,
                bytes_resident=self._segment_memory.memory.bytes_resident,
                versions_unwritten=versions,
                bytes_unwritten=nbytes,
                capacity=self._context.config.capacity,
                requests=self._context.requests,
                bytes_saved=self._segment_memory.bytes_saved,
                bytes_sent=self._context.bytes_sent,
                patches_made=self._patches.made,
                bytes_patches=self._patches.nbytes,
                bytes_replicated=self._replica_store.nbytes,
                replicas_missing=self._securing.behind,
                files_orphaned=self._history.care.orphans if self._history is not None else 0,
                waiting_for_memory=self._admission.waiting_for_memory,
                waiting_for_disk=self._admission.waiting_for_disk,
                counted=self._context.counts.copy(),
            )

    @answers(QueryCalls.unreadable)
    async def unreadable(self) -> list[UnreadFile]:
        with self._lock:
            return self._state.unreadable()

    @answers(QueryCalls.check)
    async def check(self) -> None:
        with self._lock:
            self._state.check()
