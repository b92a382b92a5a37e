"""The bytes of one save on their way to one shard.

Rules
- Where the shard is on this node: fill the parts of its memory that it granted. No message until all are filled.
- To another node: put blocks into the engine's object store, at most `IN_FLIGHT` at a time.
- Two threads copy: one alone does not reach the memory's bandwidth.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass

import numpy as np

from ..store.arena import Part
from ..store.arrays import as_bytes, dtype_name
from ..store.errors import StoreFullError
from ..store.manifest import TensorEntry
from ..store.segment import ALIGNMENT, SegmentId, layout, padded, split
from .engine import Future
from .holdings import INLINE_BYTES, Filled
from .memory import MemoryView
from .session import Session, time_left

IN_FLIGHT = 2
SERIAL_MASK = (1 << 60) - 1
PIECE_BYTES = 4 << 20
"""Copies are dealt out to the threads in pieces of about this size."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A segment to be."""

    id: SegmentId
    sizes: list[int]
    """Bytes of its tensors."""

    @property
    def length(self) -> int:
        return _length(self.sizes)


class Upload:
    """Brings tensors to a shard.

    Args:
        session: the client's.
        shard: which shard.
        save_id: holds what arrives until the commit.
        deadline: on the monotonic clock.
        what: names the save in errors.
        helper: runs half of the copying.
        granted: offsets of parts that the shard granted already, for blocks as `announce` gave them.
    """

    def __init__(
        self,
        session: Session,
        shard: int,
        save_id: str,
        deadline: float,
        what: str,
        helper: Executor,
        granted: Sequence[int] = (),
    ) -> None:
        self.save_id = save_id
        self.blocks: list[Filled] = []
        """What the shard must still be told to take: segments, where they lie, and their tensors' sizes."""
        self.life = 0
        """Process id of the shard whose memory was filled."""
        self.entries: dict[str, TensorEntry] = {}
        """The manifest's rows of what was written."""
        self._session = session
        self._shard = shard
        self._deadline = deadline
        self._what = what
        self._helper = helper
        self._granted = list(granted)
        self._answers: list[Future] = []

    def write(self, arrays: Mapping[str, np.ndarray], at_home: bool) -> None:
        """Copy all tensors to where the shard can take them; the caller may change them afterwards.

        Raises:
            StoreFullError: the shard has no room for them.
        """
        if not arrays:
            return
        names, values = list(arrays), list(arrays.values())
        total = sum(padded(array.nbytes) for array in values)
        if total <= INLINE_BYTES and at_home:
            self._pack_inline(self._block(names, values), values)
            return
        connection = self._session.connection(self._shard)
        if total > connection.hello.capacity:
            raise StoreFullError(
                f"{self._what}: expected at most {connection.hello.capacity} bytes, the capacity of shard "
                f"{self._shard}; found {total}"
            )
        runs = split([array.nbytes for array in values])
        blocks = [self._block([names[i] for i in run], [values[i] for i in run]) for run in runs]
        sources = [[values[i] for i in run] for run in runs]
        self.life = connection.hello.pid
        if connection.view is not None:
            self._fill_parts(blocks, sources, connection.view)
        else:
            self._put_blocks(blocks, sources)

    def finish(self) -> None:
        """Wait until the shard has taken what went through the object store."""
        while self._answers:
            self._wait()

    def _block(self, names: list[str], arrays: list[np.ndarray]) -> _Block:
        shards = len(self._session.shards)
        serial = (uuid.uuid4().int & SERIAL_MASK) // shards * shards + self._shard  # its owner follows from it
        identity = (self._shard, serial)
        for slot, (name, array) in enumerate(zip(names, arrays, strict=True)):
            self.entries[name] = TensorEntry(dtype_name(array.dtype), array.shape, array.nbytes, None, identity, slot)
        return _Block(identity, [array.nbytes for array in arrays])

    def _pack_inline(self, block: _Block, arrays: list[np.ndarray]) -> None:
        packed = np.zeros(layout(block.sizes)[1], np.uint8)
        copy_into(packed, arrays, self._helper)
        self.blocks.append((block.id, packed.tobytes(), block.sizes))

    def _fill_parts(self, blocks: list[_Block], sources: list[list[np.ndarray]], view: MemoryView) -> None:
        granted = self._granted
        for position, (block, arrays) in enumerate(zip(blocks, sources, strict=True)):
            if not granted:
                granted = self._grant([b.length for b in blocks[position:]])
            part = Part(granted.pop(0), block.length)
            copy_into(view.part(part), arrays, self._helper)
            self.blocks.append((block.id, part, block.sizes))

    def _grant(self, lengths: list[int]) -> list[int]:
        left = time_left(self._deadline, self._what)
        arguments = (self._session.client, self.save_id, lengths, left)
        return list(self._session.call(self._shard, "grant", *arguments, timeout=left + 1.0))

    def _put_blocks(self, blocks: list[_Block], sources: list[list[np.ndarray]]) -> None:
        for block, arrays in zip(blocks, sources, strict=True):
            packed = as_bytes(arrays[0]) if len(arrays) == 1 else np.zeros(block.length, np.uint8)
            if len(arrays) > 1:
                copy_into(packed, arrays, self._helper)
            handle = self._session.engine.put(packed)
            left = time_left(self._deadline, self._what)
            arguments = (self.save_id, block.id, handle, block.sizes, left)
            self._answers.append(self._session.send(self._shard, "adopt_block", *arguments))
            if len(self._answers) >= IN_FLIGHT:
                self._wait()

    def _wait(self) -> None:
        left = time_left(self._deadline, self._what)
        self._session.result(self._answers.pop(0), self._shard, left)


def copy_into(block: np.ndarray, arrays: Sequence[np.ndarray], helper: Executor) -> None:
    """Copy arrays into a block, each at its aligned offset; `helper` copies half of many bytes."""
    pieces = _pieces(block, arrays)
    if sum(target.nbytes for target, _ in pieces) <= PIECE_BYTES:
        _run(pieces)
        return
    other = helper.submit(_run, pieces[1::2])
    try:
        _run(pieces[::2])
    finally:
        wait([other])
    other.result()


def announce(arrays: Sequence[np.ndarray]) -> list[int]:
    """Give the lengths of the blocks that `Upload.write` makes of these arrays; none for what travels inline."""
    sizes = [array.nbytes for array in arrays]
    if sum(padded(size) for size in sizes) <= INLINE_BYTES:
        return []
    return [_length([sizes[i] for i in run]) for run in split(sizes)]


def _length(sizes: Sequence[int]) -> int:
    """Give the length of a block of tensors; never 0, which a kernel lock would take for all that follows."""
    return max(layout(sizes)[1], ALIGNMENT)


def _pieces(block: np.ndarray, arrays: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Give (target, source) pairs; a long contiguous source is cut into several."""
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    offsets, _ = layout([array.nbytes for array in arrays])
    for offset, array in zip(offsets, arrays, strict=True):
        target = block[offset : offset + array.nbytes]
        if array.nbytes > PIECE_BYTES and array.flags.c_contiguous:
            source = as_bytes(array)
            for start in range(0, array.nbytes, PIECE_BYTES):
                pieces.append((target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES]))
        elif array.nbytes:
            pieces.append((target.view(array.dtype).reshape(array.shape), array))
    return pieces


def _run(pieces: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)
