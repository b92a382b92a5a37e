"""Codes of 2 to 7 bits without the bits between them.

Rules
- Eight codes become one 64-bit word, from which three shifts take the unused bits: in pairs, in fours, in eights.
- Lowest bit first: code i has the bits i * bits to (i + 1) * bits - 1 of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .codec import Bytes

Words = np.ndarray[Any, np.dtype[np.uint64]]

CHUNK = 1 << 16
"""Codes that are packed at once; a multiple of 8."""
_FIELDS = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
"""Bits of a field that holds 1, 2 or 4 codes, and where every other such field is."""


def packed_bytes(count: int, bits: int) -> int:
    """Give the number of bytes that `count` codes take.

    >>> packed_bytes(3, 3)
    2
    """
    return -(-count * bits // 8)


def pack_bits(codes: Bytes, bits: int) -> int:
    """Pack codes in place.

    Args:
        codes: one per byte, each below 2 ** bits; its start is overwritten.
        bits: 2 to 7.

    Returns:
        How many bytes the packed codes take.

    >>> codes = np.array([1, 2, 3], np.uint8)
    >>> pack_bits(codes, 4), codes[:2].tolist()
    (2, [33, 3])
    """
    for start in range(0, len(codes), CHUNK):
        words = _as_words(codes[start : start + CHUNK], 8)
        for width, mask in _FIELDS:
            words = (words & np.uint64(mask)) | ((words & ~np.uint64(mask)) >> np.uint64(width - width // 8 * bits))
        packed = words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)
        at = start // 8 * bits
        length = packed_bytes(min(CHUNK, len(codes) - start), bits)
        codes[at : at + length] = packed[:length]
    return packed_bytes(len(codes), bits)


def unpack_bits(packed: Bytes, count: int, bits: int) -> Bytes:
    """Undo `pack_bits`.

    Args:
        packed: exactly `packed_bytes(count, bits)` bytes.
        count: of codes.
        bits: per code, 2 to 7.

    >>> unpack_bits(np.array([33, 3], np.uint8), 3, 4).tolist()
    [1, 2, 3]
    """
    codes = np.empty(count, np.uint8)
    for start in range(0, count, CHUNK):
        at = start // 8 * bits
        words = _as_words(packed[at : at + CHUNK // 8 * bits], bits)
        for width, mask in reversed(_FIELDS):
            used = width // 8 * bits
            low = np.uint64(mask & ((1 << used) - 1) * _ones(2 * width))
            words = (words & low) | ((words >> np.uint64(used) & low) << np.uint64(width))
        codes[start : start + CHUNK] = words.view(np.uint8)[: min(CHUNK, count - start)]
    return codes


def _ones(distance: int) -> int:
    return sum(1 << at for at in range(0, 64, distance))


def _as_words(data: Bytes, size: int) -> Words:
    """Spread bytes over 64-bit words, `size` in each; the last one is filled up with zeros."""
    count = -(-len(data) // size)
    words = np.zeros((count, 8), np.uint8)
    whole = len(data) // size
    words[:whole, :size] = data[: whole * size].reshape(whole, size)
    words[whole:, : len(data) - whole * size] = data[whole * size :]
    return words.view("<u8").reshape(-1)
