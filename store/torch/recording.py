"""A copy of a tree of modules that records its forward pass in place of the tree.

Rules
- Nothing that other threads use is replaced, so that they can compute, compile and trace at the same time. A copy has
  the class of its original. Its attribute `_compiled_call_impl` records a call, and its mappings of parameters and
  buffers record reads.
- The copy has the parameters of the original, copies of all other tensors, and no hooks of forward passes. A forward
  pass changes only the copy. Modules, tensors, lists, sets and mappings are copied; other objects are shared.
- The names of reads of buffers are kept, because a forward pass may depend on their values.
- Modules of torch.nn and torch.ao.nn except containers are leaves: a call of a leaf is recorded, not run.
- The functions of `math` and those named by `torch.fx.wrap` accept no proxies. If the file of a class has such names,
  the copy has a subclass with copies of the methods, for which these names are functions that record calls.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial)

from __future__ import annotations

import builtins
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx import _symbolic_trace
from torch.fx.node import Argument, map_aggregate

from .state import is_compiled

_MOST_NESTED = 8
"""Maximum depth of lists and mappings in an attribute of a module."""
_HOOKS = frozenset(name for name in vars(nn.Module()) if "forward" in name and "hooks" in name)
_MATH = {id(value) for value in vars(math).values() if callable(value)}
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of values that need no copy; most attributes have one of them."""
_EMPTIES = frozenset({dict, OrderedDict, set, list})
_Function = Callable[..., Any]


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module becomes one node."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, containers)


