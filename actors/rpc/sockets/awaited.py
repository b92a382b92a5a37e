"""A connection of an event loop to an actor of the same machine. It carries many calls at once."""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any, TypeVar, cast

from ....store.errors import ShardUnavailableError
from ..calls import Request
from .framing import HEADER, WELCOME, SocketAddress, check_server, first_of, outcome_of, packed

WELCOME_S = 5.0
"""How long a server may take to say whether it has room for a connection."""

_R = TypeVar("_R")


class AwaitedConnection(asyncio.Protocol):
    """One connection; `connected` makes it."""

    def __init__(self) -> None:
        self.open = False
        """It is welcome, and has not ended."""
        self.welcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the server has room for it."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Any], str]] = {}
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, request: Request[_R], who: str) -> asyncio.Future[_R] | None:
        """Send a call, which errors name `who`; None: it cannot be sent, and nothing has happened."""
        message = packed(request)
        if message is None or self._transport is None or self._transport.is_closing():
            return None
        number = next(self._numbers)
        answer: asyncio.Future[_R] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer, who
        self._transport.write(HEADER.pack(len(message), number) + message)
        return answer

    def close(self) -> None:
        """End the connection, and the waits for answers with it. To be called in its loop."""
        self.open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the loop calls this."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take answers; the loop calls this."""
        if not self.welcome.done():
            self.open, data = data[:1] == WELCOME, data[1:]
            self.welcome.set_result(self.open)
        self._buffer += data
        while (found := first_of(self._buffer)) is not None:
            number, message = found
            answer, _ = self._waiting.pop(number)
            if not answer.done():  # else nobody waits any more
                _settle(answer, message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all who wait that the actor died; the loop calls this."""
        self.open = False
        if not self.welcome.done():
            self.welcome.set_result(False)
        waiting, self._waiting = self._waiting, {}
        for answer, who in waiting.values():
            if not answer.done():
                answer.set_exception(ShardUnavailableError(f"{who}: expected an answer; it died or is being restarted"))


async def connected(address: SocketAddress) -> AwaitedConnection:
    """Connect this loop to an actor.

    Raises:
        OSError: it does not answer there.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.connect(f"\0{address.name}")  # on one machine it succeeds at once, or not at all
        check_server(end, address)
    except BaseException:
        end.close()
        raise
    connection = AwaitedConnection()
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=end)
    try:
        async with asyncio.timeout(WELCOME_S):  # `wait_for` loses a cancellation that comes together with the answer
            welcome = await asyncio.shield(connection.welcome)
        if not welcome:
            raise ConnectionRefusedError("expected room for another connection; there is none")
    except BaseException:
        connection.close()
        raise
    return connection


def _settle(answer: asyncio.Future[Any], message: bytes) -> None:
    try:
        answer.set_result(outcome_of(message))
    except Exception as exc:  # noqa: BLE001  raised again where it is awaited
        answer.set_exception(exc)
