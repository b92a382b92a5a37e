"""The disk of one shard: the files of the segments that it keeps.

Rules
- Manifests are the catalog's; here are segments' files only. A shard that starts reads none of them: it opens a file
  that the catalog gives it when somebody asks for what is in it (`open_known`).
- What readers ask for is `loading`, what moves between memory and files `tiers`, what waits to be written `persister`.
- A shard without a lease, or that was ordered to leave, changes no file.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ....store.archive.archive import Archive
from ....store.codecs.codec import Codec, from_spec
from ....store.errors import (
    CorruptDataError,
    ShardUnavailableError,
    StorageError,
    TensorVineError,
)
from ....store.segments.segment import Holds, SegmentId
from ...memory.workers import Workers
from ...rpc.messages import Disk
from ...rpc.ticker import Ticker
from ..context import ShardContext
from .loading import Loading
from .persister import Persister
from .tiers import Tiers

log = logging.getLogger(__name__)

READERS = 8
"""Threads that read segments for readers: an object store answers slowly, but many at once."""
DISK_PAUSE_S = 2.0
"""From one try to the next, while a shard that starts again cannot reach its path."""
AGAIN_S = 5.0
"""How often files that were to be inspected, and could not be read, are tried again."""


class History:
    """The disk of one shard.

    Args:
        context: the shard's.
        disk: the repository's.
        settle: called after the state changed, without the lock.
        report: called when there is something to report.

    Raises:
        StorageError: the disk cannot be read; a shard that starts again waits for it.
    """

    def __init__(
        self, context: ShardContext, disk: Disk, settle: Callable[[], None], report: Callable[[], None]
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._report = report
        self._archive = _opened(context, disk, self._guard)
        codec = from_spec(disk.codec) if disk.codec else None
        self._tiers = Tiers(context, self._archive, codec, settle)
        self._workers = Workers(READERS, thread_name_prefix="tensorvine-disk")
        self._deleter = Workers(1, thread_name_prefix="tensorvine-delete")
        self._unread: dict[SegmentId, str] = {}
        """Files that were to be inspected and could not be read."""
        self.loading = Loading(context, self._tiers, self._workers, settle)
        most = disk.bytes_unwritten if disk.bytes_unwritten is not None else context.config.capacity // 2
        self.persister = Persister(context, self._tiers, most, settle, report)
        if codec is not None:
            self._workers.submit(_warm, codec)
        Ticker("inspect", f"shard {context.index}", lambda: AGAIN_S, self._again)

    def tidy(self) -> None:
        """Carry out what the state left for the disk. Call it with the lock held."""
        dead, self._state.dead_files = self._state.dead_files, []
        rewritable, self._state.rewritable = self._state.rewritable, set()
        writable, self._state.writable = self._state.writable, {}
        inspect, self._state.to_inspect = self._state.to_inspect, {}
        discard, self._state.to_discard = self._state.to_discard, []
        if dead or discard:
            self._deleter.submit(self._delete, [*dead, *self._tiers.idle(discard)])
        if writable:
            self.persister.add(writable)
        for segment in rewritable:
            self._workers.submit(self._tiers.rewrite, segment)
        for segment, name in inspect.items():
            self._workers.submit(self._inspect, segment, name)

    # ---- what readers and savers need -----------------------------------------------------------------

    async def open_known(self, segments: Iterable[SegmentId]) -> None:
        """Read the rows of files that the catalog gave this shard, of those among `segments`.

        Raises:
            ModelLostError: a file is not there.
            CorruptDataError, StorageError: one cannot be read.
        """
        with self._lock:
            known = [segment for segment in segments if segment in self._state.known_files]
        if known:
            try:
                await asyncio.gather(*(self._workers.run(self._tiers.open_known, segment) for segment in known))
            finally:
                self._report()

    async def check_files(self, named: Holds) -> None:
        """Check the files of what a new version names here and is on disk only.

        Raises:
            ModelLostError, CorruptDataError: a file is damaged, or not there: the version could not be read.
        """
        with self._lock:
            here = [segment for segment_id in named if (segment := self._state.segment(segment_id)) is not None]
            cold = [each.id for each in here if each.file is not None and each.absent(named[each.id])]
            cold += [segment for segment in named if segment in self._state.known_files]
        for segment in cold:
            try:
                await self.open_known([segment])
                await self._workers.run(self._tiers.digests, segment)
            except StorageError as exc:  # it may be whole
                log.info("shard %d: a file of segment %x cannot be read now: %s", self._state.index, segment[1], exc)

    async def check_tensors(self, names: Mapping[SegmentId, dict[int, str]]) -> list[str]:
        """Read tensors of this shard's segments, and say what is wrong with them."""
        try:
            await self.open_known(names)
        except TensorVineError as exc:
            return [str(exc)]
        found = [await self._workers.run(self._tiers.check, segment, slots) for segment, slots in names.items()]
        return [problem for problems in found for problem in problems]

    # ---- within ---------------------------------------------------------------------------------------

    def _guard(self) -> None:
        """Refuse to change files."""
        self._context.lease.check()
        if self._state.left:
            raise ShardUnavailableError(f"shard {self._state.index}: expected one of the repository; it has drained")

    def _delete(self, names: list[str]) -> None:
        self._tiers.forget(names)
        try:
            self._archive.delete_segments(names)
        except (StorageError, ShardUnavailableError) as exc:  # the catalog finds them, and has them discarded
            log.warning("shard %d: unused files could not be deleted yet: %s", self._state.index, exc)

    def _inspect(self, segment_id: SegmentId, name: str) -> None:
        """Open a file that was never reported, and report it."""
        try:
            sizes, file = self._tiers.inspected(name)
            with self._lock:
                self._state.found(segment_id, sizes, file)
                self._state.note_failing(segment_id, None)
        except (CorruptDataError, StorageError) as exc:
            log.error("shard %d: %s cannot be restored: %s", self._state.index, name, exc)
            lost = isinstance(exc, CorruptDataError) or isinstance(exc.__cause__, FileNotFoundError)
            with self._lock:
                if lost:
                    self._state.note_lost(segment_id, ())
                else:
                    self._unread[segment_id] = name
                    self._state.note_failing(segment_id, str(exc))
        self._report()

    def _again(self) -> None:
        with self._lock:
            unread, self._unread = self._unread, {}
        for segment, name in unread.items():
            self._inspect(segment, name)


def required(history: History | None, index: int) -> History:
    """Return a shard's disk, for what cannot be done without one.

    Raises:
        StorageError: the repository has none.
    """
    if history is None:
        raise StorageError(f"shard {index}: expected a repository with path=; found one without")
    return history


def _opened(context: ShardContext, disk: Disk, guard: Callable[[], None]) -> Archive:
    """Open the path. A shard that starts again waits for one that is not there just now."""
    pause = threading.Event()
    while True:
        try:
            return Archive(disk.uri, create=False, guard=guard)
        except StorageError as exc:
            if context.lease.number == 1:
                raise
            log.error("shard %d restarts and is waiting for its path: %s", context.index, exc)
            pause.wait(DISK_PAUSE_S)


def _warm(codec: Codec) -> None:
    """Have a codec's kernels compiled before the first version comes."""
    codec.decode(codec.encode(np.linspace(0, 1, 1024, dtype=np.float32)))
