"""The files transport: from the repository's path, without any shard.

Rules
- A segment's newest file counts. Files are never changed, but replaced: one that is gone, or lacks a slot, is looked
  for once more.
- What is read is checked against the checksums that stand in the files (`store.archive.encoding`).
- Never taken by itself: a version may not be on disk yet, and a lossy codec gives other values than the memory has.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from cachetools import LRUCache

from ...store.archive.archive import Archive, StoredFile
from ...store.archive.encoding import decode_slot
from ...store.archive.segmentfile import SegmentFile
from ...store.errors import OperationTimeoutError, StorageError
from ...store.segments.segment import SegmentId, layout
from ...store.waiting import Deadline
from ..memory.buffers import Buffers
from .frames import Asked, Received

OPEN_FILES = 64


class FilesTransport:
    """Reads segments from their files.

    Args:
        path: the repository's; None: it has none.
    """

    name = "files"
    checks = True
    exact = False
    automatic = False

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._archive: Archive | None = None
        self._names: dict[SegmentId, list[StoredFile]] = {}
        self._open: LRUCache[SegmentId, SegmentFile] = LRUCache(OPEN_FILES)
        self._buffers = Buffers()
        self._lock = threading.Lock()

    def brings(self, shard: int, deadline: Deadline) -> bool:
        """Tell whether the repository has a path."""
        return self._path is not None

    def blocks(
        self, shard: int, places: Asked, digests: bool, deadline: Deadline, what: str
    ) -> dict[SegmentId, Received]:
        """Read slots of segments.

        Raises:
            StorageError: a segment is not on disk, or cannot be read.
            CorruptDataError: a file does not hold what was written.
        """
        found: dict[SegmentId, Received] = {}
        for segment, slots in places.items():
            if deadline.passed:
                raise OperationTimeoutError(
                    f"{what}: expected {len(places)} segments from files in time; found {len(found)}"
                )
            found[segment] = self._read(segment, slots)
        return found

    def close(self) -> None:
        """Let the files go."""
        with self._lock:
            self._open.clear()

    def _read(self, segment: SegmentId, slots: Sequence[int] | Mapping[int, int]) -> Received:
        rows = self._file(segment, slots).rows
        sizes = [slots[slot] if isinstance(slots, Mapping) else rows[slot].nbytes for slot in slots]
        offsets, length = layout(sizes)
        memory = self._buffers.take(length)
        target = np.frombuffer(memory, np.uint8)
        for slot, offset, nbytes in zip(slots, offsets, sizes, strict=True):
            decode_slot((segment, slot), nbytes, self._file, target[offset : offset + nbytes])
        return Received(dict(zip(slots, offsets, strict=True)), self._buffers.block(memory))

    def _file(self, segment: SegmentId, slots: Collection[int] = ()) -> SegmentFile:
        """Return the file of a segment that has these slots."""
        with self._lock:
            file = self._opened(segment)
            if file is None or not file.rows.keys() >= set(slots):
                self._open.pop(segment, None)
                self._names = self._files().segments()
                file = self._opened(segment)
            if file is None or not file.rows.keys() >= set(slots):
                raise StorageError(
                    f"{self._files().directory.uri}: expected segment {segment[1]:x} with slots {list(slots)} on disk; "
                    "it is not written yet, or was deleted: call `flush` first, or use another transport"
                )
            return file

    def _opened(self, segment: SegmentId) -> SegmentFile | None:
        file = self._open.get(segment)
        if file is None and segment in self._names:
            try:
                file = self._open[segment] = self._files().open_segment(self._names[segment][0])
            except StorageError:
                return None  # replaced meanwhile
        return file

    def _files(self) -> Archive:
        if self._archive is None:
            if self._path is None:
                raise StorageError("files transport: expected a repository with path=; found one without it")
            self._archive = Archive(self._path, create=False)
        return self._archive
