"""What models have on the hosts: tensors that follow from a name and a seed, and say so."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

WIDTHS = {"backbone": 60_000, "head": 40_000, "scale": 7}
"""Floats of each tensor: two of blocks of their own, one that travels in messages."""


def tensors(name: str, seed: int) -> dict[str, np.ndarray]:
    """Return the tensors of a version: the backbone is the name's and stays, the others are the seed's."""
    made = {tensor: _drawn(name, 0 if tensor == "backbone" else seed, width) for tensor, width in WIDTHS.items()}
    return made | {"seed": np.array([seed], np.int64)}


def seed_of(name: str, found: Mapping[str, np.ndarray]) -> int:
    """Return the seed of what was loaded.

    Raises:
        ValueError: it is nothing that was ever saved.
    """
    seed = int(found["seed"][0])
    expected = tensors(name, seed)
    wrong = sorted(t for t in expected.keys() | found.keys() if not np.array_equal(expected.get(t), found.get(t)))
    if wrong:
        raise ValueError(f"wrong bytes in {wrong} of {name!r}, which says that its seed is {seed}")
    return seed


def _drawn(name: str, seed: int, width: int) -> np.ndarray:
    random = np.random.default_rng([zlib.crc32(name.encode()), seed, width])
    return random.standard_normal(width, np.float32)
