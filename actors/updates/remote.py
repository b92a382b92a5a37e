"""What the starter of an actor of its own holds of it: producers and consumers are such.

Rules
- Such an actor ends with the process that started it. `close` ends it before that, first by asking it to.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import ClassVar, Self, TypeVar

from ...store.errors import TensorVineError
from ..client.repository import Repository
from ..engine.engine import Actor, Engine, Lifetime
from ..engine.opened import Opened
from ..rpc.calls import Request, remote
from ..rpc.channel import Channel

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 5.0

_R = TypeVar("_R")


class RemoteCalls:
    """Calls of every such actor."""

    @remote("ctl")
    def close(self) -> None:
        """Disconnect from the repository."""
        ...


class Remote:
    """A handle to an actor: the base class of `Producer` and `Consumer`.

    The actor stops when the process that started it ends.
    """

    role: ClassVar[str]
    """Role of the actor: "producer" or "consumer"."""

    def __init__(self, engine: Engine, name: str, actor_name: str, actor: Actor) -> None:
        self.name = name
        """Name of the model."""
        self.actor = actor
        """The engine's handle of the actor."""
        self._engine = engine
        self._actor_name = actor_name
        self._channel = Channel(engine, f"{self.role} of {name!r}", actor=actor)
        self._opened = Opened(f"{self.role} of {name!r}")

    @classmethod
    def _spawn(
        cls,
        repo: Repository,
        name: str,
        actor: type,
        arguments: Mapping[str, object],
        node: str | None,
        lifetime: Lifetime,
        first: Request[object],
    ) -> Self:
        """Start the actor, and wait until it answers the call `first`.

        Raises:
            OperationTimeoutError: it did not start in time: no node has these resources.
        """
        actor_name = f"{repo.name}/{cls.role}-{name}-{uuid.uuid4().hex[:8]}"
        given = {"repository": repo.name, "name": name, **arguments}
        started = cls(repo.engine, name, actor_name, repo.engine.spawn(actor, actor_name, given, node, lifetime))
        try:
            started._call(first, START_TIMEOUT_S)
        except BaseException:
            repo.engine.kill(actor_name)
            raise
        return started

    def _call(self, request: Request[_R], timeout: float) -> _R:
        """Call the actor; errors as of `Channel.call`.

        Raises:
            ClosedError: it was closed, or this is a forked child of its starter.
        """
        self._opened.check()
        return self._channel.call(request, timeout)

    def close(self) -> None:
        """Stop the actor, even if the actor is busy.

        This method does nothing if it was called before, or in a child process that `os.fork` created.
        """
        if not self._opened.close():
            return
        try:
            self._channel.call(RemoteCalls.close(), CLOSE_TIMEOUT_S)
        except TensorVineError as exc:
            log.info("%s of %r did not close on request: %s", self.role, self.name, exc)
        finally:  # also where this wait is interrupted
            self._engine.kill(self._actor_name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}{', closed' if self._opened.closed else ''})"

    def __enter__(self) -> Self:
        self._opened.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
