"""Who may read from a TCP server, and what strangers and a short system do to those who may."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.rpc.greetings import SILENT, credential
from tensorvine.actors.transport.frames import Served, message
from tensorvine.actors.transport.tcp import TcpClient
from tensorvine.actors.transport.tcp_server import TcpServer

from tests.support.tcp import is_ended, told

BLOCK = np.arange(64, dtype=np.uint8)
STRANGERS = 530
"""More than connections that are served."""


@pytest.fixture
def server() -> Iterator[TcpServer]:
    started = TcpServer(lambda *_: ({(0, 0): Served(BLOCK, {0: (0, 64)})}, None), "127.0.0.1")
    yield started
    started.close()


def reads(server: TcpServer) -> bool:
    """Tell whether a new client may read."""
    with closing(TcpClient(server.address, server.token, timeout=60)) as client:
        return client.read({(0, 0): [0]}, 60, "a test")[(0, 0)].block.tobytes() == BLOCK.tobytes()


def connected(server: TcpServer, said: bytes) -> socket.socket:
    connection = socket.create_connection(server.address, 60)
    connection.sendall(said)
    return connection


def test_readers_come_in_among_more_silent_connections_than_are_served(server: TcpServer) -> None:
    with ExitStack() as stack:
        for count in range(STRANGERS):
            stack.enter_context(connected(server, b"[" * (count % 32)))
        assert reads(server)
        assert len(server._greetings.connections) <= SILENT + 1  # the one more that has just come
        assert len(server._connections) <= 1


def test_silent_connections_end_by_themselves(server: TcpServer) -> None:
    assert server._greetings._silent_s == 2.0
    server._greetings._silent_s = 0.05
    with connected(server, credential(server.token)[:-1]) as stranger:
        assert is_ended(stranger)


@pytest.mark.parametrize(
    "content", [b"[" * 60_000, message({"token": "x" * 32}), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_what_is_no_credential_is_refused_and_harms_nobody(server: TcpServer, content: bytes) -> None:
    with connected(server, content) as stranger:
        assert reads(server)
        stranger.settimeout(60)
        while not is_ended(stranger):
            pass


def test_another_token_is_answered_so(server: TcpServer) -> None:
    with connected(server, credential("another")) as stranger:
        assert told(stranger)["error"] == "ShardUnavailableError"


@pytest.mark.parametrize("trouble", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_thread_that_cannot_be_started_refuses_one_reader_only(
    server: TcpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: Exception
) -> None:
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.endswith("(_serve)") and troubles:
            raise troubles.pop()
        started(thread)

    troubles: list[Any] = [trouble] * 2
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        with connected(server, credential(server.token)) as connection:
            assert is_ended(connection)
    assert not troubles
    assert "expected to serve one more connection; found " in caplog.text
    assert reads(server)
    assert server._thread.is_alive()
