"""A version's tensors under the names of a model.

Rules
- Where several stored tensors go to one of the model, because it is tied, they must be the same, bit for bit: only one
  of them could be kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..arrays import Array, as_bytes
from ..errors import TensorMismatchError


def are_same(one: Array, other: Array) -> bool:
    """Return whether two arrays of one dtype and shape have the same bytes; NaN equals itself.

    >>> are_same(np.float32([1, np.nan]), np.float32([1, np.nan])), are_same(np.float32([0.0]), np.float32([-0.0]))
    (True, False)
    """
    if one is other or one.__array_interface__ == other.__array_interface__:
        return True
    return np.array_equal(as_bytes(one), as_bytes(other))


def by_own_names(found: Iterable[tuple[str, str, Array]]) -> dict[str, Array]:
    """Return stored tensors under the names that a model has for them.

    Args:
        found: the model's name, the stored name, and the array.

    Raises:
        TensorMismatchError: several stored tensors go to one of the model, and their values differ.

    >>> sorted(by_own_names([("a", "x", np.zeros(1)), ("b", "y", np.zeros(1)), ("a", "z", np.zeros(1))]))
    ['a', 'b']
    """
    arrays: dict[str, Array] = {}
    sources: dict[str, str] = {}
    for name, stored, array in found:
        known = arrays.setdefault(name, array)
        source = sources.setdefault(name, stored)
        if known.dtype != array.dtype or known.shape != array.shape or not are_same(known, array):
            raise TensorMismatchError(
                f"stored tensors {source!r} and {stored!r}: expected one value, because the model has one tensor "
                f"{name!r} for both; found different values. Use a model that has two tensors"
            )
    return arrays
