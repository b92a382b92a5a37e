"""Quantising: each floating-point number as an integer of few bits (Check-QZP, section 3.1, equations 1 and 2).

Rules
- scale = (max - min) / (2^bits - 1) and q = round((x - min) / scale), per tensor, per channel or per block. A
  channel is one index of the last axis: the outputs of a Keras kernel. A tensor with less than two axes has one.
- The largest error is measured while the codes are made, against what decoding will give. It is at most half a
  scale, plus what rounding the decoded value to the dtype adds. Where it is not, and for NaN and infinity, the
  tensor is stored without this stage, losslessly; the log says so once.
- Only float16, bfloat16, float32 and float64 are quantised, and only to fewer bits than they have. Integers,
  booleans, complex numbers and eight-bit floats never are.

The payload, little-endian: the codes in C order; the minimum of each group; the scale of each group, rounded up
so that the highest code reaches the maximum (both float32, or float64 for float64 tensors); and one byte `low`.
Of each code the lowest `low` bits are packed, lowest bit first, behind the bits above them, of which each code
has a byte of its own if there are any. Without a compressor all bits are packed. Where one follows, each code
has its byte; but Zstandard gives up on bytes that are nearly evenly distributed, so that low bits which are
noise are packed and the rest still compresses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ..arrays import Array, as_bytes, as_numpy, dtype_name, dtype_of
from ..errors import CodecError, CorruptDataError
from .bits import noise_bits, pack_bits, packed_bytes, unpack_bits
from .blocks import (
    BLOCK_ITEMS,
    EVEN_SHARE,
    Blocks,
    Bytes,
    Encoded,
    cut,
    expect_length,
    expect_payload,
    length_of,
    new_array,
    pack,
    shrinks,
    unpack_into,
)
from .codec import ByteStage, HeadStage, encode_bytes, encode_plain
from .codes import WIDE, codes_of, range_of, scales_of, values_of, within_half_a_step
from .groups import Layout
from .kernels import Scales

log = logging.getLogger(__name__)

_MOST = 10**18
"""A block has fewer elements; `from_spec` reads no longer number."""


@dataclass(frozen=True, slots=True)
class Quantize(HeadStage):
    """A lossy stage that encodes each floating-point number as an integer code of a few bits.

    Only float16, bfloat16, float32 and float64 tensors with more than `bits` bits per element are quantised. Other
    tensors are encoded without loss. This also applies to tensors that contain NaN or infinity, and to tensors whose
    value range is too wide or too narrow for accurate floating-point calculations.

    Args:
        bits: Bits per code: 2 to 8, or 16.
        per: Group of elements that share one minimum and one scale. "tensor" means all elements. "channel" means the
            elements with the same index on the last axis (all elements if the tensor has fewer than two axes). A number
            means blocks of this number of consecutive elements.

    Raises:
        CodecError: if `bits` or `per` is invalid.

    >>> tensor = np.linspace(-1, 1, 1000, dtype=np.float32)
    >>> encoded = Quantize(8).encode(tensor)
    >>> encoded.codec, encoded.nbytes, encoded.error <= 1 / 255 + 1e-7
    ('quantize(8,tensor)', 1009, True)
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
        if self.per not in ("tensor", "channel") and not (type(self.per) is int and 0 < self.per < _MOST):
            expected = "'tensor', 'channel' or a number of elements"
            raise CodecError(f"codec 'quantize': expected {expected}; found {self.per!r:.100}")

    @property
    def levels(self) -> int:
        """The highest code, 2**bits - 1. The lowest code is 0."""
        return (1 << self.bits) - 1

    @property
    def code_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the unpacked codes: little-endian uint16 for 16 bits, otherwise uint8."""
        return np.dtype("<u2" if self.bits == 16 else "u1")

    def encode_head(self, array: object, base: object, tail: tuple[ByteStage, ...]) -> Encoded:
        """Quantise and encode a tensor. A tensor that cannot be quantised is encoded without loss."""
        tensor = as_numpy(array, "tensor to encode")
        wide = WIDE.get(dtype_name(tensor.dtype))
        if wide is None or 8 * tensor.dtype.itemsize <= self.bits or not tensor.size:
            return encode_plain(tensor, tail)
        flat = np.require(tensor, requirements=["C", "A"]).reshape(-1)
        layout = Layout.of(flat.size, tensor.shape, self.per)
        with np.errstate(all="ignore"):  # what overflows is found by looking at the result
            found = self._quantized(flat, layout, np.dtype(wide))
        if isinstance(found, str):
            _say_once(found)
            return encode_plain(tensor, tail)
        return self._stored(*found, tensor, tail)

    def _quantized(self, flat: Array, layout: Layout, wide: np.dtype[np.generic]) -> tuple[Bytes, Bytes, float] | str:
        """Quantise.

        Returns:
            The codes with room behind them for what follows in the payload, that, and the largest error; or why
            there are none.
        """
        low, high = range_of(flat, layout, wide)
        scales, reason = scales_of(low, high, self.levels, wide)
        if scales is None:
            return reason
        numbers = as_bytes(np.concatenate([scales.low, scales.step]).astype(wide.newbyteorder("<")))
        codes_bytes = flat.size * self.code_dtype.itemsize
        payload = np.empty(codes_bytes + len(numbers) + 1, np.uint8)
        worst = codes_of(flat, layout, scales, wide, payload[:codes_bytes].view(self.code_dtype))
        if not within_half_a_step(worst, scales, np.maximum(np.abs(low), np.abs(high)), flat.dtype):
            return "the error exceeds half a step: its range is too narrow for its magnitude"
        return payload, numbers, float(worst.max())

    def _stored(
        self, payload: Bytes, numbers: Bytes, error: float, tensor: Array, tail: tuple[ByteStage, ...]
    ) -> Encoded:
        """Lay out the payload as suits the stages that follow."""
        size = self.code_dtype.itemsize
        codes_bytes = len(payload) - len(numbers) - 1
        found = payload[:codes_bytes]
        if shrinks(tail):
            plain = packed_bytes(codes_bytes // size, self.bits) + len(numbers) + 1
            packed = pack(Blocks(self._parts(found, numbers, tail), size), tail, plain)
            if packed is not None:
                spec = "|".join(stage.text for stage in (self, *tail))
                return Encoded(spec, dtype_name(tensor.dtype), tensor.shape, packed, error)
            tail = ()
        rest = np.append(numbers, np.uint8(self.bits))
        if self.bits < 8:
            payload = np.concatenate([pack_bits(found, self.bits), rest])
        else:
            payload[codes_bytes:] = rest
        return encode_bytes(self.text, payload, size, tail, tensor, error)

    def _parts(self, found: Bytes, numbers: Bytes, tail: tuple[ByteStage, ...]) -> Iterator[Bytes]:
        """Return the payload for a compressor."""
        low = self.bits if self.bits == 16 else 0
        if self.bits < 16 and any(stage.skips_even for stage in tail):
            low = noise_bits(found, self.bits, EVEN_SHARE)
        if low < self.bits:
            yield from (np.right_shift(block, np.uint8(low)) for block in cut(found, BLOCK_ITEMS))
        if low >= 8:
            yield from cut(found, BLOCK_ITEMS * self.code_dtype.itemsize)
        elif low:
            yield pack_bits(found & np.uint8((1 << low) - 1), low)
        yield np.append(numbers, np.uint8(low))

    def decode_head(self, encoded: Encoded, base: object, tail: tuple[ByteStage, ...]) -> Array:
        """Decode a tensor from its codes, minima and scales."""
        name = WIDE.get(encoded.dtype)
        if name is None:
            raise CorruptDataError(f"{encoded}: expected a dtype of {', '.join(WIDE)}; found {encoded.dtype}")
        count = length_of(encoded) // dtype_of(encoded.dtype).itemsize
        expect_payload(encoded, packed_bytes(count, self.bits), tail)
        out = new_array(encoded)
        wide = np.dtype(name)
        layout = Layout.of(out.size, out.shape, self.per)
        numbers_bytes = 2 * layout.groups * wide.itemsize
        payload = encoded.data
        if tail:
            payload = np.empty(2 * out.size + numbers_bytes + 1, np.uint8)  # as long as it can be
            payload = payload[: unpack_into(payload, encoded, tail, self.code_dtype.itemsize)]
        found = self._read_codes(payload, out.size, numbers_bytes, encoded)
        with np.errstate(invalid="ignore"):  # damage can make any NaN
            numbers = payload[-1 - numbers_bytes : -1].copy().view(wide.newbyteorder("<")).astype(np.float64)
        scales = Scales(numbers[: layout.groups], numbers[layout.groups :])
        if not bool(np.isfinite(numbers).all() and (scales.step >= 0).all()):
            raise CorruptDataError(
                f"{encoded}: expected finite minima and finite scales of at least 0; found other values"
            )
        with np.errstate(all="ignore"):
            values_of(found, out.reshape(-1), layout, scales, wide)
        return out

    def _read_codes(self, payload: Bytes, count: int, numbers_bytes: int, encoded: Encoded) -> Array:
        low = int(payload[-1]) if len(payload) else 0
        if low > self.bits or (self.bits == 16 and low != 16):
            raise CorruptDataError(f"{encoded}: expected at most {self.bits} packed bits of each code; found {low}")
        above = count if low < self.bits else 0
        expect_length(len(payload), above + packed_bytes(count, low) + numbers_bytes + 1, encoded)
        packed = payload[above : above + packed_bytes(count, low)]
        if low == 8 * self.code_dtype.itemsize:
            return np.require(packed.view(self.code_dtype), requirements="A")
        codes = unpack_bits(packed, count, low) if low else np.zeros(count, np.uint8)
        if above:
            codes |= payload[:above] << low
        return codes


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("a tensor is stored without quantising: %s (logged once; applies to similar tensors)", reason)
