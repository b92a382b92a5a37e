"""What a module's architecture follows from, to find it again without tracing.

Rules
- Two modules of one signature go the same way as long as what they read is the same: classes and their code, what
  modules hold, which tensors they have, of which shape, dtype and device, and which are the same are in the signature;
  values of buffers are not, and `KnownGraphs` compares those that the trace has read.
- Where a module holds something whose meaning cannot be told, such as a closure, or an object of a class that is not
  written in Python, there is no signature. Global names of the code's files are not looked at.
- A signature keeps neither a module nor a tensor alive.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# (torch's types are partial)

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from inspect import getattr_static
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from cachetools import LRUCache
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from ..arrays import as_bytes, as_numpy
from ..graphs.graph import ModelGraph

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, CodeType})
STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_OF_ALL = frozenset({*vars(nn.Module()), "_compiled_call_impl", "_is_torch_compile"})
"""What every module has."""
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__annotations__", "__module__", "__firstlineno__"})
_MOST_NESTED = 8
"""Lists, mappings and objects in one another in an attribute of a module."""
_MOST_KNOWN = 128
LONGEST_S = 1.0
"""Wait for the known graphs: a process that was forked while another thread had them never gets them, and traces."""


class _UnknownError(Exception):
    """A module holds something whose meaning cannot be told."""


def signature(module: nn.Module) -> Hashable | None:
    """Return what the module's graph follows from; None: there is no telling.

    >>> signature(nn.Linear(4, 2)) == signature(nn.Linear(4, 2)) != signature(nn.Linear(2, 4))
    True
    """
    try:
        return _Signature(module).parts
    except Exception:  # noqa: BLE001  of the user's class, or another thread changes the module: it is traced then
        return None


class KnownGraphs:
    """The graphs of the last architectures that were traced."""

    def __init__(self) -> None:
        self._known: LRUCache[Hashable, tuple[tuple[str, ...], bytes, ModelGraph]] = LRUCache(_MOST_KNOWN)
        """Signature -> paths of the buffers that the trace read, a digest of their values, and the graph."""
        self._lock = threading.Lock()

    def find(self, key: Hashable, module: nn.Module) -> ModelGraph | None:
        """Return the graph of a module's signature, if what the trace read has the values that it had."""
        if key is None or not self._lock.acquire(timeout=LONGEST_S):
            return None
        try:
            known = self._known.get(key)
        finally:
            self._lock.release()
        if known is None:
            return None
        read, digest, graph = known
        return graph if not read or _digest(module, read) == digest else None

    def keep(self, key: Hashable, module: nn.Module, read: Collection[str], graph: ModelGraph) -> None:
        """Note what a trace found, which read the buffers at these paths. A module without a key is never known."""
        paths = tuple(sorted(read))
        if key is not None and self._lock.acquire(timeout=LONGEST_S):
            try:
                self._known[key] = paths, _digest(module, paths), graph
            finally:
                self._lock.release()


def _digest(module: nn.Module, paths: Iterable[str]) -> bytes:
    found = blake2b(digest_size=16)
    for path in paths:
        buffer = module.get_buffer(path)
        if not buffer.is_meta:
            found.update(as_bytes(as_numpy(buffer, path)).data)
        found.update(f"\0{path}\0".encode())
    return found.digest()


