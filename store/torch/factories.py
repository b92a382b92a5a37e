"""Functions and classes that build modules, found by name.

Rules
- A stored name is not a permission. It is imported only if its package is trusted by the caller. Functions that are
  registered in this process, and those that the caller passes, need no permission.
- A trusted package gives only functions and classes that are defined in it, not those that it imports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from ..errors import GraphError
from ..recipes import building, check_module

Factory = Callable[..., Any]
_F = TypeVar("_F", bound=Factory)
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_registered: dict[str, Factory] = {}


def register_factory(factory: _F) -> _F:
    """Register a function or class, so that `load_model` in this process may call it for models that name it.

    Args:
        factory: Function that returns a torch module, or a module class. Its name is "package.module:function", from
            `__module__` and `__qualname__`. A factory of the same name is replaced.

    Returns:
        The factory, so that this function can be a decorator.

    >>> import torch
    >>> @register_factory
    ... def small(width):
    ...     return torch.nn.Linear(width, 2)
    """
    _registered[name_of(factory)] = factory
    return factory


def name_of(factory: Factory) -> str:
    """Return the name of a function or class.

    >>> name_of(re.compile)
    're:compile'
    """
    return f"{factory.__module__}:{factory.__qualname__}"


def checked_name(name: str) -> str:
    """Return a name of the form "package.module:function".

    Raises:
        GraphError: if the name has another form.
    """
    if _NAME.fullmatch(str(name)) is None:
        raise GraphError(f"factory {name!r:.200}: expected a name such as 'package.module:function'")
    return name


def permitted(name: str, given: Factory | str | None, trusted: Collection[str]) -> Factory:
    """Return the factory of a stored name.

    Args:
        name: The stored name.
        given: The caller's `factory`, used instead of the stored name; None if there is none.
        trusted: Packages from which a stored name may be imported.

    Raises:
        GraphError: if the name is not permitted or cannot be imported.

    >>> permitted("os:system", None, [])
    Traceback (most recent call last):
    tensorvine.store.errors.GraphError: factory 'os:system': expected permission to import it; ...
    """
    if given is not None:
        return given_factory(given)
    if name in _registered:
        return _registered[name]
    if not _is_within(checked_name(name).partition(":")[0], trusted):
        raise GraphError(
            f"factory {name!r}: expected permission to import it; list its package in trusted_packages=, pass "
            f"factory=, or call register_factory in this process; trusted are {sorted(trusted)}"
        )
    found = _imported(name)
    if not _is_within(str(getattr(found, "__module__", "")), trusted):
        raise GraphError(f"factory {name!r}: expected a function that is defined in {sorted(trusted)}; found {found!r}")
    return found


def given_factory(given: Factory | str) -> Factory:
    """Return the caller's factory. A name is imported."""
    return given if callable(given) else _imported(checked_name(given))


def _is_within(place: str, packages: Collection[str]) -> bool:
    return any(f"{place}.".startswith(f"{package}.") for package in packages)


def _imported(name: str) -> Factory:
    place, _, path = name.partition(":")
    check_module(place)
    with building(f"factory {name!r}: expected a name that can be imported"):
        found: object = import_module(place)
        for part in path.split("."):
            found = getattr(found, part)
            if isinstance(found, ModuleType) or not callable(found):
                raise TypeError(f"{part} is a {type(found).__name__}, not a function or class")
    return found  # pyright: ignore[reportReturnType]  # checked above
