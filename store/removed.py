"""Errors for public names that were deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def removed(module: str, instead: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's `__getattr__`, which raises an ImportError for each deleted name.

    Set it under `if not TYPE_CHECKING`, because a type checker accepts all names of a module that has a `__getattr__`.

    Args:
        module: its `__name__`.
        instead: deleted name -> what to use.

    >>> removed("tensorvine.planner", {"old": "new()"})("old")
    Traceback (most recent call last):
    ImportError: tensorvine.planner.old was removed: use new()
    """

    def get(name: str) -> object:
        if name in instead:
            raise ImportError(f"{module}.{name} was removed: use {instead[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
