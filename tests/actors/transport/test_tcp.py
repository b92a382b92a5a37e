"""TCP over real sockets: what arrives, what goes wrong at either end, and what is let go afterwards."""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.actors.memory.buffers import PAGE_BYTES, Buffers
from tensorvine.actors.transport import tcp_server
from tensorvine.actors.transport.frames import (
    MESSAGE_BYTES,
    Digests,
    Pace,
    Received,
    Row,
    Served,
    Slots,
    message,
    request_of,
)
from tensorvine.actors.transport.targets import length_of
from tensorvine.actors.transport.tcp import TcpClient, UnreachableError, check_content
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store.errors import (
    CorruptDataError,
    ModelLostError,
    OperationTimeoutError,
    ShardUnavailableError,
    StoreFullError,
)
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.manifest import digest_of

from tests.support.memory import check_refused
from tests.support.tcp import dial, impostor, is_ended, told

BIG = 64 << 20
"""More than the kernel keeps for a connection at both ends."""


class Store:
    """What a server serves: slots of blocks, and who still holds a view on one."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, tuple[np.ndarray, dict[int, tuple[int, int]]]] = {}
        self.let_go = threading.Event()

    def add(self, segment: SegmentId, *tensors: bytes, gap: int = 0) -> None:
        """Put tensors one after another, at multiples of 64, or further apart and anywhere."""
        block, slots = bytearray(gap), {}
        for slot, content in enumerate(tensors):
            slots[slot] = (len(block), len(content))
            block += content + bytes(gap or -len(content) % 64)
        self.segments[segment] = np.frombuffer(bytes(block), np.uint8), slots

    def content(self, segment: SegmentId, slot: int) -> bytes:
        block, slots = self.segments[segment]
        offset, nbytes = slots[slot]
        return block[offset : offset + nbytes].tobytes()

    def answer(
        self, asked: Slots, timeout: float, hashed: bool
    ) -> tuple[dict[SegmentId, Served], Callable[[], Digests] | None]:
        found: dict[SegmentId, Served] = {}
        for segment, numbers in asked.items():
            if segment not in self.segments:
                raise ModelLostError(f"expected segment {segment}; it is gone")
            block, slots = self.segments[segment]
            view = np.frombuffer(block.data, np.uint8)
            weakref.finalize(view, self.let_go.set).atexit = False
            found[segment] = Served(view, {number: slots[number] for number in numbers})
        return found, (lambda: self.digests(asked)) if hashed else None

    def digests(self, asked: Slots) -> Digests:
        return {
            segment: [
                digest_of(np.frombuffer(self.content(segment, slot), np.uint8)) for slot in self.segments[segment][1]
            ]
            for segment in asked
        }


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


def contents(found: dict[SegmentId, Received], store: Store) -> dict[tuple[SegmentId, int], bytes]:
    """Return what arrived, each tensor cut to its length."""
    return {
        (segment, slot): part.block[offset : offset + store.segments[segment][1][slot][1]].tobytes()
        for segment, part in found.items()
        for slot, offset in part.offsets.items()
    }


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"expected: {what}"
        threading.Event().wait(0.005)


class TestWhatArrives:
    @settings(max_examples=60, deadline=None)
    @given(
        tensors=st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=5), min_size=1, max_size=7),
        gap=st.integers(0, 70),
        chosen=st.data(),
    )
    def test_any_slots_of_any_segments_arrive_as_they_are(
        self, tensors: list[list[bytes]], gap: int, chosen: st.DataObject
    ) -> None:
        store = Store()
        for serial, parts in enumerate(tensors):
            store.add((serial % 2, serial), *parts, gap=gap)
        asked = {
            segment: chosen.draw(st.lists(st.sampled_from(sorted(slots)), unique=True))
            for segment, (_, slots) in store.segments.items()
        }
        server = TcpServer(store.answer, "127.0.0.1")
        client = TcpClient(server.address, server.token)
        try:
            found = client.read(asked, 10, "a test", digests=True)
        finally:
            client.close()
            server.close()
        expected = {(segment, slot): store.content(segment, slot) for segment, slots in asked.items() for slot in slots}
        assert contents(found, store) == expected
        for segment, part in found.items():
            assert all(offset % 64 == 0 for offset in part.offsets.values())
            assert not part.block.flags.writeable
            assert part.digests == {slot: store.digests([segment])[segment][slot] for slot in asked[segment]}

    def test_empty_tensors_and_single_numbers(self, store: Store, client: TcpClient) -> None:
        store.add((0, 1), b"", b"abcd", b"", b"")
        store.add((0, 2), b"")
        found = client.read({(0, 1): [0, 1, 2, 3], (0, 2): [0]}, 10, "a test")
        assert contents(found, store)[((0, 1), 1)] == b"abcd"
        assert np.ndarray((), np.float32, found[(0, 1)].block, found[(0, 1)].offsets[1]).nbytes == 4
        assert np.ndarray((0, 3), np.float32, found[(0, 2)].block, found[(0, 2)].offsets[0]).size == 0

    def test_nothing_asked_is_no_message(self) -> None:
        assert TcpClient(("127.0.0.1", 1), "").read({}, 10, "a test") == {}

    def test_many_small_segments_share_few_buffers(self, store: Store, client: TcpClient) -> None:
        for serial in range(3000):
            store.add((0, serial), bytes([serial % 251]) * 100)
        found = client.read({segment: [0] for segment in store.segments}, 10, "a test")
        assert contents(found, store) == {(s, 0): store.content(s, 0) for s in store.segments}
        assert len({part.block.ctypes.data for part in found.values()}) == 2

    def test_large_segments_are_let_go_one_by_one(self, store: Store, client: TcpClient) -> None:
        for serial in range(5):
            store.add((0, serial), bytes([serial]) * (3 << 20))
        found = client.read({segment: [0] for segment in store.segments}, 10, "a test")
        assert contents(found, store) == {(s, 0): store.content(s, 0) for s in store.segments}
        assert len({part.block.ctypes.data for part in found.values()}) == 5

    def test_only_what_was_asked_for_is_sent(self, store: Store, client: TcpClient) -> None:
        store.add((0, 0), bytes(BIG), b"abc")
        part = client.read({(0, 0): [1]}, 10, "a test")[(0, 0)]
        assert part.block.nbytes == 64

    def test_a_connection_serves_many_reads(self, store: Store, server: TcpServer, client: TcpClient) -> None:
        store.add((0, 0), b"abc")
        for _ in range(50):
            assert contents(client.read({(0, 0): [0]}, 10, "a test"), store) == {((0, 0), 0): b"abc"}
        assert len(server._connections) == 1

    def test_two_clients_at_once_and_many_threads_of_each(self, store: Store, server: TcpServer) -> None:
        for serial in range(8):
            store.add((0, serial), bytes([serial]) * 500_000, bytes([100 + serial]) * 7)
        clients = [TcpClient(server.address, server.token) for _ in range(2)]

        def read(number: int) -> bool:
            asked = {(0, (number + i) % 8): [number % 2] for i in range(1 + number % 6)}
            found = clients[number % 2].read(asked, 30, "a test")
            return contents(found, store) == {(s, number % 2): store.content(s, number % 2) for s in asked}

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(read, range(200)))
        for client in clients:
            client.close()


class TestWhoMayRead:
    def test_who_is_not_served_at_all_is_told_apart(self, store: Store, server: TcpServer) -> None:
        """From one whose connection breaks later: nothing has been asked yet."""
        with pytest.raises(UnreachableError, match="another"):
            TcpClient(server.address, "another token").read({(0, 0): [0]}, 10, "a test")
        with impostor(message({"rows": [[[0, 0], [0], [3]]]})) as address:
            with pytest.raises(ShardUnavailableError) as caught:
                TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test")
            assert not isinstance(caught.value, UnreachableError)
        server.close()
        with pytest.raises(UnreachableError, match="expected a connection"):
            TcpClient(server.address, server.token).read({(0, 0): [0]}, 10, "a test")

    def test_another_token_is_refused(self, store: Store, server: TcpServer, caplog: pytest.LogCaptureFixture) -> None:
        store.add((0, 0), b"abc")
        for token in ("", server.token[:-1], server.token + "0", "ä"):
            with pytest.raises(ShardUnavailableError, match="expected its token; found another"):
                TcpClient(server.address, token).read({(0, 0): [0]}, 10, "a test")
        assert caplog.text.count("expected the listener's token; found another") == 4

    def test_more_connections_than_are_served_are_refused(
        self, store: Store, server: TcpServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_server, "CONNECTIONS", 1)
        store.add((0, 0), b"abc")
        with dial(server), pytest.raises(ShardUnavailableError):
            TcpClient(server.address, server.token).read({(0, 0): [0]}, 10, "a test")
        eventually(lambda: not server._connections, "the first connection is let go")
        client = TcpClient(server.address, server.token)
        assert client.read({(0, 0): [0]}, 10, "a test")
        client.close()


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
        with impostor(answer) as address, pytest.raises(CorruptDataError, match="expected what there is memory for"):
            TcpClient(address, "t").read({(0, 0): [0]}, 10, "a test")

    def test_sizes_other_than_the_manifests_are_refused_before_memory_is_taken(self) -> None:
        answer = message({"rows": [[[0, 0], [0], [1 << 30]]]})
        with impostor(answer) as address:
            client = TcpClient(address, "t")
            match = r"segment \(0, 0\): expected slots of bytes {0: 3}; found {0: 1073741824}"
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


class TestContent:
    def test_hashes_let_right_content_pass(self, store: Store, client: TcpClient) -> None:
        store.add((1, 5), b"abc", b"", b"defg")
        found = client.read({(1, 5): [0, 1, 2]}, 10, "a test", digests=True)
        check_content([("a", (1, 5), 0, 3), ("b", (1, 5), 1, 0), ("c", (1, 5), 2, 4)], found, "socket")

    def test_a_wrong_byte_is_found_and_named(self, store: Store, client: TcpClient) -> None:
        store.add((1, 5), b"abc", b"defg")
        found = client.read({(1, 5): [0, 1]}, 10, "a test", digests=True)[(1, 5)]
        block = found.block.copy()
        block[found.offsets[1] + 3] ^= 1
        wrong = {(1, 5): Received(found.offsets, block, found.digests)}
        with pytest.raises(CorruptDataError, match=r"tensor 'b' by socket from shard 1: expected content \w+; found"):
            check_content([("a", (1, 5), 0, 3), ("b", (1, 5), 1, 4)], wrong, "socket")

    def test_content_without_a_hash_does_not_pass(self, store: Store, client: TcpClient) -> None:
        store.add((1, 5), b"abc")
        with pytest.raises(CorruptDataError, match="expected content None"):
            check_content([("a", (1, 5), 0, 3)], client.read({(1, 5): [0]}, 10, "a test"), "socket")

    def test_a_segment_that_is_let_go_before_it_is_hashed_is_lost(self, store: Store) -> None:
        store.add((0, 0), b"abc")
        server = TcpServer(lambda s, t, h: (store.answer(s, t, h)[0], dict), "127.0.0.1")
        with pytest.raises(ModelLostError, match=r"\(0, 0\).*let go"):
            TcpClient(server.address, server.token).read({(0, 0): [0]}, 10, "a test", digests=True)
        server.close()


class Fixed:
    """A target of one segment of so many bytes, with something behind them."""

    def __init__(self, nbytes: int) -> None:
        self.memory = bytearray(nbytes + 64)
        self.refused: list[Row] = []

    def runs(self, rows: Sequence[Row]) -> Iterator[tuple[Sequence[Row], memoryview]]:
        if length_of(rows) != len(self.memory) - 64:
            self.refused += rows
            raise CorruptDataError("expected other sizes")
        yield rows, memoryview(self.memory)[:-64]

    def block(self, memory: memoryview) -> np.ndarray:
        return np.frombuffer(memory.toreadonly(), np.uint8)


class TestTargets:
    def test_what_arrives_stays_in_memory_that_the_caller_names(self, store: Store, server: TcpServer) -> None:
        store.add((0, 0), b"abc", b"d" * 100)
        target = Fixed(192)
        client = TcpClient(server.address, server.token, target=target)
        found = client.read({(0, 0): [0, 1]}, 10, "a test")
        client.close()
        assert contents(found, store)[((0, 0), 1)] == b"d" * 100
        assert (bytes(target.memory[:3]), bytes(target.memory[64:164])) == (b"abc", b"d" * 100)
        assert np.shares_memory(found[(0, 0)].block, np.frombuffer(target.memory, np.uint8))

    def test_no_byte_is_received_of_what_does_not_fit(self, store: Store, server: TcpServer) -> None:
        store.add((0, 0), b"a" * 300)
        target = Fixed(192)
        client = TcpClient(server.address, server.token, target=target)
        with pytest.raises(CorruptDataError, match="expected other sizes"):
            client.read({(0, 0): [0]}, 10, "a test")
        assert target.refused == [Row((0, 0), [0], [300])]
        assert not any(target.memory)
        eventually(lambda: not server._connections, "its connection is let go")

    def test_a_half_that_fails_ends_the_other(self, store: Store) -> None:
        """Nobody writes to the memory of a read that has failed, and it fails long before its deadline."""
        waits, go_on = threading.Event(), threading.Event()

        def answer(slots: Slots, *rest: Any) -> Any:
            if (0, 0) in slots:
                assert waits.wait(60)
                raise ModelLostError("it is gone")
            waits.set()
            assert go_on.wait(600)
            return store.answer(slots, *rest)

        for serial in range(4):
            store.add((0, serial), bytes(100))
        server = TcpServer(answer, "127.0.0.1")
        client = TcpClient(server.address, server.token)
        before = set(threading.enumerate())
        failed: list[BaseException] = []
        after: list[set[threading.Thread]] = []

        def read() -> None:
            try:
                client.read({segment: [0] for segment in store.segments}, 600, "a test")
            except ModelLostError as exc:
                failed.append(exc)
                after.append(set(threading.enumerate()))

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(60)
        assert failed
        assert not go_on.is_set()
        lanes = {thread for thread in after[0] - before - {reader} if "(read)" in thread.name}
        assert not lanes
        go_on.set()
        client.close()
        server.close()


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


class TestBuffers:
    def test_memory_is_used_again_when_no_array_is_left(self) -> None:
        buffers = Buffers()
        first = buffers.block(buffers.take(PAGE_BYTES + 1))
        part = first[5:9]
        second = buffers.block(buffers.take(PAGE_BYTES + 1))
        place = first.ctypes.data
        assert second.ctypes.data != place
        del first
        third = buffers.block(buffers.take(PAGE_BYTES + 1))
        assert third.ctypes.data != place
        del part
        assert buffers.block(buffers.take(PAGE_BYTES + 2)).ctypes.data == place

    def test_no_more_is_kept_than_was_in_use_at_once(self) -> None:
        buffers = Buffers()
        for pages in range(1, 20):
            buffers.block(buffers.take(pages * PAGE_BYTES))
        assert buffers._free_bytes <= 19 * PAGE_BYTES
        assert sum(map(len, buffers._free)) == buffers._free_bytes

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * PAGE_BYTES)), max_size=20))
    def test_arrays_that_live_keep_their_bytes(self, steps: Sequence[tuple[int, int]]) -> None:
        buffers = Buffers()
        alive: dict[int, tuple[np.ndarray, int]] = {}
        for number, (key, nbytes) in enumerate(steps):
            memory = buffers.take(nbytes)
            memory[:1] = memory[-1:] = bytes([number])[:nbytes]
            alive[key] = (buffers.block(memory), number)
            assert alive[key][0].nbytes == nbytes
            assert all(b.nbytes == 0 or b[0] == b[-1] == n for b, n in alive.values())


def test_the_client_needs_no_engine() -> None:
    code = (
        "import sys, tensorvine.actors.transport.tcp; sys.exit(any(m in sys.modules for m in ('ray', 'distributed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


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
