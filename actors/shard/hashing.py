"""Hashing of what lies in one shard's memory: each tensor by its bytes, behind those who save.

Rules
- Hashing waits until no save does: it would take a core and the bus.
- A segment that moved while it was hashed is hashed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from ...store.segments.segment import Offset, Segment, SegmentId
from ...store.shard import ShardState
from ...store.versions.manifest import digest_of
from ..memory.workers import Workers


class Hashing:
    """Hashes the segments of one shard.

    Args:
        state: the shard's.
        lock: guards the state and this.
        view: gives a segment's block, kept in place; called with the lock held.
    """

    def __init__(self, state: ShardState, lock: threading.RLock, view: Callable[[Segment], np.ndarray | None]) -> None:
        self._state = state
        self._lock = lock
        self._view = view
        self._unhashed: list[SegmentId] = []
        self._hashing: dict[SegmentId, Future[None]] = {}
        self._workers = Workers(1, thread_name_prefix="tensorvine-hash")

    def later(self, segment: SegmentId) -> None:
        """Have a segment hashed that has come. Call it with the lock held."""
        self._unhashed.append(segment)

    def start(self) -> None:
        """Hash in the background what was taken lately."""
        with self._lock:
            for segment_id in self._unhashed:
                segment = self._state.segment(segment_id)
                view = self._view(segment) if segment is not None else None
                if segment is not None and view is not None and not segment.absent(segment.live_slots):
                    work = (segment, view, segment.generation, segment.offsets)
                    self._hashing[segment_id] = self._workers.submit(self._hash, *work)
            self._unhashed.clear()

    def futures(self, segments: Sequence[SegmentId]) -> list[Future[None]]:
        """Start hashing, and give what to wait for until all of `segments` are hashed."""
        self.start()
        with self._lock:
            return [self._hashing[segment] for segment in segments if segment in self._hashing]

    def _hash(self, segment: Segment, view: np.ndarray, generation: int, offsets: Sequence[Offset]) -> None:
        digests = digests_of(view, offsets, segment.sizes)
        with self._lock:
            if segment.generation == generation:
                self._state.set_digests(segment.id, digests)
            else:
                self._unhashed.append(segment.id)
            self._hashing.pop(segment.id, None)  # one that was read again meanwhile is hashed twice

    def check(self, segment_id: SegmentId, names: Mapping[int, str]) -> list[str]:
        """Hold tensors in memory against their content hashes, where these are known, and say what is wrong.

        Args:
            segment_id: the segment.
            names: slot -> tensor's name.
        """
        with self._lock:
            segment = self._state.segment(segment_id)
            view = self._view(segment) if segment is not None else None
            if segment is None or view is None or segment.digests is None:
                return []
            offsets, digests, sizes = segment.offsets, segment.digests, segment.sizes
        problems: list[str] = []
        for slot, name in names.items():
            offset = offsets[slot]
            if isinstance(offset, int) and digests[slot]:
                found = digest_of(view[offset : offset + sizes[slot]])
                if found != digests[slot]:
                    problems.append(f"tensor {name!r}: expected content {digests[slot]} in memory; found {found}")
        return problems


def digests_of(block: np.ndarray, offsets: Sequence[Offset], sizes: Sequence[int]) -> list[str]:
    """Hash a block's tensors; one that was compacted away before has no hash, and no caller asks for it."""
    return [
        digest_of(block[offset : offset + size]) if isinstance(offset, int) else ""
        for offset, size in zip(offsets, sizes, strict=True)
    ]
