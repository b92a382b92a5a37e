"""Pack calls and answers as messages: a pickle, and large buffers after it.

Rules
- A buffer of at least `APART_BYTES` travels after the pickle and is received where it will stay. It is copied when the
  message is made, because the caller may overwrite it. A buffer of immutable bytes is sent without a copy.
- Functions and classes of a program (`__main__`), or of a module registered with cloudpickle, travel by value.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import cloudpickle
import numpy as np

from .framing import HEADER

APART_BYTES = 1 << 14
"""Smaller buffers are cheaper within the pickle."""
PICKLE_BYTES = (1 << 32) - 1
"""Most bytes of a pickle, because of its header."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A message to send."""

    pickled: bytes
    buffers: Sequence[memoryview] = ()
    """Sent after the pickle."""

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes, without headers."""
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    def parts(self, number: int) -> Iterator[bytes | memoryview]:
        """Yield what to send for the call of this number."""
        begin = HEADER.pack(len(self.pickled), number) + self.pickled
        if self.buffers:
            sizes = struct.pack(f"<{len(self.buffers)}Q", *(buffer.nbytes for buffer in self.buffers))
            begin = HEADER.pack(len(sizes), 0) + sizes + begin
        yield begin
        yield from self.buffers


def pack(value: object) -> Packed:
    """Pack a value.

    Raises:
        ValueError: its pickle has more than `PICKLE_BYTES`.
        Exception: it cannot be pickled.

    >>> len(pack(np.zeros(100_000)).buffers)
    1
    """
    apart: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < APART_BYTES:
            return True
        apart.append(view if _is_immutable(view.obj) else memoryview(bytes(view)))
        return False

    pickled = _by_reference(value, stays)
    if pickled is None:
        apart.clear()
        pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=stays)
    if len(pickled) > PICKLE_BYTES:
        raise ValueError(
            f"expected a pickle of at most {PICKLE_BYTES} bytes; found {len(pickled)}: pass large values as arrays"
        )
    return Packed(pickled, apart)


def _by_reference(value: object, stays: Callable[[pickle.PickleBuffer], bool]) -> bytes | None:
    """Pickle a value; return None if it needs cloudpickle, which takes several times as long."""
    if cloudpickle.list_registry_pickle_by_value():
        return None
    try:
        pickled = pickle.dumps(value, 5, buffer_callback=stays)
    except (pickle.PicklingError, AttributeError, TypeError):  # such as a lambda
        return None
    return None if b"__main__" in pickled else pickled


def immutable(array: np.ndarray) -> np.ndarray:
    """Return a copy of an array that cannot be changed."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def _is_immutable(found: object) -> bool:
    while isinstance(found, np.ndarray):
        found = cast(object, found.base)
    return isinstance(found, bytes)
