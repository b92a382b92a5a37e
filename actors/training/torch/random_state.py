"""The states of Python's and NumPy's global random generators, as JSON-like facts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from ....store.values import decode, encode


def random_facts() -> dict[str, object]:
    """Return the states of Python's and NumPy's global generators."""
    kind, key, *rest = np.random.get_state()
    return {
        "python": encode(random.getstate(), "Python's random state"),
        "numpy": [kind, np.asarray(key).tolist(), *rest],
    }


def set_random(facts: Mapping[str, object]) -> None:
    """Set Python's and NumPy's global generators to what `random_facts` gave."""
    random.setstate(cast("tuple[object, ...]", decode(facts["python"])))
    kind, key, *rest = cast("tuple[str, Sequence[int], int, int, float]", facts["numpy"])
    state = (kind, np.asarray(key, np.uint32), *rest)
    np.random.set_state(cast("tuple[str, np.ndarray, int, int, float]", state))
