"""The same as `codes`, for tensors of CuPy: they are quantised on the GPU, and only the codes come to the host.

Rules
- Codes and errors are the bits that the host would give: each operation is rounded once, never fused.
- What is per group, minima, maxima, scales and errors, is computed or kept on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from ..arrays import Array
from .groups import Floats, Layout
from .kernels import Scales

DTYPES = ("float16", "float32", "float64")
"""Those that CuPy's kernels know, of the ones that can be quantised."""
_BODY = """
    const long long group = by_column ? i % columns : i / columns;
    const double rounded = rint(__dmul_rn(__dsub_rn((double)(WIDE)value, low[group]), inverse[group]));
    code = (C)rounded;
    const T decoded = (T)(WIDE)__dadd_rn(low[group], __dmul_rn(rounded, step[group]));
    // The bits of numbers that are not negative have the order of the numbers.
    const unsigned long long error = __double_as_longlong(fabs(__dsub_rn((double)(WIDE)value, (double)(WIDE)decoded)));
    if (error > worst[group]) atomicMax(&worst[group], error);
"""


def is_cupy(array: object) -> bool:
    """Say whether an array is CuPy's, without loading CuPy.

    >>> is_cupy(np.zeros(3))
    False
    """
    return any(base.__module__.partition(".")[0] == "cupy" for base in type(array).__mro__)


def range_of(flat: Any, layout: Layout, wide: np.dtype[np.generic]) -> tuple[Floats, Floats]:
    """Find the lowest and the highest value of each group; NaN or infinite if one of its values is.

    Args:
        flat: CuPy array of one axis.
        layout: of its groups.
        wide: not needed here; `codes.range_of` reads values in this type.
    """
    low, high = np.full(layout.groups, np.inf), np.full(layout.groups, -np.inf)
    for part in layout.parts:
        values = flat[part.data].reshape(part.rows, part.columns)
        lowest, highest = part.spread(low), part.spread(high)
        np.minimum(lowest, values.min(axis=1 - part.axis).get(), out=lowest)
        np.maximum(highest, values.max(axis=1 - part.axis).get(), out=highest)
        part.gather(lowest, low, np.minimum)
        part.gather(highest, high, np.maximum)
    return low, high


def codes_of(flat: Any, layout: Layout, scales: Scales, wide: np.dtype[np.generic], out: Array) -> Floats:
    """Write the codes, and give the largest error of each group.

    Args:
        flat: CuPy array of one axis.
        layout: of its groups.
        scales: of the groups.
        wide: type to which a decoded value is rounded before it is rounded to the tensor's.
        out: on the host; the only array as long as `flat` that leaves the GPU.
    """
    cupy: Any = import_module("cupy")
    codes = cupy.empty(flat.size, out.dtype)
    worst = np.zeros(layout.groups)
    for part in layout.parts:
        spread = Scales(part.spread(scales.low), part.spread(scales.step))
        numbers = [cupy.asarray(each) for each in (spread.low, spread.step, spread.inverse)]
        found = cupy.zeros(len(spread.low), np.uint64)
        _kernel(wide.name)(flat[part.data], *numbers, part.columns, bool(part.axis), codes[part.data], found)
        errors = part.spread(worst)
        np.maximum(errors, found.get().view(np.float64), out=errors)
        part.gather(errors, worst, np.maximum)
    codes.get(out=out)
    return worst


@lru_cache(maxsize=2)
def _kernel(wide: str) -> Callable[..., object]:
    """Return the kernel that rounds to a type: CuPy knows no type that only a number has."""
    cupy: Any = import_module("cupy")
    given = "T value, raw float64 low, raw float64 step, raw float64 inverse, int64 columns, bool by_column"
    body = _BODY.replace("WIDE", {"float32": "float", "float64": "double"}[wide])
    return cupy.ElementwiseKernel(given, "C code, raw uint64 worst", body, f"tensorvine_quantize_{wide}")
