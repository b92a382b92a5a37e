"""The bytes of a patch: header, and one block for each run of words (`docs/reference/format.md`).

Rules
- A patch is never trusted: each length in it is compared with the base, which the reader has, before memory is taken.
- All numbers are little-endian. A word is an element, or 8 bytes of a longer one.
- Each block has its own form, so that a tensor whose changes are in one place costs what these cost.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ..arrays import MOST_AXES, Array, dtype_name, dtype_of, nbytes_of
from ..codecs.blocks import Bytes, Encoded
from ..codecs.compress import Zstd
from ..codecs.shuffle import Shuffle
from ..errors import CorruptDataError, TensorMismatchError

Words = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]

MAGIC, FORMAT = b"TVPA", 1
BLOCK_WORDS = 1 << 21
PACKER = Shuffle() | Zstd(1)
"""Compresses positions and values, where that makes them shorter."""
_HEADER = struct.Struct("<4sBBBBQ16s16s")
_BLOCK = struct.Struct("<BBBBIII")


class Form(IntEnum):
    """How a block lists its changed words."""

    ALL = 0
    """All did: it has no positions."""
    GAPS_1 = 1
    """Gaps of one byte: the unchanged words before each changed one."""
    GAPS_2 = 2
    GAPS_4 = 4
    MASK = 8
    """One bit for each word, the lowest bit first."""


_FORMS = frozenset[int](Form)


@dataclass(frozen=True, slots=True)
class PatchHeader:
    """The header of a patch."""

    dtype: str
    """Name of the dtype of both tensors."""
    shape: tuple[int, ...]
    """Shape of both tensors."""
    base: str
    """Content hash of the base: xxh3-128, hexadecimal."""
    result: str
    """Content hash of the tensor that the patch makes from the base."""

    @property
    def nbytes(self) -> int:
        """Bytes of either tensor."""
        return nbytes_of(self.dtype, self.shape)

    @property
    def word(self) -> int:
        """Bytes of a word."""
        return word_of(dtype_of(self.dtype))

    @property
    def packed(self) -> bytes:
        """The header's bytes."""
        dtype = self.dtype.encode()
        sizes = (FORMAT, self.word, len(dtype), len(self.shape), self.nbytes)
        hashes = bytes.fromhex(self.base), bytes.fromhex(self.result)
        return _HEADER.pack(MAGIC, *sizes, *hashes) + dtype + struct.pack(f"<{len(self.shape)}Q", *self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The changes in a run of words."""

    form: Form
    xor: bool
    """Values are the XOR of both words; else the new words."""
    count: int
    """Values."""
    positions: Encoded
    values: Encoded

    @property
    def parts(self) -> tuple[bytes, memoryview, memoryview]:
        """The block's bytes: header, positions, values."""
        where, values = self.positions, self.values
        packed = bool(where.codec), bool(values.codec)
        header = _BLOCK.pack(self.form, self.xor, *packed, self.count, where.nbytes, values.nbytes)
        return header, where.data.data, values.data.data

    @property
    def nbytes(self) -> int:
        """Length of the block."""
        return _BLOCK.size + self.positions.nbytes + self.values.nbytes


def word_of(dtype: np.dtype[np.generic]) -> int:
    """Return the bytes of a word of a tensor of this dtype."""
    return min(dtype.itemsize, 8)


def starts(words: int) -> range:
    """Return the first words of the blocks of a tensor."""
    return range(0, words, BLOCK_WORDS)


def check_like(base: Array, dtype: str, shape: tuple[int, ...]) -> None:
    """Refuse a base that is not of this dtype and shape.

    Raises:
        TensorMismatchError: it is not.
    """
    if (dtype_name(base.dtype), base.shape) != (dtype, shape):
        raise TensorMismatchError(
            f"base of a patch: expected {dtype} of shape {shape}; found {dtype_name(base.dtype)} of shape {base.shape}"
        )


def header_of(patch: Bytes) -> tuple[PatchHeader, int]:
    """Read a patch's header.

    Args:
        patch: the patch, uint8.

    Returns:
        The header, and its length in bytes.

    Raises:
        CorruptDataError: the bytes are no patch, or of another format.

    >>> header_of(np.zeros(9, np.uint8))
    Traceback (most recent call last):
    tensorvine.store.errors.CorruptDataError: patch: expected at least 48 bytes; found 9
    """
    if len(patch) < _HEADER.size:
        raise CorruptDataError(f"patch: expected at least {_HEADER.size} bytes; found {len(patch)}")
    magic, version, word, letters, axes, nbytes, base, result = _HEADER.unpack_from(patch.data)
    if (magic, version) != (MAGIC, FORMAT):
        raise CorruptDataError(f"patch: expected {MAGIC!r} and format {FORMAT}; found {magic!r} and format {version}")
    shape_at, end = _HEADER.size + letters, _HEADER.size + letters + 8 * axes
    if axes > MOST_AXES or len(patch) < end:
        raise CorruptDataError(f"patch: expected at most {MOST_AXES} axes in {len(patch)} bytes; found {axes}")
    dtype = patch[_HEADER.size : shape_at].tobytes().decode("ascii", "replace")
    shape = struct.unpack_from(f"<{axes}Q", patch.data, shape_at)
    try:
        header = PatchHeader(dtype, shape, base.hex(), result.hex())
        expected = header.word, header.nbytes
    except TensorMismatchError as exc:
        raise CorruptDataError(f"patch: {exc}") from exc
    if (word, nbytes) != expected:
        raise CorruptDataError(
            f"patch of {dtype} {shape}: expected words and tensor of {expected} bytes; found {word, nbytes}"
        )
    return header, end


def blocks_of(patch: Bytes, at: int, header: PatchHeader) -> list[Block]:
    """Read the blocks that follow a header, without decompressing them.

    Args:
        patch: the patch.
        at: where its blocks begin.
        header: its header; the reader has a base of this dtype and shape.

    Raises:
        CorruptDataError: these are no blocks of such a tensor.
    """
    words = header.nbytes // header.word
    found: list[Block] = []
    for start in starts(words):
        block = _block(patch[at:], min(BLOCK_WORDS, words - start), header.word)
        found.append(block)
        at += block.nbytes
    if at != len(patch):
        raise CorruptDataError(f"patch of {header.dtype} {header.shape}: expected {at} bytes; found {len(patch)}")
    return found


def _block(rest: Bytes, words: int, word: int) -> Block:
    if len(rest) < _BLOCK.size:
        raise CorruptDataError(f"patch: expected a block of at least {_BLOCK.size} bytes; found {len(rest)}")
    form, *flags, count, where_bytes, value_bytes = _BLOCK.unpack_from(rest.data)
    if form not in _FORMS or max(flags) > 1 or count > words or _BLOCK.size + where_bytes + value_bytes > len(rest):
        raise CorruptDataError(
            f"patch: expected a form and flags of a block of {words} words in {len(rest)} bytes; found form {form}, "
            f"flags {flags}, {count} values, and {where_bytes} and {value_bytes} bytes"
        )
    if form == Form.ALL and count != words:
        raise CorruptDataError(f"patch: expected the values of all {words} words of a block; found {count}")
    kind, length = places_of(Form(form), count, words)
    xor, packed_where, packed_values = map(bool, flags)
    end = _BLOCK.size + where_bytes
    return Block(
        Form(form),
        xor,
        count,
        _encoded(rest[_BLOCK.size : end], kind, length, packed_where),
        _encoded(rest[end : end + value_bytes], f"uint{8 * word}", count, packed_values),
    )


def places_of(form: Form, count: int, words: int) -> tuple[str, int]:
    """Return the dtype and the number of the positions of a block."""
    if form is Form.ALL:
        return "uint8", 0
    if form is Form.MASK:
        return "uint8", -(-words // 8)
    return f"uint{8 * form}", count


def _encoded(data: Bytes, dtype: str, length: int, packed: bool) -> Encoded:
    return Encoded(PACKER.spec if packed else "", dtype, (length,), data)
