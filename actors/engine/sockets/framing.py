"""How a call and its answer stand on a socket between two processes, of one machine or of two.

Rules
- A connection begins with the secret of the address, from the caller; `entrance` compares it before anything else is
  read. The server answers with one byte: `WELCOME`, or `FULL`. Who shows another secret is not answered.
- Between machines the secret does not travel: the server sends a challenge, the caller sends it back with a proof that
  it knows the secret (`response`), and the server's proof follows its `WELCOME`. A server that has no room until the
  response arrives says `AGAIN`: the caller connects again and sends the same response at once. A machine that is
  silent for `SILENT_S` has gone.
- Between machines nothing is sent on a connection of which nothing was heard for a while: the engine may know that the
  actor runs elsewhere by now. A `PING` is answered by the same bytes, at once.
- A message is a header (bytes that follow, number of the call) and a pickle, as the engine's messages are. It is
  unpickled only of who knows the secret, or is the process that the address names.
- A message of number 0 that is not empty announces buffers, where the kind of traffic has them: it has the size of
  each, in 8 bytes. They follow the message after it, one behind the other.
- What is announced has a limit, and only what has come takes memory.
- Both ends count the calls of a connection that are not answered: as many of each group as the engine serves of it.
  The caller sends more than these by the engine, so a long poll stands in no short call's way.
"""

from __future__ import annotations

import hmac
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....store.errors import ShardUnavailableError

SECRET_BYTES = 32
"""Of a secret, of a challenge and of a proof."""
SILENT_S = 20
"""How long a machine may take to confirm what it was sent, or a sign of life while nothing is sent."""
MESSAGE_BYTES = 1 << 20
"""Of a call; a larger one goes by the engine."""
ANSWER_BYTES = 64 << 20
"""Of an answer; in the place of a larger one comes `AnswerTooLargeError`. The table of 100,000 tensors has 8 MiB."""
HEADER = struct.Struct("<IQ")
"""Bytes that follow, number of the call."""
PING = HEADER.pack(0, 0)
WELCOME, FULL, AGAIN = b"+", b"-", b"~"
CONNECTS = 5
"""How often a caller of another machine connects to a server that says `AGAIN`."""
CALLER, SERVER = b"caller", b"server"
"""The ends of a connection, in their proofs."""
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Where an actor answers calls. It travels by the engine alone: who has it is trusted."""

    name: str
    """Of the socket. One for callers of its own machine needs no file; another one is called as its place."""
    pid: int
    """Of the actor's process, as which it must show itself."""
    secret: bytes = field(repr=False)
    """Of the actor's process; what callers show first."""
    place: tuple[str, int] | None = None
    """Host and port, for callers of other machines; None: a Unix socket."""


class AnswerTooLargeError(OverflowError):
    """A socket does not carry the answer to a call, which was carried out."""


def first_of(buffer: bytearray, most: int) -> tuple[int, bytes] | None:
    """Take the first whole message out of a buffer.

    Args:
        buffer: what has come.
        most: bytes that a message may have.

    Raises:
        ConnectionAbortedError: a larger one is announced.
    """
    if len(buffer) < HEADER.size:
        return None
    length, number = HEADER.unpack_from(buffer)
    if length > most:
        raise ConnectionAbortedError(f"expected a message of at most {most} bytes; found one of {length}")
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    message = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return number, message


def outcome_of(message: bytes, buffers: Sequence[memoryview] = ()) -> Any:
    """Return an answer, or raise what the method raised.

    Args:
        message: the pickle.
        buffers: what came beside it.

    Raises:
        ShardUnavailableError: the bytes are no answer.
    """
    try:
        done, found = pickle.loads(message, buffers=buffers)  # noqa: S301  of the process that the address names
        if not done and not isinstance(found, BaseException):
            raise TypeError(f"expected an error; found {type(found).__name__}")
    except Exception as exc:  # whatever the bytes make of it
        raise ShardUnavailableError(f"expected an answer to a call; found {len(message)} bytes: {exc!r}") from exc
    if not done:
        raise found
    return found


class Peered(Protocol):
    """A socket that tells who is at its other end."""

    def getsockopt(self, level: int, option: int, length: int, /) -> bytes:
        """Return an option of the socket."""
        ...


def check_server(connection: Peered, address: SocketAddress) -> None:
    """Make sure that the actor itself is at the other end.

    Raises:
        ConnectionRefusedError: it is not.
    """
    pid, user, _ = credentials(connection)
    if (pid, user) != (address.pid, os.geteuid()):
        raise ConnectionRefusedError(
            f"socket {address.name}: expected process {address.pid}; found {pid} of user {user}"
        )


def credentials(connection: Peered) -> tuple[int, int, int]:
    """Return process, user and group of who is at the other end."""
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


def watch(connection: socket.socket) -> None:
    """Have small messages sent at once, and a connection to a machine that has gone end by itself."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
        (socket.TCP_KEEPIDLE, SILENT_S // 4),
        (socket.TCP_KEEPINTVL, SILENT_S // 4),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def proof(secret: bytes, challenge: bytes, end: bytes) -> bytes:
    """Return what shows that one end, the `CALLER` or the `SERVER`, knows the secret."""
    return hmac.digest(secret, end + challenge, "sha256")


def response(address: SocketAddress, challenge: bytes) -> bytes:
    """Return what a caller sends to a challenge."""
    return challenge + proof(address.secret, challenge, CALLER)


def check_proof(found: bytes, address: SocketAddress, challenge: bytes) -> None:
    """Make sure that the server knows the secret, too.

    Raises:
        ConnectionRefusedError: it does not.
    """
    if not hmac.compare_digest(found, proof(address.secret, challenge, SERVER)):
        raise ConnectionRefusedError(f"{address.name}: expected a proof that it is the actor; found something else")


def check_welcome(found: bytes) -> None:
    """Make sure that the server has let this caller in.

    Args:
        found: its first byte, if there is one.

    Raises:
        ConnectionRefusedError: it has no room for another connection.
        ConnectionResetError: it has ended the connection: the secret is not its own, or it had too many to look at.
    """
    if found == AGAIN:
        raise ConnectionResetError(f"expected a welcome; unauthenticated connections used all places {CONNECTS} times")
    if not found:
        raise ConnectionResetError("expected a welcome; the connection was closed: the address may be stale")
    if found != WELCOME:
        raise ConnectionRefusedError("expected room for another connection; found none")
