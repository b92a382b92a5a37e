"""Arrays of any framework as NumPy's, and dtypes by name.

Rules
- No framework is imported here: an array is known by the modules of its type's bases, so that a process
  that never uses TensorFlow never loads it.
- Nothing is copied unless it must be: memory of another device, a list, a big-endian array.
- A dtype is stored by name ("float32", "bfloat16", "float8_e4m3fn"), never by a platform's code.
- What cannot be stored as plain bytes (objects, strings, records, dates) is a TensorMismatchError that says
  where it was found.
- So is what says more than its numbers: a mask, labels, missing values, a unit or other attributes of a subclass. They
  would be lost silently. NumPy's own subclasses (`memmap`, `matrix`) are the numbers that they hold.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import TensorMismatchError, TensorNotFoundError

Array = np.ndarray[Any, np.dtype[Any]]

MOST_AXES = 64
"""Of an array of NumPy."""
_NUMERIC_KINDS = "biufc"
_EXTENDED: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(cast(Any, item))
    for name, item in vars(ml_dtypes).items()
    if isinstance(item, type) and np.generic in item.__mro__
}
"""Names that NumPy does not know by itself."""
_EXTENDED_TYPES = frozenset(dtype.type for dtype in _EXTENDED.values())
_LABELLED = frozenset(("pandas", "polars", "xarray", "pint"))
"""Packages whose arrays have labels, missing values or units beside the numbers."""
_DTYPE_NAME = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
_EXPECTED = "an array of numbers or booleans"


def as_numpy(value: object, where: str) -> Array:
    """Return `value` as a NumPy array of native byte order, sharing its memory where that is possible.

    NumPy arrays, PyTorch tensors on the CPU and TensorFlow tensors on the CPU are not copied. A TensorFlow or
    Keras variable gives a snapshot: later assignments to the variable do not change it, because TensorFlow
    then writes to a new buffer. A PyTorch tensor gives a live view: later in-place changes show in it.

    Args:
        value: an array of NumPy, TensorFlow, Keras, PyTorch or CuPy, or numbers, or nested lists of them.
        where: what the array is, for the error's message, such as "tensor 'dense/kernel'".

    Raises:
        TensorMismatchError: `value` is no array of numbers.

    >>> as_numpy([[1.0, 2.0]], "tensor 'x'").shape
    (1, 2)
    """
    origins = _origins_of(value)
    _check_bare(value, origins, where)
    try:
        if "torch" in origins:
            array = _from_torch(cast(Any, value), where)
        elif "keras" in origins and hasattr(value, "value"):
            return as_numpy(cast(Any, value).value, where)
        elif "tensorflow" in origins and hasattr(value, "read_value"):
            array = np.asarray(_read(cast("_Variable", value)))
        elif "cupy" in origins:
            array = np.asarray(cast(Any, value).get())
        else:
            array = cast(Array, np.asarray(value))
    except TensorMismatchError:
        raise
    except Exception as exc:  # a type of the caller's may raise anything
        found = f"{type(value).__module__}.{type(value).__qualname__} ({exc or type(exc).__name__})"
        raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found {found}") from exc
    _check_numbers(array, type(value).__qualname__, where)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def memory_of(value: object, where: str) -> Array:
    """Return the memory of a caller's array, to be filled: never a copy, and in the byte order that it has.

    Args:
        value: an array of NumPy, a PyTorch tensor on the CPU, or another object with a writable buffer.
        where: what the array is, for the error's message.

    Raises:
        TensorMismatchError: it cannot be written, would be copied first, or has elements that share memory.

    >>> big = np.zeros(2, ">f4")
    >>> np.copyto(memory_of(big, "buffer"), [1, 2])
    >>> big.tolist()
    [1.0, 2.0]
    """
    origins, kind = _origins_of(value), type(value).__qualname__
    _check_bare(value, origins, where)
    expected = f"{where}: expected a writable array of NumPy, or a PyTorch tensor on the CPU"
    if "torch" in origins:
        array = as_numpy(value, where)
        if array.nbytes and array.ctypes.data != cast(Any, value).data_ptr():
            raise TensorMismatchError(f"{expected}; found one whose numbers have to be copied")
    else:
        try:
            array = cast(Array, np.asarray(value if isinstance(value, np.ndarray) else memoryview(cast(Any, value))))
        except (TypeError, ValueError, BufferError) as exc:
            raise TensorMismatchError(f"{expected}; found {kind}") from exc
        _check_numbers(array, kind, where)
    if not array.flags.writeable or "tensorflow" in origins:
        raise TensorMismatchError(f"{expected}; found {kind} that is read-only")
    if _overlaps_itself(array):
        raise TensorMismatchError(f"{expected}; found elements that share memory: strides {array.strides}")
    return array


def _origins_of(value: object) -> set[str]:
    return {base.__module__.partition(".")[0] for base in type(value).__mro__}


def _check_bare(value: object, origins: set[str], where: str, depth: int = 0) -> None:
    """Refuse what is more than its numbers; in lists too, where NumPy would take the numbers alone.

    Raises:
        TensorMismatchError: it is.
    """
    kind, more = type(value), ""
    if kind is np.ndarray:
        return
    if isinstance(value, list | tuple):
        if depth > MOST_AXES:
            raise TensorMismatchError(f"{where}: expected {_EXPECTED} of at most {MOST_AXES} axes; found deeper lists")
        for item in cast("Sequence[object]", value):
            if not isinstance(item, int | float | complex):
                _check_bare(item, _origins_of(item), where, depth + 1)
    elif isinstance(value, np.ma.MaskedArray):
        more = "its mask"
    elif isinstance(value, np.ndarray):
        if not kind.__module__.startswith("numpy"):
            more = ", ".join(sorted(map(str, getattr(cast(object, value), "__dict__", ()))))
    elif labelled := origins & _LABELLED:
        more = f"what {labelled.pop()} has beside its numbers"
    elif "pyarrow" in origins and getattr(value, "null_count", 0):
        more = "its missing values"
    if more:
        found = f"{kind.__qualname__}, of which {more} would be lost"
        raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found {found}")


def _check_numbers(array: Array, kind: str, where: str) -> None:
    if not _storable(array.dtype):
        raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found {kind} of dtype {array.dtype}")


def _overlaps_itself(array: Array) -> bool:
    """Tell whether elements may share memory: no slice or transpose of an array has such."""
    extent = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < extent:
            return array.size > 0
        extent = stride * (length - 1) + extent
    return False


class _Variable(Protocol):
    """A variable of TensorFlow."""

    dtype: object

    def read_value(self) -> object: ...


def _read(variable: _Variable) -> object:
    """Read a TensorFlow variable by the one operation that it takes; `read_value` runs a second one."""
    handle = getattr(variable, "handle", None)
    if handle is None:
        return variable.read_value()
    return sys.modules["tensorflow"].raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)


def dtype_name(dtype: object) -> str:
    """Name of a dtype, the same on every platform and for both byte orders.

    Raises:
        TensorMismatchError: a dtype whose values are not plain numbers, or no dtype at all.

    >>> dtype_name(np.dtype(">f4")), dtype_name(ml_dtypes.bfloat16)
    ('float32', 'bfloat16')
    """
    try:
        found = np.dtype(cast(Any, dtype))
    except TypeError as exc:
        raise TensorMismatchError(f"dtype: expected one of numbers or booleans; found {dtype!r}") from exc
    return _name_of(found)


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[np.generic]) -> str:
    if not _storable(dtype):
        raise TensorMismatchError(f"dtype: expected one of numbers or booleans; found {dtype}")
    return dtype.name


@lru_cache(maxsize=256)
def dtype_of(name: str) -> np.dtype[np.generic]:
    """Find the dtype of a name that `dtype_name` gave.

    Raises:
        TensorMismatchError: no dtype of numbers or booleans has that name.

    >>> dtype_of("float8_e4m3fn").itemsize
    1
    """
    if _DTYPE_NAME.fullmatch(str(name)) is None:  # NumPy evaluates other texts
        raise TensorMismatchError(f"dtype: expected a name such as 'float32'; found {name!r:.100}")
    try:
        found = _EXTENDED[name] if name in _EXTENDED else np.dtype(name)
    except (TypeError, ValueError) as exc:
        raise TensorMismatchError(f"dtype: expected a name such as 'float32'; found {name!r}") from exc
    if found.name != name or not _storable(found):
        raise TensorMismatchError(f"dtype: expected a name such as 'float32'; found {name!r}")
    return found


def as_bytes(array: Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory of an array in C order as bytes, copied only if the array is not C-contiguous.

    >>> as_bytes(np.array(1, dtype="int16")).tolist() == list(np.int16(1).tobytes())
    True
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def nbytes_of(name: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor, as a Python integer: it may be more than there can be.

    Raises:
        TensorMismatchError: no dtype has that name, or an axis no such length.

    >>> nbytes_of("float32", (2, 3)), nbytes_of("int8", (1 << 40, 1 << 40)) == 1 << 80
    (24, True)
    """
    itemsize = dtype_of(name).itemsize
    if shape and (len(shape) > MOST_AXES or min(shape) < 0):
        found = f"{len(shape)}: {tuple(shape[:8])}"
        raise TensorMismatchError(
            f"array of {name}: expected at most {MOST_AXES} axes of lengths from 0; found {found}"
        )
    return math.prod(shape) * itemsize


