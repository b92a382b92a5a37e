"""Groups of a tensor's elements, those that share a minimum and a scale, as rows or columns of matrices.

Rules
- A tensor is one group, or one per channel (index of its last axis), or one per block of consecutive elements.
- Its elements in C order are cut into at most two parts: one of whole rows, and one row of what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROW = 512
"""Elements that a row should have at least, where columns are channels."""
TILE = 1 << 16
"""Elements that are worked on at once where a loop is not fused, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of elements as rows and columns, where each row (axis 0) or column (axis 1) belongs to one group."""

    data: slice
    """Its elements."""
    rows: int
    columns: int
    axis: int
    groups: slice
    """Of the layout, in order."""
    repeats: int = 1
    """How often these groups follow one another along the axis."""

    def spread(self, numbers: Floats) -> Floats:
        """Give a number of each group to each row or column; where none repeats, as a view."""
        return numbers[self.groups] if self.repeats == 1 else np.tile(numbers[self.groups], self.repeats)

    def gather(self, numbers: Floats, into: Floats, choose: np.ufunc) -> None:
        """Merge numbers that `spread` gave, and that were changed, into those of the groups, by minimum or maximum."""
        if self.repeats > 1:
            merged = choose.reduce(numbers.reshape(self.repeats, -1), axis=0)
            choose(into[self.groups], merged, out=into[self.groups])


@dataclass(frozen=True, slots=True)
class Layout:
    """Which elements share a minimum and a scale."""

    groups: int
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, size: int, shape: tuple[int, ...], per: str | int) -> Layout:
        """Lay out a tensor.

        >>> Layout.of(10, (10,), 4).groups, Layout.of(6, (2, 3), "channel").groups, Layout.of(6, (6,), "channel").groups
        (3, 3, 1)
        """
        if not size:
            return cls(0, ())
        if isinstance(per, int):
            return cls._of_blocks(size, min(per, size))
        if per == "channel" and len(shape) > 1:
            return cls._of_channels(size, shape[-1])
        return cls(1, (Part(slice(0, size), 1, size, 0, slice(0, 1)),))

    @classmethod
    def _of_blocks(cls, size: int, block: int) -> Layout:
        whole = size // block
        parts = [Part(slice(0, whole * block), whole, block, 0, slice(0, whole))]
        if rest := size % block:
            parts.append(Part(slice(size - rest, size), 1, rest, 0, slice(whole, whole + 1)))
        return cls(len(parts) - 1 + whole, tuple(parts))

    @classmethod
    def _of_channels(cls, size: int, channels: int) -> Layout:
        # Rows of a few elements are slow to run over, so several make one.
        repeats = min(max(1, ROW // channels), size // channels)
        row = channels * repeats
        rest = size % row
        everything = slice(0, channels)
        parts = [Part(slice(0, size - rest), size // row, row, 1, everything, repeats)]
        if rest:
            parts.append(Part(slice(size - rest, size), 1, rest, 1, everything, rest // channels))
        return cls(channels, tuple(parts))


def tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows and columns into contiguous pieces of about `TILE` elements: whole rows, or parts of one.

    >>> list(tiles(2, TILE + 1))[1]
    (slice(0, 1, None), slice(65536, 65537, None))
    """
    many = max(1, TILE // max(1, columns))
    for row in range(0, rows, many):
        for column in range(0, columns, max(TILE, columns) if many > 1 else TILE):
            yield slice(row, min(row + many, rows)), slice(column, min(column + TILE, columns))
