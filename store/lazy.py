"""What is imported when it is first used: a package's names (PEP 562), and packages that may not be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from .errors import CodecUnavailableError


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
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

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names


def optional(name: str, path: object) -> ModuleType:
    """Import the package that reads or writes a file.

    Raises:
        CodecUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise CodecUnavailableError(
            f"{path}: expected the package {name!r}, which reads it; it is not installed"
        ) from exc
