"""Read-only arrays that are to be written to: the arguments of Ray's actors are such.

Rules
- Their bytes are those of a stored object, which others read, in other processes too. Nobody writes there.
- So the array object, the caller's own, is given other memory: a copy, which it may write to. Whoever holds the object
  sees what is written. A `memoryview` or a tensor made of it before sees the old bytes, which stay valid.
- Where another array looks at the same bytes, the result would be lost to it. Such an array is refused, and so is one
  that somebody made read-only on purpose.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, cast

import numpy as np

from ....store.arrays import Array
from ....store.errors import TensorMismatchError
from ..buffers import flat


def replace_memory(array: Array, where: str) -> None:
    """Give a read-only array that was deserialised without a copy memory of its own, with the same values.

    Args:
        array: contiguous, of NumPy.
        where: what it is, for errors.

    Raises:
        TensorMismatchError: it is none such, or another array looks at the same bytes.

    >>> array = np.frombuffer(np.arange(3).tobytes(), int).reshape(3)
    >>> array.flags.writeable, replace_memory(array, "x"), array.flags.writeable, array.tolist()
    (False, None, True, [0, 1, 2])
    """
    flat(array, where)
    base = cast(object, array.base)
    expected = f"{where}: expected a writable array, or an array that deserialisation made read-only"
    if type(array) is not np.ndarray or not _is_of_buffer(base):
        raise TensorMismatchError(f"{expected}; found an array made read-only in another way: copy it")
    del base
    if _looking(array) > _looking(np.frombuffer(b"\0", np.uint8).reshape(1)):
        raise TensorMismatchError(f"{expected}; found another array that uses the same memory: copy it")
    # A buffer of the array, such as a memoryview, keeps the array alone; so the array keeps the bytes.
    weakref.finalize(array, _nothing, array.base).atexit = False
    copied = cast(Any, array.__reduce__()[2])
    array.__setstate__(copied)


def is_read_only(tensor: object) -> bool:
    """Tell whether something is an array of NumPy that cannot be written to."""
    return isinstance(tensor, np.ndarray) and not cast(Array, tensor).flags.writeable


def _is_of_buffer(base: object) -> bool:
    """Tell whether what an array is a view of is itself an array, read-only, on memory that is no array's."""
    if type(base) is not np.ndarray:
        return False
    found = cast(Array, base)
    return not found.flags.writeable and found.base is not None and not isinstance(found.base, np.ndarray)


def _looking(array: Array) -> int:
    """Count who holds what the array is a view of; other views of it do."""
    return sys.getrefcount(array.base)


def _nothing(_: object) -> None:
    pass
