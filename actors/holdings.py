"""The bytes of one shard: granted, filled, taken, hashed, compacted, carried to other nodes, and used again.

Rules
- Shards own every byte: segments lie in the shard's shared memory (`memory`). Clients of this node fill it and read
  it in place; what comes from another node takes the engine's object store, what goes there one of the `ways`.
- A freed part is used again only when no reader has an array on it.
- Blocks of at most `INLINE_BYTES` stay in this process's heap and travel inside messages.
- Copies and hashes run in worker threads, and hashing waits until no save does: it would take a core and the bus.
- The shard's lock guards all of this; methods that say so must be called with it held.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from ..store.arena import KEPT, Arena, Part
from ..store.errors import ShardUnavailableError, StoreFullError
from ..store.manifest import digest_of
from ..store.segment import ALIGNMENT, Block, Segment, SegmentId, layout, padded
from ..store.shard import ShardState
from .engine import Engine
from .memory import SharedMemory

log = logging.getLogger(__name__)

INLINE_BYTES = 64 << 10
EXPORT_IDLE_S = 30.0
_COMPACTION = "compaction"

Counters = tuple[int, int]
"""(epoch, freeings) of a shard: see `memory`."""
Filled = tuple[SegmentId, "Part | bytes", Sequence[int]]
"""A segment to be, where its bytes are, and its tensors' sizes."""


