"""All connections of this process to one actor, and how they are made.

Rules
- A thread's short call uses a connection of `blocking` where one exists. All other calls use a connection of an event
  loop: the caller's loop, or that of the process (`background_loop`). Each concurrency group has its own connection.
- A connection is made when a call needs it. Calls wait for that in their order, also while the actor starts.
- The engine is asked for the actor's addresses, in a thread, before each connection of a loop: the actor may have been
  restarted elsewhere.
- Nothing is repeated here. A call on a connection that ends may have happened; its answer is `LostError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeAlias, TypeVar

from ....store.errors import OperationTimeoutError
from ....store.waiting import Backoff
from ..opened import Opened
from .awaited import AwaitedConnection, ConnectionEndedError, connected
from .blocking import BlockingConnections, SocketAnswer
from .framing import SocketAddress
from .packing import Packed

CROWDED_S = 30.0
"""How long connecting is retried while an actor's queue of new connections is full."""
CLOSED = "the connection was closed"

Coming: TypeAlias = Future[Any] | asyncio.Future[Any]
Find: TypeAlias = Callable[[], Awaitable[Sequence[SocketAddress]]]
_R = TypeVar("_R")


class LostError(Exception):
    """The actor ended, or is not there; says why."""


class Line:
    """A connection that is made when it is needed; for use in one event loop.

    Args:
        find: returns the actor's addresses, the one to try first at the front. Its errors are those of the calls.
    """

    def __init__(self, find: Find) -> None:
        self.outdated = False
        """The next call needs a new connection: the actor may be elsewhere."""
        self._find = find
        self._connection: AwaitedConnection | None = None
        self._replaced: list[AwaitedConnection] = []
        """Stale connections whose calls may still be answered; the system ends them if the machine does not respond."""
        self._closed = False
        self._waiting: deque[tuple[Packed, Coming]] = deque()
        self._connecting: asyncio.Task[None] | None = None

    def send(self, message: Packed, answer: Coming) -> None:
        """Send a call, now or when the connection is made, and settle its answer later."""
        if self._closed:
            _settle(answer, error=LostError(CLOSED))
            return
        connection = self._connection if self._connecting is None and not self.outdated else None
        if connection is not None and connection.open and not connection.stale:
            _send(connection, message, answer)
            return
        self._waiting.append((message, answer))
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def close(self) -> None:
        """End the connection, and fail its calls and later ones."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in self._connections():
            connection.close()
        self._fail(LostError(CLOSED))  # a task that has not begun does not do it

    async def _connect(self) -> None:
        self.outdated = False
        try:
            for old in self._connections():
                if not old.busy:
                    old.close()
            self._replaced = [old for old in self._connections() if old.busy]
            self._connection = None
            self._connection = connection = await self._reached()
        except asyncio.CancelledError:
            self._fail(LostError(CLOSED))
            raise
        except Exception as exc:  # noqa: BLE001  raised where the calls are awaited
            self._fail(exc)
        else:
            while self._waiting:
                _send(connection, *self._waiting.popleft())
        finally:
            self._connecting = None

    async def _reached(self) -> AwaitedConnection:
        reason: OSError | None = None
        for address in await self._find():
            try:
                return await _connected(address)
            except OSError as exc:
                reason = exc
        raise LostError(f"it does not answer at its address: {reason if str(reason) else 'the connection timed out'}")

    def _connections(self) -> list[AwaitedConnection]:
        return self._replaced if self._connection is None else [*self._replaced, self._connection]

    def _fail(self, error: Exception) -> None:
        while self._waiting:
            _settle(self._waiting.popleft()[1], error=error)


class Lines:
    """The connections of this process to one actor. They are closed when this object is garbage and no call is open.

    Args:
        locate: returns the actor's addresses for this process. It may wait, and is called in a thread.
    """

    def __init__(self, locate: Callable[[], Sequence[SocketAddress]]) -> None:
        self._locate = locate
        self._open = _Open(Opened("connections"))
        weakref.finalize(self, self._open.close).atexit = False

    def send(self, group: str, message: Packed) -> SocketAnswer | Future[Any]:
        """Send a call of a group from a thread; does not wait."""
        blocking = self._open.blocking if group == "ctl" else None
        answer = blocking.send(message) if blocking is not None else None
        return answer if answer is not None else self._sent(group, message)

    def ask(self, group: str, message: Packed) -> asyncio.Future[Any]:
        """Send a call of a group from an event loop."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._line(loop, group).send(message, answer)
        return answer

    def post(self, group: str, message: Packed) -> None:
        """Send a call of a group whose answer nobody needs; does not wait."""
        self._sent(group, message)

    def renew(self) -> None:
        """Use new connections for later calls, because the actor may be elsewhere. Open calls continue."""
        self._open.renew()

    def close(self) -> None:
        """End all connections. A later call makes new ones."""
        self._open.close()

    def _sent(self, group: str, message: Packed) -> Future[Any]:
        answer: Future[Any] = Future()
        loop = background_loop()
        line = self._line(loop, group)
        answer.add_done_callback(lambda _, self=self: None)  # keeps the connections until then
        loop.call_soon_threadsafe(line.send, message, answer)
        return answer

    def _line(self, loop: asyncio.AbstractEventLoop, group: str) -> Line:
        locate, opened = self._locate, self._open

        async def find() -> Sequence[SocketAddress]:
            found = await in_thread(locate)
            if group == "ctl":
                opened.use(found[0])
            return found

        return self._open.line(loop, group, find)


