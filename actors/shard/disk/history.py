"""The disk of one shard: brought back at the start, kept up in the background.

Rules
- With a path, the committed manifests on it are the truth; memory is the faster copy of the newest part.
- What goes between the disk and other shards is here; what comes back from the disk is `recovery`, what readers ask
  for `loading`, what moves between memory and files `tiers`, what waits to be written `persister`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from ....store.archive.archive import Archive
from ....store.codecs.codec import Codec, from_spec
from ....store.errors import (
    MovedError,
    OperationTimeoutError,
    ShardUnavailableError,
    StorageError,
    TensorVineError,
)
from ....store.refs import ModelRef
from ....store.segments.segment import Holds, SegmentId, Stored
from ....store.versions.manifest import Header, decode_body
from ....store.versions.version import Draft
from ....store.waiting import Backoff, Deadline
from ...memory.workers import Workers
from ...rpc.messages import PEER_TIMEOUT_S, Chains, Disk, ToStore, Wanted
from ..calls import ShardCalls
from ..context import ShardContext
from .care import Care
from .loading import Loading
from .numbering import Numbering
from .persister import Job, Persister
from .recovery import Recovery
from .tiers import Tiers

log = logging.getLogger(__name__)

READERS = 8
"""Threads that read manifests, and segments for readers: an object store answers slowly, but many at once."""
STORE_TIMEOUT_S, STORE_PAUSE_S = 600.0, 0.2
"""How long a home waits for segments to be written, and from one try to the next while they are handed over."""
BLAMES = 16
"""Failures of a retention policy that are logged, each once."""
RELEARN_S, RELEARN_PAUSE_S = 15.0, 0.2
"""How long a shard that does not answer is told that a version is on disk, and from one try to the next."""


class History:
    """The disk of one shard.

    Args:
        context: the shard's.
        disk: the repository's.
        settle: called after the state changed, without the lock.

    Raises:
        StorageError: the disk cannot be read.
    """

    def __init__(self, context: ShardContext, disk: Disk, settle: Callable[[], None]) -> None:
        config = context.config
        self._config = config
        self._disk = disk
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._settle = settle
        self._archive = Archive(
            disk.uri, lambda serial: self._peers.topology.maker(serial), create=False, guard=context.tenure.check
        )
        codec = from_spec(disk.codec) if disk.codec else None
        self._tiers = Tiers(context, self._archive, codec, settle, self._stored_elsewhere)
        self._workers = Workers(READERS, thread_name_prefix="tensorvine-disk")
        self.recovery = Recovery(context, self._archive, self._workers, settle)
        if context.recovery_info is not None or not self._peers.topology.former:  # one that joins brings nothing back
            self.recovery.start()
        self.loading = Loading(context, self._tiers, self._workers, settle)
        self._blamed: set[str] = set()
        if codec is not None:
            self._workers.submit(_warm, codec)
        persister = self.persister = Persister(
            index=config.index,
            where=lambda segment: self._state.where(segment),
            archive=self._archive,
            bytes_unwritten=disk.bytes_unwritten if disk.bytes_unwritten is not None else config.capacity // 2,
            parent_table=self._body_of,
            architecture=self._architecture,
            store=self._store,
            on_disk=self._on_disk,
            progressed=self._settle,
            counts=context.counts,
        )
        self.numbering = Numbering(config.index, self._archive.directory)
        self.care = Care(context, self._archive, self._tiers, persister, settle)

    # ---- to disk --------------------------------------------------------------------------------------

    def drafted(self, draft: Draft) -> Draft:
        """Note in a draft how the version will be stored."""
        return replace(draft, codec=self._disk.codec)

    async def written(self, job: Job, timeout: float) -> None:
        """Wait until an urgent version is on disk.

        Raises:
            StorageError: the disk does not take it; nothing of it will be there.
            OperationTimeoutError: it took longer; nothing of it will be there.
        """
        done = asyncio.wrap_future(job.done)
        try:
            await asyncio.wait_for(asyncio.shield(done), timeout)
        except TimeoutError:
            if self.persister.cancel(job):
                done.add_done_callback(lambda future: future.cancelled() or future.exception())
                raise self.persister.late(f"save of {job.header.ref}") from None
            await done  # its manifest is being written: it will be known soon whether it exists

    async def bury(self, header: Header) -> None:
        """Retire a version on disk."""
        await self._workers.run(self.persister.bury, header)
        self.numbering.done(header.ref)

    async def flush(self, timeout: float) -> None:
        """Wait until all that waits is on disk."""
        await asyncio.to_thread(self.persister.flush, timeout)  # many may wait: not in the threads that they wait for

    def retain(self, name: str) -> list[tuple[int, ModelRef]]:
        """Let go from memory what the policy does not keep; give (shard, version) for others to do the same.

        A policy that fails lets nothing go. Call it with the lock held.
        """
        if self._disk.keep is None:
            return []
        try:
            let_go = self._state.retain(self._disk.keep, name)
        except Exception as exc:  # noqa: BLE001 - the policy may be the user's own, and the version is committed
            self._blame(exc)
            return []
        others: list[tuple[int, ModelRef]] = []
        for ref, shards in let_go:
            self._state.residents.cool(ref)
            others += [(shard, ref) for shard in shards - {self._config.index}]
        return others

    def _blame(self, exc: Exception) -> None:
        """Log what a policy raised, once."""
        blamed = f"{type(self._disk.keep).__name__}: {exc!r}"
        if blamed not in self._blamed and len(self._blamed) < BLAMES:
            self._blamed.add(blamed)
            log.error(
                "shard %d: the retention policy failed, all versions stay in memory; correct keep= at the next "
                "start: %s",
                self._config.index,
                blamed,
            )

    def tidy(self) -> None:
        """Carry out what the state left for the disk. Call it with the lock held."""
        dead, self._state.dead_files = self._state.dead_files, []
        rewritable, self._state.rewritable = self._state.rewritable, set()
        if dead:
            self._tiers.forget(dead)
            self.persister.delete(dead)
        for segment in rewritable:
            self._workers.submit(self._tiers.rewrite, segment)

    # ---- checking -------------------------------------------------------------------------------------

    async def check_manifest(self, header: Header, body: bytes) -> list[str]:
        """Hold a version's manifest on disk against what this shard answers; nothing when it is not due there yet."""
        return await self._workers.run(self._check_manifest, header, body)

    async def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        """Read tensors of this shard's segments, and say what is wrong with them."""
        found = [await self._workers.run(self._tiers.check, segment, slots) for segment, slots in names.items()]
        return [problem for problems in found for problem in problems]

    def _check_manifest(self, header: Header, body: bytes) -> list[str]:
        if self.persister.waits(header.ref):
            return []
        try:
            manifest = self._archive.read_manifest(header.ref)
        except TensorVineError as exc:
            return [str(exc)]
        expected = decode_body(body, header.ref)
        found = {n: replace(e, owner=e.owner or header.ref) for n, e in manifest.entries.items()}
        if repr(manifest.header) != repr(header):  # a quality may be NaN, which equals nothing
            return [f"manifest on disk: expected {header}; found {manifest.header}"]
        return [
            f"manifest on disk: tensor {name!r}: expected {expected.get(name)}; found {found.get(name)}"
            for name in expected.keys() | found.keys()
            if expected.get(name) != found.get(name)
        ]

    async def check_files(self, holds: Holds) -> None:
        """Check the files of what a new version names of this shard's segments and is on disk only.

        Raises:
            CorruptDataError: a file is damaged: the version could not be read.
        """
        with self._lock:
            known = [segment for segment_id in holds if (segment := self._state.segment(segment_id)) is not None]
            cold = [s.id for s in known if not set(holds[s.id]).isdisjoint(s.absent(s.live_slots))]
        for segment_id in cold:
            with contextlib.suppress(StorageError):  # it cannot be read now, and may be whole
                await self._workers.run(self._tiers.digests, segment_id)

    # ---- for other shards, and by them ----------------------------------------------------------------

    async def store(self, wanted: ToStore) -> Chains:
        """Write segments of this shard for a version whose home is elsewhere."""
        return await self._workers.run(self._tiers.store, wanted)

    def store_elsewhere(self, wanted: ToStore) -> Chains:
        """Have those shards write segments that hold them now."""
        by_shard: dict[int, dict[SegmentId, Sequence[Wanted]]] = {}
        for segment, tensors in wanted.items():
            by_shard.setdefault(self._state.where(segment), {})[segment] = tensors
        chains: Chains = {}
        for shard, part in by_shard.items():
            chains |= self._store(shard, part)
        return chains

    def _store(self, shard: int, wanted: ToStore) -> Chains:
        """Have a shard write segments. Those that it hands over meanwhile, its successors write as soon as they may."""
        deadline, pauses = Deadline.after(STORE_TIMEOUT_S), Backoff(STORE_PAUSE_S, STORE_PAUSE_S)
        while True:
            try:
                if shard == self._config.index:
                    return self._tiers.store(wanted)
                return self._peers.call(shard, ShardCalls.store(wanted), deadline.left())
            except MovedError as exc:
                if not pauses.wait(deadline):
                    raise OperationTimeoutError(
                        f"segments {list(wanted)}: expected a successor to hold them; {exc}"
                    ) from exc
            if any(self._state.where(segment) != shard for segment in wanted):
                return self.store_elsewhere(wanted)

    def stored(self, segment: SegmentId) -> Stored:
        """Return the file of a segment of this shard, for another one that has tensors encoded against it."""
        return self._tiers.stored(segment)

    def _stored_elsewhere(self, segment: SegmentId) -> Stored:
        return self._peers.call(self._state.where(segment), ShardCalls.stored(segment), PEER_TIMEOUT_S)

    def _on_disk(self, ref: ModelRef, parts: Mapping[int, Sequence[SegmentId]]) -> None:
        """Have the other shards know what a version on disk names there, also those that started again meanwhile."""
        self.numbering.done(ref)
        by_shard: dict[int, list[SegmentId]] = {}
        with self._lock:  # who takes segments over from here knows it, or is told
            self._state.durability.written(ref)
            for segment in chain.from_iterable(parts.values()):
                by_shard.setdefault(self._state.where(segment), []).append(segment)
        deadline = Deadline.after(RELEARN_S)
        for shard, segments in by_shard.items():
            if shard != self._config.index:
                self._tell(shard, ref, segments, deadline)

    def _tell(self, shard: int, ref: ModelRef, segments: Sequence[SegmentId], deadline: Deadline) -> None:
        """Tell one shard, again while it is being started: it has perhaps read the manifests already."""
        pauses = Backoff(RELEARN_PAUSE_S, RELEARN_PAUSE_S)
        while shard in self._peers.topology.alive:  # else it has drained: another one knows what was there
            try:
                self._peers.call(shard, ShardCalls.relearn(ref, list(segments)), deadline.left())
                return
            except (ShardUnavailableError, OperationTimeoutError) as exc:
                if not pauses.wait(deadline):
                    log.warning("shard %d could not be notified that %s is on disk: %s", shard, ref, exc)
                    return

    # ---- within ---------------------------------------------------------------------------------------

    def _body_of(self, ref: ModelRef) -> bytes | None:
        with self._lock:
            record = self._state.known(ref)
            return record.body if record is not None else None

    def _architecture(self, key: bytes) -> tuple[str, str | None]:
        with self._lock:
            return self._state.graphs.architecture(key)


def required(history: History | None, index: int) -> History:
    """Return a shard's disk, for what cannot be done without one.

    Raises:
        StorageError: the repository has none.
    """
    if history is None:
        raise StorageError(f"shard {index}: expected a repository with path=; found one without")
    return history


def _warm(codec: Codec) -> None:
    """Have a codec's kernels compiled before the first version comes."""
    codec.decode(codec.encode(np.linspace(0, 1, 1024, dtype=np.float32)))
