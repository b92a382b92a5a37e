"""Connections of a client to the shards: each is closed once, whatever takes its place. Nothing here needs Ray."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tensorvine.actors.client import connections as module
from tensorvine.actors.client.session import Session
from tensorvine.actors.memory.memory import SharedMemory
from tensorvine.actors.rpc.catalog_messages import Page, Welcome
from tensorvine.actors.rpc.messages import Hello
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import ShardUnavailableError

from tests.support.direct import Answering, DirectLines, answered, call_directly


class View:
    """Stands in for a shard's memory."""

    made: list[View]

    def __init__(self, pid: int, fd: int, file: tuple[int, int], capacity: int) -> None:
        self.pid, self.alive, self.closes = pid, True, 0
        self.made.append(self)

    def close(self) -> None:
        self.closes += 1


class Engine:
    """One shard, whose process id is `pid`; its answers are called with what `meanwhile` does first."""

    def __init__(self) -> None:
        self.pid, self.fd = 1, 3
        self.meanwhile: Callable[[], object] = lambda: None
        self.topology = Topology("stand-in", (0,), "")
        self.is_gone = False
        self.calls: list[str] = []

    def this_node(self) -> str:
        return "here"

    def find(self, name: str) -> str:
        return name

    def reach(self, actor: str, timeout: float, who: str) -> list[Answering]:
        if self.is_gone:
            raise ShardUnavailableError(f"{actor} is gone")
        return [self._answer]

    def _answer(self, method: str, *arguments: Any) -> Future[Any]:
        self.calls.append(method)
        if method == "hello" and len(arguments) == 2:
            return answered(Welcome(1, self.topology, {}, "there", Page(0, 0, (0, 0))))
        if method == "hello":
            pid = self.pid
            self.meanwhile()
            return answered(Hello(0, "here", pid, self.fd, (1, 1), 1 << 20))
        return answered()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    call_directly(monkeypatch)
    return Engine()


@pytest.fixture
def session(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(module, "MemoryView", View)
    monkeypatch.setattr(View, "made", [], raising=False)
    made: Any = engine
    return Session(made, "stand-in")


def test_a_connection_to_a_life_that_has_ended_is_closed_when_the_next_one_takes_its_place(
    session: Session, engine: Engine
) -> None:
    for pid in (1, 2, 3):
        engine.pid = pid
        assert session.connection(0).hello.pid == pid
        assert session.connection(0).hello.pid == pid
        View.made[-1].alive = False
    assert [view.closes for view in View.made] == [1, 1, 0]
    session.close()
    assert [view.closes for view in View.made] == [1, 1, 1]


def test_the_blocks_of_a_shard_are_carried_where_its_id_and_descriptor_are_another_process_s(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    memory = SharedMemory(1 << 20)
    made: Any = engine
    engine.pid, engine.fd = os.getpid(), memory.fd
    session = Session(made, "stand-in")
    with caplog.at_level(logging.WARNING):
        assert session.connection(0).view is None
    assert len(caplog.records) == 1
    assert "copied by other transports: shared memory: expected descriptor" in caplog.text
    session.close()


def test_of_connections_that_threads_make_at_once_one_is_kept(session: Session, engine: Engine) -> None:
    engine.meanwhile = threading.Barrier(2, timeout=60.0).wait
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(session.connection, (0, 0))
    assert first is second is session.connections.present(0)
    assert sorted(view.closes for view in View.made) == [0, 1]


def test_a_session_closes_also_what_cannot_be_told_goodbye(session: Session, engine: Engine) -> None:
    session.connection(0)
    engine.is_gone = True
    session.close()
    assert [view.closes for view in View.made] == [1]


def test_a_session_closes_its_channels(engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.connection(0)
    closed: list[DirectLines] = []
    monkeypatch.setattr(DirectLines, "close", lambda lines: closed.append(lines))
    channels = [session._channels[0], session.catalog, session.planner]
    session.close()
    assert closed == [channel._lines for channel in channels]


def test_the_channel_of_a_shard_that_has_left_is_closed(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shard may be given its number."""
    channels = [session._channels[shard] for shard in (0, 1)]
    closed: list[DirectLines] = []
    monkeypatch.setattr(DirectLines, "close", lambda lines: closed.append(lines))
    engine.topology = Topology("stand-in", (0, 1), "").left([1])
    session.refresh()
    assert closed == [channels[1]._lines]
    assert session._channels[0] is channels[0]
    session.close()


def test_a_shard_whose_connection_was_dropped_is_told_goodbye(session: Session, engine: Engine) -> None:
    """It may have granted memory, which it does not take back while this process lives."""
    session.connection(0)
    session.connections.drop(0)
    session.close()
    assert engine.calls[-1] == "goodbye"
