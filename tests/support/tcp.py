"""The other side of a TCP connection, as tests want it: one that says and sends what it should not."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorvine.actors.rpc.greetings import CREDENTIAL_BYTES, credential
from tensorvine.actors.transport.frames import message
from tensorvine.actors.transport.tcp_server import TcpServer


def told(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as file:
        return json.loads(file.read(struct.unpack("!I", file.read(4))[0]))


def dial(server: TcpServer, token: str | None = None) -> socket.socket:
    """Connect without a client, and be greeted."""
    connection = socket.create_connection(server.address, 60)
    connection.sendall(credential(token or server.token))
    assert told(connection) == {}
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Tell whether the other side ended the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextmanager
def impostor(*parts: bytes) -> Iterator[tuple[str, int]]:
    """Listen like a server that greets, hears one request, sends these bytes and ends the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(CREDENTIAL_BYTES, socket.MSG_WAITALL)
            connection.sendall(message({}))
            told(connection)
            for part in parts:
                connection.sendall(part)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        thread.join(10)
        listener.close()
