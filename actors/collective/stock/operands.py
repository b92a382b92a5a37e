"""Tensors that one call takes together, of NumPy, PyTorch or CuPy.

Rules
- They have one dtype and one shape. Nothing is broadcast and nothing cast, which NumPy and PyTorch would do.
- Those that are written to have no memory in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ....store.arrays import as_numpy
from ....store.errors import TensorMismatchError


def check_alike(tensors: Mapping[str, object], where: str) -> None:
    """Refuse tensors of several dtypes or shapes.

    Args:
        tensors: by what they are, for the error; all are to be as the first.
        where: names the call.

    Raises:
        TensorMismatchError: names the first that differs.

    >>> check_alike({"tensor": np.zeros(3), "tensor_list[0]": np.ones(3)}, "allgather")
    >>> check_alike({"tensor": np.zeros(3), "tensor_list[0]": np.ones((1, 3))}, "allgather")
    Traceback (most recent call last):
    ...
    tensorvine.store.errors.TensorMismatchError: allgather: tensor_list[0]: expected float64 of shape (3,), as tensor \
has; found float64 of shape (1, 3)
    """
    kinds = {what: _kind(tensor, f"{where}: {what}") for what, tensor in tensors.items()}
    first, expected = next(iter(kinds.items()))
    for what, found in kinds.items():
        if found != expected:
            raise TensorMismatchError(f"{where}: {what}: expected {expected}, as {first} has; found {found}")


def check_apart(tensors: Mapping[str, object], where: str) -> None:
    """Refuse contiguous tensors that have memory in common; arguments and errors as in `check_alike`.

    >>> check_apart({"a": np.zeros(2), "b": np.zeros(2)}, "allgather")
    """
    spans = sorted((*_span(tensor), what) for what, tensor in tensors.items())
    for (_, end, what), (start, _, other) in pairwise(spans):
        if start < end:
            raise TensorMismatchError(f"{where}: expected separate memory for each; {what} and {other} overlap")


def copy(tensor: Any) -> object:
    """Copy a tensor into contiguous memory."""
    return tensor.detach().contiguous().clone() if hasattr(tensor, "detach") else tensor.copy()


def apart_from(outputs: Sequence[object], rank: int, source: Any) -> object:
    """Return contiguous memory with a tensor's values that stays while all outputs but the rank's are written to.

    It is the tensor itself where that will do, otherwise a copy.

    >>> outputs = [np.zeros(2), np.zeros(2)]
    >>> [apart_from(outputs, 1, source) is source for source in (np.ones(2), outputs[1], outputs[0], np.ones(4)[::2])]
    [True, True, False, False]
    """
    if hasattr(source, "data_ptr"):
        plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
    else:
        plain = source.flags.c_contiguous
    if plain:
        start, end = _span(source)
        others = [_span(output) for place, output in enumerate(outputs) if place != rank]
        if all(end <= first or last <= start for first, last in others):
            return source
    made = copy(outputs[rank])
    fill(made, source)
    return made


def fill(target: Any, source: Any) -> None:
    """Copy values into a contiguous tensor of the same dtype and shape, of the same or of the other framework."""
    if str(getattr(target, "device", "cpu")) == "cpu":
        as_numpy(target, "target")[...] = as_numpy(source, "source")  # a view of a tensor's memory
    elif hasattr(target, "copy_"):
        import torch

        target.detach().copy_(torch.as_tensor(source))
    else:
        target[...] = source


def first(tensor: Any, count: int, where: str) -> object:
    """View the first elements of a contiguous tensor; 0: it as it is.

    Raises:
        ValueError: it has not so many.
    """
    if not count:
        return tensor
    found = math.prod(tensor.shape)
    if not 0 < count <= found:
        raise ValueError(f"{where}: expected up to {found} elements, as the tensor has; found {count}")
    return tensor.reshape(-1)[:count]


def _kind(tensor: Any, where: str) -> str:
    """Say dtype and shape in words, the same ones for all frameworks."""
    dtype, shape = getattr(tensor, "dtype", None), getattr(tensor, "shape", None)
    if dtype is None or shape is None:
        raise TensorMismatchError(f"{where}: expected an array; found {type(tensor).__name__}")
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def _span(tensor: Any) -> tuple[int, int]:
    """Tell where the bytes of a contiguous tensor begin and end."""
    if hasattr(tensor, "data_ptr"):
        start = tensor.data_ptr()
    else:
        start = tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data.ptr
    return start, start + tensor.nbytes
