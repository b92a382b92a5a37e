"""Who is let in, who is sent away and when: the time is a number that the test moves."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tensorvine.actors.engine.sockets.refusals import Refusals
from tensorvine.actors.rpc.greetings import CREDENTIAL_BYTES, PAUSE_S, SILENT_S, Greetings, credential

TOKEN = "a token"  # noqa: S105  of no listener but the test's
NAME = b" and so I am"
HELLO = credential(TOKEN) + NAME
REFUSAL = b"not you"
SILENT = 4


class Door:
    """A listener, who it let in, and the time."""

    def __init__(self, stack: ExitStack) -> None:
        self.now = 0.0
        self.let_in: list[bytes] = []
        self.trouble: list[Exception] = []
        """What `welcome` raises next."""
        self.socket = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.socket.bind("")  # the system chooses a name
        self.socket.listen(1024)
        self._stack = stack
        self.greetings = Greetings(
            self.socket,
            TOKEN,
            self._welcome,
            Refusals("a door", lambda: self.now),
            more=len(NAME),
            refusal=REFUSAL,
            silent=SILENT,
            clock=lambda: self.now,
        )
        stack.callback(self.greetings.close)

    def _welcome(self, connection: socket.socket, peer: object, said: bytes) -> None:
        if self.trouble:
            raise self.trouble.pop()
        self.let_in.append(said)
        self._stack.enter_context(connection)

    def dial(self, said: bytes = b"") -> socket.socket:
        connection = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.connect(self.socket.getsockname())
        connection.sendall(said)
        return connection

    def attend(self, rounds: int = 4) -> None:
        """Hear what has come. Nothing is waited for: what a Unix socket has sent is there."""
        for _ in range(rounds):
            self.greetings.attend(0.0)


@pytest.fixture
def door() -> Iterator[Door]:
    with ExitStack() as stack:
        yield Door(stack)


def is_ended(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        while connection.recv(100):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_who_knows_the_token_is_let_in_with_what_it_said(door: Door) -> None:
    connection = door.dial(HELLO + b"what follows is not for the door")
    door.attend()
    assert door.let_in == [NAME]
    assert not is_ended(connection)
    assert door.greetings.connections == []


def test_silent_strangers_keep_nobody_waiting(door: Door) -> None:
    """The time does not move at all, and a member of a whole group of them is let in."""
    strangers = [door.dial(b"x" * k) for k in range(SILENT)]
    door.attend()
    for count in range(3):
        door.dial(HELLO)
        door.attend()
        assert len(door.let_in) == count + 1
    assert not any(is_ended(one) for one in strangers)


@pytest.mark.parametrize("pieces", [1, 7, CREDENTIAL_BYTES, CREDENTIAL_BYTES + 3])
def test_a_first_message_may_come_in_pieces_within_its_time(door: Door, pieces: int) -> None:
    connection = door.dial(HELLO[:pieces])
    door.attend()
    door.now = SILENT_S - 0.001
    assert door.let_in == []
    connection.sendall(HELLO[pieces:])
    door.attend()
    assert door.let_in == [NAME]


def test_who_is_silent_for_too_long_goes_and_who_came_later_stays(door: Door) -> None:
    early = [door.dial(), door.dial(HELLO[:-1])]
    door.attend()
    door.now = 1.0
    late = door.dial()
    door.attend()
    door.now = SILENT_S
    door.attend()
    assert [is_ended(one) for one in (*early, late)] == [True, True, False]
    door.now = SILENT_S + 1.0
    door.attend()
    assert is_ended(late)
    assert door.greetings.connections == []


def test_what_came_counts_however_late_it_is_read(door: Door) -> None:
    """The thread stood still for an hour, with a silent peer in the books and another one at the door."""
    known = door.dial()
    door.attend()
    known.sendall(HELLO)
    door.dial(HELLO)
    door.now = 3600.0
    door.attend()
    assert door.let_in == [NAME] * 2


def test_the_last_look_is_later_than_the_wait(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """It spoke after the thread had waited, and before the thread looked at the clock."""
    connection = door.dial()
    door.attend()
    monkeypatch.setattr(door.greetings._selector, "select", lambda _: connection.sendall(HELLO) or [])
    door.now = 3600.0
    door.greetings.attend(0.0)
    assert door.let_in == [NAME]


def test_when_more_come_those_that_came_first_go(door: Door) -> None:
    strangers = []
    for _ in range(SILENT + 3):
        strangers.append(door.dial())
        door.attend(1)
    assert [is_ended(one) for one in strangers] == [True] * 3 + [False] * SILENT
    door.dial(HELLO)
    door.attend()
    assert door.let_in == [NAME]


def test_who_spoke_does_not_go_because_more_come(door: Door) -> None:
    first = door.dial()
    door.attend()
    for _ in range(SILENT + 1):
        door.dial()
    first.sendall(HELLO)
    door.greetings._accept()  # before anybody is heard
    assert door.let_in == [NAME]


@pytest.mark.parametrize("content", [b"[" * 60_000, b"GET / HTTP/1.1\r\n" * 9, credential("another") + NAME])
def test_another_token_is_refused_at_once(door: Door, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    stranger = door.dial(content)
    door.attend()
    assert door.let_in == []
    assert door.greetings.connections == []
    assert stranger.recv(len(REFUSAL)) == REFUSAL
    assert is_ended(stranger)
    assert "a door: refused: this machine: expected the listener's token; found another" in caplog.text


def test_a_crowd_of_strangers_writes_few_lines(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        door.dial(bytes(len(HELLO)))
        door.attend(1)
    assert 1 <= len(caplog.records) <= 10


def test_who_goes_before_it_says_who_it_is_is_no_news(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for said in (b"", b"x", HELLO[:-1]):
            door.dial(said).close()
            door.attend()
    assert door.greetings.connections == []
    assert not caplog.records


class Short:
    """A listening socket of which the system gives no connection for a while."""

    def __init__(self, real: socket.socket, *errors: int) -> None:
        self._real, self._errors = real, list(errors)

    def accept(self) -> tuple[socket.socket, Any]:
        if self._errors:
            number = self._errors.pop()
            raise OSError(number, os.strerror(number))
        return self._real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_too_many_open_files_pause_new_connections_and_end_nothing(door: Door, number: int) -> None:
    known = door.dial()
    door.attend()
    door.greetings._selector.unregister(door.socket)
    door.greetings._listener = short = Short(door.socket, number)
    door.greetings._selector.register(short, 1)
    door.dial(HELLO)
    door.attend()
    assert door.let_in == []
    known.sendall(HELLO)
    door.attend()
    assert door.let_in == [NAME]  # who was there is heard meanwhile
    door.now = PAUSE_S
    door.attend()
    assert door.let_in == [NAME] * 2


def test_who_went_while_it_waited_does_not_pause_the_others(door: Door) -> None:
    door.greetings._selector.unregister(door.socket)
    door.greetings._listener = short = Short(door.socket, errno.ECONNABORTED)
    door.greetings._selector.register(short, 1)
    door.dial(HELLO)
    door.attend()
    assert door.let_in == [NAME]


def test_a_welcome_that_fails_ends_its_connection_and_no_other(door: Door) -> None:
    waiting = door.dial()
    door.attend()
    door.trouble.append(RuntimeError("can't start new thread"))
    unlucky = door.dial(HELLO)
    with pytest.raises(RuntimeError, match="new thread"):
        door.attend()
    assert is_ended(unlucky)
    waiting.sendall(HELLO)
    door.attend()
    assert door.let_in == [NAME]


def test_a_listener_that_is_shut_down_ends_the_wait(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    door.socket.shutdown(socket.SHUT_RDWR)
    door.greetings.attend()
    assert not caplog.records
