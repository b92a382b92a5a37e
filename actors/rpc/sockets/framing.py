"""How a call and its answer stand on a socket between two processes of one machine.

Rules
- A message is a header (bytes that follow, number of the call) and a pickle, as the engine's messages are. Only
  processes of the same user are answered, as the kernel tells who is at the other end.
- Each connection begins with one byte of the server: `WELCOME`, or `FULL`.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any, Protocol

from ..calls import Request

MESSAGE_BYTES = 1 << 20
"""Of a call; a larger one goes by the engine. Answers are as long as they are."""
HEADER = struct.Struct("<IQ")
"""Bytes that follow, number of the call."""
WELCOME, FULL = b"+", b"-"
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Where an actor answers calls of its machine."""

    name: str
    """Of the socket, which needs no file."""
    pid: int
    """Of the actor's process, as which it must show itself."""


def packed(request: Request[object]) -> bytes | None:
    """Return a call as a message without its header; None: a socket does not carry it."""
    if not request.remote.by_socket:
        return None
    message = pickle.dumps((request.remote.name, request.arguments), 5)
    return message if len(message) <= MESSAGE_BYTES else None


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
