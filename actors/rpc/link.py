"""A link from one actor of a repository to another: by its line where both are on one machine, else by the engine.

Rules
- The line is asked for beside the first call, which goes by the engine; so do calls from other event loops than that
  of the first, and what a line does not carry.
- A line that has ended is asked for again with a later call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import socket
import time
from typing import Any

from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ..engine.engine import Actor, Engine
from .line import AGAIN_S, HEADER, MESSAGE_BYTES, WELCOME, LineAddress, check_server, first_of, outcome_of

log = logging.getLogger(__name__)

ASK_S = 30.0


class Link:
    """Calls of one actor to another, each awaited.

    Args:
        engine: what runs both.
        actor: the other one, which has a method `line`.
        who: names it in errors.
    """

    def __init__(self, engine: Engine, actor: Actor, who: str) -> None:
        self._engine = engine
        self._actor = actor
        self._who = who
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: _AsyncLine | None = None
        self._again = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def call(self, timeout: float, method: str, *arguments: Any) -> Any:
        """Call the other and wait so many seconds; errors as in `Engine.awaitable`."""
        line = self._open_line()
        answer = line.send(method, arguments) if line is not None else None
        if answer is None:
            future = self._engine.call(self._actor, method, *arguments)
            return await self._engine.awaitable(future, timeout, self._who)
        await asyncio.wait([answer], timeout=timeout)
        if not answer.done():
            answer.cancel()
            raise OperationTimeoutError(f"{self._who}: expected an answer within {timeout:.1f} s; none came")
        return answer.result()

    def close(self) -> None:
        """End the line, in its loop; later calls go by the engine."""
        self._again = float("inf")
        if self._asking is not None:
            self._asking.cancel()
        if self._line is not None:
            self._line.close()

    def _open_line(self) -> _AsyncLine | None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            return None
        if self._line is not None and self._line.open:
            return self._line
        if self._asking is None and time.monotonic() >= self._again:
            self._again = time.monotonic() + AGAIN_S
            self._asking = loop.create_task(self._ask())
        return None

    async def _ask(self) -> None:
        try:
            future = self._engine.call(self._actor, "line", self._engine.this_node())
            address: LineAddress | None = await self._engine.awaitable(future, ASK_S, self._who)
            if address is None:
                self._again = float("inf")
                return
            self._line = await _connected(address, self._who)
        except (TensorVineError, OSError) as exc:
            log.info("%s: no line to it, calls go by the engine: %s", self._who, exc)
        finally:
            self._asking = None


async def _connected(address: LineAddress, who: str) -> _AsyncLine:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{address.name}")  # on one machine it succeeds at once, or not at all
        check_server(connection, address)
    except BaseException:
        connection.close()
        raise
    line = _AsyncLine(address, who)
    await asyncio.get_running_loop().create_unix_connection(lambda: line, sock=connection)
    return line


class _AsyncLine(asyncio.Protocol):
    """A connection that carries many calls at once, for one event loop."""

    def __init__(self, address: LineAddress, who: str) -> None:
        self.open = False
        """It is welcome, and has not ended."""
        self._address = address
        self._who = who
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._buffer = bytearray()
        self._transport: Any = None

    def send(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any] | None:
        """Send a call; None: it cannot be sent, and nothing has happened."""
        message = pickle.dumps((method, arguments), 5)
        if method not in self._address.methods or len(message) > MESSAGE_BYTES or self._transport.is_closing():
            return None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._transport.write(HEADER.pack(len(message), number) + message)
        return answer

    def close(self) -> None:
        """End the connection, and the waits for answers with it."""
        self.open = False
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.open:
            self.open, data = data[:1] == WELCOME, data[1:]
        self._buffer += data
        while (found := first_of(self._buffer)) is not None:
            number, message = found
            answer = self._waiting.pop(number)
            if not answer.done():  # else nobody waits any more
                _settle(answer, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(
                    ShardUnavailableError(f"{self._who}: expected an answer; it died or is being restarted")
                )


def _settle(answer: asyncio.Future[Any], message: bytes) -> None:
    try:
        answer.set_result(outcome_of(message))
    except Exception as exc:  # noqa: BLE001  raised again where it is awaited
        answer.set_exception(exc)
