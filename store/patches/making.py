"""Making a patch.

Rules
- A gap that is too long for its width is bridged: an unchanged word in it counts as changed. So few long gaps do not
  widen all others, and a reader needs no rule for them.
- XOR or verbatim, and whether to compress values at all, is decided by a sample of each block.
- Forms are chosen per block by their size, so equal inputs give equal patches, whether or not Numba is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor

import numpy as np

from ..arrays import Array, as_bytes, dtype_name
from ..codecs.blocks import Bytes, Encoded
from ..versions.manifest import digest_of
from .format import BLOCK_WORDS, PACKER, Block, Form, PatchHeader, Words, check_like, starts, word_of
from .kernels import Places, changed_words

ALL_FROM = 0.75
"""Where a larger share of a block's words changed, all are sent."""
BRIDGES = 1 / 64
"""Bridges that a narrower width may need, as a share of the changes."""
SAMPLE = 1 << 13
"""Values that are compressed both ways."""
LEAST_GAIN = 0.9
"""Values are compressed where the sample shrinks below this share: else the time costs more than a link."""


def make_patch(
    tensor: Array,
    base: Array,
    *,
    hashes: tuple[str, str] | None = None,
    limit: int | None = None,
    workers: Executor | None = None,
) -> Bytes | None:
    """Make the patch that leads from a base to a tensor.

    Args:
        tensor: any array that can be stored.
        base: of the same dtype and shape.
        hashes: content hashes of base and tensor, if they are known.
        limit: bytes that the patch may have.
        workers: make blocks at the same time. The caller must not be one of its threads.

    Returns:
        The patch, or None if it would be longer than `limit`.

    Raises:
        TensorMismatchError: the base has another dtype or shape.

    >>> from tensorvine.store.patches import apply_patch
    >>> base = np.arange(10_000, dtype=np.float32)
    >>> tensor = base.copy()
    >>> tensor[::100] += 0.5
    >>> patch = make_patch(tensor, base)
    >>> len(patch) < 300, bool((apply_patch(patch, base) == tensor).all())
    (True, True)
    """
    dtype = dtype_name(tensor.dtype)
    check_like(base, dtype, tensor.shape)
    new, old = as_bytes(tensor), as_bytes(base)
    known = hashes or (digest_of(old), digest_of(new))
    parts: list[bytes | memoryview] = [PatchHeader(dtype, tensor.shape, *known).packed]
    length = len(parts[0])
    for block in _blocks(_words(new, tensor.dtype), _words(old, tensor.dtype), workers):
        length += block.nbytes
        if limit is not None and length > limit:
            return None
        parts += block.parts
    return np.frombuffer(b"".join(parts), np.uint8) if limit is None or length <= limit else None


def _words(data: Bytes, dtype: np.dtype[np.generic]) -> Words:
    return np.require(data.view(f"u{word_of(dtype)}"), requirements="A")


def _blocks(new: Words, old: Words, workers: Executor | None) -> Iterator[Block]:
    def block(start: int) -> Block:
        return _block(new[start : start + BLOCK_WORDS], old[start : start + BLOCK_WORDS])

    places = starts(len(new))
    return map(block, places) if workers is None or len(places) < 2 else workers.map(block, places)


def _block(new: Words, old: Words) -> Block:
    places = changed_words(new, old)
    if len(places) > ALL_FROM * len(new):
        return _filled(Form.ALL, np.empty(0, np.uint8), new, old)
    width = _width(places)
    if 8 * width * len(places) > len(new):
        mask = np.zeros(len(new), np.bool_)
        mask[places] = True
        return _filled(Form.MASK, np.packbits(mask, bitorder="little"), new[places], old[places])
    bridged = _bridged(places, width)
    gaps = _gaps(bridged).astype(f"u{width}")
    return _filled(Form(width), gaps, new[bridged], old[bridged])


def _filled(form: Form, positions: Words, new: Words, old: Words) -> Block:
    xor, values = _values(new, old)
    return Block(form, xor, len(new), PACKER.encode(positions), values)


def _values(new: Words, old: Words) -> tuple[bool, Encoded]:
    """Encode values in the way that makes a sample of them the shortest: (XOR?, values)."""
    step = max(1, len(new) // SAMPLE)
    few, before = new[::step], old[::step]
    verbatim, xor = PACKER.encode(few).nbytes, PACKER.encode(few ^ before).nbytes
    values = new ^ old if xor < verbatim else new
    if min(verbatim, xor) <= LEAST_GAIN * few.nbytes:
        return xor < verbatim, PACKER.encode(values)
    return xor < verbatim, Encoded("", values.dtype.name, values.shape, as_bytes(values))


def _gaps(places: Places) -> Places:
    """Return the unchanged words before each changed one.

    >>> _gaps(np.array([0, 1, 5], np.uint32)).tolist()
    [0, 0, 3]
    """
    gaps = places.copy()
    gaps[1:] -= places[:-1]
    gaps[1:] -= 1
    return gaps


def _width(places: Places) -> int:
    """Return the narrowest bytes per gap that need few bridges."""
    gaps = _gaps(places)
    return next(w for w in (1, 2, 4) if w == 4 or int((gaps >> (8 * w)).sum()) <= BRIDGES * len(gaps))


def _bridged(places: Places, width: int) -> Places:
    """Add positions until no gap is too long for its width.

    >>> _bridged(np.array([3, 700], np.uint32), 1).tolist()
    [3, 259, 515, 700]
    """
    more = _gaps(places) >> (8 * width) if width < 4 else np.zeros(0, np.uint32)
    if not more.any():
        return places
    long = np.flatnonzero(more)
    bridges = _between(zip(long.tolist(), more[long].tolist(), strict=True), places, 1 << (8 * width))
    return np.sort(np.concatenate([places, np.array(list(bridges), np.uint32)]))


def _between(long: Iterable[tuple[int, int]], places: Places, step: int) -> Iterator[int]:
    for at, count in long:
        before = int(places[at - 1]) if at else -1
        yield from range(before + step, before + step * count + 1, step)
