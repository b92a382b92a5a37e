"""What each module of a tree holds, as digests, to tell whether another tree is the same.

Rules
- What counts: its class's name, names and shapes of its tensors and which are the same, its children, its attributes.
- What does not: values of parameters and buffers, dtypes and devices, flags, hooks, and attributes that are None or
  objects, such as the trainer that Lightning notes. Of a function its name counts.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial)

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import cast

import numpy as np
import torch
from torch import nn

from ..facts import Json, fact
from .signature import OF_ALL


def contents_of(root: nn.Module) -> dict[str, str]:
    """Return a digest of what each module holds, by its path; "" is the root's.

    >>> contents_of(nn.Linear(4, 2)) == contents_of(nn.Linear(4, 2)) != contents_of(nn.Linear(2, 4))
    True
    """
    modules = dict(root.named_modules())
    places = {id(module): place for place, module in enumerate(modules.values())}
    tensors: dict[int, int] = {}

    def tensor(item: torch.Tensor | None) -> Json:
        return None if item is None else [list(item.shape), tensors.setdefault(id(item), len(tensors))]

    def digest(module: nn.Module) -> str:
        found: dict[str, Json] = {
            "class": type(module).__name__,
            "parameters": {name: tensor(item) for name, item in module._parameters.items()},
            "buffers": {name: tensor(item) for name, item in module._buffers.items()},
            "not stored": sorted(module._non_persistent_buffers_set),
            "modules": {n: item is not None and places[id(item)] for n, item in module._modules.items()},
            "attributes": _attributes(module),
        }
        return blake2b(json.dumps(found, separators=(",", ":")).encode(), digest_size=6).hexdigest()

    return {path: digest(module) for path, module in modules.items()}


def _attributes(module: nn.Module) -> dict[str, Json]:
    found = {name: _plain(value) for name, value in sorted(vars(module).items()) if name not in OF_ALL}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: object) -> Json:
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return getattr(value, "__qualname__", None)
    if isinstance(value, Mapping):
        return [[str(key), _plain(item)] for key, item in cast("Mapping[object, object]", value).items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[object]", value)]
    told = isinstance(value, (bool, int, float, complex, str, bytes, set, frozenset, np.generic, np.ndarray))
    return fact(value) if told else None
