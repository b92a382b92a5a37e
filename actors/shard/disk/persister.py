"""Write-behind: bringing one shard's versions to disk while training goes on (Check-QZP, section 3.2).

Rules
- Versions are written one at a time, in the order of their commits. When the disk is slower than the training, savers
  wait; nothing is dropped and nothing overtakes (Check-QZP's rule). A disk that fails is tried again, ever more slowly.
- First the segments, those of other shards by asking these, then the manifest: so a version is on disk or it is not.
- Encoding and writing run in a thread of the shard's process, at low priority; the codecs let go of the GIL.
- A version that is retired before it was written is not written. One that was is buried: its manifest is replaced by
  a header that says so, and only then may its tensors go.
- The thread outlives any one exception, which is logged once per cause.
- A shard without a lease changes no file (`tenure`): its next incarnation may need what it would delete, and may name
  what it would write as lost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cachetools import LRUCache

from ....store.archive.archive import Archive
from ....store.archive.manifestfile import Manifest, manifest_name
from ....store.archive.segmentfile import Slot
from ....store.counting import Counts
from ....store.errors import (
    ModelNotFoundError,
    OperationTimeoutError,
    ShardUnavailableError,
    StorageError,
    TensorVineError,
    without_frames,
)
from ....store.graphs.graph import ModelGraph
from ....store.metrics import SHARD_WRITE, SHARD_WRITE_FAILURES
from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import Header, TensorEntry, decode_body
from ....store.waiting import Backoff, Deadline
from ...engine.warned import Failures
from ...memory.workers import Workers
from ...rpc.messages import PEER_TIMEOUT_S, Chains, ToStore, Wanted
from .tiers import give_way

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_LAST_S = 0.25, 15.0
GIVE_UP_S = 60.0
"""How long the disk may have refused what comes next until a flush does not wait for it any longer."""
NAMED = 10
"""Versions that an error names."""
VERSIONS_BEHIND = 1024
"""Versions that may wait to be written before savers wait."""
_LAYERS_KEPT = 64
_PASSING = (StorageError, ShardUnavailableError, OperationTimeoutError)
"""Failures that may be over when the same is tried again."""


@dataclass(slots=True)
class Job:
    """A version that is to be written."""

    header: Header
    body: bytes
    urgent: bool
    """Somebody waits for it, and gives it up when it fails."""
    done: Future[None] = field(default_factory=Future[None])
    held: bool = False
    """Being retired: not to be started now."""
    cancelled: bool = False
    sealed: bool = False
    """Its manifest is being written: too late to cancel."""
    given_up: str = ""
    """Why it will never be on disk though the version exists, or did."""


class Persister:
    """The write-behind of one shard.

    Args:
        index: the shard's number.
        where: segment -> the shard that holds it.
        archive: the repository's files.
        bytes_unwritten: bytes of versions' own tensors that may wait to be written before savers wait.
        parent_table: gives a version's table of tensors, where this shard has it.
        architecture: gives a stored graph's JSON and the framework's recipe.
        store: writes segments of this shard; asks other shards to.
        on_disk: told (version, shard -> its segments of it) when a manifest was written.
        progressed: called, without a lock held, whenever something has reached the disk or failed to.
        counts: the shard's.
    """

    def __init__(
        self,
        index: int,
        where: Callable[[SegmentId], int],
        *,
        archive: Archive,
        bytes_unwritten: int,
        parent_table: Callable[[ModelRef], bytes | None],
        architecture: Callable[[bytes], tuple[str, str | None]],
        store: Callable[[int, ToStore], Chains],
        on_disk: Callable[[ModelRef, Mapping[int, Sequence[SegmentId]]], None],
        progressed: Callable[[], None],
        counts: Counts,
    ) -> None:
        self.archive = archive
        self.error: StorageError | None = None
        """Why the disk does not take what waits, while that is so."""
        self._refused_since = math.inf
        """When the disk began to refuse what comes next."""
        self._index = index
        self._where = where
        self._most_behind = bytes_unwritten
        self._parent_table = parent_table
        self._architecture = architecture
        self._store = store
        self._on_disk = on_disk
        self._progressed = progressed
        self._counts = counts
        self._jobs: OrderedDict[ModelRef, Job] = OrderedDict()
        self._current: Job | None = None
        self._changed = threading.Condition()
        self._layers: LRUCache[bytes, dict[str, str]] = LRUCache(_LAYERS_KEPT)
        self._refused: set[ModelRef] = set()
        """Versions that do not exist, but whose manifests may be on disk."""
        self._deleter = Workers(1, thread_name_prefix="tensorvine-delete")
        self._thread = threading.Thread(target=self._run, name="tensorvine-persist", daemon=True)
        self._thread.start()

    # ---- what the shard asks --------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queue a version; those of one shard reach the disk in this order."""
        with self._changed:
            self._jobs[job.header.ref] = job
            self._changed.notify_all()

    def surrender(self, names: Collection[str]) -> list[Job]:
        """Give what waits of these names to another shard that writes it; first what is being written is finished.

        Raises:
            OperationTimeoutError: that takes too long.
        """
        with self._changed:
            waiting = [ref for ref in self._jobs if ref.name in names]
        held = [job for ref in waiting if (job := self._hold_back(ref)) is not None]
        with self._changed:
            for job in held:
                self._jobs.pop(job.header.ref, None)
            self._changed.notify_all()
        return held

    def behind(self) -> tuple[int, int]:
        """Tell how many versions, and how many bytes of them, wait to be written."""
        with self._changed:
            return len(self._jobs), sum(job.header.bytes_owned for job in self._jobs.values())

    def waits(self, ref: ModelRef) -> bool:
        """Tell whether a version is still to be written."""
        with self._changed:
            return ref in self._jobs

    def waiting(self) -> set[ModelRef]:
        """Return the versions that are still to be written."""
        with self._changed:
            return set(self._jobs)

    def is_full(self) -> bool:
        """Tell whether savers must wait. One version may always wait, however large."""
        versions, nbytes = self.behind()
        return versions >= VERSIONS_BEHIND or (versions > 0 and nbytes > self._most_behind)

    def cancel(self, job: Job) -> bool:
        """Give up an urgent job; False when it is too late: its manifest is being written."""
        with self._changed:
            if job.sealed or self._jobs.get(job.header.ref) is not job:
                return False
            job.cancelled = True
            if self._current is not job:
                del self._jobs[job.header.ref]
            self._changed.notify_all()
            return True

    def bury(self, header: Header) -> None:
        """Make a version cease to exist on disk, before it does so in memory.

        Raises:
            StorageError: the disk did not take it; the version lives on.
            OperationTimeoutError: it is being written, and that takes too long.
        """
        job = self._hold_back(header.ref)
        try:
            self.archive.write_manifest(Manifest(header, ("", None), {}, {}, retired=True), {})
        except BaseException:
            with self._changed:
                if job is not None:
                    job.held = False
                self._changed.notify_all()
            raise
        with self._changed:
            self._jobs.pop(header.ref, None)
            self._changed.notify_all()
        self._progressed()

    def delete(self, names: list[str]) -> None:
        """Delete files in the background."""
        self._deleter.submit(self._delete, names)

    def clean_up(self) -> None:
        """Delete the manifests of refused versions that the disk did not let go of before."""
        for ref in list(self._refused):
            self._take_back(ref)

    def flush(self, timeout: float) -> None:
        """Wait until all that waits now is on disk; no longer than `GIVE_UP_S` while the disk refuses the next version.

        Raises:
            StorageError: the disk does not take it, or a version was given up: a part of it is lost.
            OperationTimeoutError: it took longer.
        """
        deadline = Deadline.after(timeout)
        with self._changed:
            waiting = list(self._jobs.values())
            while left := [str(job.header.ref) for job in waiting if self._jobs.get(job.header.ref) is job]:
                refused_s = time.monotonic() - self._refused_since
                if deadline.passed or refused_s >= GIVE_UP_S:
                    refused = f", refused by the disk for {refused_s:.0f} s" if refused_s >= GIVE_UP_S else ""
                    names = [*left[:NAMED], f"{len(left) - NAMED} more"] if len(left) > NAMED else left
                    raise self.late(f"shard {self._index}: {len(left)} versions ({', '.join(names)}){refused}")
                self._changed.wait(deadline.left(GIVE_UP_S - refused_s))
            given_up = [f"{job.header.ref}: {job.given_up}" for job in waiting if job.given_up]
        if given_up:
            raise StorageError(
                f"shard {self._index}: expected the queued versions to be written; failed: {'; '.join(given_up)}"
            )

    def late(self, what: str) -> TensorVineError:
        """Make the error of something that did not reach the disk in time."""
        if self.error is not None:
            return StorageError(f"{what}: expected it to be written to disk; {self.error}")
        return OperationTimeoutError(
            f"{what}: expected it to be written to disk in time; the disk is slower than the saves"
        )

    # ---- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Write what is queued, as long as the process lives."""
        pauses = Backoff(RETRY_FIRST_S, RETRY_LAST_S)
        failures = Failures(log, f"shard {self._index}: background writer")
        polite = False
        while True:
            try:
                if not polite:
                    give_way()
                    polite = True
                self._step(pauses)
                failures.over()
            except Exception as exc:  # noqa: BLE001  logged
                failures.note(exc)
                with self._changed:
                    self._current = None  # else a thread that holds it back waits for it
                    self._changed.notify_all()
                pauses.wait()

    def _step(self, pauses: Backoff) -> None:
        """Write one version."""
        job = self._next()
        failure = self._attempt(job)
        if failure is None:
            pauses.reset()
        self._settle(job, failure)
        self._progressed()
        if failure is not None and not job.urgent:
            with self._changed:
                self._changed.wait_for(lambda: job.held, pauses.next())

    def _next(self) -> Job:
        with self._changed:
            while True:
                job = next((job for job in self._jobs.values() if not job.held), None)
                if job is not None:
                    self._current = job
                    return job
                self._changed.wait()

    def _attempt(self, job: Job) -> Exception | None:
        begun = time.perf_counter()
        try:
            self._write(job)
            self._counts.observe(SHARD_WRITE, time.perf_counter() - begun)
        except Exception as exc:  # noqa: BLE001 - it goes to the caller that waits for the version, or into the log
            if not job.cancelled:
                self._counts.add(SHARD_WRITE_FAILURES)
            return without_frames(exc)
        return None

    def _settle(self, job: Job, failure: Exception | None) -> None:
        """Take a job out of the queue, or leave it there to be tried again."""
        with self._changed:
            self._current = None
            again = isinstance(failure, _PASSING) and not job.urgent and not job.cancelled
            job.sealed = job.sealed and not again
            if not again and self._jobs.get(job.header.ref) is job:
                del self._jobs[job.header.ref]
                if failure is not None and not (job.urgent or job.held):
                    job.given_up = str(failure)
            known = self.error
            if not isinstance(failure, StorageError):
                self.error, self._refused_since = None, math.inf
            elif again:
                self.error, self._refused_since = failure, min(self._refused_since, time.monotonic())
            self._changed.notify_all()
        if failure is None:
            job.done.set_result(None)
            return
        if str(known) != str(failure):
            what = "retrying; check the space and the permissions of the path" if again else "giving up"
            log.warning("shard %d: %s is not on disk, %s: %s", self._index, job.header.ref, what, failure)
        if not again:
            job.done.set_exception(failure)

    def _write(self, job: Job) -> None:
        ref = job.header.ref
        table = decode_body(job.body, ref)
        architecture = self._architecture(job.header.graph_key)
        layers = self._layers_of(job.header.graph_key, architecture[0])
        chains: dict[Slot, tuple[Slot, ...]] = {}
        parts = self._wanted(job.header, table, layers)
        for shard, wanted in parts.items():
            if job.cancelled:
                break
            chains.update(self._store(shard, wanted))
        with self._changed:
            if job.cancelled:
                raise ModelNotFoundError(f"{ref}: expected a save in progress; it was cancelled")
            job.sealed = True
        try:
            self.archive.write_manifest(Manifest(job.header, architecture, table, chains), layers)
            self._on_disk(ref, {shard: list(wanted) for shard, wanted in parts.items()})
        except TensorVineError:
            if job.urgent:
                self._take_back(ref)
            raise

    def _take_back(self, ref: ModelRef) -> None:
        """Remove a manifest that was not written or not heard of, in case it got there: its version will not exist."""
        try:
            self.archive.directory.delete(manifest_name(ref))
        except (StorageError, ShardUnavailableError) as exc:
            self._refused.add(ref)
            log.warning("shard %d: %s failed, deleting its manifest later: %s", self._index, ref, exc)
        else:
            self._refused.discard(ref)

    def _wanted(
        self, header: Header, table: dict[str, TensorEntry], layers: dict[str, str]
    ) -> dict[int, dict[SegmentId, list[Wanted]]]:
        """List what must be on disk before the manifest, by shard and segment, each slot once."""
        body = self._parent_table(header.parent) if header.parent is not None else None
        parent = decode_body(body, header.parent) if body is not None and header.parent is not None else {}
        wanted: dict[int, dict[SegmentId, dict[int, Wanted]]] = {}
        for name, entry in table.items():
            old = parent.get(name)
            alike = old is not None and (old.dtype, old.shape) == (entry.dtype, entry.shape)
            base = (old.segment, old.slot) if old is not None and alike and old.segment != entry.segment else None
            slots = wanted.setdefault(self._where(entry.segment), {}).setdefault(entry.segment, {})
            slots[entry.slot] = Wanted(entry.slot, name, layers.get(name), entry.dtype, entry.shape, base)
        return {
            shard: {segment: list(slots.values()) for segment, slots in segments.items()}
            for shard, segments in wanted.items()
        }

    def _layers_of(self, key: bytes, text: str) -> dict[str, str]:
        layers = self._layers.get(key)
        if layers is None:
            graph = ModelGraph.from_json(text)
            layers = self._layers[key] = {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}
        return layers

    def _hold_back(self, ref: ModelRef) -> Job | None:
        """Keep a version's job from being started; wait if it is being written just now."""
        with self._changed:
            job = self._jobs.get(ref)
            if job is None:
                return None
            job.held = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._current is not job, PEER_TIMEOUT_S):
                job.held = False
                raise self.late(f"retire of {ref}")
            return self._jobs.get(ref)

    def _delete(self, names: list[str]) -> None:
        try:
            self.archive.delete_segments(names)
        except (StorageError, ShardUnavailableError) as exc:
            log.warning("shard %d: unused files could not be deleted yet: %s", self._index, exc)
