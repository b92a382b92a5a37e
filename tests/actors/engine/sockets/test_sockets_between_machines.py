"""Sockets for callers of other machines: what holds on one machine, and who is at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tensorvine.actors.engine.sockets import awaited, blocking, entrance
from tensorvine.actors.engine.sockets.awaited import AwaitedConnection, connected
from tensorvine.actors.engine.sockets.blocking import BlockingConnections
from tensorvine.actors.engine.sockets.entrance import VISITORS
from tensorvine.actors.engine.sockets.framing import CONNECTS, SECRET_BYTES, WELCOME, SocketAddress, response
from tensorvine.actors.rpc.lazy_server import LazyServer
from tensorvine.store.errors import ShardUnavailableError

from tests.actors.engine.sockets import test_sockets as near
from tests.support.call_targets import WAIT_S, Away, Loop, Serving, Target, TargetCalls, called, sent
from tests.support.waiting import eventually

HOST = "127.0.0.1"


@pytest.fixture(params=["asyncio", "uvloop"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """Of the loops that Ray runs actors in, for callers of other machines."""
    made = Serving(
        asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop, HOST
    )
    yield made
    made.close()


@pytest.fixture
def away() -> Iterator[Away]:
    made = Away(HOST)
    yield made
    made.kill()


class TestCalls(near.TestCalls):
    """As on one machine; how messages are cut is tried there."""

    test_messages_are_found_however_the_bytes_come = None  # type: ignore[assignment]


class TestErrors(near.TestErrors):
    """As on one machine."""


class TestDeath(near.TestDeath):
    """As on one machine, but that a process of another user is told from the actor by what it can prove."""

    test_another_user_is_not_heard = None  # type: ignore[assignment]

    def test_a_machine_that_is_silent_is_taken_for_dead(self, away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
        caller = BlockingConnections(away.address)
        answer = sent(caller, TargetCalls.wait("gate"))

        class Silent(socket.socket):
            def recv(self, *_: object) -> bytes:
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

        connection = answer._connection
        assert connection is not None
        silent = Silent(fileno=connection._socket.detach())
        monkeypatch.setattr(connection, "_socket", silent)
        with pytest.raises(ShardUnavailableError, match="its machine does not respond"):
            answer.result(WAIT_S, "shard 3")
        caller.close()
        silent.close()  # the connection closes the socket that it opened


class TestBothEnds:
    """Each shows the other that it knows the secret."""

    def test_who_does_not_know_the_secret_is_not_let_in(self, serving: Serving) -> None:
        stranger = BlockingConnections(replace(serving.address, secret=bytes(SECRET_BYTES)))
        assert stranger.send(TargetCalls.note(1)) is None
        with pytest.raises(ConnectionResetError):
            serving.run(connected(replace(serving.address, secret=bytes(SECRET_BYTES))))
        assert serving.target.seen == []
        stranger.close()

    def test_what_another_one_showed_is_worth_nothing(self, serving: Serving) -> None:
        assert serving.address.place is not None
        with socket.create_connection(serving.address.place, WAIT_S) as stranger:
            challenge = stranger.recv(SECRET_BYTES, socket.MSG_WAITALL)
            with socket.create_connection(serving.address.place, WAIT_S) as other:
                assert other.recv(SECRET_BYTES, socket.MSG_WAITALL) != challenge
            stranger.sendall(challenge + serving.address.secret)  # the secret itself is no proof either
            assert near_ended(stranger)

    @pytest.mark.parametrize("says", [WELCOME + bytes(SECRET_BYTES), WELCOME, b"", b"-"])
    def test_a_server_that_cannot_prove_itself_is_told_nothing(self, says: bytes) -> None:
        with socket.create_server((HOST, 0)) as listener, Loopback() as loop:
            heard: list[bytes] = []

            def impostor() -> None:
                for _ in range(2):
                    visitor, _ = listener.accept()
                    with visitor:
                        visitor.sendall(bytes(SECRET_BYTES))
                        visitor.recv(2 * SECRET_BYTES, socket.MSG_WAITALL)
                        visitor.sendall(says)
                        visitor.shutdown(socket.SHUT_WR)
                        heard.append(visitor.recv(1))

            serves = threading.Thread(target=impostor, daemon=True)
            serves.start()
            address = SocketAddress("an impostor", 1, b"s" * SECRET_BYTES, (HOST, listener.getsockname()[1]))
            caller = BlockingConnections(address)
            assert caller.send(TargetCalls.note("secret words")) is None
            with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
                loop.run(connected(address))
            serves.join(WAIT_S)
            assert heard == [b"", b""]
            caller.close()


class Crowd:
    """A relay before an actor: while the response of a connection is on its way, a crowd of strangers connects.

    Args:
        place: where the actor listens.
        crowded: how many connections have a crowd; the next ones have none.
    """

    def __init__(self, place: tuple[str, int], crowded: int) -> None:
        self._actor = place
        self._crowded = crowded
        self._strangers: list[socket.socket] = []
        self.connections = 0
        self.listener = socket.create_server((HOST, 0))
        self.place = (HOST, int(self.listener.getsockname()[1]))
        self._relaying = threading.Thread(target=self._relay, daemon=True)
        self._relaying.start()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._relaying.join(WAIT_S)
        self.listener.close()
        for stranger in self._strangers:
            stranger.close()

    def _relay(self) -> None:
        with contextlib.ExitStack() as relayed, contextlib.suppress(OSError):
            while True:
                caller = relayed.enter_context(self.listener.accept()[0])
                self.connections += 1
                actor = relayed.enter_context(socket.create_connection(self._actor, WAIT_S))
                caller.sendall(actor.recv(SECRET_BYTES, socket.MSG_WAITALL))
                shown = caller.recv(2 * SECRET_BYTES, socket.MSG_WAITALL)
                if self.connections <= self._crowded:
                    self._strangers += [socket.create_connection(self._actor, WAIT_S) for _ in range(2 * VISITORS)]
                    for stranger in self._strangers[-VISITORS:]:  # all have come in
                        stranger.recv(SECRET_BYTES, socket.MSG_WAITALL)
                with contextlib.suppress(OSError):  # the actor has closed it
                    actor.sendall(shown)
                answer = actor.recv(1 + SECRET_BYTES)
                caller.sendall(answer)
                if answer.startswith(WELCOME):
                    for one, other in ((caller, actor), (actor, caller)):
                        threading.Thread(target=carry, args=(one.dup(), other.dup()), daemon=True).start()


def carry(source: socket.socket, target: socket.socket) -> None:
    with source, target, contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


class TestCrowds:
    """Many connections that show nothing, at a port where a caller's response takes a while to arrive."""

    @pytest.mark.parametrize("crowded", [1, CONNECTS - 1])
    def test_a_caller_gets_in_that_was_closed_before_its_response_arrived(self, serving: Serving, crowded: int) -> None:
        for loop in (False, True):
            crowd = Crowd(serving.address.place or ("", 0), crowded)
            address = replace(serving.address, place=crowd.place)
            if loop:
                connection = serving.run(connected(address))
                serving.run(ended(connection))
            else:
                caller = BlockingConnections(address)
                assert called(caller, TargetCalls.note("in")) == "in"
                caller.close()
            assert crowd.connections == crowded + 1
            crowd.close()

    def test_one_that_is_never_let_in_gives_up_and_its_calls_go_by_the_engine(self, serving: Serving) -> None:
        for_thread, for_loop = (Crowd(serving.address.place or ("", 0), CONNECTS) for _ in range(2))
        caller = BlockingConnections(replace(serving.address, place=for_thread.place))
        assert caller.send(TargetCalls.note(1)) is None
        with pytest.raises(ConnectionResetError, match="used all places 5 times"):
            serving.run(connected(replace(serving.address, place=for_loop.place)))
        for crowd in (for_thread, for_loop):
            assert crowd.connections == CONNECTS
            crowd.close()
        caller.close()

    @pytest.mark.parametrize("what", ["used", "expired", "another server's", "another proof"])
    def test_a_response_that_does_not_count_is_refused(
        self, serving: Serving, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def dialled() -> tuple[socket.socket, bytes]:
            made = socket.create_connection(serving.address.place or ("", 0), WAIT_S)
            return made, made.recv(SECRET_BYTES, socket.MSG_WAITALL)

        known, challenge = dialled()
        shown = response(serving.address, challenge)
        if what == "used":
            known.sendall(shown)
            assert known.recv(1) == WELCOME
        elif what == "expired":
            monkeypatch.setattr(entrance, "VALID_S", -1.0)
        elif what == "another server's":
            shown = response(serving.address, bytes(SECRET_BYTES))
        else:
            shown = response(replace(serving.address, secret=bytes(SECRET_BYTES)), challenge)
        again, _ = dialled()
        with known, again:
            again.sendall(shown)
            assert near_ended(again)


async def ended(connection: AwaitedConnection) -> None:
    connection.close()


class TestReach:
    """Whether there is a way there."""

    def test_a_machine_that_is_not_reached_is_left_to_the_engine_for_a_while(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server((HOST, 0)) as listener:
            place = (HOST, int(listener.getsockname()[1]))
        caller = BlockingConnections(SocketAddress("gone", 1, b"s" * SECRET_BYTES, place))
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert caller.send(TargetCalls.note(1)) is None
        assert caplog.text.count("gone: no connection, calls are sent by the engine for 60 s") == 1
        monkeypatch.setattr(blocking.time, "monotonic", lambda: float("inf"))
        assert caller.send(TargetCalls.note(1)) is None
        assert caplog.text.count("gone: no connection") == 1  # at its level
        caller.close()

    def test_callers_of_both_kinds_are_served_at_once(self, serving: Serving) -> None:
        callers = [BlockingConnections(serving.address), BlockingConnections(serving.server.address)]
        assert [called(caller, TargetCalls.note(number)) for number, caller in enumerate(callers)] == [0, 1]
        for caller in callers:
            caller.close()

    def test_where_nothing_can_listen_only_calls_of_other_machines_go_by_the_engine(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene() -> None:
            lazy = LazyServer(Target(), "shard 3")
            assert lazy.address("192.0.2.77") is None
            assert lazy.address("192.0.2.77") is None
            assert lazy.address() is not None
            assert lazy.address(HOST) is not None
            await lazy.close()

        asyncio.run(scene())
        assert caplog.text.count("shard 3: no socket, calls from other machines are sent by the engine") == 1

    def test_a_loop_calls_a_machine_and_hears_that_it_ended(self, away: Away, away_loop: Loop) -> None:
        connection = away_loop.run(connected(away.address))

        async def note(value: int) -> int:
            answer = connection.send(TargetCalls.note(value), "shard 1")
            assert answer is not None
            return await answer

        assert away_loop.run(note(3)) == 3
        away.kill()
        eventually(lambda: not connection.open, "the loop hears of the end", pause=0.002)


class Loopback(Loop):
    """An event loop that ends with its block."""

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def near_ended(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:  # what it sent was not read
        return True


class TestSignsOfLife:
    """No call is sent to a machine of which nothing was heard for a while."""

    def test_a_thread_asks_first(self, away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocking, "FRESH_S", -1.0)
        caller = BlockingConnections(away.address)
        late = sent(caller, TargetCalls.wait("gate"))
        assert called(caller, TargetCalls.note(1)) == 1
        called(caller, TargetCalls.open("gate"))
        assert late.result(WAIT_S, "x") == "gate"
        assert called(caller, TargetCalls.note(2)) == 2
        monkeypatch.setattr(blocking, "SEND_S", 0.1)
        away.process.send_signal(signal.SIGSTOP)  # as good as a machine that is gone: what is sent is not answered
        assert caller.send(TargetCalls.note(3)) is None
        away.process.send_signal(signal.SIGCONT)
        caller.close()

    def test_what_nobody_waited_for_is_skipped_before_a_sign(self, away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocking, "FRESH_S", -1.0)
        caller = BlockingConnections(away.address)
        for number in range(5):
            sent(caller, TargetCalls.note(number))
        assert called(caller, TargetCalls.note("end")) == "end"
        caller.close()

    def test_a_loop_goes_by_the_engine_until_there_is_one_again(
        self, away: Away, away_loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(awaited, "PING_S", 0.01)
        connection = away_loop.run(connected(away.address))

        async def note(value: int) -> object:
            answer = connection.send(TargetCalls.note(value), "shard 1")
            return None if answer is None else await answer

        away.process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(awaited, "STALE_S", 0.2)
        eventually(lambda: away_loop.run(asleep(connection)), "the machine counts as silent", pause=0.002)
        assert away_loop.run(note(1)) is None
        away.process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(awaited, "STALE_S", WAIT_S)
        eventually(lambda: away_loop.run(note(2)) == 2, "calls go by the socket again", pause=0.002)
        away.kill()
        eventually(lambda: not connection.open, "the loop hears of the end", pause=0.002)


async def asleep(connection: AwaitedConnection) -> bool:
    return not connection._is_fresh
