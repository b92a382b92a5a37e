"""Differences between tensors of two versions. No other module of the page reads tensors.

Rules
- `differences` loads both tensors, in small groups. A method of the repository that computes differences at the shards
  can replace it: its arguments and results stay the same.
- Tensors with the same bytes are equal; NaN equals NaN then. Differences are computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...actors.client.repository import Repository
from ...store.refs import ModelRef

BINS = 64
GROUP = 32
"""Tensors that are loaded at once."""
CHUNK = 1 << 20
"""Elements that are compared at once."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """How the second tensor of a pair differs from the first."""

    equal: bool
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes: int
    """Of the second one."""
    norm: float | None = None
    """Square root of the sum of the squared differences. None for tensors that are equal or have other shapes."""
    relative: float | None = None
    """The norm, divided by the norm of the first tensor."""
    largest: float | None = None
    """Largest absolute difference."""
    changed: int | None = None
    """Elements that differ."""
    not_finite: int | None = None
    """Differences that are NaN or infinite. They count in no other figure but `changed`."""
    low: float = 0.0
    high: float = 0.0
    """Bounds of the histogram."""
    histogram: tuple[int, ...] = ()
    """Differences that are not 0, in 64 bins of one width."""


def differences(
    repository: Repository, a: ModelRef, b: ModelRef, pairs: Sequence[tuple[str, str]]
) -> Iterator[Difference]:
    """Yield the difference of each pair of tensors: the first of version `a`, the second of version `b`."""
    for begin in range(0, len(pairs), GROUP):
        group = pairs[begin : begin + GROUP]
        before = repository.load(a, tensors=list(dict.fromkeys(name for name, _ in group)))
        after = repository.load(b, tensors=list(dict.fromkeys(name for _, name in group)))
        yield from (difference(before[mine], after[theirs]) for mine, theirs in group)


def sizes(
    repository: Repository, ref: ModelRef, names: Sequence[str]
) -> Mapping[str, tuple[str, tuple[int, ...], int]]:
    """Return dtype, shape and bytes of tensors."""
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for begin in range(0, len(names), GROUP):
        for name, tensor in repository.load(ref, tensors=list(names[begin : begin + GROUP])).items():
            found[name] = (tensor.dtype.name, tensor.shape, tensor.nbytes)
    return found


def difference(before: Array, after: Array) -> Difference:
    """Return how two tensors differ.

    >>> found = difference(np.zeros(4), np.array([0.0, 3.0, 4.0, 0.0]))
    >>> found.norm, found.largest, found.changed, sum(found.histogram)
    (5.0, 4.0, 2, 2)
    """
    dtypes, shapes = (before.dtype.name, after.dtype.name), (before.shape, after.shape)
    if shapes[0] != shapes[1]:
        return Difference(False, dtypes, shapes, after.nbytes)
    if before.dtype == after.dtype and _same_bytes(before, after):
        return Difference(True, dtypes, shapes, after.nbytes)
    return _measured(before.reshape(-1), after.reshape(-1), dtypes, shapes, after.nbytes)


def _measured(
    before: Array,
    after: Array,
    dtypes: tuple[str, str],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    nbytes: int,
) -> Difference:
    squares = norm = largest = 0.0
    changed = bad = 0
    low, high = np.inf, -np.inf
    for old, new in _chunks(before, after):
        delta, finite = _delta(old, new)
        squares += float(np.square(delta).sum())
        norm += float(np.square(np.abs(old[np.isfinite(old)])).sum())
        changed += int((delta != 0).sum()) + finite.size - int(finite.sum())
        bad += finite.size - int(finite.sum())
        if (moved := delta[delta != 0]).size:
            low, high = min(low, float(moved.min())), max(high, float(moved.max()))
            largest = max(abs(low), abs(high))
    counts = np.zeros(BINS, np.int64)
    if low > high:
        low = high = 0.0
    else:
        low, high = (low - abs(low) * 0.5, high + abs(high) * 0.5) if low == high else (low, high)
        for old, new in _chunks(before, after):
            delta, _ = _delta(old, new)
            counts += np.histogram(delta[delta != 0], BINS, (low, high))[0]
    return Difference(
        False,
        dtypes,
        shapes,
        nbytes,
        norm=float(np.sqrt(squares)),
        relative=float(np.sqrt(squares / norm)) if norm else None,
        largest=largest,
        changed=changed,
        not_finite=bad,
        low=low,
        high=high,
        histogram=tuple(counts.tolist()),
    )


def _chunks(before: Array, after: Array) -> Iterator[tuple[Array, Array]]:
    for begin in range(0, before.size, CHUNK):
        yield _wide(before[begin : begin + CHUNK]), _wide(after[begin : begin + CHUNK])


def _wide(values: Array) -> Array:
    return values.astype(np.complex128 if np.issubdtype(values.dtype, np.complexfloating) else np.float64)


def _delta(old: Array, new: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the differences, 0 where one is not finite, and which are; NaN in both places is no difference."""
    with np.errstate(all="ignore"):
        delta = np.abs(new - old) if np.iscomplexobj(new) or np.iscomplexobj(old) else new - old
    finite = np.isfinite(delta)
    same = (old == new) | (np.isnan(old) & np.isnan(new))
    return np.where(finite, delta, 0.0), finite | same


def _same_bytes(before: Array, after: Array) -> bool:
    if before.__array_interface__["data"] == after.__array_interface__["data"]:
        return True  # one mapped block
    old, new = (np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (before, after))
    step = CHUNK * 16
    return all(np.array_equal(old[i : i + step], new[i : i + step]) for i in range(0, old.size, step))
