"""One shard's memory and disk in this process, without Ray, a catalog or clients; and files for it to open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tensorvine.actors.rpc.messages import Disk
from tensorvine.actors.shard.admission import Admission
from tensorvine.actors.shard.disk.history import History
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import encode_tensors
from tensorvine.store.catalog.orders import Take
from tensorvine.store.segments.segment import File, SegmentId
from tensorvine.store.shard import ShardState

from tests.support.contexts import context_of
from tests.support.crash import tensor_of

MIB = 1 << 20
CAPACITY = 8 * MIB


class Life:
    """A shard that keeps all segments on a path, none of them in memory."""

    def __init__(self, path: Path) -> None:
        self.state = ShardState(0, 1)
        self.context = context_of(self.state, capacity=CAPACITY)
        self.lock = self.context.lock
        self.segment_memory = self.context.segment_memory
        self.history = History(self.context, Disk(str(path), None, None, None), self.settle, lambda: None)
        self.room = Admission(self.context, cast("Any", None), self.history.persister)
        for segment, (newest, *_) in self.history._archive.segments().items():
            _, file = self.history._tiers.inspected(newest.name)
            self.take(segment, file)

    def take(self, segment: SegmentId, file: File) -> None:
        """Keep a file from now on, and open it."""
        with self.lock:
            self.state.ordered(self.state._applied + 1, [Take({segment: file})])
        self.history._tiers.open_known(segment)

    def settle(self) -> None:
        with self.lock:
            self.segment_memory.settle()
            self.history.tidy()

    def content_of(self, segment: SegmentId, slots: Sequence[int]) -> list[bytes]:
        """Read tensors of a segment from disk."""
        found: list[bytes] = []
        for slot in slots:
            known = self.state.segment(segment)
            assert known is not None
            array = self.history._tiers._read((segment, slot), known.sizes[slot])
            assert array is not None
            found.append(array.tobytes())
        return found


def put(archive: Archive, segment: SegmentId, arrays: Mapping[int, np.ndarray], generation: int = 0) -> None:
    """Write a segment's file."""
    tensors = [tensor_of(slot, f"t{slot}", array) for slot, array in arrays.items()]
    archive.write_segment(segment, generation, *encode_tensors(None, tensors))
