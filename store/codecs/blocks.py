"""Bytes on their way through the stages of a codec, block by block.

Rules
- Beside the tensor and the result no copy of either is made. A block is valid until the next one is asked for.
- Stages that do not pay are left out: `pack` gives None then.
- Bytes that are not what was written are a CorruptDataError: nothing is read or written out of bounds.
- Memory for a tensor is taken when its payload is long enough to become it; what passes between two stages is not much
  more than the tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..arrays import Array, dtype_of, nbytes_of
from ..errors import CorruptDataError, TensorMismatchError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
BLOCK_ITEMS = 1 << 17
"""Elements per block. A byte plane of a block is then exactly one block of Zstandard, with its own statistics."""
EVEN_SHARE = 1 / 128
CHUNK = 1 << 19
"""Bytes that a decompressor gives at once."""
PASSING = 2
"""What passes between two stages is at most so many times as long as the tensor."""
WORTH_BYTES = 256
"""Fewer bytes are not compressed: what they cost in time is not in proportion to what they may save."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded tensor: the encoded bytes and the information needed for decoding.

    If `codec` contains a delta stage, decoding also needs the base: the same tensor of the parent version.

    >>> from tensorvine.store.codecs.compress import Zstd
    >>> encoded = Zstd().encode(np.zeros((1000, 10), np.float32))
    >>> encoded.codec, encoded.dtype, encoded.shape, encoded.nbytes < 100
    ('zstd(3)', 'float32', (1000, 10), True)
    """

    codec: str
    """Names and parameters of the applied stages, such as "shuffle|zstd(3)". Empty if no stage was applied."""
    dtype: str
    """Name of the tensor's dtype, such as "float32" or "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    data: Bytes
    """The encoded bytes as a 1-D uint8 array. If no stage was applied, `data` can be a view of the original tensor."""
    error: float = 0.0
    """Largest absolute difference between an element and its decoded value. 0 for lossless encoding."""

    @property
    def nbytes(self) -> int:
        """Number of encoded bytes: the length of `data`."""
        return len(self.data)

    def __str__(self) -> str:
        return f"{self.dtype} tensor of shape {self.shape}, stored as {self.codec or 'plain bytes'!r}"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes on their way from stage to stage."""

    parts: Iterable[Bytes]
    """The bytes, cut anywhere."""
    itemsize: int = 1
    """Length of the elements that the bytes stand for."""
    nbytes: int | None = None
    """How many bytes there are, where that is known ahead."""


class Packer(ABC):
    """Interface of a codec stage whose input and output are bytes."""

    __slots__ = ()
    shrinks: ClassVar[bool] = False
    """Whether the stage compresses. If compression would save no bytes, the codec skips all its `Packer` stages."""
    expansion: ClassVar[int] = 1
    """Maximum number of decoded bytes per encoded byte."""

    @abstractmethod
    def pack(self, blocks: Blocks) -> Blocks:
        """Encode blocks of bytes."""

    @abstractmethod
    def unpack(self, parts: Iterable[Bytes], itemsize: int, where: str) -> Iterator[Bytes]:
        """Decode bytes that `pack` encoded.

        Args:
            parts: The encoded bytes, split at any positions.
            itemsize: Bytes per element, equal to the `itemsize` of the blocks that `pack` encoded.
            where: Description of the tensor, for error messages.

        Raises:
            CorruptDataError: if the bytes cannot be decoded.
        """


def shrinks(tail: Sequence[Packer]) -> bool:
    """Say whether a compressor is among byte stages."""
    return any(stage.shrinks for stage in tail)


def pack(blocks: Blocks, tail: Sequence[Packer], limit: int) -> Bytes | None:
    """Run blocks through byte stages.

    Args:
        blocks: of the bytes to encode.
        tail: the byte stages.
        limit: length of the bytes as they would be stored otherwise.

    Returns:
        The result; None if there are compressors and it is not shorter than the limit, or that is small.
    """
    if shrinks(tail) and limit < WORTH_BYTES:
        return None
    for stage in tail:
        blocks = stage.pack(blocks)
    out = np.empty(limit, np.uint8)  # its pages cost nothing until they are written
    end = 0
    for part in blocks.parts:
        start, end = end, end + len(part)
        if end > limit:
            return None
        out[start:end] = part
    if shrinks(tail) and end == limit:
        return None
    out.resize(end, refcheck=False)
    return out


def cut(data: Bytes, step: int) -> Iterator[Bytes]:
    """Cut bytes into blocks of `step` bytes; the last one may be shorter.

    >>> [len(block) for block in cut(np.zeros(5, np.uint8), 2)]
    [2, 2, 1]
    """
    return (data[start : start + step] for start in range(0, len(data), step))


def unpack_into(out: Bytes, encoded: Encoded, tail: Sequence[Packer], itemsize: int) -> int:
    """Undo byte stages.

    Args:
        out: gets the bytes, from its start on.
        encoded: has the payload.
        tail: the byte stages.
        itemsize: of the elements that the bytes stand for.

    Returns:
        How many bytes came out.

    Raises:
        CorruptDataError: the payload is not what the stages make, or more bytes than `out` holds.
    """
    sizes = [itemsize]
    for stage in tail:
        sizes.append(1 if stage.shrinks else sizes[-1])
    parts: Iterable[Bytes] = [encoded.data]
    for stage, size in reversed(list(zip(tail, sizes, strict=False))):
        parts = _at_most(PASSING * len(out) + CHUNK, stage.unpack(parts, size, str(encoded)), encoded)
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        if end > len(out):
            raise CorruptDataError(f"{encoded}: expected at most {len(out)} bytes; found {end} or more")
        out[start:end] = part
    return end


def _at_most(limit: int, parts: Iterable[Bytes], encoded: Encoded) -> Iterator[Bytes]:
    """Let bytes pass from stage to stage, up to a limit."""
    passed = 0
    for part in parts:
        passed += len(part)
        if passed > limit:
            raise CorruptDataError(f"{encoded}: expected at most {limit} bytes between its stages; found more")
        yield part


def expect_length(found: int, expected: int, encoded: Encoded) -> None:
    """Check a number of bytes.

    Raises:
        CorruptDataError: it is another than expected.
    """
    if found != expected:
        raise CorruptDataError(f"{encoded}: expected {expected} bytes; found {found}")


def length_of(encoded: Encoded) -> int:
    """Return the bytes of the array that an `Encoded` decodes to.

    Raises:
        CorruptDataError: no array has that dtype and shape.
    """
    try:
        return nbytes_of(encoded.dtype, encoded.shape)
    except TensorMismatchError as exc:
        raise CorruptDataError(f"{encoded}: {exc}") from exc


def expect_payload(encoded: Encoded, least: int, tail: Sequence[Packer]) -> None:
    """Refuse a payload that is too short to become what it should.

    Args:
        encoded: has the payload.
        least: bytes that must come out of the byte stages.
        tail: the byte stages.

    Raises:
        CorruptDataError: it is.
    """
    most = encoded.nbytes * math.prod(stage.expansion for stage in tail)
    if most < least:
        raise CorruptDataError(f"{encoded}: expected {least} bytes or more; found {most} at most in {encoded.nbytes}")


def new_array(encoded: Encoded) -> Array:
    """Allocate the array that an `Encoded` decodes to.

    Raises:
        CorruptDataError: no array has that dtype and shape, or the system has not so much memory.
    """
    length = length_of(encoded)
    try:
        return np.empty(encoded.shape, dtype_of(encoded.dtype))
    except (MemoryError, OverflowError, ValueError) as exc:
        raise CorruptDataError(
            f"{encoded}: expected the shape of an array; found one of {length} bytes; {exc}"
        ) from exc
