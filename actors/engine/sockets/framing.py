"""The format of calls and answers on a socket between two processes, of one machine or of two.

Rules
- A connection begins with the secret of the address, from the caller; `entrance` compares it before anything else is
  read. The server answers with one byte: `WELCOME`, or `FULL`. A wrong secret gets no answer.
- Between machines the secret does not travel: the server sends a challenge, the caller sends it back with a proof that
  it knows the secret (`response`), and the server's proof follows its `WELCOME`. A server that has no room until the
  response arrives says `AGAIN`: the caller connects again and sends the same response at once. A connection to a
  machine that does not respond for `SILENT_S` ends.
- A `PING` is answered by the same bytes, at once.
- A message is a header (bytes that follow, number of the call) and a pickle (`packing`). It is unpickled only if the
  sender knows the secret, or is the process that the address names.
- A message of number 0 that is not empty announces buffers: it has the size of each, in 8 bytes. They follow the
  message after it, one after the other. Memory for a buffer is touched as its bytes arrive.
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
    """Where an actor answers calls. Only the engine hands it out: a process that has it is trusted."""

    name: str
    """Name of the abstract Unix socket; for callers of other machines, host and port."""
    pid: int
    """Process id of the actor, which callers of its machine check."""
    secret: bytes = field(repr=False)
    """Secret of the actor's process."""
    place: tuple[str, int] | None = None
    """Host and port, for callers of other machines; None: a Unix socket."""


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
