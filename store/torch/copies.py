"""A copy of a tree of modules, to be traced in place of the tree.

Rules
- The copy's modules are of classes of their own. So calls can be taken over in it without a change to a class that
  others use. Those for the user's classes are made for the one copy, those for PyTorch's once.
- It has the parameters of the originals, copies of all other tensors, and no hooks of forward passes. What a forward
  pass sets, it sets in the copy. What modules hold beside modules, tensors, lists, sets and mappings is the originals'.
- Which buffers are asked for is noted: what is done may depend on their values.
- Modules of torch.nn and torch.ao.nn that are no containers are leaves: they are called, not looked into.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (torch's types are partial)

from __future__ import annotations

import builtins
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.fx import _symbolic_trace

_MOST_NESTED = 8
"""Lists and mappings in one another in an attribute of a module."""
_HOOKS = frozenset(name for name in vars(nn.Module()) if "forward" in name and "hooks" in name)
_MATH = {id(value) for value in vars(math).values() if callable(value)}
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""What an attribute may be that is the original's as it is; most are such."""
_EMPTIES = frozenset({dict, OrderedDict, set, list})
OWNER = "_tensorvine_copies"
"""Attribute of a copy: the `Copies` that it is one of."""
_Function = Callable[..., Any]


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a module becomes one node."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, containers)


