"""Connections of threads to an actor, past the engine.

Rules
- An engine's call wakes many threads one after another, and each may wait for a core. Here it wakes two: the actor's
  event loop, where the call is carried out as the engine's calls are, and who waits for the answer.
- What cannot be sent (it is too large, or nobody answers there) has not happened, and goes by the engine. A connection
  that ends while an answer is awaited has ended with its actor: the call may or may not have happened.
- To another machine a connection is made within `SEND_S`, or not tried again for `AWAY_S`: a firewall may say nothing.
- Calls are numbered, and a connection carries one awaited call at a time. Who does not wait any more leaves its answer
  to the next, which skips it.
- A connection is referred to by its answer or by the pool, and is closed when nothing does: so one whose call an
  exception ended, at whatever point, is closed with the frames of that call.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
import weakref
from collections import deque
from typing import Any

from ....store.errors import OperationTimeoutError, ShardUnavailableError
from ....store.waiting import Deadline
from ..engine import GROUPS
from .framing import (
    AGAIN,
    ANSWER_BYTES,
    CONNECTS,
    HEADER,
    PING,
    SECRET_BYTES,
    SocketAddress,
    check_proof,
    check_server,
    check_welcome,
    first_of,
    outcome_of,
    response,
    watch,
)
from .traffic import Request, packed

log = logging.getLogger(__name__)

SEND_S = 1.0
"""How long a server may leave a call in the socket's buffer, or a ping unanswered, before the engine is asked."""
FRESH_S = 1.0
"""How long after another machine was heard of last a call is sent without a ping before it."""
RECEIVE_BYTES = 1 << 16
UNANSWERED = GROUPS["ctl"]
"""Calls of one connection that nobody waited for: with one more it ends, and the next call opens another."""
AGAIN_S = 5.0
"""How long nothing is sent to a server that has ended a connection in the place of a welcome."""
AWAY_S = 60.0
"""How long nothing is sent to a machine to which there was no connection."""


class BlockingConnections:
    """The connections of a process's threads to one actor.

    Args:
        address: the actor's.
    """

    def __init__(self, address: SocketAddress) -> None:
        self._address = address
        self._pool = _Pool()
        weakref.finalize(self, self._pool.close)

    def send(self, request: Request) -> SocketAnswer | None:
        """Send a call; None: it cannot be sent, and nothing has happened."""
        message = packed(request)
        if message is None:
            return None
        connection: _Connection | None = None
        try:
            connection = self._pool.take(self._address)
            number = connection.send(message.pickled)
        except OSError as exc:
            log.debug("socket %s: %s is sent by the engine: %s", self._address.name, request.remote.name, exc)
            if connection is not None:
                connection.close()
            return None
        except BaseException:  # such as Ctrl-C: part of the call may have been sent
            if connection is not None:
                connection.close()
            raise
        return SocketAnswer(connection, number, self._pool)

    def close(self) -> None:
        """End the connections; one whose answer is awaited ends with that."""
        self._pool.close()


class SocketAnswer:
    """An answer to come."""

    _connection: _Connection | None = None

    def __init__(self, connection: _Connection, number: int, pool: _Pool) -> None:
        self._connection = connection
        self._number = number
        self._pool = pool
        self._message = b""
        self._ended: OSError | None = None

    def result(self, timeout: float, who: str) -> Any:
        """Wait for the answer; after a timeout it may be waited for again.

        Raises:
            OperationTimeoutError: it did not come within `timeout` seconds; names `who`.
            ShardUnavailableError: the actor died; names `who`.
            Exception: what the method raised.
        """
        if self._connection is not None:
            self._receive(self._connection, timeout, who)
        if self._ended is not None:
            raise ShardUnavailableError(
                f"{who}: expected an answer; it died or is being restarted ({self._ended})"
            ) from self._ended
        return outcome_of(self._message)

    def _receive(self, connection: _Connection, timeout: float, who: str) -> None:
        try:
            message = connection.receive(self._number, Deadline.after(timeout))
        except TimeoutError as exc:
            raise OperationTimeoutError(
                f"{who}: expected an answer within {timeout:.1f} s; the call timed out"
            ) from exc
        except OSError as exc:
            self._connection, self._ended = None, exc
            connection.close()
            return
        except BaseException:  # such as Ctrl-C: nobody knows what the socket would bring next
            self._connection, self._ended = None, ConnectionAbortedError("the wait was interrupted")
            connection.close()
            raise
        self._connection, self._message = None, message
        self._pool.give(connection)

    def __del__(self) -> None:
        if self._connection is not None:
            self._pool.give(self._connection)


