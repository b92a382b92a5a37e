"""Saves, and the path, while their shard has no lease (`actors.shard.tenure`, H2 in docs/design/hosts.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.memory.process import this_process
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.tenure import LapsedError
from tensorvine.planner.topology import Topology
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import ModelLostError, OperationTimeoutError, ShardUnavailableError
from tensorvine.store.refs import ModelRef
from tensorvine.store.waiting import Deadline

from tests.support.disklife import Life, note, put
from tests.support.home import SEGMENT, Home


@pytest.fixture
def home() -> Home:
    return Home()


class LapsedTenure:
    """A lease that is over when a version would come to exist."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holds = True
        self.superseded = False
        self.undone: list[ModelRef] = []
        monkeypatch.setattr(home.peers, "note", self._noted)
        monkeypatch.setattr(home.peers, "note_gently", self._noted)
        monkeypatch.setattr(home.peers, "release", self._released)
        home.context.tenure = self  # pyright: ignore[reportAttributeAccessIssue]

    def check(self) -> None:
        pass

    def check_running(self) -> None:
        pass

    async def held(self, deadline: Deadline) -> None:
        while not self.holds:
            if self.superseded:
                raise ShardUnavailableError("another one runs in its place")
            if deadline.passed:
                raise OperationTimeoutError("it does not answer")
            await asyncio.sleep(0)

    async def _noted(self, news: dict[ModelRef, Any]) -> None:
        self.holds = not all(exists for _, exists in news.values())

    async def _released(self, ref: ModelRef, shards: Any) -> None:
        self.undone.append(ref)


async def until(reached: Callable[[], bool]) -> None:
    deadline = Deadline.after(60.0)
    while not reached():
        deadline.left_for("what is waited for")
        await asyncio.sleep(0.001)


def test_a_version_comes_to_exist_when_there_is_a_lease_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    tenure = LapsedTenure(home, monkeypatch)

    async def save() -> None:
        saving = asyncio.create_task(home.commit([]))
        await until(lambda: not tenure.holds)
        await asyncio.sleep(0)
        assert home.state.models() == []
        tenure.holds = True
        await saving

    asyncio.run(save())
    assert home.state.models() == [ModelRef("m", 1)]


def test_what_comes_to_nothing_without_a_lease_is_undone_with_the_next(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenure = LapsedTenure(home, monkeypatch)

    async def save() -> None:
        with pytest.raises(OperationTimeoutError, match="it does not answer"):
            await home.commit([], timeout=0.05)
        assert home.state.models() == tenure.undone == []
        tenure.holds = True
        await until(lambda: bool(tenure.undone))

    asyncio.run(save())
    assert tenure.undone == [ModelRef("m", 1)]


def test_what_comes_to_nothing_where_another_is_in_the_shard_s_place_is_left_to_that(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have the version, from the copies that were made before."""
    tenure = LapsedTenure(home, monkeypatch)
    tenure.superseded = True

    async def save() -> None:
        with pytest.raises(ShardUnavailableError, match="another one runs in its place"):
            await home.commit([])
        await until(lambda: "m@1 cannot be undone at other shards" in caplog.text)

    asyncio.run(save())
    assert home.state.models() == tenure.undone == []


# ---- the saves of others ------------------------------------------------------------------------------


def test_a_shard_without_a_lease_holds_nothing_for_others(home: Home) -> None:
    """Its next incarnation may have asked all homes already what they name there."""
    tenure: Any = home.context.tenure
    tenure.holds = False
    with pytest.raises(ShardUnavailableError, match="there is no lease"):
        asyncio.run(home.holders.hold(ModelRef("m", 1), {SEGMENT: [0]}))
    assert not home.state.is_holder(ModelRef("m", 1))


def test_a_shard_without_a_lease_releases_nothing_and_is_asked_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next incarnation may hold that already; what the former one released, the next would keep for ever."""
    tenure: Any = home.context.tenure
    tenure.holds = False
    with pytest.raises(ShardUnavailableError, match="there is no lease"):
        asyncio.run(home.holders.release(ModelRef("m", 1)))
    answers = [LapsedError("no lease"), ShardUnavailableError("it is being restarted"), None]

    async def ask(shard: int, request: Request[Any], timeout: float) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(home.peers, "ask", ask)
    asyncio.run(home.peers.release(ModelRef("m", 1), [1]))
    assert answers == []


def test_a_shard_without_a_lease_greets_nobody(home: Home) -> None:
    """Its next incarnation may be on the node of who asks, and the client would take this one for the shard."""
    tenure: Any = home.context.tenure
    tenure.holds = False
    with pytest.raises(ShardUnavailableError, match="there is no lease"):
        asyncio.run(home.sessions.hello("client", "here", this_process()))


def test_a_save_asks_a_shard_again_that_is_restarted_or_has_no_lease(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    refusals: list[Exception] = [
        ShardUnavailableError("it is being restarted"),
        LapsedError("no lease"),
        ShardUnavailableError("it ended"),
        LapsedError("no lease yet"),
    ]

    async def ask(shard: int, request: Request[Any], timeout: float) -> None:
        if refusals:
            raise refusals.pop(0)
        heard.append(request.remote.name)

    monkeypatch.setattr(home.peers, "ask", ask)
    asyncio.run(home.peers.hold(ModelRef("m", 1), {(1, 1): [0]}, Deadline.after(60.0)))
    assert heard == ["hold"]


def test_after_an_error_of_one_shard_another_is_not_asked_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it held then would stay: the release has failed while it was restarted."""
    asked: list[int] = []

    async def ask(shard: int, request: Request[Any], timeout: float) -> None:
        asked.append(shard)
        if shard == 1:
            raise ShardUnavailableError("it is being restarted")
        raise ModelLostError("it has lost the segment")

    monkeypatch.setattr(home.peers, "ask", ask)
    home.peers.topology = home.peers.topology_after = Topology("gone", (0, 1, 2), "test")

    async def hold() -> None:
        with pytest.raises(ModelLostError):
            await home.peers.hold(ModelRef("m", 1), {(1, 1): [0], (2, 2): [0]}, Deadline.after(60.0))
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    asyncio.run(hold())
    assert sorted(asked) == [1, 2]


# ---- the path -----------------------------------------------------------------------------------------


def test_a_shard_without_a_lease_changes_no_file_and_does_with_the_next(tmp_path: Path) -> None:
    """The files that it does not know may be those of its next incarnation."""
    archive = Archive(str(tmp_path), 1)
    put(archive, (0, 1), {0: np.ones(100, np.uint8)})
    note(archive, ModelRef("m", 1), [(1, 0, 100)])
    life = Life(tmp_path, again=True)
    tenure: Any = life.context.tenure
    put(archive, (0, 9), {0: np.ones(100, np.uint8)})
    before = archive.segments()
    tenure.holds = False
    for _ in range(3):
        life.history.care.look(lambda: True)
    life.history.persister.delete([file.name for files in before.values() for file in files])
    with pytest.raises(ShardUnavailableError, match="there is no lease"):
        life.history.persister.bury(life.state.record("m", 1, "").header)
    life.history.persister._deleter.submit(int).result(60)
    assert archive.segments() == before
    assert len(life.content(ModelRef("m", 1))) == 1
    tenure.holds = True
    for _ in range(2):
        life.history.care.look(lambda: True)
    assert list(archive.segments()) == [(0, 1)]
