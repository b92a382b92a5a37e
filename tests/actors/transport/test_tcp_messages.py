"""Requests and answers over TCP that are not what they should be: each is refused, and harms nobody else."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tensorvine.actors.transport.frames import MESSAGE_BYTES, message, request_of
from tensorvine.actors.transport.tcp import TcpClient
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store.errors import CorruptDataError, ModelLostError, ShardUnavailableError, StoreFullError

from tests.support.memory import check_refused
from tests.support.tcp import dial, impostor, is_ended, told
from tests.support.tcp_store import Store
from tests.support.waiting import eventually


class TestBadRequests:
    @pytest.mark.parametrize(
        "content",
        [
            struct.pack("!I", MESSAGE_BYTES + 1),
            struct.pack("!I", 3) + b"{]}",
            message({})[:4] + b"[]",
            b"GET / HTTP/1.1",
            struct.pack("!I", 60_000) + b"[" * 60_000,
        ],
    )
    def test_what_is_no_message_ends_the_connection(self, server: TcpServer, content: bytes) -> None:
        with dial(server) as connection:
            connection.sendall(content)
            assert is_ended(connection)

    @pytest.mark.parametrize("kept", [0, 2, 4, 20])
    def test_a_truncated_request_harms_nobody_else(
        self, store: Store, server: TcpServer, client: TcpClient, kept: int
    ) -> None:
        store.add((0, 0), b"abc")
        with dial(server) as connection:
            connection.sendall(message({"read": [[[0, 0], [0]]], "timeout": 1})[:kept])
        assert client.read({(0, 0): [0]}, 10, "a test")
        eventually(lambda: len(server._connections) == 1, "the other connection is let go")

    @pytest.mark.parametrize(
        "request_facts",
        [
            {},
            {"read": [[[0, 0], [0]]]},
            {"read": 3, "timeout": 1},
            {"read": [[[0], [0]]], "timeout": 1},
            {"read": [[[0, 0], [-1]]], "timeout": 1},
            {"read": [[[0, 0], ["0"]]], "timeout": 1},
            {"read": [[[0, 0], 0]], "timeout": 1},
            {"read": [[[0, 0], [0], [0]]], "timeout": 1},
            {"read": [[[0, 0], [0]]], "timeout": "soon"},
        ],
    )
    def test_a_request_that_asks_for_nothing_known_is_answered_so(
        self, store: Store, server: TcpServer, request_facts: dict[str, Any]
    ) -> None:
        store.add((0, 0), b"abc")
        with dial(server) as connection:
            connection.sendall(message(request_facts))
            assert told(connection)["error"] == "CorruptDataError"
            connection.sendall(message({"read": [[[0, 0], [0]]], "timeout": 1}))
            assert told(connection) == {"rows": [[[0, 0], [0], [3]]]}


class TestBadAnswers:
    @pytest.mark.parametrize(
        "error", [ModelLostError("no segment"), StoreFullError("no room"), CorruptDataError("bad")]
    )
    def test_errors_come_back_by_their_name(self, error: Exception) -> None:
        def answer(*_: Any) -> Any:
            raise error

        server = TcpServer(answer, "127.0.0.1")
        with pytest.raises(type(error), match=str(error)):
            TcpClient(server.address, server.token).read({(0, 0): [0]}, 10, "a test")
        server.close()

    def test_an_error_of_no_name_is_logged_and_comes_back_as_unavailable(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = TcpServer(lambda *_: 1 / 0, "127.0.0.1")  # type: ignore[arg-type,return-value]
        with pytest.raises(ShardUnavailableError, match="ZeroDivisionError"):
            TcpClient(server.address, server.token).read({(0, 0): [0]}, 10, "a test")
        server.close()
        assert "an answer failed" in caplog.text

    @pytest.mark.parametrize("name", ["ValueError", "os", "TensorVineErrors", ""])
    def test_an_error_of_an_unknown_name_is_unavailable(self, name: str) -> None:
        answer = message({"error": name, "message": "why"})
        with impostor(answer) as address, pytest.raises(ShardUnavailableError, match="why"):
            TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test")

    @pytest.mark.parametrize(
        "answer",
        [
            {},
            {"rows": 1},
            {"rows": []},
            {"rows": [[[0, 0], [0], [-1]]]},
            {"rows": [[[0, 0], [0], []]]},
            {"rows": [[[0, 0], [0, 0], [3, 3]]]},
            {"rows": [[[0, 0], [1], [3]]]},
            {"rows": [[[0, 1], [0], [3]]]},
            {"rows": [[[0, 0], [0], [3]], [[0, 0], [0], [3]]]},
            {"rows": [[[0, 0], [0], [1.5]]]},
        ],
    )
    def test_an_answer_to_something_else_is_refused(self, answer: dict[str, Any]) -> None:
        with impostor(message(answer), bytes(64)) as address, pytest.raises(CorruptDataError, match="TCP: expected"):
            TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test")

    @pytest.mark.parametrize(
        "facts", [{}, {"digests": []}, {"digests": [[]]}, {"digests": 3}, {"digests": [["a", "b"]]}]
    )
    def test_hashes_of_something_else_are_refused(self, facts: dict[str, Any]) -> None:
        parts = (message({"rows": [[[0, 0], [0], [3]]]}), bytes(64), message(facts))
        with impostor(*parts) as address, pytest.raises(CorruptDataError, match="content hash of each slot"):
            TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test", digests=True)

    def test_an_oversize_answer_is_refused(self) -> None:
        long = struct.pack("!I", MESSAGE_BYTES + 1)
        with impostor(long) as address, pytest.raises(CorruptDataError, match=f"at most {MESSAGE_BYTES} bytes"):
            TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test")

    def test_more_bytes_than_there_is_memory_are_refused(self) -> None:
        answer = message({"rows": [[[0, 0], [0], [1 << 60]]]})
        with (
            impostor(answer) as address,
            pytest.raises(CorruptDataError, match="expected an answer that fits in memory"),
        ):
            TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test")

    def test_sizes_other_than_the_manifests_are_refused_before_memory_is_taken(self) -> None:
        answer = message({"rows": [[[0, 0], [0], [1 << 30]]]})
        with impostor(answer) as address:
            client = TcpClient(address, "t")
            match = r"segment \(0, 0\): expected slots of sizes {0: 3}; found {0: 1073741824}"
            check_refused(lambda: client.read({(0, 0): {0: 3}}, 10, "a test"), len(answer), match)

    def test_an_answer_of_many_small_things_is_not_parsed(self) -> None:
        text = b'{"rows":[' + b"{}," * 3_000_000 + b"0]}"
        with impostor(struct.pack("!I", len(text)), text) as address:
            client = TcpClient(address, "t")
            match = "TCP: message: expected JSON that takes at most"
            check_refused(lambda: client.read({(0, 0): [0]}, 60, "a test"), len(text), match)


@pytest.mark.parametrize(
    "request_",
    [{"read": [], "timeout": float("nan")}, {"read": [], "timeout": 10**400}, {"read": [[[0, 0], 3]], "timeout": 1}],
)
def test_a_request_that_is_none_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError, match="TCP: expected a request"):
        request_of(request_)
