"""A connection of an event loop to an actor. It carries many calls at once."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from typing import cast

from ....store.errors import ShardUnavailableError
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
from .traffic import SHORT_CALLS, Packed, Request, Traffic, packed

CONNECT_S = 5.0
"""How long another machine may take to accept a connection."""
PING_S, STALE_S = 1.0, 3.0
"""How often another machine is asked for a sign of life, and how long it may give none until calls go by the engine."""


class ConnectionEndedError(ShardUnavailableError):
    """A connection ended while an answer was awaited, and the actor with it."""


class AwaitedConnection(asyncio.BufferedProtocol):
    """One connection; `connected` makes it.

    Args:
        traffic: what it carries.
        away: the actor is on another machine.
    """

    def __init__(self, traffic: Traffic = SHORT_CALLS, away: bool = False) -> None:
        self._traffic = traffic
        self._asks_for_life = away and traffic.asks_for_life
        self._heard = asyncio.get_running_loop().time()
        self.open = False
        """It is welcome, and has not ended."""
        self.welcome: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """What the server says to it first; nothing, if it has ended."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[object], str, str]] = {}
        """The number of a call -> its answer to come, what errors name, its group."""
        self._under_way = dict.fromkeys(traffic.under_way, 0)
        """By group, as the server counts them."""
        self._incoming = Incoming(traffic.answer_bytes, traffic.buffers)
        self._said = memoryview(bytearray(1))
        """Where the welcome is received."""
        self._writable = True
        self._why = "it died or is being restarted"
        self._transport: asyncio.Transport | None = None

    def send(self, request: Request, who: str) -> asyncio.Future[object] | None:
        """Send a short call, which errors name `who`; None: it cannot be sent, and nothing has happened."""
        message = packed(request)
        return self.send_packed(message, request.remote.group, who) if message is not None else None

    def send_packed(self, message: Packed, group: str, who: str) -> asyncio.Future[object] | None:
        """Send a call of a concurrency group; see `send`."""
        if self._transport is None or self._transport.is_closing():
            return None
        if not self._writable or self._under_way[group] >= self._traffic.under_way[group] or not self._is_fresh:
            return None
        number = next(self._numbers)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer, who, group
        self._under_way[group] += 1
        for part in message.parts(number):
            self._transport.write(part)
        return answer

    def close(self) -> None:
        """End the connection, and the waits for answers with it. To be called in its loop."""
        self.open = False
        if self._transport is not None:
            self._transport.close()

    def welcomed(self, said: bytes) -> None:
        """Take what the server says first."""
        self.open = said == WELCOME
        self.welcome.set_result(said)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the loop calls this."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self._traffic.unsent_bytes)
        if self._asks_for_life:
            self._ping(self._transport)

    def pause_writing(self) -> None:
        """Leave calls to the engine; the loop calls this."""
        self._writable = False

    def resume_writing(self) -> None:
        """Take calls again; the loop calls this."""
        self._writable = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where to receive answers; the loop calls this."""
        return self._incoming.space() if self.welcome.done() else self._said

    def buffer_updated(self, nbytes: int) -> None:
        """Take answers; the loop calls this."""
        self._heard = asyncio.get_running_loop().time()
        if not self.welcome.done():
            self.welcomed(bytes(self._said))
            return
        self._incoming.came(nbytes)
        try:
            while (found := self._incoming.first()) is not None:
                self._take(found)
        except ConnectionAbortedError as exc:
            self._why = f"the received data is invalid: {exc}"
            self._incoming.clear()
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all who wait that the actor died; the loop calls this."""
        self.open = False
        if not self.welcome.done():
            self.welcome.set_result(b"")
        waiting, self._waiting = self._waiting, {}
        for answer, who, _ in waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionEndedError(f"{who}: expected an answer; {self._why}"))

    @property
    def _is_fresh(self) -> bool:
        return not self._asks_for_life or asyncio.get_running_loop().time() - self._heard < STALE_S

    def _ping(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        if self._writable:
            transport.write(PING)
        asyncio.get_running_loop().call_later(PING_S, self._ping, transport)

    def _take(self, message: Message) -> None:
        number, pickled, buffers = message
        if not number and not pickled:  # a sign of life
            return
        if number not in self._waiting:
            raise ConnectionAbortedError(f"expected the answer to a call that was sent; found one to number {number}")
        answer, _, group = self._waiting.pop(number)
        self._under_way[group] -= 1
        if not answer.done():  # else nobody waits any more
            _settle(answer, pickled, buffers)


async def connected(address: SocketAddress, traffic: Traffic = SHORT_CALLS) -> AwaitedConnection:
    """Connect this loop to an actor.

    Raises:
        OSError: it does not answer there.
    """
    if address.place is not None:
        return await _connected_away(address, address.place, traffic)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.connect(f"\0{address.name}")  # on one machine it succeeds at once, or not at all
        check_server(end, address)
        end.sendall(address.secret)  # there is room for so few bytes
    except BaseException:
        end.close()
        raise
    connection = AwaitedConnection(traffic)
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=end)
    try:
        async with asyncio.timeout(traffic.welcome_s):  # `wait_for` can lose a cancellation
            check_welcome(await asyncio.shield(connection.welcome))
    except BaseException:
        connection.close()
        raise
    return connection


async def _connected_away(
    address: SocketAddress, place: tuple[str, int], traffic: Traffic, answer: bytes = b"", connects: int = CONNECTS
) -> AwaitedConnection:
    """Connect this loop to an actor of another machine.

    Args:
        address: the actor's.
        place: its host and port.
        traffic: what the connection carries.
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
        async with asyncio.timeout(traffic.welcome_s):
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
        return await _connected_away(address, place, traffic, answer, connects - 1)
    connection = AwaitedConnection(traffic, away=True)
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
