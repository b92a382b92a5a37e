"""Calls of an actor by the name of a method, for tests of actors that declare none."""

from __future__ import annotations

from typing import Any

from tensorvine.actors.engine.engine import Actor, Engine
from tensorvine.actors.rpc.calls import Declaration, Request
from tensorvine.actors.rpc.channel import Answer, Channel

PATIENCE_S = 60.0


def request(method: str, *arguments: Any, group: str = "watch") -> Request[Any]:
    """Return a request that is sent on the connection of a group."""

    def declared(self: Any, *given: Any) -> Any: ...

    declared.__name__ = method
    return Request(Declaration(declared, group, False), arguments)


def begin(engine: Engine, actor: Actor, method: str, *arguments: Any, who: str = "probe") -> Answer[Any]:
    """Call a method, and do not wait."""
    return Channel(engine, who, actor=actor).send(request(method, *arguments))


def ask(
    engine: Engine, actor: Actor, method: str, *arguments: Any, timeout: float = PATIENCE_S, who: str = "probe"
) -> Any:
    """Call a method, and wait for its answer."""
    return begin(engine, actor, method, *arguments, who=who).result(timeout)
