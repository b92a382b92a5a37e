"""The channel: calls of this process to one actor, by our own sockets.

Rules
- Threads use `call` and `send`, event loops use `ask`, and both may use `post`. `engine.sockets.lines` makes the
  connections.
- After a call that failed with `ShardUnavailableError`, the next one makes a new connection: another process may have
  replaced the actor's, which still answers. If the engine does not reach the actor, its name is looked up again:
  a repository that was stopped and started has another actor of the same name.
- Nothing is repeated here. The declaration of a call says whether it may be repeated, and owners of channels do that
  (`Session`, `Resizing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ..engine.engine import Actor, Engine
from ..engine.opened import Opened
from ..engine.sockets.blocking import SocketAnswer
from ..engine.sockets.framing import SocketAddress
from ..engine.sockets.lines import Lines, LostError, result_of
from ..engine.sockets.packing import Packed, pack
from .calls import Request

START_S = 3600.0
"""How long calls may wait for an actor to start. Each of them has a timeout of its own."""

_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)


class Channel:
    """Calls to one actor, from any thread and event loop of this process.

    Args:
        engine: what runs the actor.
        name: the actor's name, which errors contain together with the call.
        missing: class of the error if there is no such actor.
        actor: the engine's handle of the actor. Defaults to the actor of this name, looked up when it is needed.

    >>> channel = Channel(engine, "default/shard-0")                             # doctest: +SKIP
    >>> channel.call(ShardCalls.models("resnet"), timeout=30.0)                  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        missing: type[TensorVineError] = ShardUnavailableError,
        actor: Actor | None = None,
    ) -> None:
        self.name = name
        self._opened = Opened(name)
        self._target = _Target(engine, name, missing, actor)
        self._lines = Lines(self._target.reach)

    def call(self, request: Request[_R], timeout: float) -> _R:
        """Call from a thread, and wait for the answer; errors as in `Answer.result` and `send`."""
        return self.send(request).result(timeout)

    def send(self, request: Request[_R]) -> Answer[_R]:
        """Call from a thread, and wait for the answer later.

        Raises:
            ClosedError: this is a forked child of the process that made the channel.
        """
        self.check_process()
        return Answer(self, request, self._lines.send(request.remote.group, _packed(request)))

    def post(self, request: Request[object]) -> None:
        """Call from a thread or an event loop without waiting for the answer, which is dropped; errors as in `send`."""
        self.check_process()
        self._lines.post(request.remote.group, _packed(request))

    async def ask(self, request: Request[_R], timeout: float) -> _R:
        """Call from an event loop, and await the answer; errors as in `Answer.result` and `send`."""
        self.check_process()
        who = self.who(request)
        answer = self._lines.ask(request.remote.group, _packed(request))
        try:
            await asyncio.wait([answer], timeout=max(timeout, 0.0))
        finally:  # also where this wait is cancelled
            late = answer.cancel()
        if late:
            raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; the call timed out")
        try:
            return cast(_R, answer.result())
        except LostError as exc:
            self.failed()
            raise ShardUnavailableError(f"{who}: expected an answer; {exc}") from exc
        except ShardUnavailableError:
            self.failed()
            raise

    def failed(self) -> None:
        """Note that the actor is unavailable: its next process may be elsewhere."""
        self._lines.renew()

    def check_process(self) -> None:
        """Refuse to go on in a forked child of the process that made this channel; errors as in `send`."""
        self._opened.check_process()

    def who(self, request: Request[object]) -> str:
        """Return the name of a call to this actor, for errors."""
        return f"{self.name}: {request.remote.name}"

    def close(self) -> None:
        """End the connections; a later call makes new ones. Does nothing in a forked child."""
        self._lines.close()


class _Target:
    """The actor of a channel, as the engine finds it."""

    def __init__(self, engine: Engine, name: str, missing: type[TensorVineError], actor: Actor | None) -> None:
        self._engine = engine
        self._name = name
        self._missing = missing
        self._actor = actor
        self._named = actor is None

    def reach(self) -> Sequence[SocketAddress]:
        """Return the addresses of the actor; wait while it starts."""
        if self._actor is not None:
            try:
                return self._engine.reach(self._actor, START_S, self._name)
            except ShardUnavailableError:
                if not self._named:
                    raise
        self._actor = self._found()
        return self._engine.reach(self._actor, START_S, self._name)

    def _found(self) -> Actor:
        try:
            return self._engine.find(self._name)
        except LookupError as exc:
            raise self._missing(f"{self._name}: expected it to run; it was stopped, or has drained") from exc


class Answer(Generic[_R_co]):
    """The future answer to a thread's call."""

    def __init__(self, channel: Channel, request: Request[_R_co], waiting: SocketAnswer | Future[Any]) -> None:
        self._channel = channel
        self._who = channel.who(request)
        self._waiting = waiting

    def result(self, timeout: float) -> _R_co:
        """Wait for the answer; after a timeout it may be waited for again.

        Raises:
            OperationTimeoutError: it did not arrive within `timeout` seconds.
            ShardUnavailableError, or the channel's `missing`: the actor died, is restarting, or does not exist.
            ClosedError: this is a forked child of the process that called.
            Exception: what the method raised.
        """
        self._channel.check_process()
        try:
            if isinstance(self._waiting, SocketAnswer):
                return self._waiting.result(timeout, self._who)
            return result_of(self._waiting, timeout, self._who)
        except LostError as exc:
            self._channel.failed()
            raise ShardUnavailableError(f"{self._who}: expected an answer; {exc}") from exc
        except ShardUnavailableError:
            self._channel.failed()
            raise


def _packed(request: Request[object]) -> Packed:
    return pack((request.remote.name, request.arguments))
