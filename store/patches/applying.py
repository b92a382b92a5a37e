"""Applying a patch.

Rules
- The base is never written to: a patch that fails, or is applied twice, changes nothing but its own output.
- The result counts once its content hash equals the hash that the patch states. So a base with other content is
  found out, and so is a damaged patch.
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from ..arrays import Array, as_bytes, from_bytes
from ..codecs.blocks import Bytes
from ..codecs.codec import decode
from ..errors import CorruptDataError, TensorMismatchError
from ..versions.manifest import digest_of
from .format import BLOCK_WORDS, Block, Form, Words, blocks_of, check_like, header_of, starts
from .kernels import put_at_gaps


def apply_patch(patch: Bytes, base: Array, *, into: Bytes | None = None, workers: Executor | None = None) -> Array:
    """Make the tensor that a patch leads to.

    Args:
        patch: made by `make_patch`; its bytes need not be trusted.
        base: an array with the dtype, shape and content of the patch's base. It is only read.
        into: memory for the tensor, as many bytes as `base` has, apart from it, at a multiple of 64; after an error it
            may hold anything. None: new memory.
        workers: apply blocks at the same time. The caller must not be one of its threads.

    Raises:
        CorruptDataError: the bytes are no patch, or do not lead from this base to a tensor with the stated hash.
        TensorMismatchError: the base has another dtype or shape, or `into` shares memory with it.
        MemoryError: the system has no memory for another tensor of this size.

    >>> from tensorvine.store.patches import make_patch
    >>> old, new = np.array([1.0, 2.0]), np.array([1.0, -0.0])
    >>> apply_patch(make_patch(new, old), old).tolist()
    [1.0, -0.0]
    """
    header, end = header_of(patch)
    check_like(base, header.dtype, header.shape)
    blocks = blocks_of(patch, end, header)
    old = as_bytes(base)
    data = np.empty(len(old), np.uint8) if into is None else into
    if into is not None and np.may_share_memory(into, base):
        raise TensorMismatchError("apply_patch: into: expected memory apart from the base; found memory that overlaps")
    out = from_bytes(data, header.dtype, header.shape)
    words, before = (each.view(f"u{header.word}") for each in (data, old))

    def apply(start: int) -> None:
        part = slice(start, start + BLOCK_WORDS)
        _apply(blocks[start // BLOCK_WORDS], words[part], before[part])

    places = starts(len(words))
    for _ in map(apply, places) if workers is None or len(places) < 2 else workers.map(apply, places):
        pass
    found = digest_of(data)
    if found != header.result:
        where = f"patch of {header.dtype} {header.shape}"
        raise CorruptDataError(f"{where}: expected to make content {header.result} from {header.base}; made {found}")
    return out


def _apply(block: Block, out: Words, base: Words) -> None:
    """Write one block of the result."""
    values = _native(decode(block.values))
    if block.form is Form.ALL:
        out[:] = values
        if block.xor:
            out ^= base
        return
    out[:] = base
    positions = _native(decode(block.positions))
    if block.form is Form.MASK:
        mask = np.unpackbits(positions, count=len(out), bitorder="little").view(np.bool_)
        fits = np.count_nonzero(mask) == block.count
        if fits:
            out[mask] = values ^ base[mask] if block.xor else values
    else:
        fits = put_at_gaps(positions, values, out, block.xor)
    if not fits:
        raise CorruptDataError(f"patch: expected {block.count} positions below {len(out)} in a block; found others")


def _native(array: Array) -> Words:
    return array.view(f"u{array.itemsize}")
