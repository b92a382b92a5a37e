"""The engine whose actor this process is, where an engine has a process for each actor."""

from __future__ import annotations

from .engine import Engine

_engines: list[Engine] = []


def engine() -> Engine | None:
    """Return the engine; None: this process is no actor of such an engine."""
    return _engines[0] if _engines else None


def belongs_to(engine: Engine) -> None:
    """Say that this process is an actor of an engine, from now until it ends."""
    _engines[:] = [engine]
