"""OpenTelemetry spans of saves, loads, queries, published updates, swaps of consumers, and forks.

Rules
- Off, unless the environment variable `TENSORVINE_TRACES` is set to something else than 0 when the first span begins.
  Then nothing of OpenTelemetry is imported, and a span is a shared object that does nothing.
- Spans go to the tracer provider of the process, as those of other libraries do. A program sets it; a consumer's
  process can set it in `build`.
- Names of spans are `tensorvine.save` and the like; attributes have the prefix `tensorvine.`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from .lazy import to_install

log = logging.getLogger(__name__)

VARIABLE = "TENSORVINE_TRACES"
_P = ParamSpec("_P")
_R = TypeVar("_R")
_OFF: AbstractContextManager[None] = nullcontext()


def span(what: str, parent: object = None) -> AbstractContextManager[object]:
    """Return a context manager that is a span of this thread; an error within it is recorded.

    Args:
        what: the operation, such as "save".
        parent: the result of `current` in another thread. None means the span of this thread, if there is one.

    >>> with span("load"):
    ...     note(model="m@1")
    """
    tracer = _tracer()
    return tracer.start_as_current_span(f"tensorvine.{what}", parent) if tracer is not None else _OFF


def traced(what: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make each call of a function a span."""

    def trace(work: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(work)
        def within(*arguments: _P.args, **named: _P.kwargs) -> _R:
            with span(what):
                return work(*arguments, **named)

        return within

    return trace


def note(**attributes: str | int | float) -> None:
    """Add attributes to the span of this thread."""
    if _tracer() is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes({f"tensorvine.{name}": value for name, value in attributes.items()})


def current() -> object:
    """Return the context of this thread, as the parent of a span in another thread. None if spans are off."""
    if _tracer() is None:
        return None
    from opentelemetry import context

    return context.get_current()


@cache
def _tracer() -> Any:
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return None
    try:
        from opentelemetry import trace
    except ImportError as exc:
        log.warning("%s is set, but there are no spans: %s: %s, or unset it", VARIABLE, exc, to_install("web"))
        return None
    return trace.get_tracer("tensorvine")
