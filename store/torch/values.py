"""What of a module's or an optimizer's state is no plain tensor, as JSON text and arrays.

Rules
- Tensors within a value are written as arrays beside the text, quantised ones as their integers and scales.
- Under the name of a value, the text is the array "NAME:json", and what is beside it "NAME:0", "NAME:1" and so on.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (torch's types are partial)

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast, final

import numpy as np
import torch
from torch import nn

from ..arrays import Array, as_bytes, as_numpy
from ..bounds import jsontext
from ..errors import CorruptDataError, TensorMismatchError
from ..facts import Json
from ..values import decode, encode


@final
class _PerTensor(TypedDict):
    """A quantised tensor of one scale: which of the arrays its integers are, and what they count."""

    dtype: str
    integers: int
    scale: float
    zero_point: int


@final
class _PerChannel(TypedDict):
    """A quantised tensor with scales along an axis; these are an array, and the next one is of the zeros."""

    dtype: str
    integers: int
    scales: int
    axis: int


def packed(name: str, value: object) -> dict[str, Array]:
    """Write a value as arrays under names of its own.

    Args:
        name: of the value.
        value: None, numbers, strings, bytes, tensors, arrays, dtypes and devices of PyTorch, and lists, tuples, dicts
            and sets of such.

    Raises:
        TensorMismatchError: something else; says where.

    >>> {name: array.tobytes() for name, array in packed("count", {"seen": (3, None)}).items()}
    {'count:json': b'{"value":{"dict":[["seen",{"tuple":[3,null]}]]}}'}
    """
    arrays: list[Array] = []
    facts = encode(value, name, lambda item, where: _written(item, where, arrays))
    try:
        text = json.dumps({"value": facts}, separators=(",", ":"), ensure_ascii=False)
    except ValueError as exc:  # an integer of more digits than Python writes
        raise TensorMismatchError(f"value {name!r}: expected a value that JSON can represent; found {exc}") from exc
    found: dict[str, Array] = {f"{name}:json": np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)}
    return {**found, **{f"{name}:{place}": array for place, array in enumerate(arrays)}}


def unpacked(name: str, arrays: Mapping[str, object]) -> object:
    """Read what `packed` wrote; tensors in it have memory of their own.

    Raises:
        CorruptDataError: it is not that.

    >>> unpacked("count", packed("count", {"seen": (3, None)}))
    {'seen': (3, None)}
    """
    if f"{name}:json" not in arrays:
        raise CorruptDataError(f"value {name!r}: expected its text {name + ':json'!r}; found no such array")
    text = as_bytes(as_numpy(arrays[f"{name}:json"], f"text of value {name!r}")).tobytes()
    found = jsontext.mapping(text, f"value {name!r}")
    beside: list[Array] = []
    while f"{name}:{len(beside)}" in arrays:
        beside.append(as_numpy(arrays[f"{name}:{len(beside)}"], f"part of value {name!r}"))
    try:
        return decode(found["value"], lambda kind, content: _read(kind, content, beside))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as exc:
        raise CorruptDataError(f"value {name!r}: expected the JSON text of a state; found {text[:80]!r}") from exc


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor of the CPU with memory of its own.

    >>> as_tensor(np.ones((2, 1), "float16")).shape
    torch.Size([2, 1])
    """
    dtype = dtype_called(f"torch.{array.dtype.name}")
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    raw = torch.from_numpy(as_bytes(array).copy())  # torch wants memory that it may write to
    return raw.view(dtype).reshape(array.shape)


def _written(value: object, where: str, arrays: list[Array]) -> Json | None:
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return {"quantized": _scales(value, where, arrays)}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        arrays.append(as_numpy(cast("torch.Tensor | Array", value), where))
        if isinstance(value, nn.Parameter):
            return {"parameter": [len(arrays) - 1, value.requires_grad]}
        return {"tensor" if isinstance(value, torch.Tensor) else "numpy": len(arrays) - 1}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value)}
    return None


def _read(kind: str, content: Any, arrays: Sequence[Array]) -> object:
    if kind == "tensor":
        return as_tensor(arrays[content])
    if kind == "parameter":
        return nn.Parameter(as_tensor(arrays[content[0]]), content[1])
    if kind == "numpy":
        return arrays[content].copy()
    if kind == "quantized":
        return _quantized(content, arrays)
    return {"size": torch.Size, "dtype": dtype_called, "device": torch.device}[kind](content)


def _scales(value: torch.Tensor, where: str, arrays: list[Array]) -> Json:
    """Write a quantised tensor: its integers, and what they count."""
    found: dict[str, Json] = {"dtype": str(value.dtype), "integers": len(arrays)}
    arrays.append(as_numpy(value.int_repr(), where))
    if value.qscheme() == torch.per_tensor_affine:
        return {**found, "scale": value.q_scale(), "zero_point": value.q_zero_point()}
    if value.qscheme() != torch.per_channel_affine or value.dtype in (torch.quint4x2, torch.quint2x4):
        raise TensorMismatchError(f"{where}: expected a tensor with affine scales; found {value.qscheme()}")
    found["scales"], found["axis"] = len(arrays), value.q_per_channel_axis()
    arrays += [as_numpy(value.q_per_channel_scales(), where), as_numpy(value.q_per_channel_zero_points(), where)]
    return found


def _quantized(content: _PerTensor | _PerChannel, arrays: Sequence[Array]) -> torch.Tensor:
    integers = as_tensor(arrays[content["integers"]])
    if "scale" in content:
        return torch._make_per_tensor_quantized_tensor(integers, content["scale"], content["zero_point"])
    scales, zeros = (as_tensor(arrays[content["scales"] + place]) for place in (0, 1))
    return torch._make_per_channel_quantized_tensor(integers, scales, zeros, content["axis"])


def dtype_called(name: str) -> torch.dtype:
    """Return a dtype by what `str` makes of it; a TypeError says that it is none.

    >>> dtype_called("torch.float16")
    torch.float16
    """
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found
