"""Classes and functions by the name under which they are imported.

Rules
- A name is "package.module:Class.Inner"; what is not found under its own name, as a class in a function, has none.
- Some of PyTorch's functions do not know where they are: they are looked for in `torch` and `torch.nn.functional`.
- A name is looked for only in packages that are allowed, unless it is one of a module's class; what is found must be
  defined in one of them, too, not only imported there.
- Of PyTorch's functions, those are allowed that compute with tensors or make them, and norms of weights: others open
  files, import code, or change the process.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch's types are partial)

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType
from typing import cast

import torch
from torch import nn
from torch.overrides import get_testing_overrides

from ..errors import GraphError
from ..recipes import building, check_module

_OF_TORCH = (torch, nn.functional)
_MAKING = re.compile(
    "arange|as_tensor|empty|eye|full|linspace|logspace|normal|ones|rand(int|n)?(_like)?|randperm|tensor|zeros"
)
"""Functions of PyTorch that make tensors from numbers."""
_WITH_FUNCTIONS = re.compile(r"torch\.nn\.(functional|init|utils\.(parametrizations|spectral_norm|weight_norm))")
"""Modules of PyTorch of which all functions are allowed."""


def packages_of(kind: type) -> frozenset[str]:
    """Return the packages of which a module's class and its bases are, and PyTorch's.

    >>> sorted(packages_of(nn.Linear))
    ['torch']
    """
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module)]
    return frozenset({"torch", *(base.__module__.partition(".")[0] for base in bases)})


def name_of(value: object) -> str:
    """Return the name under which a class or a function is imported.

    Raises:
        GraphError: there is none.

    >>> name_of(nn.Linear), name_of(torch.relu)
    ('torch.nn.modules.linear:Linear', 'torch:relu')
    """
    builtin = isinstance(value, BuiltinFunctionType)
    name = value.__name__ if builtin else getattr(value, "__qualname__", type(value).__qualname__)
    found = getattr(value, "__module__", None)
    for place in [item.__name__ for item in _OF_TORCH] if builtin else [found or "builtins"]:
        try:
            if _found(place, name) is value:
                return f"{place}:{name}"
        except (ImportError, AttributeError):
            continue
    raise GraphError(f"{name}: expected a name that can be imported; it is not in {found or 'a module'}")


def named(name: str, allowed: Collection[str] | None, custom: Mapping[str, object]) -> object:
    """Import what has a name.

    Args:
        name: as `name_of` gives it.
        allowed: the packages in which it may be; None: any, and it must be the class of a module.
        custom: taken in its place, by the last part of the name.

    Raises:
        GraphError: there is no such thing here, it is elsewhere, or no class of a module where one is needed.

    >>> named("torch.nn.modules.linear:Linear", None, {})
    <class 'torch.nn.modules.linear.Linear'>
    """
    place, _, path = name.partition(":")
    own = path.rpartition(".")[2]
    if own in custom:
        return custom[own]
    check(name, allowed)
    check_module(place)
    with building(f"{name}: expected a name that can be imported or is in custom_objects="):
        found = _found(place, path)
    is_module = isinstance(found, type) and issubclass(cast("type[object]", found), nn.Module)
    if (allowed is None) is not is_module:
        raise GraphError(f"{name}: expected a module class or a function on tensors; found {found!r:.80}")
    if allowed is not None:
        allowed_name(found, allowed)
    return found


def allowed_name(value: object, allowed: Collection[str] | None) -> str:
    """Return the name of a class or a function, if a recipe may have it; errors as of `name_of` and `check`."""
    name = name_of(value)
    check(name, allowed)
    place, _, path = name.partition(":")
    of_tensors = _WITH_FUNCTIONS.fullmatch(place) or _takes_tensors(value) or _MAKING.fullmatch(path)
    if place.partition(".")[0] == "torch" and not isinstance(value, type) and not of_tensors:
        raise GraphError(f"{name}: expected a module class or a function on tensors; found {value!r:.80}")
    return name


@cache
def _of_tensors() -> frozenset[object]:
    """Return the functions of PyTorch that take tensors: those that a subclass of Tensor can override."""
    return frozenset(get_testing_overrides())


def _takes_tensors(value: object) -> bool:
    name = getattr(value, "__name__", "")
    own = getattr(torch, name[:-1], None) if name.endswith("_") else value  # relu_ works in place
    return own in _of_tensors()


def check(name: str, allowed: Collection[str] | None) -> None:
    """Refuse a name of another package; of PyTorch, all but what computes with tensors: its builtins and `torch.nn`.

    Raises:
        GraphError: it is.
    """
    place = name.partition(":")[0]
    package = place.partition(".")[0]
    of_torch = package == "torch" and place != "torch" and not place.startswith("torch.nn.")
    if allowed is not None and (package not in allowed or of_torch):
        raise GraphError(
            f"{name}: expected a name in one of the packages {sorted(allowed)} (of PyTorch: in torch or torch.nn)"
        )


def _found(place: str, path: str) -> object:
    found: object = import_module(place)
    for part in path.split("."):
        found = getattr(found, part)
    return found
