"""The channel: calls of this process to one actor, by a socket where there is one for them, else by the engine.

Rules
- Threads use `call` and `send`, event loops use `ask`, either may use `post`. A loop has one connection, which carries
  many calls; a thread's connection carries one.
- A channel that follows its actor asks it for its socket beside the first call, and again when a connection has ended,
  as after a restart; until it knows, calls go by the engine. Else its owner tells the threads' socket (`open`).
- A thread's call that found the actor dead has it looked up again: what was stopped and started is another actor of
  the same name. A loop does not look up again: it would stand still for as long as the cluster's head takes.
- What a socket does not carry goes by the engine: what is too large, what needs it to travel, and all calls to a
  machine that is not reached, or was not heard of just now. A call whose answer is too large is asked again by the
  engine, if it may be repeated.
- Nothing else is repeated here. Whether a request may be repeated is said where it is declared, and owners of channels
  do it (`Session`, `Resizing`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.waiting import Deadline
from ..engine.engine import Actor, Engine, Future
from ..engine.opened import Opened
from ..engine.sockets.awaited import AwaitedConnection, connected
from ..engine.sockets.blocking import AWAY_S, BlockingConnections, SocketAnswer
from ..engine.sockets.framing import AnswerTooLargeError, SocketAddress
from .actor_calls import ActorCalls
from .calls import Request

log = logging.getLogger(__name__)

ADDRESS_S = 30.0
"""How long an actor may take to say where its socket is."""
AGAIN_S = 5.0
"""How long after it was asked for in vain, or its connections ended, a socket is asked for again."""

_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)


class Channel:
    """Calls to one actor. It may be used by several threads and event loops.

    Args:
        engine: what runs the actor.
        name: the actor's; it stands in errors, with the call.
        follows: it asks the actor for its socket, and finds it anew when a thread's call failed.
        missing: the error for an actor that is not there (any more).
        actor: the engine's handle of it, where the caller has that; the name is then for errors only.

    >>> channel = Channel(engine, "default/shard-0")                             # doctest: +SKIP
    >>> channel.call(ShardCalls.models("resnet"), timeout=30.0)                  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        follows: bool = False,
        missing: type[TensorVineError] = ShardUnavailableError,
        actor: Actor | None = None,
    ) -> None:
        self.name = name
        self._opened = Opened(name)
        self._engine = engine
        self._follows = follows
        self._missing = missing
        self._actor = actor
        self._stale = False
        """The actor may be another one by now."""
        self._threads = _ThreadSide(engine, name, self._ask_address if follows else None)
        self._loops: dict[asyncio.AbstractEventLoop, _LoopSide] = {}

    # ---- calls ----------------------------------------------------------------------------------------

    def call(self, request: Request[_R], timeout: float) -> _R:
        """Call from a thread, and wait for the answer; errors as in `Answer.result` and `send`."""
        return self.send(request).result(timeout)

    def send(self, request: Request[_R]) -> Answer[_R]:
        """Call from a thread, and wait for the answer later.

        Raises:
            ShardUnavailableError, or what `missing` says: there is no such actor.
            ClosedError: this is a forked child of the process that made the channel.
        """
        self.check_process()
        connections = self._threads.connections()
        answer = connections.send(request) if connections is not None else None
        waiting = answer if answer is not None else self.send_by_engine(request)
        return Answer(self, self._engine, request, waiting)

    def send_by_engine(self, request: Request[object]) -> Future:
        """Call from a thread, past the socket; errors as in `send`."""
        return self._engine.call(self.find(), request.remote.name, *request.arguments)

    def post(self, request: Request[object]) -> None:
        """Call from a thread or a loop, where nobody will wait for the answer: by the engine, which drops it.

        Raises:
            ShardUnavailableError, or what `missing` says: there is no such actor.
            ClosedError: as in `send`.
        """
        self.check_process()
        self._engine.call(self._known(), request.remote.name, *request.arguments)

    async def ask(self, request: Request[_R], timeout: float) -> _R:
        """Call from an event loop, and await the answer; errors as in `Answer.result` and `send`."""
        self.check_process()
        deadline = Deadline.after(timeout)
        who = self.who(request)
        connection = self._loop_connection() if self._follows else None
        answer = connection.send(request, who) if connection is not None else None
        if answer is not None:
            await asyncio.wait([answer], timeout=timeout)
            if not answer.done():
                answer.cancel()
                raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; the call timed out")
            try:
                return cast(_R, answer.result())
            except AnswerTooLargeError:
                if not request.remote.repeatable:
                    raise
        future = self._engine.call(self._known(), request.remote.name, *request.arguments)
        return await self._engine.awaitable(future, deadline.left(), who)

    # ---- the actor ------------------------------------------------------------------------------------

    def find(self) -> Actor:
        """Return the actor, as the engine knows it, looked up again if it failed a thread; errors as in `send`."""
        if self._actor is None or self._stale:
            try:
                self._actor = self._engine.find(self.name)
            except LookupError as exc:
                raise self._missing(f"{self.name}: expected it to run; it was stopped, or has drained") from exc
            self._stale = False
        return self._actor

    def failed(self) -> None:
        """Learn that a thread's call found the actor dead: its next incarnation is another process, or another
        actor."""
        if self._follows:
            self._stale = True
            self._threads.ended()

    def _known(self) -> Actor:
        return self._actor if self._actor is not None else self.find()

    def check_process(self) -> None:
        """Refuse to go on in a forked child of the process that made this channel; errors as in `send`."""
        self._opened.check_process()

    def who(self, request: Request[object]) -> str:
        """Name a call to this actor in errors."""
        return f"{self.name}: {request.remote.name}"

    # ---- its socket -----------------------------------------------------------------------------------

    def open(self, address: SocketAddress | None) -> None:
        """Have threads use this socket from now on, as the actor said; None: none, for it died."""
        self._threads.use(address)

    def close(self) -> None:
        """End the connections; later calls go by the engine. Does nothing in a forked child."""
        if self._opened.inherited:
            return
        self._threads.close()
        for side in list(self._loops.values()):
            side.close()

    def _ask_address(self) -> Future:
        return self._engine.call(self._known(), ActorCalls.socket_address.name, self._engine.this_node())

    def _loop_connection(self) -> AwaitedConnection | None:
        loop = asyncio.get_running_loop()
        side = self._loops.get(loop)
        if side is None:
            side = self._loops[loop] = _LoopSide(self._engine, self.name, self._ask_address, loop)
        return side.connection()