class _Open:
    """What `Lines` has open; it does not refer to them."""

    def __init__(self, opened: Opened) -> None:
        self.blocking: BlockingConnections | None = None
        self._opened = opened
        self._address: SocketAddress | None = None
        self._lines: dict[tuple[asyncio.AbstractEventLoop, str], Line] = {}
        self._lock = threading.RLock()  # garbage collection may call `close` within a method

    def line(self, loop: asyncio.AbstractEventLoop, group: str, find: Find) -> Line:
        with self._lock:
            if (loop, group) not in self._lines:
                self._lines = {key: line for key, line in self._lines.items() if not key[0].is_closed()}
                self._lines[loop, group] = Line(find)
            return self._lines[loop, group]

    def use(self, address: SocketAddress | None) -> None:
        with self._lock:
            if address == self._address:
                return
            old, self._address = self.blocking, address
            self.blocking = BlockingConnections(address) if address is not None else None
        if old is not None:
            old.close()

    def renew(self) -> None:
        self.use(None)
        with self._lock:
            for line in self._lines.values():
                line.outdated = True

    def close(self) -> None:
        if self._opened.inherited:
            return
        self.use(None)
        with self._lock:
            lines, self._lines = self._lines, {}
        for (loop, _), line in lines.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(line.close)


async def in_thread(work: Callable[[], _R]) -> _R:
    """Run a function in a daemon thread, which the end of the process does not wait for, and await its result."""
    coming: Future[_R] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as exc:  # noqa: BLE001  raised where it is awaited
            with contextlib.suppress(InvalidStateError):
                coming.set_exception(exc)
        else:
            with contextlib.suppress(InvalidStateError):
                coming.set_result(result)

    threading.Thread(target=run, name="tensorvine-locate", daemon=True).start()
    return await asyncio.wrap_future(coming)


class _Background:
    """The event loop of this process for calls of threads; a forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: Opened | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        if self._opened is None or self._opened.inherited or self._loop is None:
            with self._lock:
                if self._opened is None or self._opened.inherited or self._loop is None:
                    self._loop = asyncio.new_event_loop()
                    threading.Thread(target=self._loop.run_forever, name="tensorvine-calls", daemon=True).start()
                    self._opened = Opened("the event loop of calls")
        return self._loop


_background = _Background()


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process for calls of threads. It runs in a daemon thread until the process ends."""
    return _background.get()


def result_of(answer: Future[Any], timeout: float, who: str) -> Any:
    """Wait in a thread for an answer.

    Raises:
        OperationTimeoutError: there was none within `timeout` seconds; names `who`.
        LostError: the actor ended.
        Exception: what the method raised.
    """
    try:
        error = answer.exception(max(timeout, 0.0))
    except TimeoutError:
        raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; the call timed out") from None
    if error is not None:
        raise error
    return answer.result()


async def _connected(address: SocketAddress) -> AwaitedConnection:
    """Connect; retry while the actor's queue of new connections is full."""
    pauses = Backoff(0.01, 0.5)
    async with asyncio.timeout(CROWDED_S):
        while True:
            with contextlib.suppress(BlockingIOError):
                return await connected(address)
            await pauses.wait_async()


def _send(connection: AwaitedConnection, message: Packed, answer: Coming) -> None:
    if not answer.done():  # else its caller has stopped waiting
        connection.send(message).add_done_callback(lambda found: _settle(answer, found))


def _settle(answer: Coming, found: asyncio.Future[object] | None = None, error: BaseException | None = None) -> None:
    """Hand an answer to its caller, who may have stopped waiting."""
    if found is not None:
        error = LostError(CLOSED) if found.cancelled() else found.exception()
        if isinstance(error, ConnectionEndedError):
            error = LostError(str(error))
    with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):
        if error is not None:
            answer.set_exception(error)
        elif found is not None:
            answer.set_result(found.result())