class _Signature:
    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._tensors: dict[int, int] = {}
        self._modules = {id(module): place for place, module in enumerate(modules)}
        kinds = dict.fromkeys(base for module in modules for base in type(module).__mro__ if not _is_given(base))
        self.parts = (
            tuple([self._module(module) for module in modules]),
            tuple([(kind, self._class(kind)) for kind in kinds]),
        )

    def _module(self, module: nn.Module) -> Hashable:
        kind, held = type(module), vars(module).copy()
        if any(held.get(hooks) for hooks in STATE_HOOKS) or not tells_all(kind):
            raise _UnknownError
        return (
            kind,
            self._all_of(held["_parameters"]),
            self._all_of(held["_buffers"]),
            tuple(sorted(held["_non_persistent_buffers_set"])),
            tuple([(name, child is not None and self._modules[id(child)]) for name, child in held["_modules"].items()]),
            tuple([(name, self._value(value)) for name, value in held.items() if name not in _OF_ALL]),
        )

    def _all_of(self, tensors: Mapping[str, torch.Tensor | None]) -> Hashable:
        return tuple([(name, item is not None and self._tensor(item)) for name, item in tensors.items()])

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if isinstance(tensor, UninitializedTensorMixin):
            raise _UnknownError
        place = self._tensors.setdefault(id(tensor), len(self._tensors))
        scheme = tensor.is_quantized and str(tensor.qscheme())
        return tensor.shape, tensor.dtype, tensor.device, tensor.layout, scheme, place

    def _class(self, kind: type) -> Hashable:
        """Return what a class of the user's has: code, and attributes, which stay as long as it does."""
        return tuple([(k, self._attribute(v)) for k, v in vars(kind).copy().items() if k not in _OF_CLASSES])

    def _attribute(self, value: object) -> Hashable:
        if isinstance(value, (staticmethod, classmethod)):
            return type(cast(object, value)), self._attribute(cast(object, value.__func__))
        if isinstance(value, property):
            return tuple([self._attribute(part) for part in (value.fget, value.fset)])
        try:
            return self._value(value)
        except _UnknownError:
            return _Same(value)

    def _value(self, value: object, depth: int = 0) -> Hashable:
        kind = type(value)
        if depth > _MOST_NESTED:
            raise _UnknownError
        if kind is float:
            return kind, cast(float, value).hex()  # 0.0 is not -0.0
        if kind in _PLAIN:
            return kind, value
        if kind in (list, tuple, set, frozenset):
            return kind, tuple([self._value(item, depth + 1) for item in list(cast("Iterable[object]", value))])
        if kind.__module__ in ("builtins", "collections") and isinstance(value, dict):
            entries = cast("dict[object, object]", value).copy().items()
            return kind, tuple([(self._value(key, depth + 1), self._value(item, depth + 1)) for key, item in entries])
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                raise _UnknownError
            return nn.Module, self._modules[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in self._modules:
            return self._function(cast(Any, value).__func__, depth), self._modules[id(value.__self__)]
        if kind is FunctionType:
            return self._function(cast(FunctionType, value), depth)
        if isinstance(value, type) or (isinstance(value, BuiltinFunctionType) and _is_free(value)):
            return value
        if _is_all_attributes(kind):
            held = vars(value).copy().items()
            return kind, tuple([(name, self._value(item, depth + 1)) for name, item in held])
        raise _UnknownError

    def _function(self, function: FunctionType, depth: int) -> Hashable:
        cells = [self._value(_content(cell), depth + 1) for cell in function.__closure__ or ()]
        defaults = [self._value(item, depth + 1) for item in (function.__defaults__, function.__kwdefaults__)]
        return function.__code__, id(function.__globals__), tuple(defaults), tuple(cells)


class _Same:
    """An attribute of a class whose meaning cannot be told: the same only as itself."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError as exc:  # a name that is not bound yet
        raise _UnknownError from exc


def _is_given(kind: type) -> bool:
    """Tell whether a class is Python's or PyTorch's, whose code does not change."""
    return kind.__module__.partition(".")[0] in ("builtins", "typing", "abc", "torch")


def _is_free(function: BuiltinFunctionType) -> bool:
    """Tell whether a builtin is no method of an object."""
    owner = function.__self__
    return owner is None or type(owner).__name__ == "module"


@lru_cache(maxsize=1024)
def tells_all(kind: type[nn.Module]) -> bool:
    """Tell whether the state of modules of a class is what they have as parameters and buffers."""
    return all(
        getattr_static(kind, name) is getattr_static(nn.Module, name)
        for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
    )


@lru_cache(maxsize=1024)
def _is_all_attributes(kind: type) -> bool:
    """Tell whether an object of a class is what its class and its attributes say."""
    plain = kind.__new__ is object.__new__ and "__dict__" in dir(kind)
    return plain and not any("__slots__" in vars(base) for base in kind.__mro__)
