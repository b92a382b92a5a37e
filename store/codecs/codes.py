"""From the values of a tensor to codes of few bits and back, group by group (Check-QZP, equations 1 and 2).

Rules
- Half-precision values are widened to float32 in small pieces; everything else is read where it lies.
- What a code decodes to is rounded to the tensor's dtype before it is compared with the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import ml_dtypes
import numpy as np

from ..arrays import Array
from .groups import Floats, Layout, Part, tiles
from .kernels import Scales, dequantize, extremes, quantize

WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtypes that can be quantised, and the type in which their minimum and scale are stored."""
LEAST_STEP = 1e-307
"""The reciprocal of a step much smaller than this is infinite."""


def _tiles(flat: Array, part: Part, wide: np.dtype[np.generic]) -> Iterator[tuple[Array, slice, slice]]:
    """Return the elements of a part in the wide type, with their rows and columns: all at once, or as small copies."""
    values = flat[part.data].reshape(part.rows, part.columns)
    if values.dtype == wide:
        yield values, slice(0, part.rows), slice(0, part.columns)
        return
    for rows, columns in tiles(part.rows, part.columns):
        yield values[rows, columns].astype(wide), rows, columns


def range_of(flat: Array, layout: Layout, wide: np.dtype[np.generic]) -> tuple[Floats, Floats]:
    """Find the lowest and the highest value of each group."""
    low, high = np.full(layout.groups, np.inf), np.full(layout.groups, -np.inf)
    for part in layout.parts:
        lowest, highest = part.spread(low), part.spread(high)
        for values, rows, columns in _tiles(flat, part, wide):
            extremes(values, part.axis, *(each[columns if part.axis else rows] for each in (lowest, highest)))
        part.gather(lowest, low, np.minimum)
        part.gather(highest, high, np.maximum)
    return low, high


def scales_of(low: Floats, high: Floats, levels: int, wide: np.dtype[np.generic]) -> tuple[Scales | None, str]:
    """Choose each group's scale (equation 1), or say why there is none.

    Args:
        low: lowest values; NaN or infinite if one of the group's values is.
        high: highest values.
        levels: the highest code.
        wide: type in which the scale is stored.

    >>> scales_of(np.array([-1.0]), np.array([2.0]), 3, np.dtype("float32"))
    (Scales(low=array([-1.]), step=array([1.])), '')
    >>> scales_of(np.array([-1.0]), np.array([np.nan]), 3, np.dtype("float32"))
    (None, 'it contains NaN or infinity, or its range overflows')
    """
    width = high - low
    if not np.isfinite(width).all():
        return None, "it contains NaN or infinity, or its range overflows"
    step = (width / levels).astype(wide)
    short = step.astype(np.float64) * levels < width
    step = np.nextafter(step, wide.type(np.inf), out=step, where=short).astype(np.float64)
    if ((step > 0) & (step < LEAST_STEP)).any():
        return None, "its range is too narrow for the number of codes"
    return Scales(low, step), ""


def codes_of(flat: Array, layout: Layout, scales: Scales, wide: np.dtype[np.generic], out: Array) -> Floats:
    """Write the codes, and give the largest error of each group.

    Args:
        flat: finite values of one axis.
        layout: of its groups.
        scales: of the groups.
        wide: float32 or float64, see `WIDE`.
        out: uint8 or uint16, as long as `flat`.
    """
    worst = np.zeros(layout.groups)
    for part in layout.parts:
        spread = Scales(part.spread(scales.low), part.spread(scales.step))
        found = part.spread(worst)
        written = out[part.data].reshape(part.rows, part.columns)
        for values, rows, columns in _tiles(flat, part, wide):
            groups = columns if part.axis else rows
            errors = quantize(values, written[rows, columns], spread.of(groups), part.axis)
            if flat.dtype != wide:
                decoded = np.empty_like(values)
                dequantize(written[rows, columns], decoded, spread.of(groups), part.axis)
                decoded = decoded.astype(flat.dtype).astype(wide)
                errors = np.abs(np.subtract(values, decoded, dtype=np.float64)).max(axis=1 - part.axis)
            found[groups] = np.maximum(found[groups], errors)
        part.gather(found, worst, np.maximum)
    return worst


def within_half_a_step(worst: Floats, scales: Scales, largest: Floats, dtype: np.dtype[np.generic]) -> bool:
    """Check the largest error of each group.

    Args:
        worst: largest error of each group.
        scales: of the groups.
        largest: largest magnitude of each group.
        dtype: of the tensor. Rounding to it adds half a unit in the last place; for float64 tensors, whose
            arithmetic has no more digits than they have, two operations before it add one each.

    >>> one = np.ones(1)
    >>> within_half_a_step(0.6 * one, Scales(0 * one, one), one, np.dtype("float32"))
    False
    """
    relative, least = _unit_in_last_place(dtype)
    unit = np.maximum(largest * relative, least)
    return bool((worst <= scales.step / 2 + unit * (2.5 if dtype == np.float64 else 0.5)).all())


@lru_cache(maxsize=8)
def _unit_in_last_place(dtype: np.dtype[np.generic]) -> tuple[float, float]:
    """Return the largest relative unit in the last place, and the smallest absolute one."""
    facts = cast(Any, ml_dtypes.finfo(dtype))
    return float(facts.eps), float(facts.smallest_subnormal)


def values_of(codes: Array, flat: Array, layout: Layout, scales: Scales, wide: np.dtype[np.generic]) -> None:
    """Write the value of each code."""
    for part in layout.parts:
        spread = Scales(part.spread(scales.low), part.spread(scales.step))
        given = codes[part.data].reshape(part.rows, part.columns)
        out = flat[part.data].reshape(part.rows, part.columns)
        if flat.dtype == wide:
            dequantize(given, out, spread, part.axis)
            continue
        for rows, columns in tiles(part.rows, part.columns):
            decoded = np.empty(out[rows, columns].shape, wide)
            dequantize(given[rows, columns], decoded, spread.of(columns if part.axis else rows), part.axis)
            out[rows, columns] = decoded.astype(flat.dtype)
