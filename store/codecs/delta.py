"""Deltas: a tensor as its difference from the same tensor of the parent version.

Rules
- Bits are compared, never values: -0.0, NaN payloads and any dtype come back as they were.
- Where few elements changed, a sparse delta holds their places and their differing bits. Elsewhere it is the
  bitwise XOR of the two tensors, which pays only if a compressor follows.
- Both are measured against the dense tensor through the same later stages; the smaller one is kept. Without a
  base, or where a delta does not pay, `Encoded.codec` names no delta and the tensor decodes alone.
- A sparse delta is always shorter than the tensor, the XOR just as long: the length tells them apart.

A sparse delta, all integers little-endian: the XOR of each changed element; the places, either as gaps (how
many unchanged elements lie before each) or as a bit mask of all elements, lowest bit first; the number of
changed elements (8 bytes); the length of a gap in bytes: 1, 2, 4 or 8, or 0 for the mask (1 byte). Elements
longer than 8 bytes count as several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, as_bytes, as_numpy, dtype_of
from ..errors import CodecError, CorruptDataError
from .blocks import (
    BLOCK_ITEMS,
    Blocks,
    Bytes,
    Encoded,
    cut,
    expect_length,
    length_of,
    new_array,
    pack,
    shrinks,
    unpack_into,
)
from .codec import ByteStage, HeadStage, encode_bytes, encode_plain

Words = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]

SAMPLED_BYTES = 8 << 20
"""Of a longer tensor, one block in `SAMPLE_EVERY` is encoded to estimate how long the dense one would be."""
SAMPLE_EVERY = 8
MARGIN = 0.8
"""A delta shorter than this share of the estimate is taken; otherwise the dense tensor is encoded to compare."""
_TRAILER = 9


@dataclass(frozen=True, slots=True)
class Delta(HeadStage):
    """A stage that encodes the bitwise difference between a tensor and the same tensor of the parent version.

    The tensor of the parent version is the argument `base` of `encode`. Without `base`, or if the encoded difference is
    not smaller than the encoded tensor, the tensor itself is encoded.

    >>> old = np.arange(10_000, dtype=np.float32)
    >>> new = old.copy()
    >>> new[::100] += 0.5
    >>> encoded = Delta().encode(new, old)
    >>> encoded.nbytes, bool((Delta().decode(encoded, old) == new).all())
    (509, True)
    >>> Delta().encode(new).codec
    ''
    """

    name = "delta"
    relative = True

    def encode_head(self, array: object, base: object, tail: tuple[ByteStage, ...]) -> Encoded:
        """Encode the difference between a tensor and `base`, or the tensor itself, whichever result is smaller."""
        if base is None:
            return encode_plain(array, tail)
        tensor = as_numpy(array, "tensor to encode")
        parent = _matching(base, tensor.dtype, tensor.shape)
        found = self._difference(tensor, parent, tail)
        if found is None or (tensor.nbytes > SAMPLED_BYTES and found.nbytes < MARGIN * _dense_estimate(tensor, tail)):
            return found or encode_plain(tensor, tail)
        dense = encode_plain(tensor, tail)
        return found if found.nbytes < dense.nbytes else dense

    def _difference(self, tensor: Array, parent: Array, tail: tuple[ByteStage, ...]) -> Encoded | None:
        shrinking = shrinks(tail)
        size = tensor.dtype.itemsize
        data = sparse(tensor, parent, tensor.nbytes // 2 if shrinking else tensor.nbytes - 1)
        if data is not None:
            return encode_bytes(self.text, data, size, tail, tensor)
        if not shrinking:
            return None
        packed = pack(Blocks(_xor(as_bytes(tensor), as_bytes(parent), size), size, tensor.nbytes), tail, tensor.nbytes)
        if packed is None:
            return None
        return Encoded("|".join(stage.text for stage in (self, *tail)), tensor.dtype.name, tensor.shape, packed)

    def decode_head(self, encoded: Encoded, base: object, tail: tuple[ByteStage, ...]) -> Array:
        """Decode a tensor by applying the stored difference to `base`."""
        if base is None:
            raise CodecError(f"{encoded}: expected the tensor of the parent version as base; found none")
        length_of(encoded)  # there is such a dtype
        parent = as_bytes(_matching(base, dtype_of(encoded.dtype), encoded.shape))
        out = new_array(encoded)
        data = as_bytes(out)
        length = unpack_into(data, encoded, tail, out.dtype.itemsize)
        if length == len(data):
            np.bitwise_xor(data, parent, out=data)
        else:
            delta = data[:length].copy()
            data[:] = parent
            _apply(delta, _words(data, out.dtype.itemsize), encoded)
        return out


def _matching(base: object, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    parent = as_numpy(base, "base of a delta")
    if (parent.dtype, parent.shape) != (dtype, shape):
        expected = f"expected {dtype.name} of shape {shape}, like the tensor"
        raise CodecError(f"base of a delta: {expected}; found {parent.dtype.name} of shape {parent.shape}")
    return parent


def _words(data: Bytes, itemsize: int) -> Words:
    return data.view(f"<u{min(itemsize, 8)}")


def _xor(data: Bytes, parent: Bytes, itemsize: int) -> Iterator[Bytes]:
    step = BLOCK_ITEMS * itemsize
    return (np.bitwise_xor(new, old) for new, old in zip(cut(data, step), cut(parent, step), strict=True))


def _dense_estimate(tensor: Array, tail: tuple[ByteStage, ...]) -> float:
    """Estimate the length of the dense tensor behind the byte stages, in bytes, from evenly spaced blocks."""
    data, size = as_bytes(tensor), tensor.dtype.itemsize
    blocks = list(cut(data, BLOCK_ITEMS * size))[::SAMPLE_EVERY]
    length = sum(map(len, blocks))
    packed = pack(Blocks(blocks, size, length), tail, length)
    return len(data) * (1.0 if packed is None else len(packed) / length)


def sparse(tensor: Array, parent: Array, limit: int) -> Bytes | None:
    """Write a sparse delta of at most `limit` bytes; None if there is none so short.

    >>> a = np.array([5, 6, 7, 8], np.uint64)
    >>> sparse(a, a, limit=8), sparse(a, a, limit=9)
    (None, array([0, 0, 0, 0, 0, 0, 0, 0, 1], dtype=uint8))
    """
    new, old = (_words(as_bytes(array), tensor.dtype.itemsize) for array in (tensor, parent))
    most = (limit - _TRAILER) // new.itemsize
    places: list[NDArray[np.int64]] = []
    for start in range(0, len(new), BLOCK_ITEMS):
        stop = start + BLOCK_ITEMS
        found = np.flatnonzero(new[start:stop] != old[start:stop])
        places.append(found + start)
        most -= len(found)
        if most < 0:
            return None
    changed = np.concatenate(places) if places else np.empty(0, np.int64)
    width, where = _write_places(changed, len(new))
    trailer = np.frombuffer(len(changed).to_bytes(8, "little") + bytes([width]), np.uint8)
    length = len(changed) * new.itemsize + len(where) + _TRAILER
    return np.concatenate([as_bytes(new[changed] ^ old[changed]), where, trailer]) if length <= limit else None


def _write_places(changed: NDArray[np.int64], words: int) -> tuple[int, Bytes]:
    gaps = np.diff(changed, prepend=-1) - 1
    longest = int(gaps.max(initial=0))
    width = next(width for width in (1, 2, 4, 8) if longest < 1 << 8 * width)
    if len(changed) * width <= -(-words // 8):
        return width, as_bytes(gaps.astype(f"<u{width}"))
    mask = np.zeros(words, np.bool_)
    mask[changed] = True
    return 0, np.packbits(mask, bitorder="little")


def _apply(delta: Bytes, words: Words, encoded: Encoded) -> None:
    """XOR a sparse delta into the base's elements.

    Raises:
        CorruptDataError: it is not what `sparse` writes.
    """
    if len(delta) < _TRAILER:
        raise CorruptDataError(f"{encoded}: expected at least {_TRAILER} bytes of a delta; found {len(delta)}")
    count, width = int.from_bytes(delta[-_TRAILER:-1].tobytes(), "little"), int(delta[-1])
    if width not in (0, 1, 2, 4, 8) or count > len(words):
        most = f"gaps of 0, 1, 2, 4 or 8 bytes and at most {len(words)} changes"
        raise CorruptDataError(f"{encoded}: expected {most}; found gaps of {width} bytes and {count} changes")
    values = count * words.itemsize
    where = count * width if width else -(-len(words) // 8)
    expect_length(len(delta), values + where + _TRAILER, encoded)
    changed = _read_places(delta[values : values + where], width, len(words))
    if len(changed) != count or (count and int(changed[-1]) >= len(words)) or bool(np.any(changed[1:] <= changed[:-1])):
        raise CorruptDataError(f"{encoded}: expected {count} rising places of {len(words)} elements; found others")
    words[changed] ^= delta[:values].view(words.dtype)


def _read_places(where: Bytes, width: int, words: int) -> NDArray[np.int64]:
    if not width:
        return np.flatnonzero(np.unpackbits(where, count=words, bitorder="little"))
    # A gap beyond the tensor is cut, so that the sum cannot overflow; the place is then beyond it as well.
    gaps = np.minimum(where.view(f"<u{width}").astype(np.uint64), np.uint64(words)).astype(np.int64)
    return np.cumsum(gaps + 1) - 1
