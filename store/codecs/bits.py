"""Codes of 1 to 8 bits without the bits between them.

Rules
- Eight codes become one 64-bit word, from which three shifts take the unused bits: of pairs, of fours, of eights.
- Lowest bit first: code i has the bits i * bits to (i + 1) * bits - 1 of the result.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .blocks import Bytes

Words = NDArray[np.uint64]

CHUNK = 1 << 16
"""Codes that are packed at once; a multiple of 8."""
SAMPLES, SAMPLE = 16, 1 << 9
"""How many runs of how many codes are counted to estimate what compressing all gives."""
TABLE_BITS, TABLE_SPAN = 4, 1 << 17
"""What a compressor's table costs per value in it, in bits, and how many bytes share a table."""
FEW, MOST_NOISE = 1 << 12, 2
"""Fewer codes are not worth the estimate; more low bits than this were never found to be noise."""
EVEN_MARGIN = 1.5
"""The largest share is overestimated from a sample, and some blocks have a smaller one than the whole."""
_FIELDS = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
"""Bits of a field that holds 1, 2 or 4 codes, and where every other such field is."""


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes that `count` codes take.

    >>> packed_bytes(3, 3)
    2
    """
    return -(-count * bits // 8)


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Pack codes.

    Args:
        codes: one per byte, each below 2 ** bits.
        bits: 1 to 8.

    >>> pack_bits(np.array([1, 2, 3], np.uint8), 4).tolist()
    [33, 3]
    """
    if bits == 1:
        return np.packbits(codes, bitorder="little")
    packed = np.empty(packed_bytes(len(codes), bits), np.uint8)
    for start in range(0, len(codes), CHUNK):
        words = _as_words(codes[start : start + CHUNK], 8)
        for width, mask in _FIELDS:
            high = words & ~np.uint64(mask)
            high >>= np.uint64(width - width // 8 * bits)
            words = words & np.uint64(mask)
            words |= high
        out = packed[start // 8 * bits :][: CHUNK // 8 * bits]
        out[:] = _first_bytes(words, bits)[: len(out)]
    return packed


def unpack_bits(packed: Bytes, count: int, bits: int) -> Bytes:
    """Undo `pack_bits`.

    Args:
        packed: exactly `packed_bytes(count, bits)` bytes.
        count: of codes.
        bits: per code, 1 to 8.

    >>> unpack_bits(np.array([33, 3], np.uint8), 3, 4).tolist()
    [1, 2, 3]
    """
    if bits == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    codes = np.empty(count, np.uint8)
    for start in range(0, count, CHUNK):
        at = start // 8 * bits
        words = _as_words(packed[at : at + CHUNK // 8 * bits], bits)
        for width, mask in reversed(_FIELDS):
            used = width // 8 * bits
            low = np.uint64(mask & ((1 << used) - 1) * _ones(2 * width))
            high = words >> np.uint64(used)
            high &= low
            high <<= np.uint64(width)
            words = words & low
            words |= high
        codes[start : start + CHUNK] = words.view(np.uint8)[: min(CHUNK, count - start)]
    return codes


def noise_bits(codes: Bytes, bits: int, even_share: float) -> int:
    """Choose how many low bits of each code to pack, when a compressor gets the rest.

    What a choice costs is estimated from a sample: the entropy of the bits above, the compressor's table for
    them, and the packed bits.

    Args:
        codes: below 2 ** bits.
        bits: 2 to 8.
        even_share: the compressor stores bytes as they are if no value has a larger share.

    >>> rng = np.random.default_rng(0)
    >>> even, uneven = rng.integers(0, 200, 9999, np.uint8), rng.binomial(20, 0.1, 9999).astype(np.uint8)
    >>> noise_bits(even, 8, 1 / 128), noise_bits(uneven, 8, 1 / 128)
    (2, 0)
    """
    if len(codes) < FEW:
        return 0
    counts = _histogram(codes, 1 << bits)
    total = int(counts.sum())

    def cost(low: int) -> float:
        merged = counts.reshape(-1, 1 << low).sum(axis=1)
        if merged.max() <= EVEN_MARGIN * even_share * total:
            return low + 8
        entropy = math.log2(total) - float((merged * np.log2(np.maximum(merged, 1))).sum()) / total
        return low + entropy + TABLE_BITS * np.count_nonzero(merged) / min(len(codes), TABLE_SPAN)

    return min(range(min(bits, MOST_NOISE + 1)), key=cost)


def _histogram(codes: Bytes, size: int) -> NDArray[np.intp]:
    """Count the codes of a sample, evenly spaced."""
    starts = range(0, len(codes), max(SAMPLE, len(codes) // SAMPLES))
    return np.bincount(np.concatenate([codes[at : at + SAMPLE] for at in starts]), minlength=size)


def _ones(distance: int) -> int:
    return sum(1 << at for at in range(0, 64, distance))


def _as_words(data: Bytes, size: int) -> Words:
    """Spread bytes over 64-bit words, `size` in each; the last one is filled up with zeros. Not to be written to."""
    whole, rest = divmod(len(data), size)
    if size == 8 and not rest:
        return data.view("<u8")
    words = np.zeros((whole + bool(rest), 8), np.uint8)
    if size in (2, 4):
        words.view("<u8")[:whole, 0] = data[: whole * size].view(f"<u{size}")
    else:
        words[:whole, :size] = data[: whole * size].reshape(whole, size)
    words[whole:, :rest] = data[whole * size :]
    return words.view("<u8").reshape(-1)


def _first_bytes(words: Words, size: int) -> Bytes:
    """Gather the lowest `size` bytes of each word."""
    if size in (2, 4):
        return words.astype(f"<u{size}").view(np.uint8)
    return words.view(np.uint8).reshape(-1, 8)[:, :size].reshape(-1)
