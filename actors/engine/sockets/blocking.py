"""Connections of threads to an actor, for short calls.

Rules
- A call by an event loop wakes several threads, one after the other, and each may wait for a core. Here a call wakes
  two: the actor's event loop, and the caller that waits for the answer.
- `send` returns None if the call was not sent, because it is too large or nothing accepts connections there; the caller
  then uses `lines`. A connection that ends while an answer is awaited ends with its actor: the call may have happened.
- A connection to another machine is made within `SEND_S`, or not tried again for `AWAY_S`: a firewall may not answer.
- Calls are numbered, and a connection carries one awaited call at a time. A caller that stops waiting leaves the answer
  on the connection, and the next one skips it.
- A connection is referred to by its answer or by the pool, and is closed when nothing refers to it: so one whose call
  was ended by an exception, at whatever point, is closed with the frames of that call.
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
from ..groups import GROUPS
from .framing import (
    AGAIN,
    CONNECTS,
    PING,
    SECRET_BYTES,
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

log = logging.getLogger(__name__)

SHORT_BYTES = 1 << 20
"""Size of the largest call that is sent here."""
SEND_S = 1.0
"""How long a server may leave a call in the socket's buffer, or a ping unanswered."""
FRESH_S = 1.0
"""How long after the last bytes from another machine a call is sent to it without a ping."""
UNANSWERED = GROUPS["ctl"]
"""Most calls of one connection whose answers were left on it; with one more it is closed."""
AGAIN_S = 5.0
"""How long nothing is sent to a server that closed a connection instead of accepting it."""
AWAY_S = 60.0
"""How long nothing is sent to a machine that could not be connected."""


class BlockingConnections:
    """The connections of a process's threads to one actor.

    Args:
        address: the actor's.
    """

    def __init__(self, address: SocketAddress) -> None:
        self._address = address
        self._pool = _Pool()
        weakref.finalize(self, self._pool.close)

    def send(self, message: Packed) -> SocketAnswer | None:
        """Send a call; return None if it was not sent."""
        if message.nbytes > SHORT_BYTES:
            return None
        connection: _Connection | None = None
        try:
            connection = self._pool.take(self._address)
            number = connection.send(message)
        except OSError as exc:
            log.debug("socket %s: a call was not sent: %s", self._address.name, exc)
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
    """A future answer."""

    _connection: _Connection | None = None

    def __init__(self, connection: _Connection, number: int, pool: _Pool) -> None:
        self._connection = connection
        self._number = number
        self._pool = pool
        self._message = Message(0, b"")
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
        return outcome_of(self._message.pickled, self._message.buffers)

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
                log.info("%s: no connection, not tried again for %.0f s: %s", address.name, AWAY_S, exc)
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
        self._incoming = Incoming()
        self._sent = self._answered = 0
        self._away = address.place is not None
        self._heard = time.monotonic()
        self._socket = _near(address) if address.place is None else _away(address, address.place)
        self.close = weakref.finalize(self, self._socket.close)
        """Closes the socket, which is not collected before this is called."""

    def send(self, message: Packed) -> int:
        if self._sent - self._answered >= UNANSWERED:
            raise ConnectionAbortedError(f"expected at most {UNANSWERED} calls without an answer")
        if self._away:
            self._check_there()
        self._sent += 1
        self._socket.settimeout(SEND_S)
        for part in message.parts(self._sent):
            self._socket.sendall(part)
        return self._sent

    def receive(self, number: int, deadline: Deadline) -> Message:
        while True:
            while (found := self._incoming.first()) is not None:
                self._answered += 1 if found.number else 0  # else it answers a ping
                if found.number == number:
                    return found
                if found.number > number > 0:
                    raise ConnectionAbortedError(f"expected the answer to call {number}; found one to {found.number}")
            self._socket.settimeout(deadline.left())
            try:
                nbytes = self._socket.recv_into(self._incoming.space())
            except BlockingIOError:  # there is no time, and nothing has arrived
                raise TimeoutError from None
            except TimeoutError as exc:
                if exc.errno == errno.ETIMEDOUT:  # the system's, not ours
                    raise ConnectionAbortedError(f"its machine does not respond: {exc}") from exc
                raise
            if not nbytes:
                raise ConnectionResetError("it has ended")
            self._heard = time.monotonic()
            self._incoming.came(nbytes)

    def _check_there(self) -> None:
        """Check that neither the server nor its machine has ended: a call sent to them would be lost."""
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
