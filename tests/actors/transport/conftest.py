"""What tests of TCP share: a server, what it serves, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tensorvine.actors.transport.tcp import TcpClient
from tensorvine.actors.transport.tcp_server import TcpServer

from tests.support.tcp_store import Store


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store) -> Iterator[TcpServer]:
    started = TcpServer(store.answer, "127.0.0.1")
    yield started
    started.close()


@pytest.fixture
def client(server: TcpServer) -> Iterator[TcpClient]:
    started = TcpClient(server.address, server.token)
    yield started
    started.close()
