"""The hot loops of quantising: compiled by Numba where it is installed, NumPy in blocks otherwise.

Rules
- Both make the same bits: codes and decoded values are IEEE float64 arithmetic, operation by operation,
  rounded once to the tensor's type. A faster float32 loop is only used where it cannot decide otherwise.
- Arrays are two-dimensional and C-contiguous. With `axis` 0 each row is a group with its own lowest value and
  step, with `axis` 1 each column.
- Loops are compiled on first use, for about a second, and release the GIL. They index by the shapes of their
  arguments alone, so no value can lead them out of bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType

import numpy as np

from ..arrays import Array
from .groups import Floats, tiles

SLICE = 1024
"""Elements that the float32 loop takes before its result is judged."""
FAST_GROUP = 1 << 14
"""In rows of fewer elements the exact loop would repeat too much of what the float32 loop did."""

_Number = Callable[[float | np.number], float]
"""A type of Numba's, as a compiled loop calls it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scales:
    """What quantising needs to know of each group, as float64 arrays with one element per group."""

    low: Floats
    """The lowest value, whose code is 0."""
    step: Floats
    """The difference between neighbouring codes; 0 if all values are equal."""

    @property
    def inverse(self) -> Floats:
        """1 / step, or 0."""
        return np.divide(1.0, self.step, out=np.zeros_like(self.step), where=self.step > 0)

    def of(self, groups: slice) -> Scales:
        """Return those of some groups."""
        return Scales(self.low[groups], self.step[groups])


def extremes(values: Array, axis: int, low: Floats, high: Floats) -> None:
    """Lower `low` and raise `high` to the lowest and highest value of each group.

    If one of a group's values is NaN or infinite, at least one of its two results is.

    >>> low, high = np.full(2, np.inf), np.full(2, -np.inf)
    >>> extremes(np.array([[1.0, -2.0], [3.0, 4.0]]), 0, low, high)
    >>> low, high
    (array([-2.,  3.]), array([1., 4.]))
    """
    kernels = _kernels(values.dtype, np.dtype(np.uint8)) if axis == 0 else None
    if kernels is not None:
        kernels("extremes_rows")(values.view(f"i{values.itemsize}"), low, high)
        return
    for rows, columns in tiles(*values.shape):
        groups, tile = columns if axis else rows, values[rows, columns]
        np.minimum(low[groups], tile.min(axis=1 - axis), out=low[groups])
        np.maximum(high[groups], tile.max(axis=1 - axis), out=high[groups])


def quantize(values: Array, codes: Array, scales: Scales, axis: int) -> Floats:
    """Write the code of each value and measure what decoding will give (Check-QZP, equations 1 and 2).

    Args:
        values: finite float32 or float64, each at least its group's lowest.
        codes: uint8 or uint16 of the same shape; written.
        scales: of the groups.
        axis: 0 if rows are groups, 1 if columns are.

    Returns:
        The largest absolute difference between a value and what its code decodes to, for each group.

    >>> codes = np.zeros((1, 3), np.uint8)
    >>> quantize(np.array([[0, 1.25, 2]]), codes, Scales(np.zeros(1), np.ones(1)), 0), codes
    (array([0.25]), array([[0, 1, 2]], dtype=uint8))
    """
    worst = np.zeros(len(scales.low))
    kernels = _kernels(values.dtype, codes.dtype)
    if kernels is None:
        for rows, columns in tiles(*values.shape):
            groups = columns if axis else rows
            found = _quantize_numpy(values[rows, columns], codes[rows, columns], scales.of(groups), axis)
            worst[groups] = np.maximum(worst[groups], found)
        return worst
    arguments = (values, codes, scales.low, scales.step, scales.inverse)
    if axis == 1:
        kernels("quantize_columns")(*arguments, worst)
    elif values.dtype == np.float32 and codes.dtype == np.uint8 and values.shape[1] >= FAST_GROUP:
        kernels("quantize_long_rows")(*arguments, _slack(scales), worst)
    else:
        kernels("quantize_rows")(*arguments, worst)
    return worst


