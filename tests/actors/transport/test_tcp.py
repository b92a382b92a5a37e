"""TCP over real sockets: what arrives and for whom, that it is right, and in which memory it lies."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.actors.transport import tcp_server
from tensorvine.actors.transport.frames import Received, Row, Slots, message
from tensorvine.actors.transport.targets import length_of
from tensorvine.actors.transport.tcp import TcpClient, UnreachableError, check_content
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store.errors import CorruptDataError, ModelLostError, ShardUnavailableError

from tests.support.tcp import dial, impostor
from tests.support.tcp_store import BIG, Store, contents
from tests.support.waiting import eventually


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
        with pytest.raises(CorruptDataError, match=r"tensor 'b' by socket: expected content \w+; found"):
            check_content([("a", (1, 5), 0, 3), ("b", (1, 5), 1, 4)], wrong, "socket")

    def test_content_without_a_hash_does_not_pass(self, store: Store, client: TcpClient) -> None:
        store.add((1, 5), b"abc")
        with pytest.raises(CorruptDataError, match="expected content None"):
            check_content([("a", (1, 5), 0, 3)], client.read({(1, 5): [0]}, 10, "a test"), "socket")

    def test_a_segment_that_is_let_go_before_it_is_hashed_is_lost(self, store: Store) -> None:
        store.add((0, 0), b"abc")
        server = TcpServer(lambda s, t, h: (store.answer(s, t, h)[0], dict), "127.0.0.1")
        with pytest.raises(ModelLostError, match=r"\(0, 0\).*released"):
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


def test_the_client_needs_no_engine() -> None:
    code = (
        "import sys, tensorvine.actors.transport.tcp; sys.exit(any(m in sys.modules for m in ('ray', 'distributed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
