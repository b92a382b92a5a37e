"""What is imported when it is first used: a package's names (PEP 562), and packages that may not be installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from .errors import CodecUnavailableError


def lazy(
    package: str, modules: Mapping[str, str], needs: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    `dir` and `__all__` leave out names that need a framework which is not installed, so that `help(package)`,
    `from package import *` and `inspect.getmembers` work without it.

    Args:
        package: its `__name__`.
        modules: name -> the module of the package that defines it.
        needs: name -> the framework that its module imports, such as "keras".

    >>> get, names = lazy("tensorvine.store", {"ShardState": "shard"})
    >>> get("ShardState").__name__
    'ShardState'
    >>> get("Shard")
    Traceback (most recent call last):
    AttributeError: module 'tensorvine.store' has no attribute 'Shard'
    """

    def usable() -> list[str]:
        missing = {it for it in set((needs or {}).values()) if importlib.util.find_spec(it) is None}
        return sorted(name for name in modules if (needs or {}).get(name) not in missing)

    def get(name: str) -> object:
        if name == "__all__":
            return usable()
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *usable()})

    return get, names


def to_install(extra: str) -> str:
    """Return how to install an extra of TensorVine, for the end of an error message.

    >>> to_install("dask")
    "install it from your clone (pip install '.[dask]') or wheel (pip install 'WHEEL[dask]')"
    """
    return f"install it from your clone (pip install '.[{extra}]') or wheel (pip install 'WHEEL[{extra}]')"


def optional(name: str, path: object, extra: str) -> ModuleType:
    """Import a package that reads or writes a file.

    Raises:
        CodecUnavailableError: if the package is not installed. The message names the extra that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise CodecUnavailableError(
            f"{path}: expected the package {name!r} for this format; it is not installed: {to_install(extra)}"
        ) from exc