class Recorded:
    """A copy of a tree of modules, in evaluation mode.

    Args:
        root: The tree.
        called: Called instead of a leaf, with the leaf's path, its own call, and the arguments as a tuple and a
            mapping.
        found: Maps a parameter to the value that its module reads.
    """

    def __init__(self, root: nn.Module, called: _Function, found: _Function) -> None:
        self._called, self._found = called, found
        self.read: set[str] = set()
        """Paths of the buffers that were read."""
        self.tensors: dict[torch.Tensor, str] = {}
        """Tensors in plain attributes of the copies (neither parameters nor buffers), and their paths."""
        modules = dict(root.named_modules())
        originals = {path: item for path, item in modules.items() if not is_compiled(item)}
        classes = _Classes()
        self._of: dict[int, nn.Module] = {
            id(item): object.__new__(classes.of(type(item))) for item in originals.values()
        }
        """id of a module -> its copy."""
        for item in modules.values():
            if is_compiled(item):
                self._of[id(item)] = self._of[id(item._orig_mod)]
        for path, item in originals.items():
            vars(self._of[id(item)]).update(self._attributes(item, path))
        self.root = self._of[id(root)]

    def _attributes(self, module: nn.Module, path: str) -> dict[str, object]:
        """Return the attributes of a module's copy."""
        found: dict[str, object] = vars(module).copy()
        for name, value in found.items():
            kind = type(value)
            if kind in PLAIN:
                continue
            if name in _HOOKS:
                found[name] = OrderedDict()
            elif kind in _EMPTIES and not value:
                found[name] = kind()
            else:
                found[name] = swapped = self._swapped(value, 0)
                if isinstance(swapped, torch.Tensor):
                    self.tensors[swapped] = f"{path}.{name}" if path else name

        def noted(name: str, value: object) -> object:
            if isinstance(value, nn.Parameter):
                return self._found(value)
            if isinstance(value, torch.Tensor):
                self.read.add(f"{path}.{name}" if path else name)
            return value

        for name in ("_parameters", "_buffers"):
            if isinstance(found[name], dict) and found[name]:
                found[name] = _Noting(cast("dict[str, object]", found[name]), noted)
        found["training"] = False
        found.pop("_compiled_call_impl", None)
        if path and is_leaf(module):
            found["_compiled_call_impl"] = self._call_of(path, self._of[id(module)])
        return found

    def _call_of(self, path: str, leaf: nn.Module) -> _Function:
        return lambda *args, **kwargs: self._called(path, leaf._call_impl, args, kwargs)

    def _swapped(self, value: object, depth: int) -> object:
        if type(value) in PLAIN:
            return value
        if type(value) in _EMPTIES and not value:
            return cast("list[object]", value).copy()
        if isinstance(value, nn.Module):
            return self._of.get(id(value), value)
        if isinstance(value, MethodType) and id(value.__self__) in self._of:
            return MethodType(value.__func__, self._of[id(value.__self__)])
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, nn.Parameter) else value.detach().clone()
        if depth > _MOST_NESTED:
            return value
        if type(value) is list or type(value) is tuple:
            items = [self._swapped(item, depth + 1) for item in list(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
            copy = value.copy()
            for key, item in copy.items():
                if type(item) is not nn.Parameter and type(item) not in PLAIN:
                    copy[key] = self._swapped(item, depth + 1)
            return copy
        return value.copy() if isinstance(value, (set, deque)) else value


class _Noting(dict[str, Any]):
    """The parameters or buffers of a copy. `noted` maps a name and a value to the value that a module reads."""

    def __init__(self, held: Mapping[str, object], noted: _Function) -> None:
        super().__init__(held)
        self._noted = noted

    def __getitem__(self, name: str) -> Any:
        return self._noted(name, super().__getitem__(name))


# ---- classes -----------------------------------------------------------------------------------------------------


class _Classes:
    """The classes of the copies of one tree."""

    def __init__(self) -> None:
        self._of: dict[type, type] = {}
        self._files: dict[int, dict[str, object]] = {}
        """id of the global names of a file -> a copy with recording functions; empty if the file needs none."""

    def of(self, kind: type[nn.Module]) -> type[nn.Module]:
        """Return a class, or a subclass if methods have to be replaced, in it or in its bases."""
        if kind not in self._of:
            body = self._methods(kind)
            if hasattr(kind, "__del__"):
                body["__del__"] = _nothing  # it would close objects of the original
            # each is found before its base, by super() too
            bases = [_derived(base, (base,), found) for base in kind.__mro__[1:] if (found := self._methods(base))]
            self._of[kind] = _derived(kind, (kind, *bases), body) if body or bases else kind
        return self._of[kind]

    def _methods(self, kind: type) -> dict[str, object]:
        """Return copies of a class's own methods, if they need other global names."""
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            return {}
        methods = {name: value for name, value in vars(kind).copy().items() if isinstance(value, FunctionType)}
        return {
            n: _with_names(value, names) for n, value in methods.items() if (names := self._file(value.__globals__))
        }

    def _file(self, names: dict[str, object]) -> dict[str, object]:
        if id(names) not in self._files:
            held, wrapped = names.copy(), getattr(_symbolic_trace, "_wrapped_fns_to_patch", {})  # by torch.fx.wrap
            found = {name: value for name, value in held.items() if value is math or id(value) in _MATH}
            for owner, name in list(wrapped):
                if owner == id(names) and (name in held or hasattr(builtins, name)):
                    found[name] = held.get(name, getattr(builtins, name, None))
            changed = {n: _math() if item is math else _recording(cast(_Function, item)) for n, item in found.items()}
            file = self._files[id(names)] = {**held, **changed} if changed else {}
            for name, value in held.items() if changed else ():
                if isinstance(value, FunctionType) and value.__globals__ is names and name not in changed:
                    file[name] = _with_names(value, file)
        return self._files[id(names)]


def _derived(kind: type, bases: tuple[type, ...], body: dict[str, object]) -> type:
    """Return a subclass with the name of `kind`. The `__init_subclass__` of its bases does not run."""
    unannounced = type("Unannounced", (), {"__init_subclass__": classmethod(_nothing)})
    return type(kind.__name__, (unannounced, *bases), {"__module__": kind.__module__, **body})


def _nothing(of: object, **kwargs: object) -> None:
    """Do nothing."""


def _with_names(function: FunctionType, names: dict[str, object]) -> FunctionType:
    """Return a copy of a function with other global names."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function))
    return copy


@cache
def _math() -> ModuleType:
    """Return a module like `math` that records calls."""
    found = ModuleType("math")
    vars(found).update({name: _recording(value) if callable(value) else value for name, value in vars(math).items()})
    return found


def _recording(function: _Function) -> _Function:
    """Return a function that becomes a node where it is called with a proxy."""

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        met: list[fx.Proxy] = []
        given = cast(Argument, (args, kwargs))
        map_aggregate(given, lambda item: met.append(item) if isinstance(item, fx.Proxy) else None)
        return met[0].tracer.create_proxy("call_function", function, args, kwargs) if met else function(*args, **kwargs)

    return call
