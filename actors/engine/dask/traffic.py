"""What the engine's connections carry: calls of any size, arrays beside the pickle, and functions and classes by value.

Rules
- An array is copied before it is sent, as the caller may overwrite it at once. One that nobody can change, for it lies
  in `bytes`, as blocks do, is sent from where it lies.
- How many calls are carried out at once is the actor's to limit; a connection takes all.
"""

from __future__ import annotations

import pickle
from typing import cast

import cloudpickle
import numpy as np

from ..engine import GROUPS
from ..sockets.traffic import Packed, Traffic

APART_BYTES = 1 << 14
"""A buffer of so many stands beside the pickle; a smaller one is cheaper in it."""
_NO_LIMIT = 1 << 62


def pack(value: object) -> Packed:
    """Pack a value."""
    apart: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < APART_BYTES:
            return True
        apart.append(view if _is_fixed(view.obj) else memoryview(bytes(view)))
        return False

    return Packed(cloudpickle.dumps(value, protocol=5, buffer_callback=stays), apart)


def fixed(array: np.ndarray) -> np.ndarray:
    """Return a copy that nobody can change."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def _is_fixed(found: object) -> bool:
    while isinstance(found, np.ndarray):
        found = cast(object, found.base)
    return isinstance(found, bytes)


ENGINE_CALLS = Traffic(
    call_bytes=(1 << 32) - 1,
    answer_bytes=(1 << 32) - 1,
    buffers=True,
    under_way=dict.fromkeys(GROUPS, _NO_LIMIT),
    connections=1 << 16,
    unread_bytes=_NO_LIMIT,
    unsent_bytes=_NO_LIMIT,
    asks_for_life=False,
    welcome_s=float("inf"),
    pack=pack,
)
"""Welcomes and signs of life may take as long as a method blocks its group: who waits for an answer has a limit."""
