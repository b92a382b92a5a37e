"""How TCP ends at either end: who goes, stalls or comes late, and what is let go afterwards."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from tensorvine.actors.engine.sockets.framing import SILENT_S
from tensorvine.actors.transport import tcp, tcp_server
from tensorvine.actors.transport.frames import Digests, Pace, message
from tensorvine.actors.transport.tcp import TcpClient
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store.errors import CorruptDataError, OperationTimeoutError, ShardUnavailableError

from tests.support.forked import in_child, outcomes
from tests.support.tcp import dial, impostor, is_ended, told
from tests.support.tcp_store import BIG, Store, contents
from tests.support.waiting import eventually


class TestEnds:
    def test_no_server_is_unavailable(self, server: TcpServer) -> None:
        server.close()
        with pytest.raises(
            ShardUnavailableError, match=r"load of m: TCP server 127\.0\.0\.1:\d+: expected a connection"
        ):
            TcpClient(server.address, server.token).read({(0, 0): [0]}, 10, "load of m")

    @pytest.mark.parametrize("sent", [0, 1, 63])
    def test_a_server_that_ends_within_the_bytes_is_unavailable(self, sent: int) -> None:
        parts = (message({"rows": [[[0, 0], [0], [3]]]}), bytes(sent))
        with impostor(*parts) as address, pytest.raises(ShardUnavailableError, match=f"after {sent} of 64 bytes"):
            TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test")

    def test_a_server_that_is_closed_within_an_answer_is_unavailable(self, store: Store) -> None:
        store.add((0, 0), bytes(BIG))
        begun, closed = threading.Event(), threading.Event()

        def answer(*asked: Any) -> Any:
            def never() -> Digests:
                begun.set()
                assert closed.wait(10)
                raise CorruptDataError("nobody hears it")

            return store.answer(*asked)[0], never

        server = TcpServer(answer, "127.0.0.1")
        with ThreadPoolExecutor(2) as threads:
            client = TcpClient(server.address, server.token)
            reading = threads.submit(client.read, {(0, 0): [0]}, 30, "a test", True)
            assert begun.wait(10)
            closing = threads.submit(server.close)
            with pytest.raises(ShardUnavailableError):
                reading.result(20)
            closed.set()
            closing.result(20)
        assert store.let_go.wait(10)

    def test_a_client_that_goes_within_the_bytes_lets_the_memory_go(self, store: Store, server: TcpServer) -> None:
        store.add((0, 0), bytes(BIG))
        with dial(server) as connection:
            connection.sendall(message({"read": [[[0, 0], [0]]], "timeout": 10}))
            assert told(connection)["rows"]
            assert not store.let_go.is_set()
        assert store.let_go.wait(10)
        eventually(lambda: not server._connections, "the connection is let go")

    def test_a_client_that_takes_nothing_lets_the_memory_go(
        self, store: Store, server: TcpServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_server, "STALL_S", 0.1)
        store.add((0, 0), bytes(BIG))
        with dial(server) as connection:
            connection.sendall(message({"read": [[[0, 0], [0]]], "timeout": 10}))
            assert store.let_go.wait(10)

    def test_a_client_that_takes_a_little_now_and_then_lets_the_memory_go(self, store: Store) -> None:
        """By the server's clock an hour passes with each piece that goes into the connection's buffers."""
        hours = count()
        server = TcpServer(store.answer, "127.0.0.1", clock=lambda: 3600.0 * next(hours))
        store.add((0, 0), bytes(BIG))
        with dial(server) as connection:
            connection.sendall(message({"read": [[[0, 0], [0]]], "timeout": 600}))
            taken = len(connection.recv(1 << 16))
            assert store.let_go.wait(30)
            with suppress(ConnectionResetError):
                while got := len(connection.recv(1 << 20)):
                    taken += got
            assert taken < BIG
        server.close()

    @pytest.mark.parametrize(("bits", "keeps"), [(1_000_000, True), (300_000, True), (8, False), (100_000, False)])
    def test_a_slow_link_keeps_pace_and_a_trickle_does_not(self, bits: int, keeps: bool) -> None:
        """For ten hours, in pieces of what goes through in half a minute."""
        now = 0.0
        pace = Pace(tcp_server.STALL_S, lambda: now)
        try:
            while now < 36_000.0:
                now += 29.0
                pace.took(bits // 8 * 29)
        except TimeoutError:
            assert not keeps
        else:
            assert keeps

    def test_what_was_sent_is_let_go_while_the_connection_waits(self, store: Store, client: TcpClient) -> None:
        store.add((0, 0), b"abc")
        client.read({(0, 0): [0]}, 10, "a test")
        assert store.let_go.wait(10)

    def test_a_connection_that_waited_too_long_is_made_anew(
        self, store: Store, server: TcpServer, client: TcpClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_server, "IDLE_S", 2.0)
        store.add((0, 0), b"abc")
        for _ in range(2):
            assert contents(client.read({(0, 0): [0]}, 10, "a test"), store) == {((0, 0), 0): b"abc"}
            eventually(lambda: not server._connections, "the server ends what waits")

    def test_an_answer_that_comes_too_late_is_not_waited_for(self, store: Store) -> None:
        slow, late = threading.Event(), threading.Event()

        def answer(*asked: Any) -> Any:
            if slow.is_set():
                late.wait(10)
            return store.answer(*asked)

        store.add((0, 0), b"abc")
        server = TcpServer(answer, "127.0.0.1")
        client = TcpClient(server.address, server.token)
        client.read({(0, 0): [0]}, 10, "load of m")  # so that they are connected
        slow.set()
        with pytest.raises(OperationTimeoutError, match="load of m: TCP server"):
            client.read({(0, 0): [0]}, 0.05, "load of m")
        late.set()
        client.close()
        server.close()

    def test_the_server_is_told_how_long_the_client_waits(self, store: Store) -> None:
        told_s: list[float] = []
        server = TcpServer(lambda s, t, h: (told_s.append(t), store.answer(s, t, h))[1], "127.0.0.1")
        store.add((0, 0), b"abc")
        client = TcpClient(server.address, server.token)
        client.read({(0, 0): [0]}, 5, "a test")
        client.read({(0, 0): [0]}, 5000, "a test")
        assert 4 < told_s[0] <= 5
        assert told_s[1] == 600
        client.close()
        server.close()

    def test_a_machine_that_confirms_nothing_is_unavailable_before_the_read_is_late(
        self, store: Store, client: TcpClient
    ) -> None:
        store.add((0, 0), b"abc")
        client.read({(0, 0): [0]}, 10, "a test")
        connection = client._idle[0]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENT_S
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        with pytest.raises(ShardUnavailableError, match="whole answer"), client._breaking(connection, "a test"):
            raise OSError(errno.ETIMEDOUT, "what the kernel gives then")

    def test_connections_that_the_kernel_has_ended_are_replaced(
        self, store: Store, client: TcpClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A network that was cut for more than 20 s ends idle connections. The next read does not fail for it."""
        store.add((0, 0), b"abc")
        client.read({(0, 0): [0]}, 10, "a test")
        idle, sent = client._idle[0], tcp.send

        def send(connection: socket.socket, parts: Sequence[Any]) -> None:
            if connection is idle:
                raise OSError(errno.ETIMEDOUT, "what the kernel gives then")
            sent(connection, parts)

        monkeypatch.setattr(tcp, "send", send)
        assert client.read({(0, 0): [0]}, 10, "a test")
        assert idle.fileno() == -1
        assert idle not in client._idle

    def test_a_server_that_does_not_greet_is_unavailable_before_the_read_is_late(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = TcpClient(listener.getsockname(), "t", timeout=0.05)
            with pytest.raises(ShardUnavailableError, match=r"deadline has passed|timed out"):
                client.read({(0, 0): [0]}, 10, "a test")

    def test_a_closed_client_keeps_no_connection(self, store: Store, server: TcpServer, client: TcpClient) -> None:
        store.add((0, 0), b"abc")
        client.read({(0, 0): [0]}, 10, "a test")
        client.close()
        eventually(lambda: not server._connections, "its connection is let go")
        client.read({(0, 0): [0]}, 10, "a test")
        eventually(lambda: not server._connections, "so is a later one")

    def test_threads_end_with_the_server(self, store: Store) -> None:
        store.add((0, 0), b"abc")
        before = set(threading.enumerate())
        server = TcpServer(store.answer, "127.0.0.1")
        connections = [dial(server) for _ in range(3)]
        server.close()
        assert set(threading.enumerate()) <= before
        for connection in connections:
            assert is_ended(connection)
            connection.close()


class TestForks:
    def test_a_child_holds_no_socket_of_its_parents_servers(self, store: Store, server: TcpServer) -> None:
        """So who reads from the parent hears when that ends, however long the child lives."""
        with socket.create_connection(server.address, 60), dial(server):  # one silent, one served
            eventually(lambda: len(server._connections) == len(server._greetings.connections) == 1, "both are there")
            held = [server._listener, *server._greetings.connections, *server._connections]
            numbers = [connection.fileno() for connection in held]
            told_by, tells = os.pipe()
            child = os.fork()
            if child == 0:
                held = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
                os.write(tells, repr(held).encode())
                os._exit(0)
            try:
                assert os.read(told_by, 100) == b"[]"
            finally:
                os.waitpid(child, 0)
                os.close(told_by)
                os.close(tells)
            assert len(numbers) == 3
        store.add((0, 0), b"abc")
        client = TcpClient(server.address, server.token)
        assert client.read({(0, 0): [0]}, 10, "a test")
        client.close()

    def test_a_child_may_not_read_by_its_parents_connections(self, store: Store, server: TcpServer) -> None:
        store.add((0, 0), b"abc")
        client = TcpClient(server.address, server.token)

        def read() -> object:
            return client.read({(0, 0): [0]}, 10, "a test")

        assert read()
        assert in_child(lambda: [outcomes({"read": read}), client.close()]) == [{"read": "ClosedError"}, None]
        assert len(client._idle) == 1
        assert read()
        client.close()


def test_logging_is_quiet_about_clients_that_come_and_go(
    store: Store, server: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    store.add((0, 0), b"abc")
    with caplog.at_level(logging.INFO):
        client = TcpClient(server.address, server.token)
        client.read({(0, 0): [0]}, 10, "a test")
        client.close()
        eventually(lambda: not server._connections, "the connection is let go")
    assert not caplog.records