class Answer(Generic[_R_co]):
    """The answer to a thread's call, to come."""

    def __init__(
        self, channel: Channel, engine: Engine, request: Request[_R_co], waiting: SocketAnswer | Future
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._request = request
        self._who = channel.who(request)
        self._waiting = waiting

    def result(self, timeout: float) -> _R_co:
        """Wait for it; after a timeout it may be waited for again.

        Raises:
            OperationTimeoutError: it did not come within `timeout` seconds.
            ShardUnavailableError: the actor died or is restarting.
            ClosedError: this is a forked child of the process that called.
            Exception: what the method raised.
        """
        self._channel.check_process()
        deadline = Deadline.after(timeout)
        try:
            if isinstance(self._waiting, SocketAnswer):
                try:
                    return self._waiting.result(timeout, self._who)
                except AnswerTooLargeError:
                    if not self._request.remote.repeatable:
                        raise
                    self._waiting = self._channel.send_by_engine(self._request)
            return self._engine.result(self._waiting, deadline.left(), self._who)
        except ShardUnavailableError:
            self._channel.failed()
            raise


class _ThreadSide:
    """The connections of threads, and where their socket is.

    Args:
        engine: what runs the actor.
        name: the actor's.
        ask: asks the actor where its socket is; None: the channel's owner tells.
    """

    def __init__(self, engine: Engine, name: str, ask: Callable[[], Future] | None) -> None:
        self._engine = engine
        self._name = name
        self._ask = ask
        self._lock = threading.Lock()
        self._address: SocketAddress | None = None
        self._connections: BlockingConnections | None = None
        self._asked: Future | None = None
        self._again = 0.0

    def connections(self) -> BlockingConnections | None:
        """Return what threads call by; where there is nothing yet, ask for it, or take the answer. Does not wait."""
        if (found := self._connections) is not None:
            return found
        with self._lock:
            if self._connections is None and self._ask is not None:
                self._look_up(self._ask)
            return self._connections

    def use(self, address: SocketAddress | None) -> None:
        """Take an address in the place of the present one."""
        with self._lock:
            self._use(address)

    def ended(self) -> None:
        """Let go of the socket of an actor that died, and ask for the next one after a while."""
        with self._lock:
            self._again = max(self._again, time.monotonic() + AGAIN_S)
            self._asked = None
            self._use(None)

    def close(self) -> None:
        """End the connections for good."""
        with self._lock:
            self._again, self._asked = math.inf, None
            self._use(None)

    def _use(self, address: SocketAddress | None) -> None:
        if address != self._address:
            old = self._connections
            self._address = address
            self._connections = BlockingConnections(address) if address is not None else None
            if old is not None:
                old.close()

    def _look_up(self, ask: Callable[[], Future]) -> None:
        if self._asked is None:
            if time.monotonic() >= self._again:
                self._again = time.monotonic() + AGAIN_S
                self._asked = ask()
            return
        try:
            address: SocketAddress | None = self._engine.result(self._asked, 0.0, self._name)
        except OperationTimeoutError:
            return
        except TensorVineError as exc:
            self._asked, self._again = None, time.monotonic() + AGAIN_S
            log.info("%s: its socket is unknown, calls are sent by the engine: %s", self._name, exc)
            return
        self._asked = None
        if address is None:  # it has none
            self._again = math.inf
        self._use(address)


class _LoopSide:
    """The connection of one event loop; for the arguments see `_ThreadSide`."""

    def __init__(self, engine: Engine, name: str, ask: Callable[[], Future], loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._name = name
        self._ask = ask
        self._loop = loop
        self._connection: AwaitedConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._again = 0.0

    def connection(self) -> AwaitedConnection | None:
        """Return the connection; where there is none (any more), begin to connect. Does not wait."""
        if self._connection is not None and self._connection.open:
            return self._connection
        if self._connecting is None and time.monotonic() >= self._again:
            self._again = time.monotonic() + AGAIN_S
            self._connecting = self._loop.create_task(self._connect())
        return None

    def close(self) -> None:
        """End it for good; safe from any thread."""
        self._again = math.inf
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _connect(self) -> None:
        address: SocketAddress | None = None
        try:
            address = await self._engine.awaitable(self._ask(), ADDRESS_S, self._name)
            if address is None:  # it has none
                self._again = math.inf
            else:
                self._connection = await connected(address)
        except (TensorVineError, OSError) as exc:
            if address is not None and address.place is not None:
                self._again = time.monotonic() + AWAY_S
            log.info("%s: no connection to it, calls are sent by the engine: %s", self._name, exc)
        finally:
            self._connecting = None
