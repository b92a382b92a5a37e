"""Write-behind: bringing one shard's segments to disk while training goes on (Check-QZP, section 3.2).

Rules
- Segments are written in the order of their commits, two at a time. When the disk is slower than the training, commits
  wait; nothing is dropped. A disk that fails is tried again, ever more slowly; what else fails is tried again later,
  behind the others.
- Encoding and writing run in threads of the shard's process, at low priority; the codecs let go of the GIL.
- A segment waits until its file was offered to the catalog (`ShardState.offer`); its memory stays until the catalog has
  answered. One that is freed meanwhile is not written.
- The threads outlive any one exception, which is logged once per cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ....store.errors import OperationTimeoutError, ShardUnavailableError, StorageError, TensorVineError, without_frames
from ....store.metrics import SHARD_WRITE, SHARD_WRITE_FAILURES
from ....store.segments.segment import SegmentId
from ....store.waiting import Backoff
from ...engine.warned import Failures
from ..context import ShardContext
from .tiers import WRITERS, Tiers, give_way

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_LAST_S = 0.25, 15.0
SEGMENTS_BEHIND = 1024
"""Segments that may wait to be written before savers wait."""


@dataclass(slots=True)
class _Job:
    nbytes: int
    plain: bool = False
    """Its file is not to be encoded against others."""
    due: float = 0.0
    """When to try again."""
    busy: bool = False
    again: bool = False
    """It was queued again while it was written."""


class Persister:
    """The write-behind of one shard.

    Args:
        context: the shard's.
        tiers: writes files.
        bytes_unwritten: bytes that may wait to be written before savers wait.
        settle: called, without a lock held, whenever something has reached the disk or failed to.
        report: called when there is something to report.
    """

    def __init__(
        self,
        context: ShardContext,
        tiers: Tiers,
        bytes_unwritten: int,
        settle: Callable[[], None],
        report: Callable[[], None],
    ) -> None:
        self.error: TensorVineError | None = None
        """Why the disk does not take what waits, while that is so."""
        self._said = ""
        """The failure that was logged last."""
        self._state = context.state
        self._lock = context.lock
        self._tiers = tiers
        self._most = bytes_unwritten
        self._settle = settle
        self._report = report
        self._jobs: OrderedDict[SegmentId, _Job] = OrderedDict()
        self._nbytes = 0
        self._pauses = Backoff(RETRY_FIRST_S, RETRY_LAST_S)
        self._resumes = 0.0
        """When the disk is tried again that has failed."""
        self._counts = context.counts
        self._changed = threading.Condition()
        for _ in range(WRITERS):
            threading.Thread(target=self._run, name="tensorvine-persist", daemon=True).start()

    # ---- what the shard asks --------------------------------------------------------------------------

    def add(self, segments: Iterable[SegmentId], plain: bool = False) -> None:
        """Queue segments whose files this shard is to write; one that waits already keeps its place."""
        with self._lock:
            known = [segment for segment_id in segments if (segment := self._state.segment(segment_id)) is not None]
            sizes = {segment.id: segment.resident_bytes(segment.live) for segment in known}
        with self._changed:
            for segment_id, nbytes in sizes.items():
                job = self._jobs.get(segment_id)
                if job is None:
                    job = self._jobs[segment_id] = _Job(nbytes)
                    self._nbytes += nbytes
                job.again = job.busy
                if plain:
                    job.plain, job.due = True, time.monotonic() + RETRY_FIRST_S
            self._changed.notify_all()

    def refused(self, segments: Collection[SegmentId]) -> None:
        """Write files again that the catalog did not take: what they were encoded against is gone."""
        if segments:
            self.add(segments, plain=True)

    def behind(self) -> tuple[int, int]:
        """Tell how many segments, and how many bytes of them, wait to be written."""
        with self._changed:
            return len(self._jobs), self._nbytes

    def is_full(self) -> bool:
        """Tell whether savers must wait. One segment may always wait, however large."""
        segments, nbytes = self.behind()
        return segments >= SEGMENTS_BEHIND or (segments > 0 and nbytes > self._most)

    def late(self, what: str) -> TensorVineError:
        """Make the error of something that did not reach the disk in time."""
        if self.error is not None:
            return StorageError(f"{what}: expected the write queue to be written to disk; {self.error}")
        return OperationTimeoutError(
            f"{what}: expected the write queue to be written to disk in time; the disk is slower than the saves"
        )

    # ---- the threads ----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Write what is queued, as long as the process lives."""
        failures = Failures(log, f"shard {self._state.index}: background writer")
        pauses = Backoff(RETRY_FIRST_S, RETRY_LAST_S)
        polite = False
        while True:
            try:
                if not polite:
                    give_way()
                    polite = True
                self._step()
                failures.over()
            except Exception as exc:  # noqa: BLE001  logged
                failures.note(exc)
                pauses.wait()

    def _step(self) -> None:
        """Write one segment."""
        segment_id, job = self._next()
        failure: Exception | None = None
        begun = time.perf_counter()
        try:
            self._tiers.write(segment_id, plain=job.plain)
            self._counts.observe(SHARD_WRITE, time.perf_counter() - begun)
        except Exception as exc:  # noqa: BLE001  noted, and tried again
            self._counts.add(SHARD_WRITE_FAILURES)
            failure = without_frames(exc)
        self._done(segment_id, job, failure)
        self._settle()
        self._report()

    def _next(self) -> tuple[SegmentId, _Job]:
        with self._changed:
            while True:
                now = time.monotonic()
                due = self._resumes
                if due <= now:
                    waiting = [(each.due, segment) for segment, each in self._first(now)]
                    found = next((segment for at, segment in waiting if at <= now), None)
                    if found is not None:
                        self._jobs[found].busy = True
                        return found, self._jobs[found]
                    due = min((at for at, _ in waiting), default=now + RETRY_LAST_S)
                self._changed.wait(due - now)

    def _first(self, now: float) -> Iterable[tuple[SegmentId, _Job]]:
        """Give the jobs that nobody does, up to the first that is due."""
        for segment, job in self._jobs.items():
            if not job.busy:
                yield segment, job
                if job.due <= now:
                    return

    def _done(self, segment_id: SegmentId, job: _Job, failure: Exception | None) -> None:
        with self._changed:
            job.busy, again, job.again = False, job.again, False
            if failure is None:
                if not again:
                    del self._jobs[segment_id]
                    self._nbytes -= job.nbytes
                self._pauses.reset()
                self.error, self._resumes = None, 0.0
            elif isinstance(failure, (StorageError, ShardUnavailableError, OperationTimeoutError)):
                self.error = failure if isinstance(failure, StorageError) else None
                self._resumes = time.monotonic() + self._pauses.next()
                self._jobs.move_to_end(segment_id)  # the next one may fare better
            else:
                job.due = time.monotonic() + RETRY_LAST_S
            self._changed.notify_all()
        with self._lock:
            self._state.note_failing(segment_id, str(failure) if failure is not None else None)
        said, self._said = self._said, str(failure) if failure is not None else ""
        if failure is not None and said != str(failure):
            log.warning(
                "shard %d: segment %x is not on disk, retrying; check the space and the permissions of the path: %s",
                self._state.index,
                segment_id[1],
                failure,
            )
