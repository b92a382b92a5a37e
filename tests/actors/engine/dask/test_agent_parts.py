"""An agent's parts: processes that are killed before they are there, and who is attached in whatever order they go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tensorvine.actors.engine.dask import attendance
from tensorvine.actors.engine.dask.attendance import Attendance
from tensorvine.actors.engine.dask.children import Children
from tensorvine.actors.engine.dask.records import Boot, Plan, Report, Start
from tensorvine.actors.engine.dask.workers.plugins import TRIMMING, environment_of_agents
from tensorvine.actors.engine.sockets.framing import SocketAddress

from tests.support.other_user import as_other_user, needs_root

WAIT_S = 60.0


@pytest.mark.parametrize("after_s", [0.0, 600.0])
@pytest.mark.parametrize("begun", [False, True])
def test_a_process_that_is_killed_before_it_is_there_has_ended_once(after_s: float, begun: bool) -> None:
    died: list[tuple[str, int, str]] = []

    def boot(report: Report) -> Boot:
        return Boot(report, SocketAddress("none", 0, b""), "", "", "")

    async def scene() -> None:
        children = Children(boot, lambda key, life, why, _: died.append((key, life, why)))
        children.start(Start(Report(Plan("k", "an actor", b"", "client"), 3), after_s))
        for _ in range(3 if begun else 0):
            await asyncio.sleep(0)
        children.kill("k", 3)
        await children.kill_all()
        assert children.reports() == []

    asyncio.run(scene())
    assert died == [("k", 3, "it was killed")]


@pytest.mark.parametrize(("there", "passed_on"), [("65536", None), ("131072", "131072")])
def test_an_agent_is_told_of_memory_what_the_user_set_and_not_what_nannies_do(
    there: str, passed_on: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRIMMING, there)
    monkeypatch.setenv("OTHERS", "stay")
    found = environment_of_agents()
    assert (found.get(TRIMMING), found["OTHERS"]) == (passed_on, "stay")


class Desk:
    """Where workers attach, with all that it calls."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.changes: list[bool] = []
        """Whether all were closing, at each change."""
        self.alone = asyncio.Event()
        self.attendance = Attendance(lambda: self.changes.append(self.attendance.is_closing), self.alone.set)
        self.attendance.directory = "this"
        self.attendance.joined()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self.attendance.serve, self.path)
        yield
        server.close()
        await self.attendance.close()

    async def attach(self, directory: str = "this") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        told = {"memory": 10, "resources": {"disk": 1.0}, "directory": directory}
        writer.write(json.dumps(told).encode() + b"\n")
        assert await asyncio.wait_for(reader.read(1), WAIT_S) == b"+"
        return reader, writer


async def may_go(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(1), WAIT_S) == b"-"


@pytest.mark.parametrize("anew", [False, True], ids=["the-same-scheduler", "the-next-scheduler"])
def test_who_closes_before_an_agent_knows_that_the_scheduler_has_ended_takes_no_node_of_the_next(
    tmp_path: Path, anew: bool
) -> None:
    """Else an agent tells a scheduler that was started anew that its node leaves, and ends with all its actors."""

    async def scene() -> None:
        desk = Desk(tmp_path / "desk")
        async with desk.open():
            reader, writer = await desk.attach()
            writer.write(b"{}\n")
            while not desk.attendance.leaves:
                await asyncio.sleep(0)
            desk.attendance.let_go()
            assert await may_go(reader)
            if anew:
                desk.attendance.directory = "the next"
            assert desk.attendance.is_closing
            assert desk.attendance.leaves is not anew
            writer.close()

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))


def test_who_closes_for_want_of_a_scheduler_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    async def scene() -> None:
        desk = Desk(tmp_path / "desk")
        async with desk.open():
            old = await desk.attach("the one before")
            old[1].write(b"{}\n")
            assert await may_go(old[0])
            assert desk.attendance.is_closing
            assert not desk.attendance.leaves
            new = await desk.attach()
            new[1].write(b"{}\n")
            old[1].close()
            while not desk.attendance.leaves:
                await asyncio.sleep(0)
            new[1].close()

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))


def test_the_last_one_that_closes_waits_and_who_comes_after_it_is_counted(tmp_path: Path) -> None:
    async def scene() -> None:
        desk = Desk(tmp_path / "desk")
        async with desk.open():
            first, second = await desk.attach(), await desk.attach()
            assert (desk.attendance.memory(100), desk.attendance.memory(30)) == (80, 15)
            assert desk.attendance.resources() == {"disk": 2.0}
            first[1].write(b"{}\n")
            assert await may_go(first[0])
            first[1].close()
            second[1].write(b"{}\n")
            while not desk.attendance.leaves:
                await asyncio.sleep(0.001)
            third = await desk.attach()
            assert desk.changes[-2:] == [True, False]
            third[1].close()
            second[1].close()
        assert not desk.alone.is_set()

    asyncio.run(scene())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["who-closes-first", "who-is-gone-first"])
