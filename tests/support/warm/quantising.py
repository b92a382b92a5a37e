"""Asked for by name in a fork server: the loops of `Quantize` are compiled before shards are forked, which
takes 2 to 3 s of a core in each that quantises."""

from __future__ import annotations

import numpy as np
from tensorvine.store import Quantize


def install() -> None:
    """Have the loops compiled, by what needs them."""
    for dtype in (np.float32, np.float64):
        array = np.linspace(-1, 1, 1 << 18, dtype=dtype).reshape(-1, 64)
        for codec in (Quantize(8), Quantize(8, per="channel")):
            codec.decode(codec.encode(array))
