"""One shard's share of the repository on disk: brought back at the start, kept up in the background.

Rules
- With a path, the committed manifests on it are the truth; memory is the faster copy of the newest part.
- A shard that starts reads all manifests: of its own names it takes the versions, of its own segments the holders.
- A manifest that cannot be read now is not lost: it is tried again (`care`), and nothing is deleted meanwhile.
- What others hold only in memory, a shard that starts *again* learns by asking them; what its earlier incarnation had
  only in memory is lost, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, count
from typing import Any

import numpy as np

from ....planner.topology import Topology
from ....store.archive.archive import Archive
from ....store.archive.manifestfile import Manifest, version_of
from ....store.archive.numbers import given
from ....store.codecs.codec import Codec, from_spec
from ....store.errors import (
    CorruptDataError,
    ModelLostError,
    MovedError,
    OperationTimeoutError,
    ShardUnavailableError,
    StorageError,
    TensorVineError,
    Unreadable,
    without_frames,
)
from ....store.holders import Filling, Owner, Reason
from ....store.recovery import Recovered, recover, relearn, take_over
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId, Stored, padded
from ....store.versions.manifest import Header, decode_body
from ....store.versions.version import Draft
from ....store.waiting import Backoff, Deadline
from ...memory.workers import Workers
from ...rpc.messages import PEER_TIMEOUT_S, Chains, Disk, RecoveryInfo, ToStore, Wanted
from ..calls import ShardCalls
from ..context import ShardContext
from ..segment_memory import INLINE_BYTES, READ_ROUNDS
from .care import Care
from .numbering import Numbering
from .persister import Job, Persister
from .tiers import Tiers

log = logging.getLogger(__name__)

READERS = 8
"""Threads that read manifests, and segments for readers: an object store answers slowly, but many at once."""
READ_AT_ONCE = 1024
"""Manifests whose bytes are in memory at one time."""
STORE_TIMEOUT_S, STORE_PAUSE_S = 600.0, 0.2
"""How long a home waits for segments to be written, and from one try to the next while they are handed over."""
BLAMES = 16
"""Failures of a retention policy that are logged, each once."""
RELEARN_S, RELEARN_PAUSE_S = 15.0, 0.2
"""How long a shard that does not answer is told that a version is on disk, and from one try to the next."""

Take = Callable[[str, Owner, int, "Callable[[], _Begun | None]"], "Awaitable[_Begun]"]
"""Takes memory, waiting for it: `Admission.taken`."""
_Plan = tuple[SegmentId, list[int], int]
"""A segment to read, the slots, and their bytes in all."""
_Begun = tuple[list[np.ndarray], "list[Future[np.ndarray | None]]", "list[Future[np.ndarray | None]]"]
"""What keeps in the memory what was there, what is read now, and what others read."""


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
        config, recovery_info = context.config, context.recovery_info
        self._config = config
        self._disk = disk
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._settle = settle
        self._archive = Archive(disk.uri, lambda serial: self._peers.topology.maker(serial), create=False)
        codec = from_spec(disk.codec) if disk.codec else None
        self._tiers = Tiers(context, self._archive, codec, settle, self._stored_elsewhere)
        self._workers = Workers(READERS, thread_name_prefix="tensorvine-disk")
        self._loading: dict[SegmentId, Future[np.ndarray | None]] = {}
        """What is read into the memory now."""
        self._serial = count(1)
        self._blamed: set[str] = set()
        self.recovered: list[ModelRef] = []
        """Versions that the disk named; those that came since are of commits on their way."""
        if recovery_info is not None or not self._peers.topology.former:  # one that joins brings nothing back
            self._recover(recovery_info)
        if codec is not None:
            self._workers.submit(_warm, codec)
        persister = self.persister = Persister(
            index=config.index,
            where=lambda segment: self._state.where(segment),
            archive=self._archive,
            bytes_behind=disk.bytes_behind if disk.bytes_behind is not None else config.capacity // 2,
            parent_table=self._body_of,
            architecture=self._architecture,
            store=self._store,
            on_disk=self._on_disk,
            progressed=self._settle,
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

    async def store(self, wanted: ToStore) -> Chains:
        """Write segments of this shard for a version whose home is elsewhere."""
        return await self._in_thread(self._tiers.store, wanted)

    async def bury(self, header: Header) -> None:
        """Retire a version on disk."""
        await self._in_thread(self.persister.bury, header)
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
            log.error("shard %d: the retention policy fails, nothing leaves the memory: %s", self._config.index, blamed)

    def tidy(self) -> None:
        """Carry out what the state left for the disk. Call it with the lock held."""
        dead, self._state.dead_files = self._state.dead_files, []
        rewritable, self._state.rewritable = self._state.rewritable, set()
        if dead:
            self._tiers.forget(dead)
            self.persister.delete(dead)
        for segment in rewritable:
            self._workers.submit(self._tiers.rewrite, segment)

    # ---- to memory ------------------------------------------------------------------------------------

    async def load(self, what: str, wanted: Mapping[SegmentId, Sequence[int]], take: Take) -> list[np.ndarray]:
        """Bring segments into the memory, together; they stay there as long as what is given back lives.

        A load takes the room for all that it reads at one time, and keeps nothing while it waits for room: so no two
        loads wait for each other, and what it has already is in nobody's way. What others read now it lets them read,
        and looks again: they may want less of it, or fail.

        Args:
            what: names the load in errors.
            wanted: the slots, by segment.
            take: `Admission.taken`.

        Raises:
            CorruptDataError, StorageError: a file cannot be read; names it.
            StoreFullError: there is no room.
        """
        for _ in range(READ_ROUNDS):
            owner = Filling("load", next(self._serial))
            with self._lock:
                nbytes = sum(length for _, _, length in self._plans(wanted))
            kept, mine, others = await take(
                f"load of {what}", owner, nbytes, lambda owner=owner: self._begun(owner, wanted)
            )
            try:
                read = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(future)) for future in mine))
                await asyncio.gather(
                    *(asyncio.shield(asyncio.wrap_future(future)) for future in others), return_exceptions=True
                )
            except BaseException:
                kept.clear()  # whoever keeps the error keeps this frame
                raise
            finally:
                mine.clear()
            if not others:
                return [*kept, *(view for view in read if view is not None)]
            kept.clear()
            read.clear()
            others.clear()
        raise self._segment_memory.crowded(what)

    def _begun(self, owner: Owner, wanted: Mapping[SegmentId, Sequence[int]]) -> _Begun | None:
        """Take the room for what is on disk only, and begin to read it; None: there is no room now.

        What is in memory already may lie so that the rest finds no room beside it: then that leaves, too, where it
        may, and all is read again.

        Call it with the lock held.
        """
        for again in (False, True):
            if again and not self._segment_memory.let_go(wanted):
                return None
            plans = self._plans(wanted)
            kept = self._segment_memory.kept(wanted)
            lengths = [length for _, _, length in plans if length > INLINE_BYTES]
            offsets = self._segment_memory.grant(owner, lengths, len(lengths))
            if len(offsets) == len(lengths):
                break
            kept.clear()
        else:
            return None
        others = [self._loading[segment] for segment in self._state.absent(wanted) if segment in self._loading]
        mine: list[Future[np.ndarray | None]] = []
        for segment, chosen, length in plans:
            part = Part(offsets.pop(0), padded(length)) if length > INLINE_BYTES else None
            self._loading[segment] = self._workers.submit(self._read_in, segment, chosen, part, owner)
            mine.append(self._loading[segment])
        return kept, mine, others

    def _plans(self, wanted: Mapping[SegmentId, Sequence[int]]) -> list[_Plan]:
        """Say what to read of what is on disk only, unless it is read already; the longest first.

        Call it with the lock held.
        """
        absent = {s: slots for s, slots in self._state.absent(wanted).items() if s not in self._loading}
        return sorted(((s, *self._tiers.plan(s, slots)) for s, slots in absent.items()), key=lambda plan: -plan[2])

    def _read_in(self, segment: SegmentId, chosen: Sequence[int], part: Part | None, owner: Owner) -> np.ndarray | None:
        """Read slots into the memory, in a thread; give what keeps them there."""
        try:
            view = self._tiers.load(segment, chosen, part, owner)
            if view is not None:
                with self._lock:
                    self._segment_memory.hash_later(segment)
            return view
        finally:
            with self._lock:
                del self._loading[segment]
            self._settle()

    async def digests(self, segments: Iterable[SegmentId], take: Take) -> None:
        """Learn the content hashes of segments that are on disk: from their files, or by reading them."""
        for segment_id in segments:
            with self._lock:
                segment = self._state.segment(segment_id)
                absent = segment.absent(segment.live_slots) if segment and segment.digests is None else []
            if not absent:
                continue
            known = await self._in_thread(self._tiers.digests, segment_id)
            if known is None:
                await self.load(f"segment {segment_id}", {segment_id: absent}, take)
                continue
            with self._lock:
                self._state.set_digests(segment_id, known)

    # ---- checking -------------------------------------------------------------------------------------

    async def check_manifest(self, header: Header, body: bytes) -> list[str]:
        """Hold a version's manifest on disk against what this shard answers; nothing when it is not due there yet."""
        return await self._in_thread(self._check_manifest, header, body)

    async def check_tensors(self, names: dict[SegmentId, dict[int, str]]) -> list[str]:
        """Read tensors of this shard's segments, and say what is wrong with them."""
        found = [await self._in_thread(self._tiers.check, segment, slots) for segment, slots in names.items()]
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
            return [f"its manifest on disk: expected {header}; found {manifest.header}"]
        return [
            f"its manifest on disk: tensor {name!r}: expected {expected.get(name)}; found {found.get(name)}"
            for name in expected.keys() | found.keys()
            if expected.get(name) != found.get(name)
        ]

    # ---- starting -------------------------------------------------------------------------------------

    def _recover(self, recovery_info: RecoveryInfo | None) -> None:
        began = time.monotonic()
        index, home = self._config.index, _homes(self._config.index, self._peers.topology, recovery_info)
        names = self._archive.manifests()
        files = self._archive.segments()
        with _collector_paused():  # all that comes now stays: looking for garbage among it takes a third of the time
            manifests, unread = self._read(names)
            found = recover(self._state, manifests, files, home, unread)
            if (
                recovery_info is not None and self._peers.others
            ):  # a version that only its home knows may name any of it
                self._state.hold_all(Reason.RESTORED)
        for ref, why in unread.items():
            log.error("shard %d: %s cannot be brought back, and nothing is deleted: %s", index, ref, why)
        self.recovered = self._state.version_holders()
        for reader, segment in found.missing:
            log.error("shard %d: %s names segment %x, which has no file: it is lost in part", index, reader, segment[1])
        if recovery_info is None:  # when it starts again, others can be about to name these, and tell what is lost
            self._archive.delete_segments(found.garbage)
            self._name_lost(names, home)
        self._log(found, len(names), time.monotonic() - began)

    def _name_lost(self, names: Sequence[str], home: Callable[[str], int]) -> None:
        """Learn which versions earlier clusters had only in memory when they died."""
        lost = sorted(given(self._archive.directory) - set(map(version_of, names)))
        self._state.ledger.note(dict.fromkeys(lost, (None, True)))
        mine = [ref for ref in lost if home(ref.name) == self._config.index]
        self._state.restore(dict.fromkeys(mine, (None, True)))
        if mine:
            log.warning(
                "shard %d: %d versions were not on disk when their cluster died, and are lost: %s%s",
                self._config.index,
                len(mine),
                ", ".join(map(str, mine[:10])),
                ", ..." if len(mine) > 10 else "",
            )

    def _log(self, found: Recovered, manifests: int, seconds: float) -> None:
        if manifests or found.garbage:
            log.info(
                "shard %d: read %d manifests in %.2f s; %d files that nobody needs",
                self._config.index,
                manifests,
                seconds,
                len(found.garbage),
            )

    def _read(self, names: Sequence[str]) -> tuple[list[Manifest], dict[ModelRef, Unreadable]]:
        """Read manifests, and say why others cannot be read: many at once, but decoded by one thread.

        Several would only wait for one another's turn with the interpreter.
        """
        read: list[Manifest] = []
        unread: dict[ModelRef, Unreadable] = {}
        for start in range(0, len(names), READ_AT_ONCE):
            some = names[start : start + READ_AT_ONCE]
            for name, content in zip(some, self._workers.map(self._content, some), strict=True):
                try:
                    if content is None:
                        continue
                    if isinstance(content, StorageError):
                        raise content
                    read.append(self._archive.manifest_of(name, content))
                except (CorruptDataError, StorageError) as exc:
                    ref = version_of(name)
                    if ref is not None:  # else it is no version's
                        unread[ref] = without_frames(exc)
        return read, unread

    def _content(self, name: str) -> Any:
        """Read a manifest's bytes; give the error of the disk, or None where it is not there any more."""
        try:
            return self._archive.directory.read(name)
        except StorageError as exc:
            return None if isinstance(exc.__cause__, FileNotFoundError) else without_frames(exc)

    def store_elsewhere(self, wanted: ToStore) -> Chains:
        """Have those shards write segments that hold them now."""
        by_shard: dict[int, dict[SegmentId, Sequence[Wanted]]] = {}
        for segment, tensors in wanted.items():
            by_shard.setdefault(self._state.where(segment), {})[segment] = tensors
        chains: Chains = {}
        for shard, part in by_shard.items():
            chains |= self._store(shard, part)
        return chains

    # ---- within ---------------------------------------------------------------------------------------

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
                        f"segments {list(wanted)}: expected a successor to have them; {exc}"
                    ) from exc
            if any(self._state.where(segment) != shard for segment in wanted):
                return self.store_elsewhere(wanted)

    def stored(self, segment: SegmentId) -> Stored:
        """Return the file of a segment of this shard, for another one that has tensors encoded against it."""
        return self._tiers.stored(segment)

    async def relearn(self, ref: ModelRef) -> None:
        """Know what a version on disk names here."""
        await self._in_thread(self._relearn, ref)

    def _relearn(self, ref: ModelRef) -> None:
        manifest, files = self._archive.read_manifest(ref), self._archive.segments()
        with self._lock:
            relearn(self._state, manifest, files)
        log.info("shard %d: %s was on its way to the disk when this shard started again", self._config.index, ref)

    async def take_over(self, ask_anew: Callable[[Iterable[ModelRef]], None], learn: Callable[[], None]) -> None:
        """Bring back the segments that are this shard's by a new topology, in the step in which it goes by that.

        Args:
            ask_anew: has other homes asked what they name here, and what the disk brought back released if they name it
                no more. Called with the lock held.
            learn: goes by the topology. Called with the lock held.

        Raises:
            StorageError: a manifest that was there before cannot be read; nothing has changed.
        """
        await asyncio.to_thread(self._take_over, ask_anew, learn)

    def _take_over(self, ask_anew: Callable[[Iterable[ModelRef]], None], learn: Callable[[], None]) -> None:
        with self._lock:
            ask_anew(())  # from now on it is noted what they let go
        names = self._archive.manifests()
        manifests, unread = self._read(names)
        for ref, why in unread.items():
            raise StorageError(
                f"shard {self._config.index}: expected to read {ref} to know whose its tensors are; {why}"
            )
        files = self._archive.segments()
        with self._lock:
            learn()
            before = set(self._state.version_holders())
            missing = take_over(self._state, manifests, files)
            self._state.hold_all(Reason.RESTORED)
            ask_anew(set(self._state.version_holders()) - before)
        for reader, segment in missing:
            log.error("shard %d: %s names segment %x, which has no file", self._config.index, reader, segment[1])
        self._read_late(names)
        self._settle()

    def _read_late(self, early: Collection[str]) -> None:
        """Learn of the manifests that came while the others were read: who wrote them may have told of it too early."""
        pauses = Backoff(STORE_PAUSE_S, STORE_PAUSE_S)
        while True:
            try:
                manifests, unread = self._read(sorted(set(self._archive.manifests()) - set(early)))
                files = self._archive.segments() if manifests else {}
                break
            except StorageError as exc:
                log.warning("shard %d: the manifests are listed again: %s", self._config.index, exc)
            pauses.wait()
        with self._lock:
            for ref, why in unread.items():
                if self._state.known(ref) is None:
                    self._state.miss(ref, why, self._state.home_of(ref.name) == self._config.index)
            for manifest in manifests:
                try:
                    relearn(self._state, manifest, files)
                except ModelLostError as exc:
                    log.error("shard %d: %s", self._config.index, exc)

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
                    log.warning("shard %d did not hear that %s is on disk: %s", shard, ref, exc)
                    return

    def _stored_elsewhere(self, segment: SegmentId) -> Stored:
        return self._peers.call(self._state.where(segment), ShardCalls.stored(segment), PEER_TIMEOUT_S)

    def _body_of(self, ref: ModelRef) -> bytes | None:
        with self._lock:
            record = self._state.known(ref)
            return record.body if record is not None else None

    def _architecture(self, key: bytes) -> tuple[str, str | None]:
        with self._lock:
            return self._state.graphs.architecture(key)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)


def required(history: History | None, index: int) -> History:
    """Return a shard's disk, for what cannot be done without one.

    Raises:
        StorageError: the repository has none.
    """
    if history is None:
        raise StorageError(f"shard {index}: expected a repository with path=; it has none")
    return history


@contextlib.contextmanager
def _collector_paused() -> Generator[None]:
    """Keep Python from looking for cyclic garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _homes(index: int, topology: Topology, recovery_info: RecoveryInfo | None) -> Callable[[str], int]:
    """Say which names on disk are at home here: in the middle of a change, not those that others hand over still."""
    if recovery_info is None or not topology.former:
        return topology.home
    return recovery_info.home


def _warm(codec: Codec) -> None:
    """Have a codec's kernels compiled before the first version comes."""
    codec.decode(codec.encode(np.linspace(0, 1, 1024, dtype=np.float32)))
