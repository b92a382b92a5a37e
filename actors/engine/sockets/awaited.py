"""A connection of an event loop to an actor. It carries many calls at once."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from typing import cast

from .framing import (
    AGAIN,
    CONNECTS,
    PING,
    SECRET_BYTES,
    WELCOME,
    SocketAddress,
    check_proof,
    check_server,
    check_welcome,
    outcome_of,
    response,
    watch,
)
from .incoming import Incoming, Message
from .packing import Packed

CONNECT_S = 10.0
"""How long another machine may take to accept a connection. Its network may be down for some seconds of these."""
WELCOME_S = 30.0
"""How long an actor may take to authenticate a connection: its event loop may be busy."""
PING_S, STALE_S = 1.0, 5.0
"""How often an actor of another machine is sent a ping, and for how long it may answer none until its connection is
stale."""


class ConnectionEndedError(Exception):
    """A connection ended while an answer was awaited."""


class AwaitedConnection(asyncio.BufferedProtocol):
    """One connection; `connected` makes it.

    Args:
        away: the actor is on another machine.
    """

    def __init__(self, away: bool = False) -> None:
        self._away = away
        self._unanswered = 0
        """Pings since the last bytes arrived."""
        self.open = False
        """It is authenticated, and has not ended."""
        self.welcome: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The first byte from the server; empty if the connection ended before."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[object]] = {}
        """Number of a call -> its future answer."""
        self._incoming = Incoming()
        self._first = memoryview(bytearray(1))
        """Buffer of the welcome."""
        self._why = "it died or is being restarted"
        self._transport: asyncio.Transport | None = None

    def send(self, message: Packed) -> asyncio.Future[object]:
        """Send a call and return its future answer, which is `ConnectionEndedError` if the connection ends."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            answer.set_exception(ConnectionEndedError(self._why))
            return answer
        number = next(self._numbers)
        self._waiting[number] = answer
        for part in message.parts(number):
            self._transport.write(part)
        return answer

    @property
    def stale(self) -> bool:
        """Whether another machine has answered no ping for `STALE_S`.

        Pings are counted, not seconds: while this loop is busy, or sends a large call, no ping is sent.
        """
        return self._unanswered * PING_S > STALE_S

    @property
    def busy(self) -> bool:
        """Whether it is open, and answers are awaited."""
        return self.open and any(not answer.done() for answer in self._waiting.values())

    def close(self, why: str = "the connection was closed") -> None:
        """End the connection, and fail its calls. Call this in its loop."""
        self._why = why
        self.open = False
        if self._transport is not None:
            self._transport.close()

    def welcomed(self, said: bytes) -> None:
        """Take the first byte from the server."""
        self.open = said == WELCOME
        self.welcome.set_result(said)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the loop calls this."""
        self._transport = cast(asyncio.Transport, transport)
        if self._away:
            self._ping(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that the next bytes are received into; the loop calls this."""
        return self._incoming.space() if self.welcome.done() else self._first

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes; the loop calls this."""
        self._unanswered = 0
        if not self.welcome.done():
            self.welcomed(bytes(self._first))
            return
        self._incoming.came(nbytes)
        try:
            while (found := self._incoming.first()) is not None:
                self._take(found)
        except ConnectionAbortedError as exc:
            self._incoming.clear()
            self.close(f"the received data is invalid: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all calls; the loop calls this."""
        self.open = False
        if not self.welcome.done():
            self.welcome.set_result(b"")
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionEndedError(self._why))

    def _ping(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            if not transport.get_write_buffer_size():
                transport.write(PING)
                self._unanswered += 1
            asyncio.get_running_loop().call_later(PING_S, self._ping, transport)

    def _take(self, message: Message) -> None:
        number, pickled, buffers = message
        if not number and not pickled:  # the answer to a ping
            return
        if number not in self._waiting:
            raise ConnectionAbortedError(f"expected the answer to a call that was sent; found one to number {number}")
        answer = self._waiting.pop(number)
        if not answer.done():
            _settle(answer, pickled, buffers)


async def connected(address: SocketAddress) -> AwaitedConnection:
    """Connect this loop to an actor.

    Raises:
        OSError: it does not answer there.
    """
    if address.place is not None:
        return await _connected_away(address, address.place)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.connect(f"\0{address.name}")  # on one machine this succeeds or fails at once
        check_server(end, address)
        end.sendall(address.secret)  # there is room for so few bytes
    except BaseException:
        end.close()
        raise
    connection = AwaitedConnection()
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=end)
    try:
        async with asyncio.timeout(WELCOME_S):  # `wait_for` can lose a cancellation
            check_welcome(await asyncio.shield(connection.welcome))
    except BaseException:
        connection.close()
        raise
    return connection


async def _connected_away(
    address: SocketAddress, place: tuple[str, int], answer: bytes = b"", connects: int = CONNECTS
) -> AwaitedConnection:
    """Connect this loop to an actor of another machine.

    Args:
        address: the actor's.
        place: its host and port.
        answer: the response to a challenge of an earlier connection, which ended with `AGAIN`.
        connects: how often to connect at most.
    """
    loop = asyncio.get_running_loop()
    end = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(end, place)
        watch(end)
        async with asyncio.timeout(WELCOME_S):
            if answer:
                await loop.sock_sendall(end, answer)
                await _exactly(end, SECRET_BYTES)
            else:
                answer = response(address, await _exactly(end, SECRET_BYTES))
                await loop.sock_sendall(end, answer)
            welcome = await loop.sock_recv(end, 1)
            if welcome != AGAIN or connects == 1:
                check_welcome(welcome)
                check_proof(await _exactly(end, SECRET_BYTES), address, answer[:SECRET_BYTES])
    except BaseException:
        end.close()
        raise
    if welcome == AGAIN:
        end.close()
        return await _connected_away(address, place, answer, connects - 1)
    connection = AwaitedConnection(away=True)
    connection.welcomed(WELCOME)
    await loop.create_connection(lambda: connection, sock=end)
    return connection


async def _exactly(end: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        data = await asyncio.get_running_loop().sock_recv(end, nbytes - len(found))
        if not data:
            raise ConnectionResetError("expected a challenge or a proof; the connection was closed")
        found += data
    return found


def _settle(answer: asyncio.Future[object], pickled: bytes, buffers: Sequence[memoryview]) -> None:
    try:
        answer.set_result(outcome_of(pickled, buffers))
    except Exception as exc:  # noqa: BLE001  raised again where it is awaited
        answer.set_exception(exc)
