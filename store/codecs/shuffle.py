"""Byte planes: all first bytes of the elements, then all second bytes, and so on.

Rules
- Signs and exponents of weights are alike while the low bits of their mantissas are noise. In planes of their
  own the former compress well, and a compressor skips the latter quickly.
- Planes are made per block (`codec.BLOCK_ITEMS` elements), so that a tensor needs no second copy of itself.
- The number and the length of the blocks follow from the number of bytes; nothing else is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from .blocks import BLOCK_ITEMS, Blocks, Bytes, cut
from .codec import ByteStage


@dataclass(frozen=True, slots=True)
class Shuffle(ByteStage):
    """A lossless stage that stores the first byte of each element, then the second byte of each element, and so on.

    Weights compress better in this order. Each block of 131,072 elements is regrouped separately. The elements are the
    values of the tensor or, after `Quantize`, the integer codes. One-byte elements are not changed.

    >>> encoded = Shuffle().encode(np.array([0x0102, 0x0304], np.uint16))
    >>> encoded.data.tolist(), Shuffle().decode(encoded).tolist() == [0x0102, 0x0304]
    ([2, 4, 1, 3], True)
    """

    name = "shuffle"

    def pack(self, blocks: Blocks) -> Blocks:
        """Regroup the bytes of each block by position within the element."""
        if blocks.itemsize == 1:
            return blocks
        size = blocks.itemsize
        whole = (to_planes(block, size) for block in recut(blocks.parts, BLOCK_ITEMS * size))
        # Each plane is a part, since a compressor takes what is alike in a part together.
        planes = (plane for block in whole for plane in cut(block, max(1, len(block) // size)))
        return Blocks(planes, size, blocks.nbytes)

    def unpack(self, parts: Iterable[Bytes], itemsize: int, where: str) -> Iterator[Bytes]:
        """Restore the original order of the bytes that `pack` regrouped."""
        if itemsize == 1:
            return iter(parts)
        return (from_planes(block, itemsize) for block in recut(parts, BLOCK_ITEMS * itemsize))


def to_planes(block: Bytes, itemsize: int) -> Bytes:
    """Gather the bytes of the elements by their place in the element; an incomplete element stays at the end.

    >>> to_planes(np.arange(7, dtype=np.uint8), 3).tolist()
    [0, 3, 1, 4, 2, 5, 6]
    """
    out = np.empty_like(block)
    for place, plane in enumerate(_planes(out, itemsize)):
        plane[...] = block[place : len(plane) * itemsize : itemsize]
    whole = len(block) // itemsize * itemsize
    out[whole:] = block[whole:]
    return out


def from_planes(block: Bytes, itemsize: int) -> Bytes:
    """Undo `to_planes`.

    >>> from_planes(np.array([0, 3, 1, 4, 2, 5, 6], np.uint8), 3).tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    out = np.empty_like(block)
    for place, plane in enumerate(_planes(block, itemsize)):
        out[place : len(plane) * itemsize : itemsize] = plane
    whole = len(block) // itemsize * itemsize
    out[whole:] = block[whole:]
    return out


def _planes(block: Bytes, itemsize: int) -> Array:
    items = len(block) // itemsize
    return block[: items * itemsize].reshape(itemsize, items)


def recut(parts: Iterable[Bytes], step: int) -> Iterator[Bytes]:
    """Cut bytes anew into blocks of `step` bytes; the last one may be shorter.

    >>> [len(block) for block in recut([np.zeros(3, np.uint8), np.zeros(4, np.uint8)], 2)]
    [2, 2, 2, 1]
    """
    rest = np.empty(step, np.uint8)
    held = 0
    for part in parts:
        start = 0
        while start < len(part):
            if not held and len(part) - start >= step:
                yield part[start : start + step]
                start += step
                continue
            taken = min(step - held, len(part) - start)
            rest[held : held + taken] = part[start : start + taken]
            held, start = held + taken, start + taken
            if held == step:
                yield rest
                held = 0
    if held:
        yield rest[:held]
