"""What is asked of a shard about its models, and not about their bytes.

Rules
- An answer is what the state says at one moment, under the lock.
- What concerns one name is answered by its home only (`elastic`); the others are asked of all shards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...store.graphs.index import PrefixQuery
from ...store.refs import ModelRef
from ...store.shard import ShardStats
from ...store.versions.manifest import Header
from ..engine.engine import group
from ..rpc.messages import Fetched, Matches
from .parts import ShardParts


class ShardQueries(ShardParts):
    """A shard, as those see it who look for models."""

    # ---- one version ------------------------------------------------------------------------------------

    @group("ctl")
    async def header(self, client: str, name: str, version: int | None) -> Header:
        """Return what is known of a version without its table."""
        with self._lock:
            self._elastic.check(name)
            return self._state.record(name, version, client).header

    @group("ctl")
    async def body(self, client: str, ref: ModelRef) -> bytes:
        """Return a version's table of tensors."""
        with self._lock:
            self._elastic.check(ref.name)
            return self._state.record(ref.name, ref.version, client).body

    @group("ctl")
    async def architecture(self, client: str, ref: ModelRef, key: bytes) -> tuple[str, str | None]:
        """Return the graph's JSON text of a version, and the framework's recipe for it."""
        with self._lock:
            self._elastic.check(ref.name)
            return self._state.architecture(ref, key, client)

    @group("ctl")
    async def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Return a version and its ancestors, as far as this shard knows."""
        with self._lock:
            self._elastic.check(ref.name)
            return self._state.lineage.chain(ref)

    @group("ctl")
    async def qualities(self, name: str, versions: Sequence[int]) -> dict[ModelRef, float]:
        """Return the qualities of versions of a name, retired ones included."""
        with self._lock:
            self._elastic.check(name)
            return self._state.lineage.qualities(ModelRef(name, version) for version in versions)

    @group("watch", line=True)
    async def wait_newer(self, name: str, after: int, timeout: float) -> ModelRef | None:
        """Answer as soon as `name` has a version above `after`; None when none came in time."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                self._elastic.check(name)
                newest = self._state.newer(name, after)
                waiter = self._waiters.join(name) if newest is None else None
            if waiter is None:
                return newest
            if not await self._waiters.woken(name, waiter, deadline):
                return None

    # ---- all versions -----------------------------------------------------------------------------------

    @group("ctl")
    async def models(self, prefix: str) -> list[ModelRef]:
        """List live versions."""
        with self._lock:
            return self._state.models(prefix)

    @group("ctl")
    async def find(self, pattern: Sequence[Mapping[str, Any]], exact: bool) -> list[ModelRef]:
        """List versions whose architecture fits a pattern."""
        with self._lock:
            return self._state.graphs.find(pattern, exact)

    @group("ctl")
    async def match(self, client: str, queries: Sequence[PrefixQuery], places: bool) -> Matches:
        """Answer prefix queries, each with a pin, and the graphs, as JSON, of the models found.

        With `places` the answer to the load that follows is given, too, as far as it can be without reading from disk.
        """
        with self._lock:
            self._requests += len(queries)
            found = self._state.match(queries, client, time.monotonic())
            models = [match for match in found if match is not None]
            graphs = {match.graph_key: self._state.graphs.architecture(match.graph_key)[0] for match in models}
            return Matches(found, graphs, {match.ref: self._in_memory(match.ref) for match in models if places})

    def _in_memory(self, ref: ModelRef) -> Fetched:
        """Return a live version's manifest, and its blocks that lie in the memory here; with the lock held."""
        record, held = self._state.record(ref.name, ref.version, ""), self._state.held(ref)
        present = held.keys() - self._state.absent(held).keys()
        return Fetched(record.header, record.body, self._state.blocks(present), self._holdings.epoch)

    @group("ctl")
    async def unpin(self, leases: Sequence[str]) -> None:
        """Let pins go."""
        await self._elastic.unpin(leases)
        await self._settle()

    @group("ctl")
    async def offspring(self, refs: Sequence[ModelRef]) -> list[tuple[ModelRef, bool]]:
        """Return descendants, as far as this shard knows, and whether each lives."""
        with self._lock:
            return self._state.offspring(refs)

    # ---- the shard --------------------------------------------------------------------------------------

    @group("ctl")
    async def stats(self) -> ShardStats:
        """Sum up what is here."""
        with self._lock:
            versions, nbytes = self._history.persister.behind() if self._history is not None else (0, 0)
            filling = self._holdings.bytes_filling
            behind = self._mirrors.behind if self._mirrors is not None else 0
            return replace(
                self._state.stats(),
                bytes_staged=filling,
                versions_behind=versions,
                bytes_behind=nbytes,
                capacity=self._config.capacity,
                requests=self._requests,
                bytes_mirrored=self._shelf.nbytes,
                mirrors_behind=behind,
                files_orphaned=self._history.care.orphans if self._history is not None else 0,
            )

    @group("ctl")
    async def check(self) -> None:
        """Derive all counts anew and compare."""
        with self._lock:
            self._state.check()
