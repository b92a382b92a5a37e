"""What one end of a socket may cost the other: announced sizes, unread answers, calls under way, false answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tensorvine.actors.engine.engine import GROUPS
from tensorvine.actors.engine.sockets import blocking
from tensorvine.actors.engine.sockets.awaited import connected
from tensorvine.actors.engine.sockets.blocking import BlockingConnections
from tensorvine.actors.engine.sockets.framing import (
    ANSWER_BYTES,
    HEADER,
    MESSAGE_BYTES,
    SECRET_BYTES,
    SocketAddress,
    first_of,
)
from tensorvine.actors.engine.sockets.traffic import SHORT_CALLS
from tensorvine.store.errors import ShardUnavailableError

from tests.support.call_targets import WAIT_S, Serving, TargetCalls, called, sent
from tests.support.waiting import eventually


def message(number: int, method: str, *arguments: Any) -> bytes:
    packed = pickle.dumps((method, arguments), 5)
    return HEADER.pack(len(packed), number) + packed


@pytest.fixture
def friend(serving: Serving) -> Iterator[socket.socket]:
    """A connection that was let in."""
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
    """Of messages."""

    @pytest.mark.parametrize("nbytes", [MESSAGE_BYTES + 1, 2**32 - 1])
    def test_what_is_announced_too_large_ends_the_connection_and_no_other(
        self,
        serving: Serving,
        caller: BlockingConnections,
        friend: socket.socket,
        caplog: pytest.LogCaptureFixture,
        nbytes: int,
    ) -> None:
        friend.sendall(HEADER.pack(nbytes, 1) + b"x")
        until_ended(friend)
        assert f"expected a message of at most 1048576 bytes; found one of {nbytes}" in caplog.text
        assert called(caller, TargetCalls.note(1)) == 1

    def test_a_message_takes_memory_as_it_comes(self, serving: Serving, friend: socket.socket) -> None:
        friend.sendall(HEADER.pack(MESSAGE_BYTES, 1) + b"abc")
        (served,) = serving.server._served
        eventually(lambda: len(served._incoming) == HEADER.size + 3, "the first three bytes have come", pause=0.002)

    def test_what_is_announced_may_be_as_large_as_the_limit(self) -> None:
        buffer = bytearray(HEADER.pack(3, 7) + b"abcd")
        assert first_of(buffer, 3) == (7, b"abc")
        with pytest.raises(ConnectionAbortedError, match="of at most 2 bytes; found one of 3"):
            first_of(bytearray(HEADER.pack(3, 7)), 2)


class TestUnread:
    """Answers that a caller does not read."""

    def test_who_does_not_read_is_not_read_from_and_costs_little(
        self, serving: Serving, caller: BlockingConnections, friend: socket.socket
    ) -> None:
        friend.setblocking(False)
        content, calls, unsent = bytes(200_000), 0, b""

        def stuck() -> bool:
            nonlocal calls, unsent
            if not unsent:
                unsent, calls = message(calls, "note", content), calls + 1
            before = len(unsent)
            unsent = unsent[pushed(friend, unsent) :]
            return len(unsent) == before and not all(each._transport.is_reading() for each in serving.server._served)

        eventually(stuck, "the server reads no more", pause=0.002)
        assert called(caller, TargetCalls.note("other")) == "other"
        (served,) = (each for each in serving.server._served if unread(each))
        assert unread(served) < 3 * MESSAGE_BYTES
        assert sum(served._under_way.values()) <= 3
        found, buffer = 0, bytearray()

        def all_came() -> bool:  # once it reads, all comes that it asked for
            nonlocal found, unsent
            unsent = unsent[pushed(friend, unsent) :]
            with contextlib.suppress(BlockingIOError):
                buffer.extend(friend.recv(1 << 20))
            while (answer := first_of(buffer, MESSAGE_BYTES)) is not None:
                assert answer[0] == found
                found += 1
            return found == calls

        eventually(all_came, "all answers have come", pause=0.002)

    def test_with_too_much_unread_the_connection_ends(
        self,
        serving: Serving,
        caller: BlockingConnections,
        friend: socket.socket,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        serving.server.traffic = replace(SHORT_CALLS, unread_bytes=1_000_000)
        serving.target.gates["x" * 400_000] = gate = asyncio.Event()
        for number in range(20):
            friend.sendall(message(number, "wait", "x" * 400_000))
        eventually(lambda: serving.target.waiting == 20, "all calls wait", pause=0.002)
        most = 0

        async def open_and_look() -> None:
            nonlocal most
            (served,) = serving.server._served
            gate.set()
            for _ in range(100):
                await asyncio.sleep(0)
                most = max(most, served._transport.get_write_buffer_size())

        serving.run(open_and_look())
        eventually(lambda: not serving.server._served, "no connection is left", pause=0.002)
        until_ended(friend)
        assert "expected a caller that reads its answers; " in caplog.text
        assert 1_000_000 < most < 1_900_000
        assert called(caller, TargetCalls.note(1)) == 1


class TestUnderWay:
    """Calls without an answer yet."""

    def test_a_caller_with_too_many_short_calls_is_refused_and_one_with_polls_is_not(
        self,
        serving: Serving,
        caller: BlockingConnections,
        friend: socket.socket,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setitem(GROUPS, "ctl", 3)
        gate = asyncio.Event()

        async def slow(value: Any) -> Any:
            await gate.wait()
            return value

        monkeypatch.setattr(serving.target, "note", slow)
        for number in range(60):
            friend.sendall(message(number, "wait", "gate"))
        for number in range(3):
            friend.sendall(message(60 + number, "note", number))
        eventually(lambda: serving.target.waiting == 60, "all calls wait", pause=0.002)
        assert called(caller, TargetCalls.waits()) == 60
        friend.sendall(message(63, "note", 3))
        until_ended(friend)
        assert "expected at most 3 calls of 'ctl' under way on a connection; found more" in caplog.text
        serving.loop.call_soon_threadsafe(gate.set)
        serving.run(serving.target.open("gate"))

    def test_a_thread_s_connection_with_too_many_answers_to_come_makes_room_for_another(
        self, serving: Serving, caller: BlockingConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(blocking, "UNANSWERED", 3)
        for _ in range(3):
            sent(caller, TargetCalls.wait("gate"))  # nobody waits for it
        assert caller.send(TargetCalls.note(1)) is None, "it goes by the engine"
        assert called(caller, TargetCalls.note(2)) == 2
        assert len(caller._pool._idle) == 1
        for number in range(10):
            assert called(caller, TargetCalls.note(number)) == number
        serving.run(serving.target.open("gate"))

    def test_a_loop_keeps_few_calls_that_the_server_does_not_take(self, serving: Serving) -> None:
        content, stop, stopped = bytes(MESSAGE_BYTES - 100), threading.Event(), threading.Event()

        async def scene() -> tuple[int, list[bytes], bytes | None]:
            connection = await connected(serving.address)
            serving.loop.call_soon_threadsafe(lambda: (stopped.set(), stop.wait(WAIT_S)))
            assert await asyncio.to_thread(stopped.wait, WAIT_S)
            waiting = []
            while (answer := connection.send(TargetCalls.note(content), "an actor")) is not None:
                waiting.append(answer)
            stop.set()
            came = await asyncio.gather(*waiting)
            again = connection.send(TargetCalls.note(b"again"), "an actor")
            answered = await again if again is not None else None
            connection.close()
            return len(waiting), came, answered

        count, came, again = asyncio.run(asyncio.wait_for(scene(), WAIT_S))
        assert count * MESSAGE_BYTES <= SHORT_CALLS.unsent_bytes + 2 * MESSAGE_BYTES
        assert came == [content] * count
        assert again == b"again", "and takes calls again when these have gone"


class FalseServer:
    """Lets a caller in, waits for a call, and answers with what it is told to."""

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
        (HEADER.pack(2**32 - 1, 1) + b"abc", rf"at most {ANSWER_BYTES} bytes; found one of 4294967295"),
    ],
    ids=["to no call", "4 GiB"],
)
class TestFalseAnswers:
    """What an actor would not send: who waits hears at once what came."""

    def test_to_a_thread(self, says: bytes, why: str) -> None:
        server = FalseServer(says)
        caller = BlockingConnections(server.address)
        with pytest.raises(ShardUnavailableError, match=f"an actor: expected an answer; .*{why}"):
            called(caller, TargetCalls.note(1))
        assert not caller._pool._idle
        server.close()
        caller.close()

    def test_to_a_loop(self, says: bytes, why: str) -> None:
        server = FalseServer(says)

        async def scene() -> None:
            connection = await connected(server.address)
            waiting = [connection.send(TargetCalls.note(number), "an actor") for number in range(2)]
            for answer in waiting:
                assert answer is not None
                with pytest.raises(ShardUnavailableError, match=f"an actor: expected an answer; .*{why}"):
                    await asyncio.wait_for(answer, WAIT_S)
            assert not connection.open

        asyncio.run(scene())
        server.close()
