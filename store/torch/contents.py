"""What each module of a tree holds, as digests, to tell whether another tree is the same.

Rules
- What counts: its class's name, names and shapes of its tensors and which are the same, its children, its attributes.
- Attributes count by what they hold: numbers, text, lists, mappings; tensors and arrays by all their values; Enums,
  partial applications; functions by their names, those within functions by their code and what they close over; objects
  that can be called, dataclasses, and objects of the package of the module's class by their attributes.
- What does not: values of parameters and buffers, dtypes and devices, flags, hooks, and attributes that are None or
  other objects, such as the trainer that Lightning notes, or a configuration that has `to_dict` and `from_dict`.
- Values of buffers that are not stored are digests of their own (`unsaved_of`), since a signature does not have them.
- Recipes of earlier versions have digests of samples of large tensors; `sampled` gives these.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial)

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from hashlib import blake2b
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, cast
from weakref import ReferenceType

import numpy as np
import torch
import xxhash
from torch import nn

from ..arrays import as_bytes, as_numpy
from ..errors import GraphError
from ..facts import Json, fact
from .signature import OF_ALL

_TOLD = (bool, int, float, complex, str, bytes, slice, np.generic, np.ndarray, np.dtype)
_NAMED = (type, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, np.ufunc)
_AS_TEXT = (torch.dtype, torch.layout, torch.memory_format, range)
_NAMESPACES = (argparse.Namespace, SimpleNamespace)
_SAMPLE = 65_536
"""Elements of a tensor or an array that earlier versions compared: of a larger one every second, third, ..."""


def contents_of(root: nn.Module, *, sampled: bool = False) -> dict[str, str]:
    """Return a digest of what each module holds, by its path; "" is the root's.

    Args:
        root: the module.
        sampled: digest tensors as earlier versions did.

    Raises:
        GraphError: a module that is none of the tree, and has tensors, which are not stored then, is in an attribute.

    >>> contents_of(nn.Linear(4, 2)) == contents_of(nn.Linear(4, 2)) != contents_of(nn.Linear(2, 4))
    True
    """
    return _Contents(root, sampled).digests()


def unsaved_of(root: nn.Module, *, sampled: bool = False) -> dict[str, str]:
    """Return digests of the values of buffers that are not stored, by their paths; `sampled` as in `contents_of`.

    >>> unsaved_of(nn.BatchNorm1d(2))
    {}
    """
    return {
        f"{path}.{name}" if path else name: _digest(_values(buffer, sampled))
        for path, module in root.named_modules()
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set and buffer is not None
    }


def _digest(found: Json) -> str:
    return blake2b(json.dumps(found, separators=(",", ":")).encode(), digest_size=6).hexdigest()


def _values(tensor: torch.Tensor, sampled: bool) -> Json:
    described: list[Json] = [list(tensor.shape), str(tensor.dtype)]
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        return described
    if not sampled:
        return [*described, xxhash.xxh3_128_hexdigest(as_bytes(as_numpy(tensor, "a tensor")).data)]
    elements = tensor.detach().reshape(-1)[:: max(1, -(-tensor.numel() // _SAMPLE))]
    content = as_bytes(as_numpy(elements, "a tensor")).data
    return [*described, blake2b(content, digest_size=8).hexdigest()]


class _Contents:
    """What the modules of one tree hold."""

    def __init__(self, root: nn.Module, sampled: bool) -> None:
        self._sampled = sampled
        self._modules = dict(root.named_modules())
        self._places = {id(module): place for place, module in enumerate(self._modules.values())}
        self._tensors: dict[int, int] = {}
        """id of a parameter or buffer -> how many were before it."""
        self._stored: set[int] = set()
        """ids of those that are stored."""
        for module in self._modules.values():
            for name, item in [*module._parameters.items(), *module._buffers.items()]:
                if item is not None:
                    self._tensors.setdefault(id(item), len(self._tensors))
                    self._stored.update([id(item)] if name not in module._non_persistent_buffers_set else [])

    def digests(self) -> dict[str, str]:
        return {path: _digest(self._of(module)) for path, module in self._modules.items()}

    def _of(self, module: nn.Module) -> Json:
        return {
            "class": type(module).__name__,
            "parameters": {name: self._named(item) for name, item in module._parameters.items()},
            "buffers": {name: self._named(item) for name, item in module._buffers.items()},
            "not stored": sorted(module._non_persistent_buffers_set),
            "modules": {n: item is not None and self._places[id(item)] for n, item in module._modules.items()},
            "attributes": _Attributes(self._places, self._tensors, self._stored, type(module), self._sampled).of(
                module
            ),
        }

    def _named(self, item: torch.Tensor | None) -> Json:
        return None if item is None else [list(item.shape), self._tensors[id(item)]]


class _Attributes:
    """What the attributes of one module hold."""

    def __init__(
        self,
        places: Mapping[int, int],
        tensors: Mapping[int, int],
        stored: set[int],
        kind: type[nn.Module],
        sampled: bool,
    ) -> None:
        self._sampled = sampled
        self._places, self._tensors, self._stored, self._kind = places, tensors, stored, kind
        self._package = kind.__module__.partition(".")[0]
        self._seen: dict[int, int] = {}
        """id of an object -> how many were before it."""

    def of(self, module: nn.Module) -> dict[str, Json]:
        held = sorted(vars(module).copy().items())
        found = {name: self._value(value) for name, value in held if name not in OF_ALL}
        return {name: value for name, value in found.items() if value is not None}

    def _value(self, value: object) -> Json:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, torch.Tensor):
            stored = id(value) in self._stored
            return {"tensor": self._tensors[id(value)]} if stored else _values(value, self._sampled)
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if self._sampled and isinstance(value, np.ndarray) and value.size > _SAMPLE:
            return [list(value.shape), fact(value.reshape(-1)[:: -(-value.size // _SAMPLE)])]
        if isinstance(value, _TOLD) or value is Ellipsis:
            return fact(value)
        if isinstance(value, _AS_TEXT):
            return str(value)
        if isinstance(value, Mapping):
            entries = cast("dict[object, object]", value).items()
            return [[self._value(key), self._value(item)] for key, item in entries]
        if isinstance(value, (list, tuple, deque)):
            return [self._value(item) for item in cast("Iterable[object]", value)]
        if isinstance(value, (set, frozenset)):
            return sorted((self._value(item) for item in cast("Iterable[object]", value)), key=json.dumps)
        return self._called(value) if callable(value) else self._object(value)

    def _module(self, module: nn.Module) -> Json:
        if id(module) in self._places:
            return {"module": self._places[id(module)]}
        if any(True for _ in [*module.parameters(), *module.buffers()]):
            raise GraphError(
                f"{self._kind.__qualname__}: expected all modules with tensors to be registered as submodules, because "
                f"others are not stored; found {type(module).__qualname__} in another attribute"
            )
        return self._held(module, [*vars(module).items(), *module._modules.items()])

    def _called(self, value: object) -> Json:
        if isinstance(value, _NAMED):
            return str(getattr(value, "__qualname__", value.__name__))
        if isinstance(value, MethodType):
            return [value.__qualname__, self._value(value.__self__)]
        if isinstance(value, partial):
            given = cast("partial[object]", value)
            return [self._value(part) for part in (given.func, given.args, given.keywords)]
        if isinstance(value, FunctionType):
            cells = value.__closure__ or ()
            if not cells and "<" not in value.__qualname__:
                return value.__qualname__
            return [value.__qualname__, fact(value), [self._value(_content(cell)) for cell in cells]]
        return self._object(value) if not isinstance(value, ReferenceType) else None

    def _object(self, value: object) -> Json:
        kind = type(value)
        own = self._package != "torch" and kind.__module__.partition(".")[0] == self._package
        counts = own or callable(value) or is_dataclass(value) or isinstance(value, _NAMESPACES)
        if not counts or (hasattr(kind, "to_dict") and hasattr(kind, "from_dict")):
            return None
        slots = [name for base in kind.__mro__ for name in _slots_of(base)]
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        return self._held(value, [*held.items(), *getattr(value, "__dict__", {}).items()])

    def _held(self, value: object, held: Iterable[tuple[str, object]]) -> Json:
        if id(value) in self._seen:
            return {"again": self._seen[id(value)]}
        self._seen[id(value)] = len(self._seen)
        return [type(value).__qualname__, {n: self._value(item) for n, item in held if n not in OF_ALL}]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def _slots_of(kind: type) -> tuple[str, ...]:
    found: Any = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)
