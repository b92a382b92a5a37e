"""From tensors to the rows of a segment file and back.

Rules
- Each tensor is encoded alone, so that each can be read alone.
- A tensor may be encoded against its parent version's. The chain of such bases ends, after at most `DENSE_EVERY`
  tensors, with one that stands alone: that many reads at most give any tensor.
- What decoding gives is checked against the tensor's content hash wherever that is known. How long it is is checked
  before it is decoded: a base is as long as what is encoded against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Array, as_bytes, from_bytes
from ..codecs.blocks import Encoded
from ..codecs.codec import Codec, decode
from ..errors import CodecError, CodecUnavailableError, CorruptDataError, TensorMismatchError
from ..segments.segment import SegmentId, layout
from ..versions.manifest import digest_of
from .directory import Bytes
from .segmentfile import Row, SegmentFile, Slot, pack, row_of

DENSE_EVERY = 8
"""Longest chain of tensors of which each is encoded against the next, the last one counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor that is to be stored."""

    slot: int
    name: str
    layer: str | None
    dtype: str
    shape: tuple[int, ...]
    data: Bytes
    digest: str | None
    """Content hash, if it is known already."""
    base: tuple[Slot, Bytes] | None = None
    """What it may be encoded against, of the same dtype and shape, and that one's bytes."""


def encode_tensors(codec: Codec | None, tensors: Sequence[Tensor]) -> tuple[list[Row], list[Encoded]]:
    """Encode tensors for a segment file; `codec` None: their bytes as they are.

    Raises:
        CodecError, CodecUnavailableError: see `codec`.
    """
    rows: list[Row] = []
    parts: list[Encoded] = []
    for tensor in tensors:
        if codec is None:
            encoded = Encoded("", tensor.dtype, tensor.shape, tensor.data)
        else:
            array = from_bytes(tensor.data, tensor.dtype, tensor.shape)
            base = from_bytes(tensor.base[1], tensor.dtype, tensor.shape) if tensor.base is not None else None
            encoded = codec.encode(array, base)
        digest = tensor.digest or (digest_of(tensor.data) if encoded.codec else None)
        place = tensor.base[0] if tensor.base is not None else None
        rows.append(row_of(tensor.slot, tensor.name, tensor.layer, encoded, digest, place))
        parts.append(encoded)
    return rows, parts


def block_of(parts: Sequence[Encoded]) -> Bytes:
    """Lay stored bytes out for the file: without a copy where they lie so already, as an unencoded segment does."""
    offsets, _ = layout([part.nbytes for part in parts])
    last = next((i for i in reversed(range(len(parts))) if parts[i].nbytes), None)
    if last is None:
        return np.empty(0, np.uint8)
    first = next(i for i in range(len(parts)) if parts[i].nbytes)
    start = parts[first].data.ctypes.data - offsets[first]
    whole = parts[first].data.base
    consecutive = all(p.nbytes == 0 or p.data.ctypes.data == start + o for p, o in zip(parts, offsets, strict=True))
    if not consecutive or not isinstance(whole, np.ndarray) or whole.dtype != np.uint8 or whole.ndim != 1:
        return pack(parts)
    begin, length = start - whole.ctypes.data, layout([part.nbytes for part in parts])[1]
    if begin < 0 or begin + length > whole.nbytes or not whole.flags.c_contiguous:
        return pack(parts)
    return whole[begin : begin + length]


def decode_slot(
    place: Slot, nbytes: int, open_segment: Callable[[SegmentId], SegmentFile], into: Bytes | None = None
) -> Array:
    """Read a tensor, and the ones that it is encoded against.

    Args:
        place: where it is.
        nbytes: its length as the manifest says it, in bytes: no file has another one decoded.
        open_segment: gives the file of a segment.
        into: memory to have its bytes in, so many, which may hold anything after an error; None: new memory.

    Raises:
        CorruptDataError: a file does not hold what was written; names it.
        CodecUnavailableError: decoding needs a package that is not installed; names the file.
    """
    chain: list[tuple[SegmentFile, Row, Encoded]] = []
    following: Slot | None = place
    while following is not None:
        if len(chain) >= DENSE_EVERY:
            where = f"{chain[-1][0].where}: tensor {chain[-1][1].name!r}"
            raise CorruptDataError(f"{where}: expected a chain of at most {DENSE_EVERY} deltas; found a longer one")
        file = open_segment(following[0])
        row = file.row(following[1])
        if row.nbytes != nbytes:
            raise CorruptDataError(f"{file.where}: tensor {row.name!r}: expected {nbytes} bytes; found {row.nbytes}")
        encoded = file.encoded(row.slot, into if _stands_alone(row) and not chain else None)
        chain.append((file, row, encoded))
        following = row.base
    array = _decoded(*chain.pop(), None, None if chain else into)
    while chain:
        array = _decoded(*chain.pop(), array, None if chain else into)
    return array


def _stands_alone(row: Row) -> bool:
    """Tell whether the stored bytes are the tensor's."""
    return not row.codec and row.stored == row.nbytes


def _decoded(file: SegmentFile, row: Row, encoded: Encoded, base: Array | None, into: Bytes | None) -> Array:
    where = f"{file.where}: tensor {row.name!r}"
    try:
        if _stands_alone(row):
            return from_bytes(encoded.data, row.dtype, row.shape)
        array = decode(encoded, base, into)
    except CodecUnavailableError as exc:
        raise CodecUnavailableError(f"{where}: {exc}") from exc
    except (CorruptDataError, CodecError, TensorMismatchError, MemoryError) as exc:
        raise CorruptDataError(f"{where}: {exc}") from exc
    if row.codec and row.digest and digest_of(as_bytes(array)) != row.digest:
        raise CorruptDataError(f"{where}: expected content with checksum {row.digest}; found other content")
    return array
