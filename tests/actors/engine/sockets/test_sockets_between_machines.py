"""Sockets for callers of other machines: the promises within a machine, authentication, and signs of life."""

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
from typing import Any

import pytest
from tensorvine.actors.engine.sockets import awaited, blocking, entrance
from tensorvine.actors.engine.sockets.awaited import AwaitedConnection, ConnectionEndedError, connected
from tensorvine.actors.engine.sockets.blocking import BlockingConnections
from tensorvine.actors.engine.sockets.entrance import VISITORS
from tensorvine.actors.engine.sockets.framing import CONNECTS, SECRET_BYTES, WELCOME, SocketAddress, response
from tensorvine.store.errors import ShardUnavailableError

from tests.actors.engine.sockets import test_sockets as near
from tests.support.call_targets import WAIT_S, Away, Loop, Serving, TargetCalls, called, packed, sent
from tests.support.waiting import eventually

HOST = "127.0.0.1"


@pytest.fixture(params=["asyncio", "uvloop"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """In the event loops that actors may have."""
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
    """As on one machine."""


class TestErrors(near.TestErrors):
    """As on one machine."""


class TestDeath(near.TestDeath):
    """As on one machine, except that a process of another user is refused because it lacks the secret."""

    test_another_user_is_refused = None  # type: ignore[assignment]

    def test_a_machine_that_does_not_respond_counts_as_dead(self, away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
        caller = BlockingConnections(away.address)
        answer = sent(caller, TargetCalls.wait("gate"))

        class Silent(socket.socket):
            def recv_into(self, *_: object) -> int:
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
    """Each end proves to the other that it knows the secret."""

    def test_a_caller_without_the_secret_is_refused(self, serving: Serving) -> None:
        stranger = BlockingConnections(replace(serving.address, secret=bytes(SECRET_BYTES)))
        assert stranger.send(packed(TargetCalls.note(1))) is None
        with pytest.raises(ConnectionResetError):
            serving.run(connected(replace(serving.address, secret=bytes(SECRET_BYTES))))
        assert serving.target.seen == []
        stranger.close()

    def test_a_response_without_a_proof_is_refused(self, serving: Serving) -> None:
        assert serving.address.place is not None
        with socket.create_connection(serving.address.place, WAIT_S) as stranger:
            challenge = stranger.recv(SECRET_BYTES, socket.MSG_WAITALL)
            with socket.create_connection(serving.address.place, WAIT_S) as other:
                assert other.recv(SECRET_BYTES, socket.MSG_WAITALL) != challenge
            stranger.sendall(challenge + serving.address.secret)  # the secret itself is no proof either
            assert near_ended(stranger)

    @pytest.mark.parametrize("says", [WELCOME + bytes(SECRET_BYTES), WELCOME, b"", b"-"])
    def test_a_server_without_a_proof_receives_no_call(self, says: bytes) -> None:
        with socket.create_server((HOST, 0)) as listener, Loopback() as loop:
            received: list[bytes] = []

            def impostor() -> None:
                for _ in range(2):
                    visitor, _ = listener.accept()
                    with visitor:
                        visitor.sendall(bytes(SECRET_BYTES))
                        visitor.recv(2 * SECRET_BYTES, socket.MSG_WAITALL)
                        visitor.sendall(says)
                        visitor.shutdown(socket.SHUT_WR)
                        received.append(visitor.recv(1))

            serves = threading.Thread(target=impostor, daemon=True)
            serves.start()
            address = SocketAddress("an impostor", 1, b"s" * SECRET_BYTES, (HOST, listener.getsockname()[1]))
            caller = BlockingConnections(address)
            assert caller.send(packed(TargetCalls.note("secret words"))) is None
            with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
                loop.run(connected(address))
            serves.join(WAIT_S)
            assert received == [b"", b""]
            caller.close()


class Crowd:
    """A relay before an actor: while it holds the response of a caller, many strangers connect to the actor.

    Args:
        place: host and port of the actor.
        crowded: number of connections for which it does so; later ones are relayed at once.
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
                    for stranger in self._strangers[-VISITORS:]:  # all are accepted
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
    """Many silent connections, at a port where a caller's response takes a while to arrive."""

    @pytest.mark.parametrize("crowded", [1, CONNECTS - 1])
    def test_a_caller_that_was_disconnected_before_its_response_arrived_is_accepted(
        self, serving: Serving, crowded: int
    ) -> None:
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

    def test_a_caller_that_is_never_accepted_gives_up(self, serving: Serving) -> None:
        for_thread, for_loop = (Crowd(serving.address.place or ("", 0), CONNECTS) for _ in range(2))
        caller = BlockingConnections(replace(serving.address, place=for_thread.place))
        assert caller.send(packed(TargetCalls.note(1))) is None
        with pytest.raises(ConnectionResetError, match="used all places 5 times"):
            serving.run(connected(replace(serving.address, place=for_loop.place)))
        for crowd in (for_thread, for_loop):
            assert crowd.connections == CONNECTS
            crowd.close()
        caller.close()

    @pytest.mark.parametrize("what", ["used", "expired", "another server's", "another proof"])
    def test_an_invalid_response_is_refused(self, serving: Serving, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Machines that cannot be reached, and interfaces."""

    def test_connecting_to_an_unreachable_machine_is_not_retried_for_a_while(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server((HOST, 0)) as listener:
            place = (HOST, int(listener.getsockname()[1]))
        caller = BlockingConnections(SocketAddress("gone", 1, b"s" * SECRET_BYTES, place))
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert caller.send(packed(TargetCalls.note(1))) is None
        assert caplog.text.count("gone: no connection, not tried again for 60 s") == 1
        monkeypatch.setattr(blocking.time, "monotonic", lambda: float("inf"))
        with caplog.at_level(logging.INFO):
            assert caller.send(packed(TargetCalls.note(1))) is None
        assert caplog.text.count("gone: no connection") == 2
        caller.close()

    def test_callers_of_this_machine_and_of_others_are_served_at_once(self, serving: Serving) -> None:
        callers = [BlockingConnections(serving.address), BlockingConnections(serving.server.address)]
        assert [called(caller, TargetCalls.note(number)) for number, caller in enumerate(callers)] == [0, 1]
        for caller in callers:
            caller.close()

    def test_an_interface_has_one_port_and_one_that_does_not_exist_is_an_error(self, serving: Serving) -> None:
        with pytest.raises(OSError, match="assign requested address"):
            serving.run(serving._address_at("192.0.2.77"))
        assert serving.run(serving._address_at(HOST)) == serving.address
        caller = BlockingConnections(serving.address)
        assert called(caller, TargetCalls.note(1)) == 1
        caller.close()

    def test_an_event_loop_calls_a_machine_and_sees_that_it_ended(self, away: Away, away_loop: Loop) -> None:
        connection = away_loop.run(connected(away.address))

        assert away_loop.run(noted(connection, 3)) == 3
        away.kill()
        eventually(lambda: not connection.open, "the connection has ended", pause=0.002)
        with pytest.raises(ConnectionEndedError, match="it died or is being restarted"):
            away_loop.run(noted(connection, 4))


class Loopback(Loop):
    """An event loop that is closed after its `with` block."""

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
    """No call is sent to a machine that has been silent for a while."""

    def test_a_thread_sends_a_ping_first(self, away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocking, "FRESH_S", -1.0)
        caller = BlockingConnections(away.address)
        late = sent(caller, TargetCalls.wait("gate"))
        assert called(caller, TargetCalls.note(1)) == 1
        called(caller, TargetCalls.open("gate"))
        assert late.result(WAIT_S, "x") == "gate"
        assert called(caller, TargetCalls.note(2)) == 2
        monkeypatch.setattr(blocking, "SEND_S", 0.1)
        away.process.send_signal(signal.SIGSTOP)  # like a machine without power: it answers nothing
        assert caller.send(packed(TargetCalls.note(3))) is None
        away.process.send_signal(signal.SIGCONT)
        caller.close()

    def test_answers_without_a_waiter_are_skipped_before_that_to_a_ping(
        self, away: Away, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(blocking, "FRESH_S", -1.0)
        caller = BlockingConnections(away.address)
        for number in range(5):
            sent(caller, TargetCalls.note(number))
        assert called(caller, TargetCalls.note("end")) == "end"
        caller.close()

    def test_a_connection_is_stale_until_the_machine_responds(
        self, away: Away, away_loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(awaited, "PING_S", 0.01)
        monkeypatch.setattr(awaited, "STALE_S", 0.2)
        connection = away_loop.run(connected(away.address))
        away.process.send_signal(signal.SIGSTOP)
        eventually(lambda: connection.stale, "the connection is stale", pause=0.002)
        assert connection.open
        waiting = asyncio.run_coroutine_threadsafe(noted(connection, 1), away_loop.loop)
        away.process.send_signal(signal.SIGCONT)
        assert waiting.result(WAIT_S) == 1
        eventually(lambda: not connection.stale, "the connection is not stale", pause=0.002)
        away.kill()
        eventually(lambda: not connection.open, "the connection has ended", pause=0.002)

    def test_a_connection_that_sends_a_large_call_is_not_stale(
        self, serving: Serving, away_loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection = away_loop.run(connected(serving.address))
        timers, ping = list[int](), connection._ping
        monkeypatch.setattr(connection, "_ping", lambda transport: (timers.append(1), ping(transport)))
        stop, stopped = threading.Event(), threading.Event()
        serving.loop.call_soon_threadsafe(lambda: (stopped.set(), stop.wait(WAIT_S)))
        assert stopped.wait(WAIT_S)
        content = bytes(24 << 20)  # more than the buffers of the system hold
        waiting = asyncio.run_coroutine_threadsafe(noted(connection, content), away_loop.loop)
        monkeypatch.setattr(awaited, "PING_S", 0.001)
        monkeypatch.setattr(awaited, "STALE_S", 0.005)
        eventually(lambda: len(timers) > 50, "a ping has been due 50 times", pause=0.002)
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() > 0
        assert not connection.stale
        stop.set()
        assert waiting.result(WAIT_S) == content
        away_loop.run(ended(connection))

    def test_a_connection_is_not_stale_because_its_event_loop_was_busy(
        self, serving: Serving, away_loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection = away_loop.run(connected(serving.address))
        assert away_loop.run(noted(connection, 1)) == 1
        now = away_loop.loop.time
        monkeypatch.setattr(away_loop.loop, "time", lambda: now() + 3600.0)
        assert not connection.stale
        assert away_loop.run(noted(connection, 2)) == 2
        away_loop.run(ended(connection))


async def noted(connection: AwaitedConnection, value: Any) -> object:
    return await connection.send(packed(TargetCalls.note(value)))