class Copies:
    """A copy of a tree of modules, in inference.

    Args:
        root: the tree.
        called: called in place of a leaf, with its path, its own call, and the arguments as a tuple and a mapping.
        found: what a parameter is for a module that asks for it.
        noted: makes, of a function that is no method but whose call is to be noted, such as `math.sqrt`, one that
            does; None: these stay as they are.
    """

    def __init__(
        self, root: nn.Module, called: _Function, found: _Function, noted: Callable[[_Function], _Function] | None
    ) -> None:
        self._called, self._found = called, found
        self._methods = _Methods(noted) if noted is not None else None
        self._classes: dict[tuple[type, bool], type] = {}
        self._of: dict[int, nn.Module] = {}
        """id of a module -> its copy."""
        self._paths: dict[int, str] = {}
        """id of a copy -> its first path."""
        self._read_buffers: set[str] = set()
        self.tensors: dict[torch.Tensor, str] = {}
        """Tensors that copies have as plain attributes, neither as parameters nor as buffers -> their paths."""
        modules = dict(root.named_modules())
        originals = {path: item for path, item in modules.items() if not is_compiled(item)}
        for path, item in originals.items():
            copy = self._of[id(item)] = object.__new__(self._class_of(type(item), bool(path) and is_leaf(item)))
            self._paths[id(copy)] = path
        for item in modules.values():
            if is_compiled(item):
                self._of[id(item)] = self._of[id(item._orig_mod)]
        for path, item in originals.items():
            vars(self._of[id(item)]).update(self._attributes(item, path))
        self.root = self._of[id(root)]

    @property
    def read(self) -> frozenset[str]:
        """Paths of the buffers that were asked for."""
        return frozenset(self._read_buffers)

    def _attributes(self, module: nn.Module, path: str) -> dict[str, object]:
        """Return what the copy of a module has: its attributes, with copies in place of modules of the tree."""
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
        found["training"] = False
        found["_compiled_call_impl"] = None
        found[OWNER] = self
        return found

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

    def _class_of(self, kind: type[nn.Module], leaf: bool) -> type:
        """Return the class of a module's copy: as the module's own, but for calls and what it reads."""
        found = self._classes.get((kind, leaf))
        if found is None:
            methods = self._methods.of(kind) if self._methods is not None and not leaf else {}
            of_torch = all(base.__module__.partition(".")[0] in ("torch", "builtins") for base in kind.__mro__)
            found = _class_of_torch(kind, leaf) if of_torch else _made(kind, leaf, methods)
            self._classes[kind, leaf] = found
        return found

    def read_by(self, copy: nn.Module, name: str, value: object) -> object:
        """Return what a copy gets for a value of the original's that it asks for."""
        if isinstance(value, nn.Parameter):
            return self._found(value)
        if isinstance(value, torch.Tensor):
            self._read_buffers.add(f"{self._paths[id(copy)]}.{name}".lstrip("."))
        return value

    def call_of(self, copy: nn.Module, call: _Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return what a copy of a leaf gives when it is called."""
        return self._called(self._paths[id(copy)], call, args, kwargs)

    def __deepcopy__(self, memo: object) -> Copies:
        return self


def _made(kind: type[nn.Module], leaf: bool, methods: Mapping[str, object]) -> type:
    """Make a class of copies, with other `methods`. What it does is up to the `Copies` that an object of it has."""

    def read(copy: nn.Module, name: str) -> object:
        return vars(copy)[OWNER].read_by(copy, name, kind.__getattr__(copy, name))

    def call(copy: nn.Module, *args: object, **kwargs: object) -> object:
        return vars(copy)[OWNER].call_of(copy, MethodType(kind.__call__, copy), args, kwargs)

    body: dict[str, object] = {**methods, "__module__": kind.__module__, "__getattr__": read}
    if hasattr(kind, "__del__"):
        body["__del__"] = _nothing  # what it would close is the original's
    if leaf:
        body["__call__"] = call
    return type(kind.__name__, (_Unheard, kind), body)


@lru_cache(maxsize=256)
def _class_of_torch(kind: type[nn.Module], leaf: bool) -> type:
    """Return the class of copies of one of PyTorch's own: made for each trace, it takes a third of the trace's time."""
    return _made(kind, leaf, {})


class _Unheard:
    """First base of the copy's classes: a class that is told of what derives from it is not told of them."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass


class _Methods:
    """Methods of modules, with functions in place of those that they find by global names.

    Args:
        noted: makes a function that takes the place of another.
    """

    def __init__(self, noted: Callable[[_Function], _Function]) -> None:
        self._noted = noted
        self._globals: dict[int, dict[str, object]] = {}
        """id of a file's global names -> those names, with functions replaced; empty where none is."""
        self._of_fx: set[tuple[int, str]] = set(getattr(_symbolic_trace, "_wrapped_fns_to_patch", ()))
        """What `torch.fx.wrap` was told of: ids of a file's global names, and name."""

    def of(self, kind: type) -> dict[str, FunctionType]:
        """Return the methods of a class that are to be others, by name; all, where one of the file's needs to be."""
        bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
        own = {
            name: value
            for base in reversed(bases)
            for name, value in vars(base).items()
            if isinstance(value, FunctionType) or not name.startswith("__")
        }
        of_bases = (value for base in bases for value in vars(base).values() if isinstance(value, FunctionType))
        if not any(self._known(value.__globals__) for value in of_bases):
            return {}
        return {name: self.changed(value) for name, value in own.items() if isinstance(value, FunctionType)}

    def changed(self, function: FunctionType) -> FunctionType:
        """Return a method that finds other functions, and other such methods by `super()`."""
        names = function.__globals__
        known = self._known(names)
        return _on(function, {**(known or names), "super": self._super})

    def _super(self, *given: object) -> _Super:
        """Take the place of `super`, which finds its class and object in who calls it."""
        if given:
            return _Super(self, cast(Any, super)(*given))
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # as Python's own does
        of, name = frame.f_locals["__class__"], frame.f_code.co_varnames[0]
        return _Super(self, super(of, frame.f_locals[name]))

    def _known(self, names: dict[str, object]) -> dict[str, object]:
        if id(names) not in self._globals:
            told: set[str] = {name for owner, name in self._of_fx if owner == id(names)}
            changed = {
                name: _Math(self._noted) if value is math else self._noted(cast(_Function, value))
                for name, value in names.items()
                if value is math or id(value) in _MATH or (name in told and callable(value))
            }
            of_python = [name for name in told - names.keys() if hasattr(builtins, name)]
            changed.update({name: self._noted(getattr(builtins, name)) for name in of_python})
            known = self._globals[id(names)] = {**names, **changed} if changed else {}
            for name, value in names.items() if changed else ():
                if isinstance(value, FunctionType) and value.__globals__ is names and name not in changed:
                    known[name] = _on(value, known)
        return self._globals[id(names)]


class _Super:
    """What `super()` gives, with other methods."""

    def __init__(self, methods: _Methods, found: object) -> None:
        self._methods = methods
        self._found = found

    def __getattr__(self, name: str) -> object:
        value = getattr(self._found, name)
        function = value.__func__ if isinstance(value, MethodType) else None
        if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
            return value
        return MethodType(self._methods.changed(function), value.__self__)


class _Math:
    """The module `math`, with other functions."""

    def __init__(self, noted: Callable[[_Function], _Function]) -> None:
        self._noted = noted

    def __getattr__(self, name: str) -> object:
        value = getattr(math, name)
        return self._noted(value) if callable(value) else value


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a wrapper from `torch.compile`. If so, the original module is `module._orig_mod`."""
    return type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")


def _on(function: FunctionType, names: dict[str, object]) -> FunctionType:
    """Return a function that finds its global names elsewhere."""
    other = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    other.__kwdefaults__ = function.__kwdefaults__
    other.__dict__.update(vars(function))
    return other


def _nothing(module: object) -> None:
    """Do nothing."""
