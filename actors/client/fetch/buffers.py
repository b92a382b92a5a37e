"""A caller's buffers, which a load fills.

Rules
- All are checked before one is written.
- Two that have memory in common are refused: one tensor would be written over another. Tied tensors, which are stored
  once, may be loaded into the very same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from ....store.arrays import Array, dtype_name, memory_of
from ....store.errors import TensorMismatchError, TensorNotFoundError

_MOST_WORK = 100_000
"""Steps to find out whether two arrays that lie within one another have an element in common."""


class Expected(NamedTuple):
    """A tensor that is to be copied into a buffer."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    origin: object
    """Equal for tied tensors."""


def filled(arrays: Mapping[str, Array], into: Mapping[str, object], model: str) -> dict[str, Array]:
    """Copy tensors into a caller's buffers.

    Args:
        arrays: name -> tensor.
        into: name -> its buffer.
        model: for errors.

    Returns:
        The buffers of these tensors as NumPy arrays.

    Raises:
        TensorNotFoundError: one has no buffer.
        TensorMismatchError: a buffer cannot be filled with its tensor, or has memory in common with another.
    """
    expected = {name: Expected(array.dtype, array.shape, _start(array)) for name, array in arrays.items()}
    targets = targets_of(expected, into, model)
    for name, array in arrays.items():
        np.copyto(targets[name], array)
    return targets


def targets_of(expected: Mapping[str, Expected], into: Mapping[str, object], model: str) -> dict[str, Array]:
    """Check a caller's buffers, and return those of the expected tensors; errors as in `filled`."""
    targets: dict[str, Array] = {}
    for name, array in expected.items():
        if name not in into:
            raise TensorNotFoundError(f"load of {model}: expected a buffer for tensor {name!r} in into=; found none")
        target = memory_of(into[name], f"load of {model}: into[{name!r}]")
        if target.shape != array.shape or target.dtype.newbyteorder("=") != array.dtype:
            raise TensorMismatchError(
                f"load of {model}: into[{name!r}]: expected {dtype_name(array.dtype)} {array.shape}; "
                f"found {dtype_name(target.dtype)} {target.shape}"
            )
        targets[name] = target
    if shared := _in_common(targets, expected):
        raise TensorMismatchError(
            f"load of {model}: into=: expected separate memory for each tensor; the buffers of {shared[0]!r} and "
            f"{shared[1]!r} overlap"
        )
    return targets


def _in_common(targets: Mapping[str, Array], expected: Mapping[str, Expected]) -> tuple[str, str] | None:
    """Return the names of two buffers that have memory in common and are not to hold one stored tensor."""
    if len(targets) < 2 or _own_all(targets):
        return None
    spans: dict[object, tuple[int, int, str]] = {}
    for name, target in targets.items():
        if target.size == 0:
            continue
        low, high = _span(target)
        _, _, other = spans.setdefault((low, target.shape, target.strides, target.dtype), (low, high, name))
        if other != name and expected[other].origin != expected[name].origin:
            return other, name
    before: list[tuple[int, str]] = []
    for low, high, name in sorted(spans.values()):
        if before:
            before = [span for span in before if span[0] > low]
            for _, other in before:
                if _meet(targets[other], targets[name]):
                    return other, name
        before.append((high, name))
    return None


def _own_all(targets: Mapping[str, Array]) -> bool:
    """Tell whether all arrays are different ones, of which each has memory of its own."""
    return all(target.flags.owndata for target in targets.values()) and len(set(map(id, targets.values()))) == len(
        targets
    )


def _start(array: Array) -> int:
    return array.__array_interface__["data"][0]


def _span(array: Array) -> tuple[int, int]:
    """Return where an array's memory begins and ends."""
    if array.flags.c_contiguous:
        start = _start(array)
        return start, start + array.nbytes
    return np.lib.array_utils.byte_bounds(array)


def _meet(one: Array, other: Array) -> bool:
    if one.flags.c_contiguous and other.flags.c_contiguous:
        return True
    try:
        return np.shares_memory(one, other, max_work=cast(Any, _MOST_WORK))
    except np.exceptions.TooHardError:
        return True