def dequantize(codes: Array, values: Array, scales: Scales, axis: int) -> None:
    """Write the value of each code.

    Args:
        codes: uint8 or uint16.
        values: float32 or float64 of the same shape; written.
        scales: of the groups.
        axis: 0 if rows are groups, 1 if columns are.

    >>> values = np.zeros((1, 3), np.float32)
    >>> dequantize(np.array([[0, 1, 2]], np.uint8), values, Scales(np.array([-1.0]), np.array([0.5])), 0)
    >>> values
    array([[-1. , -0.5,  0. ]], dtype=float32)
    """
    kernels = _kernels(values.dtype, codes.dtype)
    if kernels is None:
        for rows, columns in tiles(*values.shape):
            groups = columns if axis else rows
            _dequantize_numpy(codes[rows, columns], values[rows, columns], scales.of(groups), axis)
    else:
        kernels("dequantize_columns" if axis else "dequantize_rows")(codes, values, scales.low, scales.step)


def _slack(scales: Scales) -> Floats:
    """Bound by how much the float32 loop misjudges the error of a value.

    Its roundings are at most half a unit in the last place of the largest magnitude each, except for that of
    the product, which may be twice as large: together less than 2.5 units.
    """
    largest = np.maximum(np.abs(scales.low), np.abs(scales.low + 255 * scales.step))
    return 2.5 * float(np.finfo(np.float32).eps) * largest


def _along(numbers: Floats, axis: int) -> Floats:
    return numbers[:, None] if axis == 0 else numbers[None, :]


def _quantize_numpy(values: Array, codes: Array, scales: Scales, axis: int) -> Floats:
    low, step, inverse = (_along(numbers, axis) for numbers in (scales.low, scales.step, scales.inverse))
    rounded = values.astype(np.float64)
    rounded -= low
    rounded *= inverse
    np.rint(rounded, out=rounded)
    np.copyto(codes, rounded, casting="unsafe")
    rounded *= step
    rounded += low
    decoded = rounded.astype(values.dtype)
    np.subtract(values, decoded, out=rounded, dtype=np.float64)
    np.abs(rounded, out=rounded)
    return rounded.max(axis=1 - axis)


def _dequantize_numpy(codes: Array, values: Array, scales: Scales, axis: int) -> None:
    wide = codes.astype(np.float64)
    wide *= _along(scales.step, axis)
    wide += _along(scales.low, axis)
    np.copyto(values, wide, casting="same_kind")


@lru_cache(maxsize=1)
def _numba() -> ModuleType | None:
    try:
        import numba
    except ImportError as exc:
        log.info("Numba is not available (%s): quantising uses NumPy, which is several times slower", exc)
        return None
    return numba


@lru_cache(maxsize=8)
def _kernels(real: np.dtype[np.generic], code: np.dtype[np.generic]) -> Callable[[str], Callable[..., None]] | None:
    """Return a function that compiles loops by name for these dtypes; None without Numba."""
    numba = _numba()
    if numba is None:
        return None
    types = numba.types

    def array(name: str, dimensions: int, written: bool) -> object:
        return types.Array(getattr(types, name), dimensions, "C", readonly=not written)

    numbers = array("float64", 1, False)
    quantizing = [array(real.name, 2, False), array(code.name, 2, True), numbers, numbers, numbers]
    dequantizing = [array(code.name, 2, False), array(real.name, 2, True), numbers, numbers]
    worst = array("float64", 1, True)
    signatures = {
        "extremes_rows": [array(f"int{8 * real.itemsize}", 2, False), worst, worst],
        "quantize_rows": [*quantizing, worst],
        "quantize_long_rows": [*quantizing, numbers, worst],
        "quantize_columns": [*quantizing, worst],
        "dequantize_rows": dequantizing,
        "dequantize_columns": dequantizing,
    }
    sources = _sources(numba, getattr(numba, real.name), getattr(numba, code.name))

    @cache
    def compiled(name: str) -> Callable[..., None]:
        return numba.njit(types.void(*signatures[name]), nogil=True)(sources[name])

    return compiled


