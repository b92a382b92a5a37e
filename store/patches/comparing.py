"""Comparing two tensors: how many elements differ, and by how much.

Rules
- An element differs if its bits do: so a NaN is equal to itself, and -0.0 differs from 0.0.
- Only elements that differ are turned into float64, a block at a time: memory is taken for these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, as_bytes, dtype_name
from .format import check_like, word_of
from .kernels import changed_words

BLOCK_ELEMENTS = 1 << 20
WIDEST = float(np.finfo(np.float64).max) / 4
"""Differences beyond are counted in the first or last bin: the width of a bin must be a number."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The difference between two tensors.

    If the tensors differ in dtype or shape, `share` is 1, `norm` is NaN, and there is no histogram.
    """

    share: float
    """Share of the elements whose bits differ, from 0 to 1."""
    norm: float
    """L2 norm of the difference, computed in float64. NaN if it is not finite."""
    counts: tuple[int, ...] = ()
    """The histogram, if requested: the number of elements that differ in each bin. Differences that are not finite are
    not counted."""
    edges: tuple[float, ...] = ()
    """Edges of the bins, one more than `counts`. The bins have equal widths and cover all finite differences."""


def difference(tensor: Array, base: Array, bins: int = 0) -> TensorDiff:
    """Compare a tensor with another of the same dtype and shape.

    Args:
        tensor: the minuend.
        base: the subtrahend.
        bins: of the histogram of the differences, of complex numbers of their magnitudes. 0: no histogram.

    Raises:
        TensorMismatchError: dtype or shape differ.

    >>> difference(np.array([1.0, 5.0, 3.0]), np.array([1.0, 2.0, 7.0]), bins=2)
    TensorDiff(share=0.6666666666666666, norm=5.0, counts=(1, 1), edges=(-4.0, -0.5, 3.0))
    """
    check_like(base, dtype_name(tensor.dtype), tensor.shape)
    changed, squares, low, high = 0, 0.0, np.inf, -np.inf
    for each in _differences(tensor, base):
        changed += len(each)
        squares += float(np.dot(each, each))
        finite = each[np.isfinite(each)]
        low, high = float(finite.min(initial=low)), float(finite.max(initial=high))
    share = changed / tensor.size if changed else 0.0
    norm = float(np.sqrt(squares)) if np.isfinite(squares) else np.nan
    if not bins:
        return TensorDiff(share, norm)
    low, high = (max(low, -WIDEST), min(high, WIDEST)) if low <= high else (0.0, 0.0)
    counts, edges = np.zeros(bins, np.int64), np.histogram_bin_edges([low, high], bins)
    for each in _differences(tensor, base):
        counts += np.histogram(each[np.isfinite(each)].clip(low, high), edges)[0]
    return TensorDiff(share, norm, tuple(counts.tolist()), tuple(edges.tolist()))


def _differences(tensor: Array, base: Array) -> Iterator[Floats]:
    """Yield the differences of the elements whose bits differ, block by block."""
    new, old = (np.ascontiguousarray(each).reshape(-1) for each in (tensor, base))
    for at in range(0, new.size, BLOCK_ELEMENTS):
        one, other = new[at : at + BLOCK_ELEMENTS], old[at : at + BLOCK_ELEMENTS]
        found = changed_elements(one, other)
        if len(found):
            with np.errstate(all="ignore"):
                yield _minus(one[found], other[found])


def changed_elements(new: Array, old: Array) -> NDArray[np.integer]:
    """Return the positions of the elements that differ, of two flat arrays.

    >>> changed_elements(np.array([1j, 2, 3]), np.array([1j, 2, 4])).tolist()
    [2]
    """
    word = word_of(new.dtype)
    words = changed_words(*(np.require(as_bytes(each).view(f"u{word}"), requirements="A") for each in (new, old)))
    return np.unique(words // (new.itemsize // word)) if new.itemsize > word else words


def _minus(new: Array, old: Array) -> Floats:
    if new.dtype.kind == "c":
        return np.abs(new.astype(np.complex128) - old.astype(np.complex128))
    return new.astype(np.float64) - old.astype(np.float64)
