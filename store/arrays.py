"""Arrays of any framework as NumPy's, and dtypes by name.

Rules
- No framework is imported here: an array is known by the modules of its type's bases, so that a process
  that never uses TensorFlow never loads it.
- Nothing is copied unless it must be: memory of another device, a list, a big-endian array.
- A dtype is stored by name ("float32", "bfloat16", "float8_e4m3fn"), never by a platform's code.
- What cannot be stored as plain bytes (objects, strings, records, dates) is a TensorMismatchError that says
  where it was found.
- So is what says more than its numbers: a mask, labels, missing values, a unit or other attributes of a subclass. They
  would be lost silently. NumPy's own subclasses (`memmap`, `matrix`) are the numbers that they hold. Memory that is to
  be filled loses nothing but a mask.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import TensorMismatchError, TensorNotFoundError

if TYPE_CHECKING:
    import torch

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
_KIND: Callable[[object], type[object]] = type
_DTYPE_NAME = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
_EXPECTED = "an array of numbers or booleans"
_FILLED = "expected a writable NumPy array or PyTorch CPU tensor"


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
    kind = type(value)
    origins = _origins_of(kind)
    if not _is_bare(kind):
        _check_bare(value, where)
    try:
        if "torch" in origins:
            array = _from_torch(_plain(value, where))
        elif "keras" in origins and hasattr(value, "value"):
            return as_numpy(cast(Any, value).value, where)
        elif "tensorflow" in origins and hasattr(value, "read_value"):
            array = np.asarray(_read(cast("_Variable", value)))
        elif "cupy" in origins:
            array = np.asarray(cast(Any, value).get())
        else:
            array = cast(Array, np.asarray(value))
    except (TensorMismatchError, MemoryError):
        raise
    except Exception as exc:  # a type of the caller's may raise anything
        raise _no_numbers(value, exc, where) from exc
    _check_numbers(array, kind.__qualname__, where)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def memory_of(value: object, where: str) -> Array:
    """Return the memory of a caller's array, to be filled: never a copy, and in the byte order that it has.

    Args:
        value: an array of NumPy, a PyTorch tensor on the CPU, or another object that shows writable memory.
        where: what the array is, for the error's message.

    Raises:
        TensorMismatchError: it cannot be written, would be copied first, has a mask, or elements that share memory.

    >>> big = np.zeros(2, ">f4")
    >>> np.copyto(memory_of(big, "buffer"), [1, 2])
    >>> big.tolist()
    [1.0, 2.0]
    """
    kind = type(value)
    array = cast(Array, value) if kind is np.ndarray else _shown_memory(value, where)
    if array.dtype.kind not in _NUMERIC_KINDS:
        _check_numbers(array, kind.__qualname__, where)
    flags = array.flags
    if not flags.writeable:
        raise TensorMismatchError(f"{where}: {_FILLED}; found a read-only {kind.__qualname__}")
    if not flags.c_contiguous and _overlaps_itself(array):
        raise TensorMismatchError(f"{where}: {_FILLED}; found elements that share memory: strides {array.strides}")
    return array


def _shown_memory(value: object, where: str) -> Array:
    """Return the memory that an array of another kind, or another object, says it has."""
    origins, name = _origins_of(type(value)), type(value).__qualname__
    if "torch" in origins:
        try:
            plain = _plain(value, where)
            if plain is value or plain.data_ptr() == cast(Any, value).data_ptr():
                return _from_torch(plain)
        except (TensorMismatchError, MemoryError):
            raise
        except Exception as exc:
            raise _no_numbers(value, exc, where) from exc
        raise TensorMismatchError(f"{where}: {_FILLED}; found a tensor whose numbers have to be copied")
    if isinstance(value, np.ma.MaskedArray):
        raise TensorMismatchError(f"{where}: {_FILLED}; found {name}: its mask would not be filled")
    if "tensorflow" in origins:
        raise TensorMismatchError(f"{where}: {_FILLED}; found a read-only {name}")
    try:
        return cast(Array, np.asarray(value if isinstance(value, np.ndarray) else memoryview(cast(Any, value))))
    except (TypeError, ValueError, BufferError):
        pass
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # it says that it may copy
            return cast(Array, np.asarray(cast(Any, value), copy=False))
    except MemoryError:
        raise
    except Exception as exc:
        raise TensorMismatchError(f"{where}: {_FILLED}; found {name}") from exc


def _no_numbers(value: object, exc: Exception, where: str) -> TensorMismatchError:
    found = f"{type(value).__module__}.{type(value).__qualname__} ({exc or type(exc).__name__})"
    return TensorMismatchError(f"{where}: expected {_EXPECTED}; found {found}")


@lru_cache(maxsize=512)
def _origins_of(kind: type) -> frozenset[str]:
    """Return the packages that a type and its bases are of."""
    return frozenset(base.__module__.partition(".")[0] for base in kind.__mro__)


@lru_cache(maxsize=512)
def _is_bare(kind: type[object]) -> bool:
    """Tell whether a type's values never are more than their numbers, so that none has to be looked at."""
    looked_at = issubclass(kind, list | tuple | np.ndarray) or not _origins_of(kind).isdisjoint(_LABELLED | {"pyarrow"})
    return kind is np.ndarray or not looked_at


