"""Concurrency groups of an actor's methods, so that a slow call delays no short one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

GROUPS = {"ctl": 512, "data": 64, "watch": 16384}
"""Group -> number of calls that run at once: short calls, bytes, long polls."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def group(name: str) -> Callable[[_Method], _Method]:
    """Assign an actor's method to a group of `GROUPS`."""

    def mark(method: _Method) -> _Method:
        method.concurrency_group = name  # pyright: ignore[reportFunctionMemberAccess]
        return method

    return mark
