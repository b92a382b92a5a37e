"""Limits of memory, concurrency and unread answers, and invalid answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tensorvine.actors.engine.groups import GROUPS
from tensorvine.actors.engine.sockets import blocking, packing
from tensorvine.actors.engine.sockets.awaited import ConnectionEndedError, connected
from tensorvine.actors.engine.sockets.blocking import SHORT_BYTES, BlockingConnections
from tensorvine.actors.engine.sockets.framing import HEADER, SECRET_BYTES, SocketAddress
from tensorvine.actors.engine.sockets.incoming import Incoming
from tensorvine.store.errors import ShardUnavailableError

from tests.support.call_targets import WAIT_S, Serving, TargetCalls, called, packed, sent
from tests.support.waiting import eventually

ANNOUNCED = HEADER.pack(8, 0) + struct.pack("<Q", 1 << 62)
"""The announcement of a buffer of 4 EiB."""


def message(number: int, method: str, *arguments: Any) -> bytes:
    pickled = pickle.dumps((method, arguments), 5)
    return HEADER.pack(len(pickled), number) + pickled


@pytest.fixture
def friend(serving: Serving) -> Iterator[socket.socket]:
    """An authenticated connection."""
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(WAIT_S)
        made.connect(f"\0{serving.address.name}")
        made.sendall(serving.address.secret)
        assert made.recv(1) == b"+"
        yield made


def pushed(end: socket.socket, data: bytes) -> int:
    try:
        return end.send(data)
    except BlockingIOError:
        return 0


def unread(served: Any) -> int:
    return served._transport.get_write_buffer_size()


def until_ended(end: socket.socket) -> None:
    try:
        while end.recv(1 << 20):
            pass
    except ConnectionResetError:  # what it sent was not read
        pass


class TestSizes:
    """Sizes of messages."""

    def test_a_message_takes_memory_as_it_arrives(self, serving: Serving, friend: socket.socket) -> None:
        friend.sendall(HEADER.pack(2**32 - 1, 1) + b"abc")
        (served,) = serving.server._served
        eventually(lambda: len(served._incoming) == HEADER.size + 3, "the first three bytes have arrived", pause=0.002)

    def test_a_buffer_beyond_the_memory_ends_its_connection_and_no_other(
        self,
        serving: Serving,
        caller: BlockingConnections,
        friend: socket.socket,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        friend.sendall(ANNOUNCED + message(1, "note", 1))
        until_ended(friend)
        assert f"expected memory for {1 << 62} announced bytes" in caplog.text
        assert called(caller, TargetCalls.note(2)) == 2
        assert serving.target.seen == [2]

    def test_a_pickle_that_its_header_cannot_announce_is_an_error(
        self, serving: Serving, caller: BlockingConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def long(value: Any) -> str:
            return "x" * 2000

        monkeypatch.setattr(serving.target, "note", long)
        monkeypatch.setattr(packing, "PICKLE_BYTES", 1000)
        with pytest.raises(ValueError, match="expected a pickle of at most 1000 bytes; found 20"):
            packed(TargetCalls.note("x" * 2000))
        with pytest.raises(TypeError, match="note: its answer cannot be sent: expected a pickle of at most 1000"):
            called(caller, TargetCalls.note(1))
        assert called(caller, TargetCalls.waits()) == 0


class TestUnread:
    """Answers that a caller does not read."""

    def test_from_a_caller_that_does_not_read_no_calls_are_read(
        self, serving: Serving, caller: BlockingConnections, friend: socket.socket
    ) -> None:
        friend.setblocking(False)
        content, calls, unsent = bytes(200_000), 0, b""

        def stuck() -> bool:
            nonlocal calls, unsent
            if not unsent:
                calls += 1
                unsent = message(calls, "note", content)
            before = len(unsent)
            unsent = unsent[pushed(friend, unsent) :]
            return len(unsent) == before and not all(each._transport.is_reading() for each in serving.server._served)

        eventually(stuck, "the server reads no more", pause=0.002)
        assert called(caller, TargetCalls.note("other")) == "other"
        (served,) = (each for each in serving.server._served if unread(each))
        assert unread(served) < 3 << 20
        assert len(served._tasks) <= 3
        found, incoming = 0, Incoming()

        def all_arrived() -> bool:  # once the caller reads, every call is answered
            nonlocal found, unsent
            unsent = unsent[pushed(friend, unsent) :]
            with contextlib.suppress(BlockingIOError):
                incoming.take(friend.recv(1 << 20))
            while (answer := incoming.first()) is not None:
                found += 1
                assert answer.number == found
            return found == calls

        eventually(all_arrived, "all answers have arrived", pause=0.002)


class TestUnderWay:
    """Calls without an answer yet."""

    def test_calls_above_the_limit_of_their_group_wait_and_delay_no_other_group(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(GROUPS, "ctl", 3)
        serving = Serving()
        begun, gate = list[int](), asyncio.Event()

        async def slow(value: int) -> int:
            begun.append(value)
            await gate.wait()
            return value

        monkeypatch.setattr(serving.target, "note", slow)
        caller = BlockingConnections(serving.address)
        short = [sent(caller, TargetCalls.note(number)) for number in range(8)]
        polls = [sent(caller, TargetCalls.wait("gate")) for _ in range(8)]
        eventually(lambda: serving.target.waiting == 8, "all long polls run", pause=0.002)
        assert called(caller, TargetCalls.bytes()) is None
        assert sorted(begun) == [0, 1, 2]
        serving.loop.call_soon_threadsafe(gate.set)
        assert [answer.result(WAIT_S, "x") for answer in short] == [*range(8)]
        called(caller, TargetCalls.open("gate"))
        assert [answer.result(WAIT_S, "x") for answer in polls] == ["gate"] * 8
        caller.close()
        serving.close()

    def test_a_thread_s_connection_with_too_many_unread_answers_is_replaced(
        self, serving: Serving, caller: BlockingConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(blocking, "UNANSWERED", 3)
        for _ in range(3):
            sent(caller, TargetCalls.wait("gate"))  # nothing waits for the answer
        assert caller.send(packed(TargetCalls.note(1))) is None
        assert called(caller, TargetCalls.note(2)) == 2
        assert len(caller._pool._idle) == 1
        for number in range(10):
            assert called(caller, TargetCalls.note(number)) == number
        serving.run(serving.target.open("gate"))

    def test_an_event_loop_keeps_calls_that_a_blocked_server_does_not_read(self, serving: Serving) -> None:
        content, stop, stopped = bytes(SHORT_BYTES), threading.Event(), threading.Event()

        async def scene() -> list[object]:
            connection = await connected(serving.address)
            serving.loop.call_soon_threadsafe(lambda: (stopped.set(), stop.wait(WAIT_S)))
            assert await asyncio.to_thread(stopped.wait, WAIT_S)
            waiting = [connection.send(packed(TargetCalls.note((number, content)))) for number in range(20)]
            stop.set()
            answers = await asyncio.gather(*waiting)
            connection.close()
            return answers

        assert asyncio.run(asyncio.wait_for(scene(), WAIT_S)) == [(number, content) for number in range(20)]
        assert [number for number, _ in serving.target.seen] == [*range(20)]


class FalseServer:
    """Accepts a caller, waits for a call, and sends the given bytes as the answer."""

    def __init__(self, says: bytes) -> None:
        self.says = says
        name = f"tensorvine-false-{uuid.uuid4().hex}"
        self.address = SocketAddress(name, os.getpid(), bytes(SECRET_BYTES))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(WAIT_S)
        self._listener.bind(f"\0{name}")
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        end, _ = self._listener.accept()
        with end:
            end.settimeout(WAIT_S)
            assert end.recv(SECRET_BYTES, socket.MSG_WAITALL) == self.address.secret
            end.sendall(b"+")
            assert end.recv(1 << 16)
            end.sendall(self.says)
            until_ended(end)

    def close(self) -> None:
        self._thread.join(WAIT_S)
        self._listener.close()


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (HEADER.pack(3, 99) + b"abc", r"found one to (number )?99"),
        (ANNOUNCED + HEADER.pack(3, 1) + b"abc", f"expected memory for {1 << 62} announced bytes"),
        (HEADER.pack(3, 0) + b"abc", "expected the sizes of buffers; found 3 bytes"),
    ],
    ids=["to no call", "4 EiB", "no sizes"],
)
class TestFalseAnswers:
    """Invalid data from a server ends the connection; the error says what was found."""

    def test_to_a_thread(self, says: bytes, why: str) -> None:
        server = FalseServer(says)
        caller = BlockingConnections(server.address)
        with pytest.raises(ShardUnavailableError, match=f"an actor: expected an answer; .*{why}"):
            called(caller, TargetCalls.note(1))
        assert not caller._pool._idle
        server.close()
        caller.close()

    def test_to_an_event_loop(self, says: bytes, why: str) -> None:
        server = FalseServer(says)

        async def scene() -> None:
            connection = await connected(server.address)
            waiting = [connection.send(packed(TargetCalls.note(number))) for number in range(2)]
            for answer in waiting:
                with pytest.raises(ConnectionEndedError, match=f"the received data is invalid: .*{why}"):
                    await asyncio.wait_for(answer, WAIT_S)
            assert not connection.open

        asyncio.run(scene())
        server.close()
