"""Where bytes that arrive are to stay: whoever reads names the memory, and what receives fills it.

Rules
- A target sees all that an answer announces before a byte of it is received, and refuses what does not fit: so the
  other side decides nothing about where something is written, or how much.
- The memory is the target's. Nobody writes to it after the read that fills it has returned or raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ...store.archive.directory import Bytes
from ...store.segments.segment import SegmentId, layout
from ..memory.buffers import Buffers
from .frames import Received, Row

SHARED_BYTES = 1 << 20
"""Segments that are small together arrive in one buffer."""


class Target(Protocol):
    """Gives memory for the bytes of segments."""

    def runs(self, rows: Sequence[Row]) -> Iterator[tuple[Sequence[Row], memoryview]]:
        """Give memory for the rows of an answer, in their order: some that follow one another, and what they fill.

        Args:
            rows: all that comes.

        Returns:
            Rows, and as many writable bytes as `length_of` says.

        Raises:
            CorruptDataError: they are not what is to stay there; nothing was given yet.
        """
        ...

    def block(self, memory: memoryview) -> Bytes:
        """Make a read-only array of memory that is filled now."""
        ...


class NewMemory:
    """Memory of this process that nobody has, for a reader.

    Args:
        buffers: gives it; several targets may share them.

    >>> rows = [Row((0, 1), [0], [70]), Row((0, 2), [3, 4], [5, 0])]
    >>> [(len(run), len(memory)) for run, memory in NewMemory(Buffers()).runs(rows)]
    [(2, 192)]
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def runs(self, rows: Sequence[Row]) -> Iterator[tuple[Sequence[Row], memoryview]]:
        """Give memory of any length; small segments share some."""
        for group in groups(rows):
            yield group, self._buffers.take(length_of(group))

    def block(self, memory: memoryview) -> Bytes:
        """Make an array; the memory comes back when it and its views have gone."""
        return self._buffers.block(memory)


def length_of(rows: Sequence[Row]) -> int:
    """Return the bytes that rows take one after another, padding included."""
    return layout([layout(row.sizes)[1] for row in rows])[1]


def groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Put small segments together that follow one another."""
    group: list[Row] = []
    filled = 0
    for row in rows:
        length = layout(row.sizes)[1]
        if group and filled + length > SHARED_BYTES:
            yield group
            group, filled = [], 0
        group.append(row)
        filled += length
    if group:
        yield group


def received(rows: Sequence[Row], block: Bytes) -> dict[SegmentId, Received]:
    """Say where slots are in a block in which rows lie one after another."""
    starts, _ = layout([layout(row.sizes)[1] for row in rows])
    found: dict[SegmentId, Received] = {}
    for row, start in zip(rows, starts, strict=True):
        offsets = layout(row.sizes)[0]
        found[row.segment] = Received({s: start + at for s, at in zip(row.slots, offsets, strict=True)}, block)
    return found