def _check_bare(value: object, where: str, depth: int = 0) -> None:
    """Refuse what is more than its numbers; in lists too, where NumPy would take the numbers alone.

    Raises:
        TensorMismatchError: it is.
    """
    kind, more = type(value), ""
    if isinstance(value, list | tuple):
        if depth > MOST_AXES:
            raise TensorMismatchError(f"{where}: expected {_EXPECTED} of at most {MOST_AXES} axes; found deeper lists")
        items = cast("Sequence[object]", value)
        kinds: set[type[object]] = set(map(_KIND, items))
        if all(map(_is_bare, kinds)):
            return
        for item in items:
            if not _is_bare(type(item)):
                _check_bare(item, where, depth + 1)
    elif isinstance(value, np.ma.MaskedArray):
        more = "its mask"
    elif isinstance(value, np.ndarray):
        if not kind.__module__.startswith("numpy"):
            more = ", ".join(sorted(map(str, getattr(cast(object, value), "__dict__", ()))))
    elif labelled := _origins_of(kind) & _LABELLED:
        more = f"the labels, missing values or units of {min(labelled)}"
    elif getattr(value, "null_count", 0):  # of PyArrow
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
        raise TensorMismatchError(f"dtype: expected a dtype of numbers or booleans; found {dtype!r}") from exc
    return _name_of(found)


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[np.generic]) -> str:
    if not _storable(dtype):
        raise TensorMismatchError(f"dtype: expected a dtype of numbers or booleans; found {dtype}")
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
            f"array of {name}: expected at most {MOST_AXES} axes with lengths of at least 0; found {found}"
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
            raise TensorNotFoundError(f"tensor {name!r}: expected a tensor of the model ({known}); found no such name")
        array = as_numpy(value, f"tensor {name!r}")
        dtype, shape = expected[name]
        found = _name_of(array.dtype)
        if found != dtype or array.shape != shape:
            raise TensorMismatchError(
                f"tensor {name!r}: expected {dtype} of shape {shape}; found {found} of shape {array.shape}"
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


def _plain(tensor: object, where: str) -> torch.Tensor:
    """Return a tensor of PyTorch whose memory is its numbers: the same memory, but where they have to be copied."""
    if not isinstance(tensor, sys.modules["torch"].Tensor):
        raise TensorMismatchError(f"{where}: expected {_EXPECTED}; found {type(tensor).__qualname__}")
    plain = cast("torch.Tensor", tensor).detach()
    if plain.device.type == "cpu" and not plain.is_conj() and not plain.is_neg():
        return plain
    return plain.cpu().resolve_conj().resolve_neg()


@lru_cache(maxsize=64)
def _extended_of(dtype: object) -> np.dtype[np.generic] | None:
    """Return the dtype that stands for one of PyTorch's; None: NumPy knows it by itself."""
    return _EXTENDED.get(str(dtype).removeprefix("torch."))


def _from_torch(plain: torch.Tensor) -> Array:
    """View a tensor through unsigned integers where NumPy does not know its dtype by itself."""
    dtype = _extended_of(plain.dtype)
    if dtype is None:
        return plain.numpy()
    torch = sys.modules["torch"]
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    return plain.view(unsigned).numpy().view(dtype)