class Holdings:
    """The memory of one shard and what lies in it.

    Args:
        state: the shard's.
        lock: guards the state and this.
        engine: carries blocks to other nodes.
        capacity: bytes of memory.
        touch: how much of it to take from the system now.
    """

    def __init__(self, state: ShardState, lock: threading.RLock, engine: Engine, capacity: int, touch: int) -> None:
        self.memory = SharedMemory(capacity, touch)
        self._state = state
        self._lock = lock
        self._engine = engine
        self._arena = Arena(capacity)
        self._base = time.time_ns()
        """Counters start here: those of an earlier life of the shard never come again."""
        self._freed = 0
        self._still_read: list[Part] = []
        self._unhashed: list[SegmentId] = []
        self._hashing: dict[SegmentId, Future[None]] = {}
        self._exports: dict[SegmentId, tuple[int, Any, float]] = {}
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="tensorvine-shard")
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-hash")

    @property
    def counters(self) -> Counters:
        """What the board shows, or is about to."""
        return (self._base + self._state.epoch, self._base + self._freed)

    @property
    def bytes_filling(self) -> int:
        """Bytes that savers hold and have not handed over yet."""
        return self._arena.used(kept=False)

    @property
    def serves_saves(self) -> bool:
        """Whether a save fills memory here: one that has begun, not one that may come. Call it with the lock held."""
        return any(owner.partition("/")[2].startswith("s") for owner in self._arena.owners())

    def publish(self) -> None:
        """Show the counters on the board. Call it with the lock held."""
        self.memory.publish(*self.counters)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run something long without stopping this loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    # ---- taking -----------------------------------------------------------------------------------------

    def grant(self, owner: str, sizes: Sequence[int]) -> list[int]:
        """Grant what fits, after taking back what nobody reads any more, and then what is on disk as well.

        Call it with the lock held.
        """
        offsets = self._arena.grant(owner, sizes)
        if not offsets and self._still_read:
            self._recycle()
            offsets = self._arena.grant(owner, sizes)
        if not offsets and sizes and padded(sizes[0]) <= self._arena.capacity:
            for segment_id in self._state.evictable():
                if self._evict(segment_id):
                    offsets = self._arena.grant(owner, sizes)
                if offsets:
                    break
        return offsets

    def reserve(self, owner: str, sizes: Sequence[int]) -> list[int]:
        """Grant all of `sizes` for a save to come, or nothing: nobody who saves now may be short of room for it.

        Call it with the lock held.
        """
        self._recycle()
        free = self._arena.capacity - self._arena.used(kept=True) - self._arena.used(kept=False)
        if free < 2 * sum(map(padded, sizes)):
            return []
        offsets = self._arena.grant(owner, sizes)
        if len(offsets) == len(sizes):
            return offsets
        self._arena.free_owner(owner)
        return []

    def _evict(self, segment_id: SegmentId) -> bool:
        """Let a segment leave the memory, unless somebody reads it: then its place would not come back."""
        segment = self._state.segment(segment_id)
        if segment is None or not isinstance(segment.handle, Part) or self.memory.is_read(segment.handle):
            return False
        if not self._state.evict(segment_id):
            return False
        self._take_back()
        return True

    def room_may_come(self, save_id: str) -> bool:
        """Tell whether others hold what may become free by itself. Call it with the lock held.

        What is on disk as well may: it only stays because somebody reads it now.
        """
        on_disk = next(self._state.evictable(), None) is not None
        return on_disk or bool(self._still_read) or bool(self._arena.owners() - {save_id})

    def full(self, save_id: str, nbytes: int) -> StoreFullError:
        """Make the error of a save for which there is no room."""
        with self._lock:
            kept, filled = self._arena.used(kept=True), self._arena.used(kept=False)
        return StoreFullError(
            f"save {save_id}: expected room for {nbytes} bytes in shard {self._state.index}; of its "
            f"{self._arena.capacity} bytes {kept} hold segments and {filled} are being filled: retire models, or start "
            "the repository with more store_bytes"
        )

    def crowded(self, what: str) -> StoreFullError:
        """Make the error of a read that never got all it wanted into the memory at one time."""
        return StoreFullError(
            f"load of {what}: expected room for it in the {self._arena.capacity} bytes of shard {self._state.index}; "
            "others push it out again: load layers or tensors apart, or start the repository with more store_bytes"
        )

    def kept(self, wanted: Mapping[SegmentId, Sequence[int]]) -> list[np.ndarray]:
        """Keep what is in memory of these segments from leaving it, as long as the arrays live.

        Call it with the lock held.

        Raises:
            StoreFullError: all that is wanted never fits into the memory.
        """
        segments = [segment for s in wanted if (segment := self._state.segment(s)) is not None]
        needed = sum(layout([segment.sizes[slot] for slot in wanted[segment.id]])[1] for segment in segments)
        if needed > self._arena.capacity:
            raise StoreFullError(
                f"load: expected at most {self._arena.capacity} bytes, the capacity of shard {self._state.index}; "
                f"found {needed}: load layers or tensors apart, or start the repository with more store_bytes"
            )
        return [view for segment in segments if (view := self.view(segment)) is not None]

    def adopt(self, save_id: str, life: int, blocks: Sequence[Filled]) -> None:
        """Take what a saver filled as segments. Call it with the lock held.

        Args:
            save_id: the save, which holds the segments until its commit.
            life: process id of the shard whose memory was filled.
            blocks: the segments.

        Raises:
            ShardUnavailableError: an earlier life of this shard was filled, or the save was given up.
        """
        for segment, handle, sizes in blocks:
            if not isinstance(handle, Part):
                self._state.adopt(save_id, segment, handle, sizes)
                hashes = _digests(np.frombuffer(handle, np.uint8), layout(sizes)[0], sizes)
                self._state.set_digests(segment, hashes)
                continue
            if life != os.getpid() or self._arena.owner_of(handle.offset) != save_id:
                raise ShardUnavailableError(
                    f"shard {self._state.index}: expected {handle} to be filled by {save_id} in its present life; the "
                    "save was given up, or the shard started again meanwhile"
                )
            self._state.adopt(save_id, segment, handle, sizes)
            self._arena.give(handle.offset, KEPT)
            self._unhashed.append(segment)

    def keep(self, part: Part) -> None:
        """Count a part that was granted as a segment's place. Call it with the lock held."""
        self._arena.give(part.offset, KEPT)

    def give_back(self, part: Part, save_id: str) -> None:
        """Take back a part that a save did not come to use. Call it with the lock held."""
        if self._arena.owner_of(part.offset) == save_id:
            self._arena.free(part.offset)

    def drop_save(self, save_id: str) -> None:
        """Take back what a save was granted and did not hand over. Call it with the lock held."""
        self._arena.free_owner(save_id)

    def drop_client(self, client: str) -> None:
        """Take back what all saves of a client were granted. Call it with the lock held."""
        for owner in self._arena.owners():
            if owner.startswith(f"{client}/"):
                self._arena.free_owner(owner)

    # ---- hashing ----------------------------------------------------------------------------------------

    def start_hashing(self) -> None:
        """Hash in the background what was taken lately."""
        with self._lock:
            for segment_id in self._unhashed:
                segment = self._state.segment(segment_id)
                view = self.view(segment) if segment is not None else None
                if segment is not None and view is not None and not segment.absent(segment.live_slots):
                    work = (segment, view, segment.generation, segment.offsets)
                    self._hashing[segment_id] = self._hasher.submit(self._hash, *work)
            self._unhashed.clear()

    def hashing(self, segments: Sequence[SegmentId]) -> list[Future[None]]:
        """Start hashing, and give what to wait for until all of `segments` are hashed."""
        self.start_hashing()
        with self._lock:
            return [self._hashing[segment] for segment in segments if segment in self._hashing]

    def _hash(self, segment: Segment, view: np.ndarray, generation: int, offsets: Sequence[int]) -> None:
        digests = _digests(view, offsets, segment.sizes)
        with self._lock:
            if segment.generation == generation:
                self._state.set_digests(segment.id, digests)
            else:
                self._unhashed.append(segment.id)
            self._hashing.pop(segment.id, None)  # one that was read again meanwhile is hashed twice

    def hash_later(self, segment: SegmentId) -> None:
        """Have a segment hashed that was read from disk. Call it with the lock held."""
        self._unhashed.append(segment)

    def check(self, segment_id: SegmentId, names: Mapping[int, str]) -> list[str]:
        """Hold tensors in memory against their content hashes, where these are known, and say what is wrong.

        Args:
            segment_id: the segment.
            names: slot -> tensor's name.
        """
        with self._lock:
            segment = self._state.segment(segment_id)
            view = self.view(segment) if segment is not None else None
            if segment is None or view is None or segment.digests is None:
                return []
            offsets, digests, sizes = segment.offsets, segment.digests, segment.sizes
        problems: list[str] = []
        for slot, name in names.items():
            if offsets[slot] >= 0 and digests[slot]:
                found = digest_of(view[offsets[slot] : offsets[slot] + sizes[slot]])
                if found != digests[slot]:
                    problems.append(f"tensor {name!r}: expected content {digests[slot]} in memory; found {found}")
        return problems

    # ---- to other nodes ---------------------------------------------------------------------------------

    def view(self, segment: Segment) -> np.ndarray | None:
        """Give a segment's block, kept in place; None when it is on disk only. Call it with the lock held."""
        if segment.handle is None:
            return None
        if isinstance(segment.handle, Part):
            return self.memory.read(segment.handle)
        return np.frombuffer(segment.handle, np.uint8)

    def views(self, blocks: Mapping[SegmentId, Block]) -> dict[SegmentId, np.ndarray]:
        """Keep blocks in place while they are copied. Call it with the lock held."""
        return {s: self.memory.read(b.handle) for s, b in blocks.items() if isinstance(b.handle, Part)}

    def exported(
        self, blocks: Mapping[SegmentId, Block], views: Mapping[SegmentId, np.ndarray]
    ) -> dict[SegmentId, Block]:
        """Put blocks into the engine's object store for readers elsewhere; each stays there until it is idle."""
        carried = dict(blocks)
        for segment, view in views.items():
            with self._lock:
                known = self._exports.get(segment)
            generation = blocks[segment].generation
            handle = known[1] if known is not None and known[0] == generation else self._engine.put(view)
            with self._lock:
                self._exports[segment] = (generation, handle, time.monotonic())
            carried[segment] = replace(blocks[segment], handle=handle)
        return carried

    def drop_idle_exports(self) -> None:
        """Let go of the copies in the object store that nobody asked for lately, or whose segment is gone."""
        idle = time.monotonic() - EXPORT_IDLE_S
        with self._lock:
            for segment, (_, _, used) in list(self._exports.items()):
                if used < idle or self._state.segment(segment) is None:
                    del self._exports[segment]

    # ---- freeing ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Free and compact what the state says. Call it with the lock held."""
        compactable, self._state.compactable = self._state.compactable, set()
        self._take_back()
        for segment in compactable:
            self._workers.submit(self._compact, segment)

    def _take_back(self) -> None:
        freed, self._state.freed = self._state.freed, []
        parts = [handle for handle in freed if isinstance(handle, Part)]
        self._freed += len(parts)
        self._still_read += parts
        self._recycle()

    def _recycle(self) -> None:
        """Take back the parts that nobody reads. The board shows their freeing first: see `memory`."""
        self.publish()
        still_read: list[Part] = []
        for part in self._still_read:
            if self.memory.is_read(part):
                still_read.append(part)
            else:
                self._arena.free(part.offset)
        self._still_read = still_read

    def _compact(self, segment_id: SegmentId) -> None:
        """Copy the live slots of a segment into a smaller block."""
        with self._lock:
            segment = self._state.segment(segment_id)
            if segment is None or segment.handle is None or not segment.wants_compaction:
                return
            handle, before = segment.handle, segment.offsets
            sizes, (after, length) = segment.sizes, segment.compacted()
            offsets = self.grant(_COMPACTION, [length]) if isinstance(handle, Part) else []
            if isinstance(handle, Part) and not offsets:
                log.info("segment %s: no room to compact it into; its dead bytes stay for now", segment_id)
                return
            old = self.memory.read(handle) if isinstance(handle, Part) else np.frombuffer(handle, np.uint8)
        part = Part(offsets[0], max(length, ALIGNMENT)) if offsets else None
        new = self.memory.part(part) if part is not None else np.zeros(length, np.uint8)
        for slot, offset in enumerate(after):
            if offset >= 0:
                new[offset : offset + sizes[slot]] = old[before[slot] : before[slot] + sizes[slot]]
        del old
        with self._lock:
            moved = self._state.move(segment_id, part if part is not None else new.tobytes(), after, length)
            if part is not None and moved:
                self._arena.give(part.offset, KEPT)
            elif part is not None:
                self._arena.free(part.offset)
            self.settle()


def _digests(block: np.ndarray, offsets: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Hash a block's tensors; one that was compacted away before has no hash, and nobody who asks for it."""
    return [
        digest_of(block[offset : offset + size]) if offset >= 0 else ""
        for offset, size in zip(offsets, sizes, strict=True)
    ]
