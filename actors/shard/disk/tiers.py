"""Moving one shard's tensors between its memory and the disk.

Rules
- To disk: a segment is written when a version that is to be on disk names slots that its file lacks; a file that is
  mostly dead is written anew. Two segments at once, so that one is encoded while the other is synced, by threads of
  low priority; each segment by one thread at a time.
- To memory: what a reader asks for of a segment that is on disk only, and no more: one tensor of a large segment is
  one read. When more of the same segment is asked for, all of it comes.
- While there are manifests that could not be read, a new generation of a file has all that the one before had.
- A file that was replaced while it was read says nothing: who reads looks again at what counts now.
- What is read is checked (`store.archive.encoding`); what a reader gets lies in the shard's memory like all else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import TypeVar

import numpy as np
from cachetools import LRUCache

from ....store.archive.archive import Archive, StoredFile
from ....store.archive.encoding import DENSE_EVERY, Tensor, decode_slot, encode_tensors
from ....store.archive.segmentfile import Row, SegmentFile, Slot
from ....store.arrays import as_bytes
from ....store.codecs.codec import Codec, Encoded
from ....store.errors import CorruptDataError, ModelLostError, StorageError, TensorVineError
from ....store.holders import Owner
from ....store.segments.arena import Part
from ....store.segments.segment import GONE, Segment, SegmentId, Stored, layout
from ...memory.workers import Workers
from ...rpc.messages import Chains, ToStore, Wanted
from ..context import ShardContext

log = logging.getLogger(__name__)

T = TypeVar("T")
OPEN_FILES = 64
WRITERS = 2
NICENESS = 10


class Tiers:
    """Memory and disk of one shard.

    Args:
        context: the shard's.
        archive: the repository's files.
        codec: how tensors are stored; None: as they are.
        settle: called after the state changed, without the lock.
        stored_elsewhere: asks another shard for the file of its segment.
    """

    def __init__(
        self,
        context: ShardContext,
        archive: Archive,
        codec: Codec | None,
        settle: Callable[[], None],
        stored_elsewhere: Callable[[SegmentId], Stored],
    ) -> None:
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._archive = archive
        self._codec = codec
        self._settle = settle
        self._stored_elsewhere = stored_elsewhere
        self._writers = Workers(WRITERS, thread_name_prefix="tensorvine-write", initializer=give_way)
        self._writing: set[SegmentId] = set()
        self._written = threading.Condition()
        self._open: LRUCache[str, SegmentFile] = LRUCache(OPEN_FILES)
        self._open_lock = threading.Lock()

    # ---- to disk --------------------------------------------------------------------------------------

    def store(self, wanted: ToStore) -> Chains:
        """Bring tensors to disk, those that are not there yet, and tell what they were encoded against.

        Raises:
            ModelLostError: a segment is not here any more.
            MovedError: another shard writes a segment's files, now or soon.
            StorageError, CodecError: it could not be written.
        """
        futures = {
            segment_id: self._writers.submit(self._store_segment, segment_id, tensors)
            for segment_id, tensors in wanted.items()
        }
        wait(futures.values())  # also when one fails: nothing of this is going on when this returns
        self._settle()
        chains: Chains = {}
        for segment_id, future in futures.items():
            bases = future.result().bases
            chains |= {(segment_id, t.slot): bases[t.slot] for t in wanted[segment_id] if t.slot in bases}
        return chains

    def rewrite(self, segment_id: SegmentId) -> None:
        """Write a file anew that is mostly dead."""
        try:
            with self._alone(segment_id):
                with self._lock:
                    segment = self._state.segment(segment_id)
                    if segment is None or not segment.wants_rewriting or not self._state.in_care(segment_id):
                        return
                self._write(segment_id, [])
            self._settle()
        except TensorVineError as exc:
            log.warning("segment %s: its file could not be compacted yet: %s", segment_id, exc)

    def _store_segment(self, segment_id: SegmentId, wanted: Sequence[Wanted]) -> Stored:
        with self._alone(segment_id):
            with self._lock:
                segment = self._segment(segment_id)
                stored = segment.stored
                missing = [t for t in wanted if stored is None or t.slot not in stored.slots]
            return self._write(segment_id, missing) if missing or stored is None else stored

    @contextlib.contextmanager
    def _alone(self, segment_id: SegmentId) -> Generator[None]:
        """Be the only one who writes this segment."""
        with self._written:
            while segment_id in self._writing:
                self._written.wait()
            self._writing.add(segment_id)
        try:
            yield
        finally:
            with self._written:
                self._writing.discard(segment_id)
                self._written.notify_all()

    def _write(self, segment_id: SegmentId, new: Sequence[Wanted]) -> Stored:
        """Write the next generation of a segment's file: its live old rows as they are, and these new ones."""
        with self._lock:
            segment = self._segment(segment_id)
            self._state.check_care(segment_id)
            before, generation = segment.stored, segment.files
            segment.files += 1
            live, whole = set(segment.live_slots), self._state.is_blind
            sources, chains = self._sources(segment, new)
        written = {tensor.slot for tensor in new}
        old_rows, old_parts = self._old(before, None if whole else live, written)
        rows, parts = encode_tensors(self._codec, sources)
        del sources
        bases = {slot: chain for slot, chain in (before.bases.items() if before else ()) if slot in live}
        bases |= {row.slot: chains[row.slot] for row in rows if row.base is not None}
        rows, parts = [*old_rows, *rows], [*old_parts, *parts]
        file = self._archive.write_segment(segment_id, generation, rows, parts)
        slots = frozenset(row.slot for row in rows) & (live | written)
        stored = Stored(file.name, file.generation, file.nbytes, slots, bases)
        try:
            with self._lock:
                if self._state.store(segment_id, stored):
                    return stored
                self._segment(segment_id)
                reason = "it got new holders of tensors that are not in the file"
        except (ModelLostError, CorruptDataError) as exc:
            reason = str(exc)
        log.info("segment %s: its file is written again, without bases: %s", segment_id, reason)
        return self._write(segment_id, [replace(tensor, base=None) for tensor in new])

    def _sources(self, segment: Segment, wanted: Sequence[Wanted]) -> tuple[list[Tensor], dict[int, tuple[Slot, ...]]]:
        """Return the tensors' bytes, kept in place, and the chains they would continue. Call it with the lock held."""
        if not wanted:
            return [], {}
        view = self._segment_memory.view(segment)
        tensors: list[Tensor] = []
        chains: dict[int, tuple[Slot, ...]] = {}
        for t in sorted(wanted, key=lambda t: t.slot):
            offset = segment.offsets[t.slot]
            if view is None or not isinstance(offset, int):
                raise ModelLostError(f"segment {segment.id}: expected tensor {t.name!r} in memory; found none")
            data = view[offset : offset + segment.sizes[t.slot]]
            digest = segment.digests[t.slot] if segment.digests is not None else None
            chain = self._chain(t.base)
            base = self._base(chain[0]) if chain else None
            if base is not None:
                chains[t.slot] = chain
            found = (chain[0], base) if base is not None else None
            tensors.append(
                Tensor(
                    slot=t.slot,
                    name=t.name,
                    layer=t.layer,
                    dtype=t.dtype,
                    shape=t.shape,
                    data=data,
                    digest=digest or None,
                    base=found,
                )
            )
        return tensors, chains

    def _chain(self, base: Slot | None) -> tuple[Slot, ...]:
        """Return a base and what it is encoded against itself; nothing where it cannot serve as one."""
        if (
            base is None
            or self._codec is None
            or not self._codec.needs_base
            or self._state.where(base[0]) != self._state.index
        ):
            return ()
        segment = self._state.segment(base[0])
        if segment is None or segment.stored is None or base[1] not in segment.stored.slots:
            return ()
        chain = (base, *segment.stored.bases.get(base[1], ()))
        return chain if len(chain) < DENSE_EVERY else ()

    def _base(self, base: Slot) -> np.ndarray | None:
        """Return a base's bytes, if it is in memory and held: reading it back would cost more than it saves."""
        segment = self._state.segment(base[0])
        offset = segment.offsets[base[1]] if segment is not None else GONE
        if segment is None or not isinstance(offset, int) or not segment.counts[base[1]]:
            return None
        view = self._segment_memory.view(segment)
        return view[offset : offset + segment.sizes[base[1]]] if view is not None else None

    def _old(self, stored: Stored | None, live: set[int] | None, written: set[int]) -> tuple[list[Row], list[Encoded]]:
        """Return the rows of a file that are still needed (None: all may be), and their stored bytes.

        Those that are `written` anew are not among them.
        """
        if stored is None:
            return [], []
        file = self._file(stored)
        slots = sorted((file.rows.keys() if live is None else live & file.rows.keys()) - written)
        return [file.rows[slot] for slot in slots], [file.encoded(slot) for slot in slots]

    # ---- to memory ------------------------------------------------------------------------------------

    def plan(self, segment_id: SegmentId, slots: Sequence[int]) -> tuple[list[int], int]:
        """Say which slots a new block should have so that it has `slots`, and its length in bytes."""
        with self._lock:
            segment = self._segment(segment_id)
            here = any(isinstance(segment.offsets[slot], int) for slot in segment.live_slots)
            chosen = sorted(segment.live_slots if here else set(slots) & set(segment.live_slots))
            return chosen, layout([segment.sizes[slot] for slot in chosen])[1]

    def load(self, segment_id: SegmentId, chosen: Sequence[int], part: Part | None, owner: Owner) -> np.ndarray | None:
        """Read slots into a part of the memory that `owner` was granted, or, where they are few bytes, into the heap.

        Returns:
            What keeps the segment in the memory; None when it changed meanwhile: the part is given back, as with an
            error.

        Raises:
            CorruptDataError, StorageError: a file cannot be read; names it.
        """
        filled: np.ndarray | None = None
        try:
            filled = self._filled(segment_id, chosen, part)
        finally:
            with self._lock:
                if part is not None and filled is None:
                    self._segment_memory.give_back(part, owner)
        return filled

    def _filled(self, segment_id: SegmentId, chosen: Sequence[int], part: Part | None) -> np.ndarray | None:
        with self._lock:
            segment = self._segment(segment_id)
            offsets, length = segment.arranged(chosen)
            before, sizes, view = segment.offsets, segment.sizes, self._segment_memory.view(segment)
            generation = segment.generation
        block = self._segment_memory.memory.part(part) if part is not None else np.zeros(length, np.uint8)
        for slot, end in enumerate(offsets):
            if not isinstance(end, int):
                continue
            start, target = before[slot], block[end : end + sizes[slot]]
            if view is not None and isinstance(start, int):
                target[:] = view[start : start + sizes[slot]]
            elif self._read((segment_id, slot), sizes[slot], target) is None:
                return None
        handle = part if part is not None else block.tobytes()
        with self._lock:
            if not self._state.residents.move(segment_id, generation, handle, offsets, length):
                return None
            if part is not None:
                self._segment_memory.keep(part, segment_id)
            return self._segment_memory.view(segment)

    def digests(self, segment_id: SegmentId) -> tuple[str, ...] | None:
        """Return a segment's content hashes from its file; None where it has no file, or does not know one."""
        with self._lock:
            segment = self._state.segment(segment_id)
            if segment is None or segment.stored is None:
                return None
            live, count = segment.live_slots, len(segment.sizes)
        file = self._unless_replaced(lambda opened: opened(segment_id))
        known = {slot: row.digest for slot, row in file.rows.items()} if file is not None else {}
        if not all(known.get(slot) for slot in live):
            return None
        return tuple(known.get(slot, "") for slot in range(count))

    def check(self, segment_id: SegmentId, names: dict[int, str]) -> list[str]:
        """Read tensors from disk and hold them against their checksums and against what is in memory.

        Args:
            segment_id: the segment.
            names: slot -> tensor's name.

        Returns:
            What is wrong, one sentence each.
        """
        problems: list[str] = []
        for slot, name in names.items():
            try:
                problems += self._check_slot(segment_id, slot)
            except TensorVineError as exc:
                problems.append(f"tensor {name!r}: {exc}")
        return problems

    def _check_slot(self, segment_id: SegmentId, slot: int) -> list[str]:
        with self._lock:
            segment = self._segment(segment_id)
            stored, offset, view = segment.stored, segment.offsets[slot], self._segment_memory.view(segment)
            size = segment.sizes[slot]
        resident = view[offset : offset + size] if view is not None and isinstance(offset, int) else None
        if stored is None or slot not in stored.slots:
            return []
        array = self._read((segment_id, slot), size)
        file = self._unless_replaced(lambda opened: opened(segment_id))
        if resident is None or array is None or file is None or slot not in file.rows:
            return []
        return _difference(file.where, file.rows[slot], resident.view(array.dtype).reshape(array.shape), array)

    # ---- within ---------------------------------------------------------------------------------------

    def _segment(self, segment_id: SegmentId) -> Segment:
        segment = self._state.segment(segment_id)
        if segment is None:
            raise ModelLostError(f"segment {segment_id}: expected a segment in use; its last holder has released it")
        return segment

    def stored(self, segment_id: SegmentId) -> Stored:
        """Return the file of a segment of this shard.

        Raises:
            ModelLostError: it has none, or is not here.
        """
        with self._lock:
            stored = self._segment(segment_id).stored
        if stored is None:
            raise ModelLostError(f"segment {segment_id}: expected a file; it exists only in memory")
        return stored

    def writes(self, segment_id: SegmentId) -> bool:
        """Tell whether a file of a segment is being written."""
        with self._written:
            return segment_id in self._writing

    def forget(self, names: Sequence[str]) -> None:
        """Let go of files that are to be deleted: one that is open keeps its place on the disk."""
        with self._open_lock:
            for name in names:
                self._open.pop(name, None)

    def _read(self, place: Slot, nbytes: int, into: np.ndarray | None = None) -> np.ndarray | None:
        """Read a tensor, and the ones that it is encoded against; None when it moved to another file meanwhile.

        Args:
            place: where it is.
            nbytes: its length in bytes.
            into: memory to have its bytes in, which may hold anything when it gives none; None: new memory.
        """

        def read(opened: Callable[[SegmentId], SegmentFile]) -> np.ndarray | None:
            if place[1] not in self._stored(place[0]).slots:
                return None  # its last holder let it go, and a file without it came
            return decode_slot(place, nbytes, opened, into)

        return self._unless_replaced(read)

    def _unless_replaced(self, read: Callable[[Callable[[SegmentId], SegmentFile]], T | None]) -> T | None:
        """Read from files of segments; None when one of them was replaced, or let go of, before it was read.

        What fails then is the look at a file that is no one's any more: it says nothing of those that count.
        """
        used: dict[SegmentId, Stored] = {}

        def opened(segment_id: SegmentId) -> SegmentFile:
            used[segment_id] = self._stored(segment_id)
            return self._file(used[segment_id])

        try:
            return read(opened)
        except (CorruptDataError, StorageError, ModelLostError):
            if self._are_current(used):
                raise
            return None

    def _are_current(self, used: Mapping[SegmentId, Stored]) -> bool:
        try:
            return all(self._stored(segment_id) == stored for segment_id, stored in used.items())
        except ModelLostError:
            return False

    def _stored(self, segment_id: SegmentId) -> Stored:
        mine = self._state.where(segment_id) == self._state.index
        return self.stored(segment_id) if mine else self._stored_elsewhere(segment_id)

    def _file(self, stored: Stored) -> SegmentFile:
        """Return an open file; the ones used last are kept open."""
        with self._open_lock:
            file = self._open.get(stored.name)
            if file is None:
                file = self._open[stored.name] = self._archive.open_segment(
                    StoredFile(stored.name, stored.generation, stored.nbytes)
                )
            return file


def give_way() -> None:
    """Make this thread one that others go before: what trains needs the cores more."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _difference(where: str, row: Row, original: np.ndarray, decoded: np.ndarray) -> list[str]:
    """Hold what a file gives against what is in memory; a lossy codec may differ by the error that it noted."""
    if np.array_equal(as_bytes(original), as_bytes(decoded)):
        return []
    worst = float(np.max(np.abs(original.astype(np.float64) - decoded.astype(np.float64)))) if row.error else np.inf
    if worst <= row.error * (1 + 1e-6):
        return []
    return [f"{where}: tensor {row.name!r}: expected a difference from memory of at most {row.error}; found {worst}"]
