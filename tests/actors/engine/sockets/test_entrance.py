"""Authentication of connections: a caller with the secret is accepted whatever others do; nothing else is read."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorvine.actors.engine.sockets import blocking, entrance
from tensorvine.actors.engine.sockets.blocking import BlockingConnections
from tensorvine.actors.engine.sockets.entrance import VISITORS
from tensorvine.actors.engine.sockets.framing import HEADER, SECRET_BYTES
from tensorvine.actors.engine.sockets.refusals import LINES, Refusals
from tensorvine.actors.engine.sockets.server import CallServer

from tests.support.call_targets import WAIT_S, Serving, TargetCalls, called, packed
from tests.support.waiting import eventually

REFUSED = "an actor: its socket: refused: "


@pytest.fixture(params=["asyncio", "uvloop"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """In the event loops that actors may have."""
    made = Serving(
        asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    )
    yield made
    made.close()


class Trap:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def visitor(serving: Serving, shown: bytes = b"") -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(WAIT_S)
    made.connect(f"\0{serving.address.name}")
    made.sendall(shown)
    return made


def ended(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:  # what it sent was not read
        return True


def held(server: CallServer) -> int:
    return sum(len(door._silent) + len(door._refused) for door in server._entrances)


class TestSecret:
    """The secret of an address."""

    @pytest.mark.parametrize("shown", ["nothing", "too little", "another", "all but the last"])
    def test_nothing_is_unpickled_of_a_process_of_this_user_without_the_secret(
        self, serving: Serving, caller: BlockingConnections, tmp_path: Path, shown: str
    ) -> None:
        secret, call = serving.address.secret, pickle.dumps(("note", (Trap(tmp_path / "sprung"),)))
        message = HEADER.pack(len(call), 1) + call
        greeting = {
            "nothing": b"",
            # with one byte missing, the message's first byte is the right one in one run of 256
            "too little": secret[: SECRET_BYTES // 2],
            "another": os.urandom(SECRET_BYTES),
            "all but the last": secret[:-1] + bytes([secret[-1] ^ 1]),
        }[shown]
        with visitor(serving, greeting + message) as stranger:
            assert ended(stranger)
        assert called(caller, TargetCalls.note(1)) == 1
        assert not (tmp_path / "sprung").exists()
        with visitor(serving, secret + message) as friend:
            assert friend.recv(1) == b"+"
            eventually((tmp_path / "sprung").exists, "the message is read", pause=0.002)

    def test_it_may_arrive_in_pieces(self, serving: Serving) -> None:
        with visitor(serving) as slow:
            for byte in serving.address.secret:
                slow.sendall(bytes([byte]))
            assert slow.recv(1) == b"+"

    def test_it_is_in_no_text(self, serving: Serving) -> None:
        assert "secret" not in repr(serving.address)
        assert repr(serving.address.secret)[2:-1] not in repr(serving.address)

    def test_each_server_has_its_own(self, serving: Serving) -> None:
        other = Serving()
        assert serving.address.secret != other.address.secret
        assert len(other.address.secret) == SECRET_BYTES
        other.close()

    def test_with_an_old_one_no_call_is_sent_and_connecting_is_retried_later(
        self, serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        stale = BlockingConnections(replace(serving.address, secret=bytes(SECRET_BYTES)))
        assert [stale.send(packed(TargetCalls.note(number))) for number in range(3)] == [None] * 3
        assert caplog.messages == [REFUSED + "expected the secret of this socket's address; found something else"]
        stale.close()
        monkeypatch.setattr(blocking, "AGAIN_S", 0.0)
        later = BlockingConnections(replace(serving.address, secret=bytes(SECRET_BYTES)))
        assert [later.send(packed(TargetCalls.note(number))) for number in range(2)] == [None] * 2
        assert len(caplog.messages) == 3
        later.close()


class TestCrowds:
    """Many connections without the secret."""

    def test_silent_connections_lock_no_caller_out(
        self, serving: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(entrance, "GREETING_S", 10 * WAIT_S)
        with ExitStack() as strangers:
            for number in range(3 * VISITORS):
                strangers.enter_context(visitor(serving))
                if number % VISITORS == 0:
                    caller = BlockingConnections(serving.address)
                    assert called(caller, TargetCalls.note(number)) == number
                    caller.close()
            eventually(lambda: held(serving.server) == VISITORS, f"{VISITORS} silent connections are kept", pause=0.002)
            caller = BlockingConnections(serving.address)
            assert called(caller, TargetCalls.note("in")) == "in"
            caller.close()
        assert f"{VISITORS} connections had not sent the secret when another one arrived" in caplog.messages[0]
        assert len(caplog.messages) <= LINES
        eventually(lambda: held(serving.server) == 0, "no unauthenticated connection is kept", pause=0.002)

    def test_a_silent_connection_is_closed(
        self, serving: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(entrance, "GREETING_S", 1.0)
        with visitor(serving, serving.address.secret[:5]) as stranger:
            assert ended(stranger)
        assert caplog.messages == [REFUSED + "expected 32 bytes of a secret within 1 s; found 5"]

    def test_a_secret_that_arrived_in_time_counts_however_long_the_loop_was_busy(self) -> None:
        async def scene() -> list[socket.socket]:
            admitted: list[socket.socket] = []
            door = entrance.Entrance(lambda visitor, _: admitted.append(visitor), Refusals("a door"))
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(f"\0{door.address.name}")
                while not door._silent:
                    await asyncio.sleep(0)
                caller.sendall(door.address.secret)
                (silent,) = door._silent
                door._give_up(silent)  # uvloop runs timers before it reads sockets
                door.close()
            return admitted

        (admitted,) = asyncio.run(scene())
        admitted.close()

    def test_a_flood_of_refused_connections_writes_few_lines_and_locks_no_caller_out(
        self, serving: Serving, caller: BlockingConnections, caplog: pytest.LogCaptureFixture
    ) -> None:
        wrong, most = bytes(SECRET_BYTES), 0
        for number in range(1000):
            visitor(serving, wrong).close()
            if number % 100 == 0:
                other = BlockingConnections(serving.address)
                assert called(other, TargetCalls.note(number)) == number
                other.close()
                most = max(most, held(serving.server))
        assert called(caller, TargetCalls.note("in")) == "in"
        assert len(caplog.messages) == LINES
        assert most <= VISITORS

    def test_without_file_descriptors_accepting_pauses_and_then_goes_on(
        self, serving: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accept, tries = socket.socket.accept, list[float]()

        def none_left(listener: socket.socket) -> Any:
            tries.append(time.monotonic())
            if len(tries) <= 3:
                raise OSError(24, "Too many open files")
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", none_left)
        monkeypatch.setattr(entrance, "REST_S", 0.02)
        with visitor(serving, serving.address.secret) as patient:
            assert patient.recv(1) == b"+"
        assert caplog.text.count("Too many open files") == 3
        assert all(after - before > 0.01 for before, after in itertools.pairwise(tries[:4]))

    def test_close_closes_unauthenticated_connections(self, serving: Serving) -> None:
        with visitor(serving) as silent, visitor(serving, bytes(SECRET_BYTES)) as refused:
            eventually(
                lambda: held(serving.server) == 2 or serving.server._entrances[0]._silent,
                "both connections are accepted",
                pause=0.002,
            )
            serving.run(closed(serving.server))
            assert ended(silent)
            assert ended(refused)


async def closed(server: CallServer) -> None:
    await server.close()
