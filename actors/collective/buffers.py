"""Arrays of any framework as the bytes that a group carries.

Rules
- Nothing is copied: the bytes are the array's own memory. What has no such memory (not contiguous, on another device,
  no numbers) is a TensorMismatchError that says where it was found.
- TensorFlow's tensors can be read, and not written to: it takes them for constants.
- An array is known by the modules of its type's bases; no framework is imported here. What is of none of the known ones
  says by DLPack or as a buffer where it lies.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ...store.arrays import Array, as_numpy, dtype_name
from ...store.errors import TensorMismatchError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_CPU = 1
"""DLPack's number of it."""
_EXPECTED = "a contiguous array of numbers in the memory of the CPU"


def readable(array: object, where: str) -> Bytes:
    """View an array's memory as bytes.

    Args:
        array: contiguous, of NumPy, PyTorch, TensorFlow or Keras, or anything with DLPack or a buffer, in the memory
            of the CPU.
        where: what it is, for errors.

    Raises:
        TensorMismatchError: it is none such.

    >>> readable(np.array([[1, 2], [3, 4]], np.int16)[1], "tensor 'x'").tolist()
    [3, 0, 4, 0]
    """
    return flat(array, where).view(np.uint8)


def writable(array: object, where: str) -> Bytes:
    """View an array's memory as bytes that may be written to; arguments and errors as in `readable`."""
    return typed(array, where).view(np.uint8)


def typed(array: object, where: str) -> Array:
    """View an array's memory as a writable 1-d array of its own dtype; arguments and errors as in `readable`.

    >>> typed(np.zeros((2, 3), np.float32), "gradient 'w'").shape
    (6,)
    """
    found = flat(array, where)
    if not found.flags.writeable:
        raise TensorMismatchError(f"{where}: expected a writable array; found a read-only one")
    return found


def flat(array: object, where: str) -> Array:
    """View an array's memory as a 1-d array of its own dtype; arguments and errors as in `readable`."""
    # no matrix, no mask
    found = np.asarray(cast(Array, array)) if isinstance(array, np.ndarray) else _view(array, where)
    if not found.dtype.isnative:
        raise TensorMismatchError(f"{where}: expected this machine's byte order; found {found.dtype}")
    dtype_name(found.dtype) if found.dtype.kind in "biufc" else as_numpy(found, where)  # numbers only
    if not found.flags.c_contiguous:
        raise TensorMismatchError(f"{where}: expected a contiguous array; found strides {found.strides}")
    return found.reshape(-1)


def _view(array: Any, where: str) -> Array:
    """View an array that is not NumPy's."""
    origins = {base.__module__.partition(".")[0] for base in type(array).__mro__}
    if "torch" in origins:
        return _of_torch(array, where)
    if "keras" in origins and hasattr(array, "value"):
        return flat(array.value, where)
    if "tensorflow" in origins:
        if "CPU" not in str(array.device):
            raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found one on {array.device}")
        found = as_numpy(array, where).view()
        found.flags.writeable = False
        return found
    try:
        if hasattr(array, "__dlpack_device__"):
            if array.__dlpack_device__()[0] != _CPU:
                raise TypeError("it is on another device")
            return np.from_dlpack(array)
        return np.asarray(memoryview(array))
    except (BufferError, RuntimeError, TypeError, ValueError) as exc:
        raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found {type(array).__name__}: {exc}") from exc


def _of_torch(tensor: Any, where: str) -> Array:
    if str(getattr(tensor, "device", "no")) != "cpu":
        found = getattr(tensor, "device", type(tensor).__name__)
        raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found one on {found}")
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        found = tensor.stride() if str(tensor.layout) == "torch.strided" else tensor.layout
        raise TensorMismatchError(f"{where}: expected a contiguous array; found strides {found}")
    if tensor.is_conj() or tensor.is_neg():
        raise TensorMismatchError(f"{where}: expected the values in memory; found a lazily conjugated or negated view")
    return as_numpy(tensor, where)
