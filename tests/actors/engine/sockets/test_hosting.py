"""An actor that is served: its methods run in the event loop of their group, and no group delays another."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from tensorvine.actors.engine.groups import GROUPS, group
from tensorvine.actors.engine.sockets import entrance
from tensorvine.actors.engine.sockets.blocking import BlockingConnections, SocketAnswer
from tensorvine.actors.engine.sockets.hosting import Host, methods_of
from tensorvine.actors.engine.sockets.lines import Lines, LostError, result_of
from tensorvine.actors.engine.sockets.packing import pack
from tensorvine.store.errors import ModelLostError

from tests.support.call_targets import METHODS, WAIT_S, Target
from tests.support.waiting import eventually

HOST = "127.0.0.1"


class Grouped:
    """An actor with methods of each group."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.blocked = threading.Event()
        self.running = 0

    @group("ctl")
    async def ctl(self) -> str:
        return threading.current_thread().name

    @group("data")
    async def data(self) -> str:
        return threading.current_thread().name

    @group("watch")
    async def watch(self) -> str:
        return threading.current_thread().name

    @group("data")
    async def block(self) -> str:
        """Block the event loop of the group."""
        self.blocked.set()
        assert self.release.wait(WAIT_S)
        return threading.current_thread().name

    @group("watch")
    async def poll(self) -> None:
        self.running += 1
        await asyncio.Event().wait()

    @group("data")
    async def fail(self) -> None:
        raise ModelLostError("it was lost")

    async def no_group(self) -> str:
        return threading.current_thread().name

    def no_coroutine(self) -> None: ...


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the event loops: with uvloop, or as on a machine without it."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    else:
        pytest.importorskip("uvloop")


@pytest.fixture
def host(kind: None) -> Iterator[Host]:
    made = Host(Grouped(), "an actor")
    yield made
    made.actor.release.set()
    made.close()


@pytest.fixture
def lines(host: Host) -> Iterator[Lines]:
    made = Lines(lambda: [host.address])
    yield made
    made.close()


def send(lines: Lines, method: str, group: str) -> SocketAnswer | Future[Any]:
    return lines.send(group, pack((method, ())))


def outcome(answer: SocketAnswer | Future[Any]) -> Any:
    if isinstance(answer, SocketAnswer):
        return answer.result(WAIT_S, "an actor")
    return result_of(answer, WAIT_S, "an actor")


def called(lines: Lines, method: str, group: str) -> Any:
    return outcome(send(lines, method, group))


def test_coroutine_methods_can_be_called() -> None:
    assert methods_of(Target) == METHODS
    assert methods_of(Grouped) == {
        "block": "data",
        "ctl": "ctl",
        "data": "data",
        "fail": "data",
        "no_group": "ctl",
        "poll": "watch",
        "watch": "watch",
    }


def test_each_group_has_a_thread_of_its_own(host: Host, lines: Lines) -> None:
    for _ in range(2):  # by the event loop, then by a blocking connection
        assert [called(lines, name, name) for name in GROUPS] == [f"group-{name}" for name in GROUPS]
        assert called(lines, "no_group", "ctl") == "group-ctl"
    assert called(lines, "data", "watch") == "group-data", "the actor chooses the loop, not the connection"
    for name in GROUPS:
        assert host.run(name, getattr(host.actor, name)()) == f"group-{name}"


def test_a_blocked_loop_delays_no_other_group(host: Host, lines: Lines) -> None:
    blocked = send(lines, "block", "data")
    assert host.actor.blocked.wait(WAIT_S)
    for _ in range(3):
        assert called(lines, "ctl", "ctl") == "group-ctl"
        assert called(lines, "watch", "watch") == "group-watch"
    waiting = send(lines, "data", "data")
    assert isinstance(blocked, Future)
    assert isinstance(waiting, Future)
    assert not blocked.done()
    assert not waiting.done()
    host.actor.release.set()
    assert outcome(blocked) == outcome(waiting) == "group-data"


def test_errors_of_every_loop_are_raised(lines: Lines) -> None:
    with pytest.raises(ModelLostError, match="it was lost"):
        called(lines, "fail", "data")
    with pytest.raises(AttributeError, match=r"expected one of .*; found 'no_coroutine'"):
        called(lines, "no_coroutine", "ctl")


def test_callers_of_other_machines_are_served(host: Host) -> None:
    address = host.address_at(HOST)
    assert address.place is not None
    assert host.address_at(HOST) == address
    caller = BlockingConnections(address)
    answers = [caller.send(pack((name, ()))) for name in GROUPS]
    for name, answer in zip(GROUPS, answers, strict=True):
        assert answer is not None
        assert answer.result(WAIT_S, "an actor") == f"group-{name}"
    caller.close()


@pytest.mark.usefixtures("kind")
def test_close_ends_connections_and_loops(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(Grouped(), "an actor")
    lines = Lines(lambda: [host.address])
    polls = [send(lines, "poll", "watch") for _ in range(3)]
    eventually(lambda: host.actor.running == 3, "the long polls run", pause=0.002)
    loops = [host.loop_of(name) for name in GROUPS]
    host.close()
    for poll in polls:
        with pytest.raises(LostError, match="it died or is being restarted"):
            outcome(poll)
    eventually(lambda: all(loop.is_closed() for loop in loops), "the loops are closed", pause=0.002)
    with pytest.raises(LostError, match="it does not answer at its address"):
        called(lines, "ctl", "ctl")
    lines.close()
    del polls, poll
    gc.collect()
    assert not caplog.records


def test_a_machine_without_sockets_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("no more sockets")

    with monkeypatch.context() as patched:
        patched.setattr(entrance, "_listening", refuse)
        with pytest.raises(OSError, match="no more sockets"):
            Host(Grouped(), "an actor")
