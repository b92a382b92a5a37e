"""What a control service of Ray says of itself before it is joined."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from tensorvine.actors.engine.ray import control_service

from tests.support.control_service import control_service as started


@pytest.mark.parametrize("token", [None, "a" * 64], ids=["without-a-token", "with-a-token"])
def test_a_control_service_says_whether_it_asks_for_a_token(tmp_path: Path, token: str | None) -> None:
    with started(tmp_path, token) as address:
        assert control_service.asks_for_token(address) is (token is not None)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"grpc-status\x02"])
def test_what_answers_otherwise_says_nothing(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert control_service.asks_for_token(f"127.0.0.1:{server.getsockname()[1]}") is None
        thread.join(60.0)


def test_what_is_silent_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "REACH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert control_service.asks_for_token(f"127.0.0.1:{server.getsockname()[1]}") is None


def test_nobody_is_an_error_that_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=f"no server answers at {address}"):
        control_service.asks_for_token(address)


@pytest.mark.parametrize("address", ["nonsense", "host:", ":1", "host:port", "host:65536", "host:²"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        control_service.split(address)


def test_an_address_is_read() -> None:
    assert control_service.split("10.0.0.1:6379") == ("10.0.0.1", 6379)
    assert control_service.split("[::1]:6379") == ("::1", 6379)
