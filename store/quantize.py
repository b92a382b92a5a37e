"""Quantising: each floating-point number as an integer of few bits (Check-QZP, section 3.1, equations 1 and 2).

Rules
- scale = (max - min) / (2^bits - 1) and q = round((x - min) / scale), per tensor, per channel or per block. A
  channel is one index of the last axis: the outputs of a Keras kernel. A tensor with less than two axes has one.
- The largest error is measured while the codes are made, against what decoding will give. It is at most half a
  scale, plus what rounding the decoded value to the dtype adds. Where it is not, and for NaN and infinity, the
  tensor is stored without this stage, losslessly; the log says so once.
- Only float16, bfloat16, float32 and float64 are quantised, and only to fewer bits than they have. Integers,
  booleans, complex numbers and eight-bit floats never are.

The payload, little-endian: the codes in C order, `bits` bits each, lowest bit first; then the minimum of each
group; then the scale of each group. Both are float32, or float64 for float64 tensors. The stored scale is
rounded up, so that the highest code reaches the maximum.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import ml_dtypes
import numpy as np

from .arrays import Array, as_bytes, as_numpy
from .bits import pack_bits, packed_bytes, unpack_bits
from .codec import (
    Bytes,
    ByteStage,
    Encoded,
    HeadStage,
    encode_bytes,
    encode_plain,
    expect_length,
    new_array,
    unpack_into,
)
from .errors import CodecError, CorruptDataError
from .kernels import Floats, Scales, dequantize, extremes, quantize, tiles

ROW = 512
"""Elements that a row should have at least, where columns are channels."""
_WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Quantised dtypes, and the type in which their minimum and scale are stored."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quantize(HeadStage):
    """Codes of few bits instead of floating-point numbers.

    Args:
        bits: per code, 2 to 8, or 16.
        per: what shares a minimum and a scale: the "tensor", each "channel" (index of the last axis), or each
            block of so many consecutive elements.

    Raises:
        CodecError: other arguments.

    >>> tensor = np.linspace(-1, 1, 1000, dtype=np.float32)
    >>> encoded = Quantize(8).encode(tensor)
    >>> encoded.codec, encoded.nbytes, encoded.error <= 1 / 255 + 1e-7
    ('quantize(8,tensor)', 1008, True)
    >>> error = np.abs(Quantize(8).decode(encoded) - tensor).max()
    >>> bool(np.isclose(error, encoded.error))
    True
    >>> Quantize(8).encode(np.arange(5)).codec
    ''
    """

    bits: int = 8
    per: Literal["tensor", "channel"] | int = "tensor"

    name = "quantize"
    exact = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (2, 3, 4, 5, 6, 7, 8, 16):
            raise CodecError(f"codec 'quantize': expected 2 to 8 bits, or 16; found {self.bits!r}")
        if self.per not in ("tensor", "channel") and not (type(self.per) is int and self.per > 0):
            expected = "'tensor', 'channel' or a number of elements"
            raise CodecError(f"codec 'quantize': expected {expected}; found {self.per!r}")

    @property
    def levels(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1

    @property
    def code_dtype(self) -> np.dtype[Any]:
        """Of a code before it is packed."""
        return np.dtype("<u2" if self.bits == 16 else "u1")

    def encode_head(self, array: object, base: object, tail: tuple[ByteStage, ...]) -> Encoded:
        """Quantise the tensor, or leave it as it is."""
        tensor = as_numpy(array, "tensor to encode")
        wide = _WIDE.get(tensor.dtype.name)
        if wide is None or 8 * tensor.dtype.itemsize <= self.bits or not tensor.size:
            return encode_plain(tensor, tail)
        flat = np.ascontiguousarray(tensor).reshape(-1)
        flat = flat if flat.flags.aligned else flat.copy()
        with np.errstate(all="ignore"):  # what overflows is found by looking at the result
            payload, error = self._quantized(flat, tensor.shape, np.dtype(wide))
        if payload is None:
            return encode_plain(tensor, tail)
        return encode_bytes(self.text, payload, self.code_dtype.itemsize, tail, tensor, error)

    def _quantized(self, flat: Array, shape: tuple[int, ...], wide: np.dtype[Any]) -> tuple[Bytes | None, float]:
        layout = Layout.of(flat.size, shape, self.per)
        low, high = _range(flat, layout, wide)
        scales, reason = scales_of(low, high, self.levels, wide)
        if scales is None:
            return _left_out(reason), 0.0
        codes_bytes = flat.size * self.code_dtype.itemsize
        payload = np.empty(codes_bytes + 2 * layout.groups * wide.itemsize, np.uint8)
        codes = payload[:codes_bytes].view(self.code_dtype)
        worst = _codes(flat, codes, layout, scales, wide)
        if not within_half_a_step(worst, scales, np.maximum(np.abs(low), np.abs(high)), flat.dtype):
            return _left_out("the error exceeds half a step: its range is too narrow for its magnitude"), 0.0
        end = pack_bits(codes, self.bits) if self.bits < 8 else codes_bytes
        stored = as_bytes(np.concatenate([scales.low, scales.step]).astype(wide.newbyteorder("<")))
        payload[end : end + len(stored)] = stored
        payload.resize(end + len(stored), refcheck=False)
        return payload, float(worst.max())

    def decode_head(self, encoded: Encoded, base: object, tail: tuple[ByteStage, ...]) -> Array:
        """Give the values that the codes stand for."""
        out = new_array(encoded)
        wide_name = _WIDE.get(out.dtype.name)
        if wide_name is None:
            raise CorruptDataError(f"{encoded}: expected a dtype of {', '.join(_WIDE)}; found {encoded.dtype}")
        wide = np.dtype(wide_name)
        layout = Layout.of(out.size, out.shape, self.per)
        codes_bytes = packed_bytes(out.size, self.bits)
        payload, expected = encoded.data, codes_bytes + 2 * layout.groups * wide.itemsize
        if tail:
            payload = np.empty(expected, np.uint8)
            expect_length(unpack_into(payload, encoded, tail, self.code_dtype.itemsize), expected, encoded)
        else:
            expect_length(len(payload), expected, encoded)
        numbers = np.frombuffer(payload[codes_bytes:].tobytes(), wide.newbyteorder("<")).astype(np.float64)
        scales = Scales(numbers[: layout.groups], numbers[layout.groups :])
        if not bool(np.isfinite(numbers).all() and (scales.step >= 0).all()):
            raise CorruptDataError(f"{encoded}: expected finite minima and scales of at least 0; found others")
        codes = payload[:codes_bytes]
        codes = unpack_bits(codes, out.size, self.bits) if self.bits < 8 else codes.view(self.code_dtype)
        with np.errstate(all="ignore"):
            _values(codes, out.reshape(-1), layout, scales, wide)
        return out


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
        """Give a number of each group to each row or column."""
        return np.tile(numbers[self.groups], self.repeats)

    def gather(self, numbers: Floats, into: Floats, choose: np.ufunc) -> None:
        """Merge a number of each row or column into those of the groups, by minimum or maximum."""
        merged = choose.reduce(numbers.reshape(self.repeats, -1), axis=0)
        into[self.groups] = choose(into[self.groups], merged)


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


def _tiles(flat: Array, part: Part, wide: np.dtype[Any]) -> Iterator[tuple[Array, slice, slice]]:
    """Give the elements of a part in the wide type, with their rows and columns: all at once, or as small copies."""
    values = flat[part.data].reshape(part.rows, part.columns)
    if values.dtype == wide:
        yield values, slice(0, part.rows), slice(0, part.columns)
        return
    for rows, columns in tiles(part.rows, part.columns):
        yield values[rows, columns].astype(wide), rows, columns


def _range(flat: Array, layout: Layout, wide: np.dtype[Any]) -> tuple[Floats, Floats]:
    """Find the lowest and the highest value of each group."""
    low, high = np.full(layout.groups, np.inf), np.full(layout.groups, -np.inf)
    for part in layout.parts:
        lowest, highest = part.spread(low), part.spread(high)
        for values, rows, columns in _tiles(flat, part, wide):
            groups = columns if part.axis else rows
            least, most = extremes(values, part.axis)
            lowest[groups] = np.minimum(lowest[groups], least)
            highest[groups] = np.maximum(highest[groups], most)
        part.gather(lowest, low, np.minimum)
        part.gather(highest, high, np.maximum)
    return low, high


def scales_of(low: Floats, high: Floats, levels: int, wide: np.dtype[Any]) -> tuple[Scales | None, str]:
    """Choose each group's scale (equation 1), or say why there is none.

    Args:
        low: lowest values; NaN or infinite if one of the group's values is.
        high: highest values.
        levels: the highest code.
        wide: type in which the scale is stored.

    >>> scales_of(np.array([-1.0]), np.array([2.0]), 3, np.dtype("float32"))
    (Scales(low=array([-1.]), step=array([1.])), '')
    >>> scales_of(np.array([-1.0]), np.array([np.nan]), 3, np.dtype("float32"))
    (None, 'it holds NaN or infinity')
    """
    if not bool(np.isfinite(low).all() and np.isfinite(high).all()):
        return None, "it holds NaN or infinity"
    width = high - low
    step = (width / levels).astype(wide)
    short = step.astype(np.float64) * levels < width
    step = np.where(short, np.nextafter(step, wide.type(np.inf)), step).astype(np.float64)
    if not bool(np.isfinite(step).all() and np.isfinite(1 / step[step > 0]).all()):
        return None, "its range is too wide or too narrow to be divided"
    return Scales(low, step), ""


def _codes(flat: Array, codes: Array, layout: Layout, scales: Scales, wide: np.dtype[Any]) -> Floats:
    """Write the codes, and give the largest error of each group."""
    worst = np.zeros(layout.groups)
    for part in layout.parts:
        spread = Scales(part.spread(scales.low), part.spread(scales.step))
        found = part.spread(worst)
        out = codes[part.data].reshape(part.rows, part.columns)
        for values, rows, columns in _tiles(flat, part, wide):
            groups = columns if part.axis else rows
            errors = quantize(values, out[rows, columns], spread.of(groups), part.axis)
            if flat.dtype != wide:
                decoded = np.empty_like(values)
                dequantize(out[rows, columns], decoded, spread.of(groups), part.axis)
                decoded = decoded.astype(flat.dtype).astype(wide)
                errors = np.abs(np.subtract(values, decoded, dtype=np.float64)).max(axis=1 - part.axis)
            found[groups] = np.maximum(found[groups], errors)
        part.gather(found, worst, np.maximum)
    return worst


def within_half_a_step(worst: Floats, scales: Scales, largest: Floats, dtype: np.dtype[Any]) -> bool:
    """Check the largest error of each group.

    Args:
        worst: largest error of each group.
        scales: of the groups.
        largest: largest magnitude of each group.
        dtype: of the tensor. Rounding to it adds half a unit in the last place; for float64 tensors, whose
            arithmetic has no more digits than they have, two operations before it add one each.

    >>> one = np.ones(1)
    >>> within_half_a_step(0.6 * one, Scales(0 * one, one), one, np.dtype("float32"))
    False
    """
    facts = cast(Any, ml_dtypes.finfo(dtype))
    unit = np.maximum(largest * float(facts.eps), float(facts.smallest_subnormal))
    return bool((worst <= scales.step / 2 + unit * (2.5 if dtype == np.float64 else 0.5)).all())


def _values(codes: Array, flat: Array, layout: Layout, scales: Scales, wide: np.dtype[Any]) -> None:
    """Write the value of each code."""
    for part in layout.parts:
        spread = Scales(part.spread(scales.low), part.spread(scales.step))
        given = codes[part.data].reshape(part.rows, part.columns)
        out = flat[part.data].reshape(part.rows, part.columns)
        if flat.dtype == wide:
            dequantize(given, out, spread, part.axis)
            continue
        for rows, columns in tiles(part.rows, part.columns):
            decoded = np.empty(out[rows, columns].shape, wide)
            dequantize(given[rows, columns], decoded, spread.of(columns if part.axis else rows), part.axis)
            out[rows, columns] = decoded.astype(flat.dtype)


def _left_out(reason: str) -> None:
    _say_once(reason)


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("a tensor is stored without being quantised, as are others like it: %s", reason)