def from_bytes(buffer: NDArray[np.uint8], name: str, shape: Sequence[int]) -> Array:
    """View bytes as the array that they were; a read-only buffer gives a read-only array.

    Args:
        buffer: contiguous bytes, exactly as many as the array has.
        name: of the dtype, as `dtype_name` gives it.
        shape: lengths of the axes; empty for a scalar.

    Raises:
        TensorMismatchError: the buffer has another length, or no dtype has that name.

    >>> from_bytes(np.zeros(8, np.uint8), "float32", (2, 1)).tolist()
    [[0.0], [0.0]]
    """
    expected = nbytes_of(name, shape)
    if buffer.nbytes != expected:
        raise TensorMismatchError(
            f"array of {name} of shape {tuple(shape)}: expected {expected} bytes; found {buffer.nbytes}"
        )
    try:
        return buffer.view(dtype_of(name)).reshape(tuple(shape))
    except (ValueError, OverflowError) as exc:  # without elements, but with axes that are too long
        raise TensorMismatchError(f"array of {name}: expected the shape of an array; found {tuple(shape)}") from exc


def checked(tensors: Mapping[str, object], expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
    """Return `tensors` as NumPy arrays, if every one is known and has the dtype and shape expected of it.

    Args:
        tensors: name -> array.
        expected: name -> dtype's name and shape.

    Raises:
        TensorNotFoundError: a name that is not among the expected.
        TensorMismatchError: another dtype or shape, or no array.

    >>> list(checked({"b": [1.5]}, {"b": ("float64", (1,)), "kernel": ("float64", (3, 1))}))
    ['b']
    """
    arrays: dict[str, Array] = {}
    for name, value in tensors.items():
        if name not in expected:
            known = ", ".join(list(expected)[:8]) + (", ..." if len(expected) > 8 else "")
            raise TensorNotFoundError(f"tensor {name!r}: expected a tensor of the model ({known}); found no such")
        array = as_numpy(value, f"tensor {name!r}")
        dtype, shape = expected[name]
        if array.dtype.name != dtype or array.shape != shape:
            raise TensorMismatchError(
                f"tensor {name!r}: expected {dtype} of shape {shape}; found {array.dtype.name} of shape {array.shape}"
            )
        arrays[name] = array
    return arrays


def read_only(array: Array) -> Array:
    """View `array` without the right to write to it.

    >>> read_only(np.zeros(2)).flags.writeable
    False
    """
    view = array.view()
    view.flags.writeable = False
    return view


def _storable(dtype: np.dtype[np.generic]) -> bool:
    return dtype.kind in _NUMERIC_KINDS or dtype.type in _EXTENDED_TYPES


def _from_torch(tensor: Any, where: str) -> Array:
    """View a tensor through unsigned integers where NumPy does not know its dtype by itself."""
    torch = sys.modules["torch"]
    if not isinstance(tensor, torch.Tensor):
        raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found {type(tensor).__qualname__}")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(plain.dtype).removeprefix("torch.")
    if name not in _EXTENDED:
        return plain.numpy()
    dtype = _EXTENDED[name]
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    return plain.view(unsigned).numpy().view(dtype)
