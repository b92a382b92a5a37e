"""Combining the arrays of several ranks, elementwise.

Rules
- Arrays are combined in the order of the ranks, so that the same arrays give the same bits.
- Fractions of less than 32 bits are combined as float32 (complex ones as complex64), and rounded once. Whole numbers
  wrap around as NumPy's do, and have no mean; a sum of booleans is "any", a product "all". What is beyond a dtype's
  numbers is infinite or NaN, without a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...store.arrays import Array, dtype_name
from ...store.errors import TensorMismatchError
from .group import OPS, Op

Number = np.dtype[Any]
"""A dtype."""

_UFUNCS: dict[Op, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


_PIECE = 1 << 15
"""Elements that are combined at once: they stay in a processor's cache."""


class Numbers(NamedTuple):
    """What an array holds."""

    dtype: Number
    size: int


class Reduction:
    """How arrays are combined.

    Args:
        op: how.
        dtype: of the arrays.
        where: for errors.

    Raises:
        ValueError: there is no such operation.
        TensorMismatchError: a mean of whole numbers.

    >>> out = np.zeros(2, np.float16)
    >>> blocks = Reduction("mean", out.dtype, "x").blocks(2)
    >>> blocks.combine([np.float16([1, 2]), np.float16([3, 6])], out)
    >>> out.tolist()
    [2.0, 4.0]
    """

    def __init__(self, op: Op, dtype: Number, where: str) -> None:
        if op not in OPS:
            raise ValueError(f"{where}: expected one of {', '.join(OPS)}; found {op!r}")
        name = dtype_name(dtype)
        real = name.startswith(("float", "bfloat"))
        if op == "mean" and not real and "complex" not in name:
            raise TensorMismatchError(f"{where}: expected floating-point or complex numbers for a mean; found {name}")
        self.op: Op = op
        self.dtype = dtype
        self.name = name
        """Of the dtype."""

    def combine(self, arrays: Sequence[Array], out: Array) -> None:
        """Combine whole arrays: two at once where nothing is widened, otherwise a piece after another.

        Args:
            arrays: in the order of the ranks.
            out: gets the result; may be one of the arrays.
        """
        if len(arrays) == 2 and self.dtype == _wide(self.dtype, self.name):
            with np.errstate(all="ignore"):
                _UFUNCS[self.op](*arrays, out=out)
                if self.op == "mean":
                    np.divide(out, 2, out=out)
            return
        blocks = self.blocks(min(out.size, _PIECE))
        for first in range(0, out.size, _PIECE):
            piece = slice(first, first + _PIECE)
            blocks.combine([array[piece] for array in arrays], out[piece])

    def blocks(self, length: int) -> Blocks:
        """Make what combines blocks of up to so many elements."""
        return Blocks(self, length)


class Blocks:
    """Combines blocks of arrays; `Reduction.blocks` makes it."""

    def __init__(self, reduction: Reduction, length: int) -> None:
        wide = _wide(reduction.dtype, reduction.name)
        self._mean = reduction.op == "mean"
        self._combine = _UFUNCS[reduction.op]
        self._total = np.empty(length, wide)
        self._next = np.empty(length if wide != reduction.dtype else 0, wide)

    def combine(self, blocks: Iterable[Array], out: Array) -> None:
        """Combine one block of each rank.

        Args:
            blocks: in the order of the ranks; each is used before the next is asked for.
            out: gets the result; may be one of the blocks.
        """
        with np.errstate(all="ignore"):
            total, count = self._total[: out.size], 0
            for count, block in enumerate(blocks, 1):
                if count == 1:
                    np.copyto(total, block, casting="unsafe")
                    continue
                if self._next.size:
                    wide = self._next[: out.size]
                    np.copyto(wide, block, casting="unsafe")
                    block = wide
                self._combine(total, block, out=total)
            if self._mean:
                np.divide(total, count, out=total)
            np.copyto(out, total, casting="unsafe")


def _wide(dtype: Number, name: str) -> Number:
    """Return the dtype in which numbers are combined; NumPy knows little of those that are not its own."""
    if dtype.kind in "biufc" and name != "float16":
        return dtype
    kinds = {"float": np.float32, "bfloat": np.float32, "uint": np.uint8, "int": np.int8}
    return np.dtype(next((wide for kind, wide in kinds.items() if name.startswith(kind)), np.complex64))
