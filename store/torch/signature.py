"""What a module's architecture follows from, to find it again without tracing.

Rules
- Two modules of one signature have one graph. All that a forward pass may look at is in it: classes and their code,
  what modules hold, which tensors they have, of which shape, and which are the same.
- Where a module holds something whose meaning cannot be told, such as a hook, a closure, or an object of a class that
  is not written in Python, there is no signature.
- A signature keeps neither a module nor a tensor alive.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# (torch's types are partial)

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
_OF_ALL = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""What every module has."""
_MOST_NESTED = 8
"""Lists, mappings and objects in one another in an attribute of a module."""


class _UnknownError(Exception):
    """A module holds something whose meaning cannot be told."""


def signature(module: nn.Module) -> Hashable | None:
    """Return what the module's graph follows from; None: there is no telling.

    >>> signature(nn.Linear(4, 2)) == signature(nn.Linear(4, 2)) != signature(nn.Linear(2, 4))
    True
    """
    try:
        return _Signature(module).parts
    except _UnknownError:
        return None


class _Signature:
    def __init__(self, root: nn.Module) -> None:
        self._tensors: dict[int, int] = {}
        self._modules = {id(module): place for place, module in enumerate(root.modules())}
        self.parts = tuple(self._module(module) for module in root.modules())

    def _module(self, module: nn.Module) -> Hashable:
        kind, held = type(module), vars(module)
        if any(held.get(hooks) for hooks in _HOOKS) or not _tells_all(kind):
            raise _UnknownError
        return (
            kind,
            kind.forward,
            self._all_of(held["_parameters"]),
            self._all_of(held["_buffers"]),
            tuple(sorted(held["_non_persistent_buffers_set"])),
            tuple((name, child is not None and self._modules[id(child)]) for name, child in held["_modules"].items()),
            tuple((name, self._value(value)) for name, value in held.items() if name not in _OF_ALL),
        )

    def _all_of(self, tensors: Mapping[str, torch.Tensor | None]) -> Hashable:
        return tuple([(name, item is not None and self._tensor(item)) for name, item in tensors.items()])

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if isinstance(tensor, UninitializedTensorMixin):
            raise _UnknownError
        return tensor.shape, self._tensors.setdefault(id(tensor), len(self._tensors))

    def _value(self, value: Any, depth: int = 0) -> Hashable:
        kind = cast("type[object]", type(value))
        if depth > _MOST_NESTED:
            raise _UnknownError
        if kind in _PLAIN:
            return kind, value
        if kind in (list, tuple, set, frozenset):
            return kind, tuple([self._value(item, depth + 1) for item in cast("Iterable[object]", value)])
        if kind.__module__ in ("builtins", "collections") and isinstance(value, Mapping):
            entries = cast("Mapping[object, object]", value).items()
            return kind, tuple([(self._value(key, depth + 1), self._value(item, depth + 1)) for key, item in entries])
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return nn.Module, self._modules[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in self._modules:
            return value.__func__, self._modules[id(value.__self__)]
        if isinstance(value, (type, BuiltinFunctionType)) or (kind is FunctionType and not value.__closure__):
            return value
        if _is_all_attributes(kind):
            return kind, tuple([(name, self._value(item, depth + 1)) for name, item in vars(value).items()])
        raise _UnknownError


@lru_cache(maxsize=1024)
def _tells_all(kind: type[nn.Module]) -> bool:
    """Tell whether the state of modules of a class is what they have as parameters and buffers."""
    return all(
        getattr(kind, name) is getattr(nn.Module, name)
        for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
    )


@lru_cache(maxsize=1024)
def _is_all_attributes(kind: type) -> bool:
    """Tell whether an object of a class is what its class and its attributes say."""
    plain = kind.__new__ is object.__new__ and "__dict__" in dir(kind)
    return plain and not any("__slots__" in vars(base) for base in kind.__mro__)
