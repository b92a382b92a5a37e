"""The line: short calls to an actor of the same machine, past the engine.

Rules
- An engine's call wakes many threads one after another, and each may wait for a core. A line wakes two: the actor's
  event loop, where the call is carried out as the engine's calls are, and who waits for the answer.
- A line is a Unix socket that needs no file. Only processes of the same user are heard, as the kernel tells: messages
  are pickled, as the engine's are.
- What cannot be sent by a line (it is too large, or there is no line) has not happened and goes by the engine. A line
  that ends while an answer is awaited has ended with its actor: the call may or may not have happened.
- Calls are numbered, and a socket carries one awaited call at a time. Who does not wait any more leaves its answer to
  the next, which skips it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from ...store.errors import OperationTimeoutError, ShardUnavailableError

log = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
"""Of a call; a larger one goes by the engine. Answers are as long as they are."""
SEND_S = 1.0
"""How long a server may leave a call in the socket's buffer before the engine is asked."""
RECEIVE_BYTES = 1 << 16
AGAIN_S = 5.0
"""How long after it was asked for in vain a line is asked for again."""
HEADER = struct.Struct("<IQ")
"""Bytes that follow, number of the call."""
WELCOME, FULL = b"+", b"-"
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class LineAddress:
    """Where an actor's line is."""

    name: str
    """Of the socket."""
    pid: int
    """Of the actor's process, as which it must show itself."""
    methods: frozenset[str]
    """What may be called by it."""


class Line:
    """Calls an actor of this machine. It may be used by several threads.

    Args:
        address: the actor's.

    >>> line = Line(hello.line)                                                  # doctest: +SKIP
    >>> line.send("tag", ()).result(30.0, "shard 0")                             # doctest: +SKIP
    """

    def __init__(self, address: LineAddress) -> None:
        self._address = address
        self._pool = _Pool()
        weakref.finalize(self, self._pool.close)

    def carries(self, method: str) -> bool:
        """Tell whether a method can be called by it."""
        return method in self._address.methods

    def send(self, method: str, arguments: tuple[Any, ...]) -> LineAnswer | None:
        """Send a call; None: it cannot be sent, and nothing has happened."""
        message = pickle.dumps((method, arguments), 5)
        if len(message) > MESSAGE_BYTES:
            return None
        wire: _Wire | None = None
        try:
            wire = self._pool.take(self._address)
            number = wire.send(message)
        except OSError as exc:
            log.debug("line %s: %s goes by the engine: %s", self._address.name, method, exc)
            if wire is not None:
                self._pool.drop(wire)
            return None
        return LineAnswer(wire, number, self._pool)

    def close(self) -> None:
        """End the connections; one whose answer is awaited ends with that."""
        self._pool.close()


class LineAnswer:
    """An answer to come."""

    def __init__(self, wire: _Wire, number: int, pool: _Pool) -> None:
        self._wire: _Wire | None = wire
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
        if self._wire is not None:
            self._receive(self._wire, timeout, who)
        if self._ended is not None:
            raise ShardUnavailableError(
                f"{who}: expected an answer; it died or is being restarted ({self._ended})"
            ) from self._ended
        return outcome_of(self._message)

    def _receive(self, wire: _Wire, timeout: float, who: str) -> None:
        try:
            message = wire.receive(self._number, time.monotonic() + timeout)
        except TimeoutError as exc:
            raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; none came") from exc
        except OSError as exc:
            self._wire, self._ended = None, exc
            self._pool.drop(wire)
            return
        except BaseException:  # such as Ctrl-C: nobody knows what the socket would bring next
            self._wire, self._ended = None, ConnectionAbortedError("the wait was broken off")
            self._pool.drop(wire)
            raise
        self._wire, self._message = None, message
        self._pool.give(wire)

    def __del__(self) -> None:
        if self._wire is not None:
            self._pool.give(self._wire)


class _Pool:
    """The connections of one line. It holds all of them, so that a line's end finds them open, and closes them.

    One that is closed lives until its last answer was given or dropped: of what is collected together, a socket may be
    the first.
    """

    _closing: ClassVar[set[_Pool]] = set()

    def __init__(self) -> None:
        self._all: set[_Wire] = set()
        self._idle: deque[_Wire] = deque()
        self._closed = False

    def take(self, address: LineAddress) -> _Wire:
        try:
            return self._idle.pop()  # the one used last: what one thread sends arrives in order
        except IndexError:
            wire = _Wire(address)
            self._all.add(wire)
            return wire

    def give(self, wire: _Wire) -> None:
        self._idle.append(wire)
        if self._closed:
            self.close()

    def drop(self, wire: _Wire) -> None:
        self._all.discard(wire)
        wire.close()
        if not self._all:
            self._closing.discard(self)

    def close(self) -> None:
        self._closed = True
        self._closing.add(self)
        with contextlib.suppress(IndexError):
            while True:
                self.drop(self._idle.pop())
        if not self._all:
            self._closing.discard(self)


class _Wire:
    """A connection, at the client."""

    def __init__(self, address: LineAddress) -> None:
        self._buffer = bytearray()
        self._sent = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(SEND_S)
            self._socket.connect(f"\0{address.name}")
            check_server(self._socket, address)
            if self._socket.recv(1) != WELCOME:
                raise ConnectionRefusedError("expected room for another connection; there is none")
        except BaseException:
            self._socket.close()
            raise

    def send(self, message: bytes) -> int:
        self._sent += 1
        self._socket.settimeout(SEND_S)
        self._socket.sendall(HEADER.pack(len(message), self._sent) + message)
        return self._sent

    def receive(self, number: int, deadline: float) -> bytes:
        while True:
            while (found := first_of(self._buffer)) is not None:
                if found[0] == number:
                    return found[1]
            self._socket.settimeout(max(deadline - time.monotonic(), 0.0))
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:  # there is no time, and nothing has come
                raise TimeoutError from None
            if not data:
                raise ConnectionResetError("its line has ended")
            self._buffer += data

    def close(self) -> None:
        self._socket.close()


def first_of(buffer: bytearray) -> tuple[int, bytes] | None:
    """Take the first whole message out of a buffer."""
    if len(buffer) < HEADER.size:
        return None
    length, number = HEADER.unpack_from(buffer)
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    message = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return number, message


def outcome_of(message: bytes) -> Any:
    """Return an answer, or raise what the method raised."""
    done, found = pickle.loads(message)  # noqa: S301  of the same user
    if not done:
        raise found
    return found


def check_server(connection: Any, address: LineAddress) -> None:
    """Make sure that the actor itself is at the other end.

    Raises:
        ConnectionRefusedError: it is not.
    """
    pid, user, _ = credentials(connection)
    if (pid, user) != (address.pid, os.geteuid()):
        raise ConnectionRefusedError(f"line {address.name}: expected process {address.pid}; found {pid} of user {user}")


def credentials(connection: Any) -> tuple[int, int, int]:
    """Return process, user and group of who is at the other end."""
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