def test_nobody_is_attached_when_one_has_closed_and_the_other_is_just_gone(
    tmp_path: Path, order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "ALONE_S", 0.01)

    async def scene() -> None:
        desk = Desk(tmp_path / "desk")
        async with desk.open():
            both = await desk.attach(), await desk.attach()
            both[0][1].write(b"{}\n")
            assert await may_go(both[0][0])
            for place in order:
                both[place][1].close()
                await both[place][1].wait_closed()
            await asyncio.wait_for(desk.alone.wait(), WAIT_S)

    asyncio.run(scene())


TOLD: dict[str, Any] = {"memory": 10, "resources": {"disk": 1.0}, "directory": "this"}
WRONG = {
    "a list": b"[1]",
    "a null": b"null",
    "no JSON": b"{",
    "a deep list": b"[" * 50_000,
    "no end": b" " * (1 << 17),
    "negative memory": json.dumps({**TOLD, "memory": -1}).encode(),
    "memory of no machine": json.dumps({**TOLD, "memory": 1 << 63}).encode(),
    "infinite memory": b'{"memory": 1e999}',
    "memory that is a text": json.dumps({**TOLD, "memory": "12"}).encode(),
    "memory that is a truth": json.dumps({**TOLD, "memory": True}).encode(),
    "resources that are a text": json.dumps({**TOLD, "resources": "disk"}).encode(),
    "resources that are texts": json.dumps({**TOLD, "resources": {"disk": "much"}}).encode(),
    "negative resources": json.dumps({**TOLD, "resources": {"disk": -1}}).encode(),
    "infinite resources": b'{"resources": {"disk": 1e999}}',
    "resources that are no number": b'{"resources": {"disk": NaN}}',
    "a directory that is a list": json.dumps({**TOLD, "directory": []}).encode(),
}


@pytest.mark.parametrize("said", WRONG.values(), ids=WRONG)
def test_what_no_worker_says_is_refused_with_one_line_and_changes_nothing(
    tmp_path: Path, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        desk = Desk(tmp_path / "desk")
        async with desk.open():
            _, known = await desk.attach()
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "desk"))
            writer.write(said + b"\n")
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            assert (desk.attendance.memory(100), desk.attendance.resources()) == (90, {"disk": 1.0})
            assert len(desk.changes) == 1
            writer.close()
            known.close()

    asyncio.run(scene())
    (line,) = caplog.messages
    assert line.startswith("the agent: its socket: refused: ")
    assert len(line) < 300


def test_no_more_processes_are_attached_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attendance, "CONNECTIONS", 2)

    async def scene() -> None:
        desk = Desk(tmp_path / "desk")
        async with desk.open():
            both = await desk.attach(), await desk.attach()
            for _ in range(20):
                reader, writer = await asyncio.open_unix_connection(str(tmp_path / "desk"))
                assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
                writer.close()
            both[0][1].close()
            await both[0][1].wait_closed()
            while desk.attendance.resources() != {"disk": 1.0}:
                await asyncio.sleep(0)
            third = await desk.attach()
            third[1].close()
            both[1][1].close()

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))
    assert "expected at most 2 attached processes; found one more" in caplog.messages[0]
    assert len(caplog.messages) == 5


@needs_root
def test_processes_of_another_user_are_refused_and_neither_attached_nor_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = """
told = b'{"memory": 1, "resources": {"forged": 1.0}}\\n'
peers = [socket.socket(socket.AF_UNIX) for _ in range(100)]
for peer in peers:
    peer.settimeout(60)
    peer.connect(chr(0) + arguments[0])
answers = [tried(lambda: (peer.sendall(told), peer.recv(1))[1]) for peer in peers]
print(sum(answer in (b"", "EPIPE", "ECONNRESET") for answer in answers))
"""

    async def scene() -> None:
        desk = Desk(Path("\0tensorvine-test-" + uuid.uuid4().hex))
        async with desk.open():
            _, known = await desk.attach()
            found = await asyncio.to_thread(as_other_user, code, desk.path.removeprefix("\0"))
            assert found == "100"
            assert (desk.attendance.memory(100), desk.attendance.resources()) == (90, {"disk": 1.0})
            assert len(desk.changes) == 1
            known.close()

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))
    assert "expected a process of user 0; found one of user 65534" in caplog.messages[0]
    assert len(caplog.messages) == 5
