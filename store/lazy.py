"""Names of a package that are imported when they are first used (PEP 562): what a user does not need is not loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`.
        modules: name -> the module of the package that defines it.

    >>> get, names = lazy("tensorvine.store", {"ShardState": "shard"})
    >>> get("ShardState").__name__
    'ShardState'
    >>> get("Shard")
    Traceback (most recent call last):
    AttributeError: module 'tensorvine.store' has no attribute 'Shard'
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
