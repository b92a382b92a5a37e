"""Moving one shard's tensors between its memory and the disk.

Rules
- To disk: a file has all live slots of its segment. One that is mostly dead is written anew, its rows as they are. Each
  segment is written by one thread at a time, of low priority. The catalog says whether a file counts.
- A tensor is encoded against another one only where that lies in this shard's memory, and in a file of it, with all
  that it is encoded against itself.
- To memory: what a reader asks for of a segment that is on disk only, and no more: one tensor of a large segment is
  one read. When more of the same segment is asked for, all of it comes.
- A file that was replaced while it was read says nothing: who reads looks again at what counts now.
- What is read is checked (`store.archive.encoding`); what a reader gets lies in the shard's memory like all else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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
from ....store.segments.segment import File, Label, Segment, SegmentId, file_name, layout
from ...rpc.catalog_calls import CatalogCalls
from ...rpc.messages import PEER_TIMEOUT_S
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
    """

    def __init__(
        self, context: ShardContext, archive: Archive, codec: Codec | None, settle: Callable[[], None]
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._archive = archive
        self._codec = codec
        self._settle = settle
        self._writing: dict[SegmentId, str] = {}
        """Segments that are written -> the file."""
        self._written = threading.Condition()
        self._open: LRUCache[str, SegmentFile] = LRUCache(OPEN_FILES)
        self._open_lock = threading.Lock()

    # ---- to disk --------------------------------------------------------------------------------------

    def write(self, segment_id: SegmentId, plain: bool = False) -> None:
        """Write a segment's file, and offer it to the catalog, unless there is nothing to write any more.

        Args:
            segment_id: which.
            plain: encode nothing against other tensors.

        Raises:
            StorageError, CodecError: it could not be written.
        """
        with self._alone(segment_id):
            with self._lock:
                segment = self._state.segment(segment_id)
                due = segment is not None and segment.keeper and not self._state.is_offered(segment_id)
                if segment is None or not due or (segment.is_safe and not segment.wants_rewriting):
                    return
                before, live = segment.file, frozenset(segment.live)
                if segment.save is not None:  # the version to be does not name the others
                    live &= {label.slot for label in segment.labels}
                name = self._writing[segment_id] = file_name(segment_id, self._state.next_generation(segment))
                missing = live - before.slots if before is not None else live
                tensors = self._sources(segment, missing, plain)
            rows, parts = self._old(before, live - missing)
            new_rows, new_parts = encode_tensors(self._codec, tensors)
            del tensors
            rows, parts = [*rows, *new_rows], [*parts, *new_parts]
            generation = int(name.split(".")[-2])
            stored = self._archive.write_segment(segment_id, generation, rows, parts)
            bases = {row.slot: row.base for row in rows if row.base is not None}
            with self._lock:
                self._state.offer(segment_id, File(stored.name, generation, stored.nbytes, live, bases))

    def rewrite(self, segment_id: SegmentId) -> None:
        """Write a file anew that is mostly dead."""
        try:
            self.write(segment_id)
            self._settle()
        except TensorVineError as exc:
            log.warning("segment %x: its file could not be compacted yet: %s", segment_id[1], exc)

    @contextlib.contextmanager
    def _alone(self, segment_id: SegmentId) -> Generator[None]:
        """Be the only one who writes this segment."""
        with self._written:
            while segment_id in self._writing:
                self._written.wait(PEER_TIMEOUT_S)
            self._writing[segment_id] = ""
        try:
            yield
        finally:
            with self._written:
                del self._writing[segment_id]
                self._written.notify_all()

    def _sources(self, segment: Segment, slots: Iterable[int], plain: bool) -> list[Tensor]:
        """Return the tensors of slots that no file has, their bytes kept in place. Call it with the lock held."""
        labels = {label.slot: label for label in segment.labels}
        view = self._segment_memory.view(segment)
        tensors: list[Tensor] = []
        for slot in sorted(slots):
            offset, label = segment.offsets[slot], labels.get(slot)
            if view is None or label is None or not isinstance(offset, int):
                raise CorruptDataError(
                    f"segment {segment.id[1]:x}: expected slot {slot} in memory, with its name; found neither"
                )
            digest = segment.digests[slot] if segment.digests is not None else None
            tensors.append(
                Tensor(
                    slot=slot,
                    name=label.name,
                    layer=label.layer,
                    dtype=label.dtype,
                    shape=label.shape,
                    data=view[offset : offset + segment.sizes[slot]],
                    digest=digest or None,
                    base=None if plain else self._base(label),
                )
            )
        return tensors

    def _base(self, label: Label) -> tuple[Slot, np.ndarray] | None:
        """Return what a tensor may be encoded against, if that is here, with its bytes. Call it with the lock held."""
        base = label.base
        if base is None or self._codec is None or not self._codec.needs_base:
            return None
        segment = self._state.segment(base[0])
        offset = segment.offsets[base[1]] if segment is not None and segment.has([base[1]]) else None
        if segment is None or not isinstance(offset, int) or base[1] not in segment.live or not self._is_short(base):
            return None
        view = self._segment_memory.view(segment)
        return (base, view[offset : offset + segment.sizes[base[1]]]) if view is not None else None

    def _is_short(self, base: Slot) -> bool:
        """Tell whether all that a tensor is encoded against is in files of this shard, and may be continued."""
        following: Slot | None = base
        for _ in range(DENSE_EVERY - 1):
            segment = self._state.segment(following[0])
            if segment is None or segment.file is None or following[1] not in segment.file.slots:
                return False
            following = segment.file.bases.get(following[1])
            if following is None:
                return True
        return False

    def _old(self, before: File | None, slots: Iterable[int]) -> tuple[list[Row], list[Encoded]]:
        """Return rows of a file, and their stored bytes."""
        if before is None:
            return [], []
        file = self._file(before)
        return [file.row(slot) for slot in sorted(slots)], [file.encoded(slot) for slot in sorted(slots)]

    # ---- files that others wrote ----------------------------------------------------------------------

    def open_known(self, segment_id: SegmentId) -> None:
        """Make a segment of a file that the catalog gave; nothing where that was done already.

        Raises:
            ModelLostError: the file is not there; that is reported, as slots are that it lacks.
            CorruptDataError, StorageError: it cannot be read.
        """
        with self._lock:
            file = self._state.known_files.get(segment_id)
        if file is None:
            return
        try:
            rows = self._opened(file).rows
        except StorageError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise
            with self._lock:
                if self._state.known_files.get(segment_id) == file:
                    self._state.note_lost(segment_id, file.slots)
            raise ModelLostError(f"segment {segment_id[1]:x}: expected {file.name}; it is not there") from exc
        with self._lock:
            self._state.open_known(segment_id, _sizes(rows), rows.keys())

    def inspected(self, name: str) -> tuple[list[int], File]:
        """Open a file of which only the name is known; return the bytes of its slots, and what is in it.

        Raises:
            CorruptDataError, StorageError: it cannot be read.
        """
        generation = int(name.split(".")[-2])
        opened = self._opened(File(name, generation, 0, frozenset()))
        bases = {row.slot: row.base for row in opened.rows.values() if row.base is not None}
        return _sizes(opened.rows), File(name, generation, opened.nbytes, frozenset(opened.rows), bases)

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
            if segment is None or segment.file is None:
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
            stored, offset, view = segment.file, segment.offsets[slot], self._segment_memory.view(segment)
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
            raise ModelLostError(f"segment {segment_id[1]:x}: expected a segment in use; it was freed")
        return segment

    def idle(self, names: Iterable[str]) -> list[str]:
        """Return those of some files that nobody writes just now."""
        with self._written:
            return [name for name in names if name not in self._writing.values()]

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
        used: dict[SegmentId, File] = {}

        def opened(segment_id: SegmentId) -> SegmentFile:
            used[segment_id] = self._stored(segment_id)
            return self._file(used[segment_id])

        try:
            return read(opened)
        except (CorruptDataError, StorageError, ModelLostError):
            if self._are_current(used):
                raise
            return None

    def _are_current(self, used: Mapping[SegmentId, File]) -> bool:
        try:
            return all(self._stored(segment_id).name == file.name for segment_id, file in used.items())
        except ModelLostError:
            return False

    def _stored(self, segment_id: SegmentId) -> File:
        """Return the file of a segment, which another shard may keep.

        Raises:
            ModelLostError: it has none.
        """
        with self._lock:
            segment = self._state.segment(segment_id)
            file = segment.file if segment is not None else self._state.known_files.get(segment_id)
        if file is None:
            file = self._context.catalog.call(CatalogCalls.files([segment_id]), PEER_TIMEOUT_S).get(segment_id)
        if file is None:
            raise ModelLostError(f"segment {segment_id[1]:x}: expected a file; it exists only in memory, or not at all")
        return file

    def _opened(self, stored: File) -> SegmentFile:
        """Return an open file; an error that says that it is not there is true also where the path was away."""
        try:
            return self._file(stored)
        except StorageError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                self._archive.check_there()
                return self._file(stored)
            raise

    def _file(self, stored: File) -> SegmentFile:
        """Return an open file; the ones used last are kept open."""
        with self._open_lock:
            file = self._open.get(stored.name)
            if file is None:
                file = self._open[stored.name] = self._archive.open_segment(
                    StoredFile(stored.name, stored.generation, stored.nbytes)
                )
            return file


def _sizes(rows: Mapping[int, Row]) -> list[int]:
    """Return the bytes of all slots of a segment; 0 of those without a row."""
    return [rows[slot].nbytes if slot in rows else 0 for slot in range(max(rows, default=-1) + 1)]


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