class _Pool:
    """The idle connections of a process to one actor. One that is given back after `close` is closed."""

    def __init__(self) -> None:
        self._idle: deque[_Connection] = deque()
        self._closed = False
        self._again = 0.0
        """When the server may be asked for a connection again."""

    def take(self, address: SocketAddress) -> _Connection:
        try:
            return self._idle.pop()  # the one used last: what one thread sends arrives in order
        except IndexError:
            return self._opened(address)

    def _opened(self, address: SocketAddress) -> _Connection:
        if time.monotonic() < self._again:
            raise ConnectionRefusedError("it has just closed a connection instead of accepting it")
        try:
            return _Connection(address)
        except (ConnectionResetError, BrokenPipeError):
            self._again = time.monotonic() + AGAIN_S
            raise
        except OSError as exc:
            if address.place is not None:
                self._again = time.monotonic() + AWAY_S
                log.info("%s: no connection, calls are sent by the engine for %.0f s: %s", address.name, AWAY_S, exc)
            raise

    def give(self, connection: _Connection) -> None:
        self._idle.append(connection)
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


class _Connection:
    """A connection, at the client."""

    def __init__(self, address: SocketAddress) -> None:
        self._buffer = bytearray()
        self._sent = self._answered = 0
        self._away = address.place is not None
        self._heard = time.monotonic()
        self._socket = _near(address) if address.place is None else _away(address, address.place)
        self.close = weakref.finalize(self, self._socket.close)
        """Closes the socket, which is not collected before this is called."""

    def send(self, message: bytes) -> int:
        if self._sent - self._answered >= UNANSWERED:
            raise ConnectionAbortedError(f"expected at most {UNANSWERED} calls without an answer")
        if self._away:
            self._check_there()
        self._sent += 1
        self._socket.settimeout(SEND_S)
        self._socket.sendall(HEADER.pack(len(message), self._sent) + message)
        return self._sent

    def receive(self, number: int, deadline: Deadline) -> bytes:
        while True:
            while (found := first_of(self._buffer, ANSWER_BYTES)) is not None:
                self._answered += 1 if found[0] else 0  # to a ping
                if found[0] == number:
                    return found[1]
                if found[0] > number > 0:
                    raise ConnectionAbortedError(f"expected the answer to call {number}; found one to {found[0]}")
            self._socket.settimeout(deadline.left())
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:  # there is no time, and nothing has come
                raise TimeoutError from None
            except TimeoutError as exc:
                if exc.errno == errno.ETIMEDOUT:  # the system's, and not ours
                    raise ConnectionAbortedError(f"its machine does not respond: {exc}") from exc
                raise
            if not data:
                raise ConnectionResetError("it has ended")
            self._heard = time.monotonic()
            self._buffer += data

    def _check_there(self) -> None:
        """Find out that the server has ended, or its machine is gone: what is sent then would come to nothing."""
        self._socket.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            if not self._socket.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("it has ended")
        if time.monotonic() - self._heard > FRESH_S:
            self._socket.settimeout(SEND_S)
            self._socket.sendall(PING)
            self.receive(0, Deadline.after(SEND_S))


def _near(address: SocketAddress) -> socket.socket:
    """Connect to an actor of this machine."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(SEND_S)
        end.connect(f"\0{address.name}")
        check_server(end, address)
        end.sendall(address.secret)
        check_welcome(end.recv(1))
    except BaseException:
        end.close()
        raise
    return end


def _away(
    address: SocketAddress, place: tuple[str, int], answer: bytes = b"", connects: int = CONNECTS
) -> socket.socket:
    """Connect to an actor of another machine; arguments as of `awaited._connected_away`."""
    end = socket.create_connection(place, SEND_S)
    try:
        watch(end)
        if answer:
            end.sendall(answer)
            _exactly(end, SECRET_BYTES)
        else:
            answer = response(address, _exactly(end, SECRET_BYTES))
            end.sendall(answer)
        welcome = end.recv(1)
        if welcome != AGAIN or connects == 1:
            check_welcome(welcome)
            check_proof(_exactly(end, SECRET_BYTES), address, answer[:SECRET_BYTES])
            return end
    except BaseException:
        end.close()
        raise
    end.close()
    return _away(address, place, answer, connects - 1)


def _exactly(end: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        data = end.recv(nbytes - len(found))
        if not data:
            raise ConnectionResetError("expected a challenge or a proof; the connection was closed")
        found += data
    return found
