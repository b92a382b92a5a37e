"""The bytes of one shard: granted, filled, taken, compacted, and used again.

Rules
- Shards own every byte: segments lie in the shard's shared memory (`memory`). Clients of this node fill it and read
  it in place; what comes from another node is fetched (`copying`), what goes there takes one of the
  readers' `transports`.
- M8. A part that becomes free, whoever had it, first loses its header and is used again only when nobody has a lock on
  it: no reader, and nobody in this process who still copies from it or into it. Whoever copies takes the lock in the
  same locked section in which he learns the place.
- Blocks of at most `INLINE_BYTES` stay in this process's heap and travel inside messages.
- Copies run in worker threads.
- The shard's lock guards all of this; methods that say so must be called with it held.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ...store.errors import ShardUnavailableError, StoreFullError, TensorMismatchError
from ...store.holders import Filling, Owner, Request
from ...store.segments.arena import KEPT, Arena, Part
from ...store.segments.blockheader import HEADER_BYTES, header_of
from ...store.segments.segment import ALIGNMENT, Block, Segment, SegmentId, layout, pack, padded
from ...store.segments.written import Box, Written
from ...store.shard import ShardState
from ...store.sizes import size
from ..memory.memory import SMALLEST_BYTES, SharedMemory
from ..memory.page_care import PageCare
from ..memory.workers import Workers
from ..rpc.messages import Filled
from .hashing import Hashing, digests_of

log = logging.getLogger(__name__)

INLINE_BYTES = SMALLEST_BYTES
READ_ROUNDS = 32
"""How often a read may find that others pushed out again what it had brought into the memory."""
_COMPACTION = Filling("compaction")


class SegmentMemory:
    """The memory of one shard and what lies in it.

    Args:
        state: the shard's.
        lock: guards the state and this.
        capacity: bytes of memory.
        touch: how much of it to take from the system now.
    """

    def __init__(self, state: ShardState, lock: threading.RLock, capacity: int, touch: int) -> None:
        self.memory = SharedMemory(capacity, touch)
        self._state = state
        self._lock = lock
        self._capacity = capacity
        self._arena = Arena(self.memory.size)
        """Of parts with their headers; all else here names a part by where its bytes start, after the header."""
        self.page_care = PageCare(self.memory, self._arena, lock, min(touch, capacity), f"shard {state.index}")
        self._filling: Counter[Part] = Counter()
        """Parts that this process fills -> in how many places."""
        self._written: dict[int, Written] = {}
        """Where a part starts that this process fills piece by piece -> the pieces that are written."""
        self._freed: list[Part] = []
        """Parts that are free but for who still reads them, or copies."""
        self.hashing = Hashing(state, lock, self.view)
        self.workers = Workers(2, thread_name_prefix="tensorvine-shard")
        """Threads for what takes long."""
        self.bytes_saved = 0
        """Of the tensors that saves brought."""

    @property
    def bytes_filling(self) -> int:
        """Bytes that savers hold and have not handed over yet."""
        return sum(self._bytes_of(owner) for owner in self._arena.owners())

    # ---- taking ---------------------------------------------------------------------------------------

    def grant(self, owner: Owner, sizes: Sequence[int], least: int = 1) -> list[int]:
        """Grant what fits, after taking back what nobody reads any more, and then what is on disk as well.

        Call it with the lock held.

        Args:
            owner: whose it is to be.
            sizes: bytes of the blocks.
            least: how many of them; where fewer fit, nothing is granted.

        Raises:
            OperationTimeoutError: the owner is a save that has ended.
        """
        if isinstance(owner, Request):
            self._state.requests.check(owner)
        self.page_care.asked(owner, list(map(_arena_bytes, sizes)))
        offsets = self._granted(owner, sizes, least)
        if not offsets:
            self._recycle_all()
            offsets = self._granted(owner, sizes, least)
        return offsets if offsets or not sizes else self._granted_of_others(owner, sizes, least)

    def _granted_of_others(self, owner: Owner, sizes: Sequence[int], least: int) -> list[int]:
        """Have others leave the memory until `sizes` are granted; none leaves where all that may would not do."""
        needed, room, ready = sum(map(_arena_bytes, sizes[:least])), self._arena.free_bytes, list[SegmentId]()
        for segment_id, nbytes in self._leaving():
            ready.append(segment_id)
            room += nbytes
            while room >= needed and ready:
                self._evict(ready.pop(0))
                offsets = self._granted(owner, sizes, least)
                if offsets:
                    return offsets
        return []

    def _granted(self, owner: Owner, sizes: Sequence[int], least: int) -> list[int]:
        """Grant as many of `sizes` as fit now, each with room for a header in front of it."""
        needed = list(map(_arena_bytes, sizes))
        offsets = self._arena.grant(owner, needed, least)
        self.page_care.granted(list(zip(offsets, needed, strict=False)))
        return [offset + HEADER_BYTES for offset in offsets]

    def reserve(self, save: Request, sizes: Sequence[int]) -> list[int]:
        """Grant all of `sizes` for a save to come, or nothing: nobody who saves now may be short of room for it.

        Call it with the lock held.

        Raises:
            OperationTimeoutError: the owner is a save that has ended.
        """
        self._state.requests.check(save)
        self._recycle_all()
        if self._arena.free_bytes < 2 * sum(map(padded, sizes)):
            return []
        return self._granted(save, sizes, len(sizes))

    def let_go(self, wanted: Mapping[SegmentId, Sequence[int]]) -> bool:
        """Let segments of which slots are wanted leave the memory, to be read again in one piece.

        Call it with the lock held.

        Returns:
            False when that cannot make room for them; then none has left.
        """
        self._recycle_all()
        leaving = dict(self._leaving())
        coming = [s for s in self._state.absent(wanted).keys() | (wanted.keys() & leaving.keys()) if wanted[s]]
        known = [(segment, wanted[s]) for s in coming if (segment := self._state.segment(s)) is not None]
        needed = sum(_arena_bytes(layout([segment.sizes[slot] for slot in slots])[1]) for segment, slots in known)
        if not wanted.keys() & leaving.keys() or needed > self._arena.free_bytes + sum(leaving.values()):
            return False
        for segment_id in wanted.keys() & leaving.keys():
            self._evict(segment_id)
        return True

    def _leaving(self) -> Iterator[tuple[SegmentId, int]]:
        """Return what may leave the memory, least recently used first, and the bytes that are free then.

        It is on disk, and nobody reads it: else its place would not come back.
        """
        for segment_id in self._state.residents.evictable():
            segment = self._state.segment(segment_id)
            part = segment.handle if segment is not None else None
            if isinstance(part, Part) and not self.memory.is_read(part):
                yield segment_id, _arena_bytes(part.length)

    def _evict(self, segment_id: SegmentId) -> None:
        self._state.residents.evict(segment_id)
        self._take_back()

    def room_may_come(self, owner: Owner) -> bool:
        """Tell whether others hold what may become free by itself. Call it with the lock held.

        What is on disk as well may: it only stays because somebody reads it now.
        """
        on_disk = next(self._state.residents.evictable(), None) is not None
        return on_disk or bool(self._freed) or bool(self._arena.owners() - {owner})

    def full(self, what: str, nbytes: int) -> StoreFullError:
        """Make the error of a save, or a load, for which there is no room."""
        with self._lock:
            kept, filled = self._bytes_of(KEPT), self.bytes_filling
        return StoreFullError(
            f"{what}: expected room for {size(nbytes)} in shard {self._state.index}; of its {size(self._capacity)}, "
            f"{size(kept)} hold segments and {size(filled)} are being filled: retire models, or start the repository "
            "with more store_bytes"
        )

    def crowded(self, what: str) -> StoreFullError:
        """Make the error of a read that never got all it wanted into the memory at one time."""
        return StoreFullError(
            f"load of {what}: expected room in the {size(self._capacity)} of shard {self._state.index}; other "
            "loads evict its tensors: load layers or tensors separately, or start the repository with more store_bytes"
        )

    def kept(self, wanted: Mapping[SegmentId, Sequence[int]]) -> list[np.ndarray]:
        """Keep what is in memory of these segments from leaving it, as long as the arrays live.

        Call it with the lock held.

        Raises:
            StoreFullError: all that is wanted never fits into the memory.
        """
        segments = [segment for s in wanted if (segment := self._state.segment(s)) is not None]
        needed = sum(layout([segment.sizes[slot] for slot in wanted[segment.id]])[1] for segment in segments)
        if needed > self._capacity:
            raise StoreFullError(
                f"load: expected at most {size(self._capacity)}, the capacity of shard {self._state.index}; "
                f"found {size(needed)}: load layers or tensors separately, or start the repository with more "
                "store_bytes"
            )
        return [view for segment in segments if (view := self.view(segment)) is not None]

    def adopt(self, save: Request, incarnation: int, blocks: Sequence[Filled]) -> None:
        """Take what a saver filled as segments. Call it with the lock held.

        Args:
            save: the save, which has the segments until its commit.
            incarnation: process id of the shard whose memory was filled.
            blocks: the segments. One that the save brought before is not taken again.

        Raises:
            ShardUnavailableError: an earlier incarnation of this shard was filled, or has fetched them.
            OperationTimeoutError: the save has ended.
            TensorMismatchError: a part that is filled piece by piece is not complete.
        """
        self._state.requests.check(save)
        staged = self._state.staged(save)
        for block in blocks:
            known = staged.get(block.id)
            if known is not None:
                known.labels = tuple(block.labels) or known.labels
            elif isinstance(block.place, Part):
                self._adopt_part(save, incarnation, block, block.place)
            elif block.place is not None:
                self._state.stage(save, block.id, block.place, block.sizes, block.labels)
                content = np.frombuffer(block.place, np.uint8)
                self._state.set_digests(block.id, digests_of(content, layout(block.sizes)[0], block.sizes))
            else:
                raise ShardUnavailableError(
                    f"save {save}: expected segment {block.id[1]:x} to have been fetched; the shard restarted"
                )
        filled = sum(sum(block.sizes) for block in blocks if block.id not in staged)
        self.bytes_saved += filled
        self.page_care.filled(filled)

    def _adopt_part(self, save: Request, incarnation: int, block: Filled, part: Part) -> None:
        self._check_granted(part, save, incarnation)
        if part in self._filling:  # by a process that was taken for dead, whose task another one did as well
            raise ShardUnavailableError(f"save {save}: expected {part} to be complete; another process still fills it")
        written = self._written.get(part.offset)
        fault = written.fault(block.sizes) if written is not None else None
        if fault is not None:
            raise TensorMismatchError(f"save {save}: expected each byte of its tensors to be written once; {fault}")
        self._written.pop(part.offset, None)
        self._state.stage(save, block.id, part, block.sizes, block.labels)
        self.keep(part, block.id)
        self.hashing.later(block.id)

    def expect_pieces(self, save: Request, offsets: Iterable[int]) -> None:
        """Record from now on what is written into parts that a save was granted. Call it with the lock held."""
        for offset in offsets:
            if self._arena.owner_of(offset - HEADER_BYTES) == save:  # else the save has ended
                self._written[offset] = Written()

    def takes_piece(self, part: Part, offset: int, shape: tuple[int, ...], box: Box) -> bool:
        """Record a piece that is about to be written into a part, as `Written.add` does.

        Raises:
            ShardUnavailableError: the part is not filled piece by piece.
        """
        with self._lock:
            written = self._written.get(part.offset)
            if written is None:
                raise ShardUnavailableError(f"expected {part} to be part of a save in progress; the save has ended")
            return written.add(offset, shape, box)

    def fill(self, part: Part, owner: Owner, block: np.ndarray) -> None:
        """Copy a block into a part that `owner` was granted. Takes long: not for a loop.

        Raises:
            ShardUnavailableError: it is the owner's no more.
        """
        with self.filling([part], owner):
            np.copyto(self.memory.part(part)[: block.nbytes], block)

    @contextlib.contextmanager
    def filling(self, parts: Iterable[Part], owner: Owner) -> Generator[None]:
        """Keep parts in place that `owner` was granted while this process fills them, whatever becomes of the owner.

        Raises:
            ShardUnavailableError: one is the owner's no more.
        """
        filled = list(parts)
        with contextlib.ExitStack() as stack:
            with self._lock:
                for part in filled:
                    self._check_granted(part, owner, os.getpid())
                    stack.enter_context(self.memory.held(part))
                self._filling.update(filled)
            try:
                yield
            finally:
                with self._lock:
                    self._filling -= Counter(filled)

    def keep(self, part: Part, segment_id: SegmentId) -> None:
        """Count a part that was granted as the place of a segment.

        Call it with the lock held, in the same locked section in which the state takes the part.
        """
        self._arena.give(part.offset - HEADER_BYTES, KEPT)
        segment = self._state.segment(segment_id)
        if segment is not None:
            self.memory.label(part, header_of(segment.id, segment.generation))

    def give_back(self, part: Part, owner: Owner) -> None:
        """Take back a part that its owner did not come to use. Call it with the lock held."""
        if self._arena.owner_of(part.offset - HEADER_BYTES) == owner:
            self._free([part])

    def drop_grants(self, owner: Owner) -> None:
        """Take back what somebody was granted and did not hand over. Call it with the lock held."""
        granted = self._arena.parts_of(owner)
        self._free([Part(part.offset + HEADER_BYTES, part.length - HEADER_BYTES) for part in granted])

    def drop_over(self, now_gone: str | None = None) -> None:
        """Take back what saves that are over were granted, and all saves of a client. Call it with the lock held."""
        for owner in self._arena.owners():
            if isinstance(owner, Request) and (owner.client == now_gone or self._state.requests.is_over(owner)):
                self.drop_grants(owner)

    def _bytes_of(self, owner: Owner) -> int:
        return sum(part.length - HEADER_BYTES for part in self._arena.parts_of(owner))

    def _check_granted(self, part: Part, owner: Owner, incarnation: int) -> None:
        if incarnation != os.getpid() or self._arena.owner_of(part.offset - HEADER_BYTES) != owner:
            raise ShardUnavailableError(
                f"shard {self._state.index}: expected {part} to be filled by {owner} in this incarnation; the save was "
                "cancelled, or the shard restarted"
            )

    # ---- reading --------------------------------------------------------------------------------------

    def view(self, segment: Segment) -> np.ndarray | None:
        """Return a segment's block, kept in place; None when it is on disk only. Call it with the lock held."""
        if segment.handle is None:
            return None
        if isinstance(segment.handle, Part):
            return self.memory.read(segment.handle)
        return np.frombuffer(segment.handle, np.uint8)

    def views(self, blocks: Mapping[SegmentId, Block]) -> dict[SegmentId, np.ndarray]:
        """Keep blocks in place while they are copied. Call it with the lock held."""
        return {s: self.memory.read(b.handle) for s, b in blocks.items() if isinstance(b.handle, Part)}

    # ---- freeing --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Free and compact what the state says. Call it with the lock held."""
        compactable, self._state.residents.compactable = self._state.residents.compactable, set()
        self._take_back()
        for segment in compactable:
            self.workers.submit(self._compact, segment)

    def _take_back(self) -> None:
        freed, self._state.residents.freed = self._state.residents.freed, []
        self._free([handle for handle in freed if isinstance(handle, Part)])

    def _free(self, parts: Sequence[Part]) -> None:
        """Take parts back, as soon as nobody reads them or copies: their headers go first (see `memory`)."""
        for part in parts:
            self._arena.give(part.offset - HEADER_BYTES, KEPT)
            self._written.pop(part.offset, None)
            self.memory.clear(part)
        self._freed += parts
        self._recycle()

    def _recycle(self) -> None:
        """Use the parts again that nobody reads any more."""
        freed, self._freed = self._freed, []
        for part in freed:
            if self.memory.is_read(part):
                self._freed.append(part)
            else:
                self._arena.free(part.offset - HEADER_BYTES)

    def _recycle_all(self) -> None:
        """The same, and with them what `page_care` has for a moment: after that, no room is missed that there is."""
        self.page_care.settle()
        self._recycle()

    def _compact(self, segment_id: SegmentId) -> None:
        """Copy the live slots of a segment into a smaller block."""
        with self._lock:
            segment = self._state.segment(segment_id)
            old = self.view(segment) if segment is not None else None  # kept in place: `grant` lets others leave
            if segment is None or old is None or not segment.wants_compaction:
                return
            in_memory, generation = isinstance(segment.handle, Part), segment.generation
            after, length = segment.compacted()
            places = [
                (at, size)
                for at, end, size in zip(segment.offsets, after, segment.sizes, strict=True)
                if isinstance(at, int) and isinstance(end, int)
            ]
            offsets = self.grant(_COMPACTION, [length]) if in_memory else []
            if in_memory and not offsets:
                log.info("segment %s: no memory to compact it, keeping its dead bytes", segment_id)
                return
        part = Part(offsets[0], max(length, ALIGNMENT)) if offsets else None
        new = self.memory.part(part) if part is not None else np.zeros(length, np.uint8)
        pack(old, places, new)
        del old
        with self._lock:
            handle = part if part is not None else new.tobytes()
            moved = self._state.residents.move(segment_id, generation, handle, after, length)
            if part is not None and moved:
                self.keep(part, segment_id)
            elif part is not None:
                self.give_back(part, _COMPACTION)
            self.settle()


def _arena_bytes(size: int) -> int:
    """Return the bytes of the arena that a block takes, header included."""
    return padded(HEADER_BYTES + max(size, ALIGNMENT))