def _sources(numba: ModuleType, real: _Number, code: _Number) -> dict[str, Callable[..., None]]:
    """Return the loops for values of the Numba type `real`, as Numba reads them.

    Largest errors are found as integers: for numbers that are not negative the order of their bits is theirs,
    and only the integers' maximum becomes vector instructions without loosening IEEE arithmetic.
    """
    f32, i32, f64, i64 = np.float32, np.int32, np.float64, np.int64
    floating, integer = (f32, i32) if real == numba.float32 else (f64, i64)
    bottom, top = integer(np.iinfo(integer).min), integer(np.iinfo(integer).max)
    last = integer(np.iinfo(integer).bits - 1)

    def extremes_rows(values: Array, low: Floats, high: Floats) -> None:
        # As sign and magnitude, made two's complement, the bits of floats have the order of the floats, and
        # NaN lies beyond infinity.
        for row in range(len(values)):
            least, most = top, bottom
            for i in range(values.shape[1]):
                bits = values[row, i]
                bits ^= bits >> last & top
                least, most = min(least, bits), max(most, bits)
            # NaN stays, whether it came now or before.
            lowest = f64(integer(least ^ (least >> last & top)).view(floating))
            highest = f64(integer(most ^ (most >> last & top)).view(floating))
            low[row] = lowest if lowest < low[row] or lowest != lowest else low[row]
            high[row] = highest if highest > high[row] or highest != highest else high[row]

    @numba.njit(nogil=True)
    def exact(values: Array, codes: Array, low: float, step: float, inverse: float) -> float:
        worst = i64(0)
        for i in range(len(values)):
            value = f64(values[i])
            rounded = np.rint((value - low) * inverse)
            codes[i] = code(i32(rounded))
            error = f64(abs(value - f64(real(low + rounded * step))))
            worst = max(worst, f64(error).view(i64))
        return i64(worst).view(f64)

    @numba.njit(nogil=True)
    def fast(values: Array, codes: Array, low: np.float32, step: np.float32, inverse: np.float32) -> np.floating:
        worst = i32(0)
        for i in range(len(values)):
            value = values[i]
            rounded = np.rint((value - low) * inverse)
            codes[i] = code(i32(rounded))
            error = f32(abs(value - f32(low + rounded * step)))
            worst = max(worst, f32(error).view(i32))
        return i32(worst).view(f32)

    def quantize_rows(values: Array, codes: Array, low: Floats, step: Floats, inverse: Floats, worst: Floats) -> None:
        for row in range(len(values)):
            worst[row] = exact(values[row], codes[row], low[row], step[row], inverse[row])

    def quantize_long_rows(
        values: Array, codes: Array, low: Floats, step: Floats, inverse: Floats, slack: Floats, worst: Floats
    ) -> None:
        for row in range(len(values)):
            half, most = step[row] / 2, f64(0)
            for start in range(0, values.shape[1], SLICE):
                part, out = values[row][start : start + SLICE], codes[row][start : start + SLICE]
                seen = fast(part, out, f32(low[row]), f32(step[row]), f32(inverse[row]))
                # Where a code may be wrong, or the largest error may be in this slice, the exact loop decides.
                if not f64(seen) + slack[row] <= min(half, most):
                    most = max(most, exact(part, out, low[row], step[row], inverse[row]))
            worst[row] = most

    def quantize_columns(
        values: Array, codes: Array, low: Floats, step: Floats, inverse: Floats, worst: Floats
    ) -> None:
        for row in range(values.shape[0]):
            for i in range(values.shape[1]):
                value = f64(values[row, i])
                rounded = np.rint((value - low[i]) * inverse[i])
                codes[row, i] = code(i32(rounded))
                error = abs(value - f64(real(low[i] + rounded * step[i])))
                worst[i] = max(worst[i], error)

    def dequantize_rows(codes: Array, values: Array, low: Floats, step: Floats) -> None:
        for row in range(codes.shape[0]):
            for i in range(codes.shape[1]):
                values[row, i] = real(low[row] + f64(codes[row, i]) * step[row])

    def dequantize_columns(codes: Array, values: Array, low: Floats, step: Floats) -> None:
        for row in range(codes.shape[0]):
            for i in range(codes.shape[1]):
                values[row, i] = real(low[i] + f64(codes[row, i]) * step[i])

    named = (extremes_rows, quantize_rows, quantize_long_rows, quantize_columns, dequantize_rows, dequantize_columns)
    return {source.__name__: source for source in named}
