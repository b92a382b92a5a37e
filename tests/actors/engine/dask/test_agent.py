"""An agent whose scheduler ends and is started anew, step by step: who closes at which moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler, Security
from tensorvine.actors.engine.dask import agent, links
from tensorvine.actors.engine.dask.agent import AgentProcess
from tensorvine.actors.engine.dask.links import SchedulerLink
from tensorvine.actors.engine.dask.records import Agent
from tensorvine.actors.engine.dask.workers.agentfile import AgentFile
from tensorvine.actors.engine.dask.workers.plugins import Hiring
from tensorvine.actors.engine.engine import Node
from tensorvine.store.errors import ShardUnavailableError

from tests.support.dask_cluster import WAIT_S

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(200)]


class HeldLink(SchedulerLink):
    """A link that stops before it joins, while a gate is closed."""

    gate: asyncio.Event
    waits: asyncio.Event

    async def join(self, *arguments: Any) -> Any:
        if not self.gate.is_set():
            self.waits.set()
            await self.gate.wait()
        return await super().join(*arguments)


class Worker:
    """What is attached to an agent, as a worker's nanny is."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._reader, self._writer = streams

    async def is_attached(self) -> bool:
        return await asyncio.wait_for(self._reader.read(1), WAIT_S) == b"+"

    async def closes(self) -> None:
        """Say so, and wait until the agent lets go."""
        self._writer.write(b"{}\n")
        assert await asyncio.wait_for(self._reader.read(1), WAIT_S) == b"-"
        self._writer.close()


class Machine:
    """A machine with an agent, and a scheduler that may be replaced."""

    def __init__(self) -> None:
        self._socket = f"tensorvine-test-{uuid.uuid4().hex}"
        self.scheduler: Scheduler

    async def start_scheduler(self, port: int = 0) -> None:
        self.scheduler = await Scheduler(host="127.0.0.1", port=port, dashboard_address=":0")

    async def replace_scheduler(self) -> None:
        port = self.scheduler.port
        await self.scheduler.close()
        await self.start_scheduler(port)

    async def ask(self, method: str, *arguments: object) -> Any:
        link = SchedulerLink(self.scheduler.address, Security())
        try:
            return await link.ask(method, *arguments)
        finally:
            await link.close()

    async def node(self, **resources: float) -> Node:
        """Wait until there is a node that has these resources."""

        async def found() -> list[Node]:
            known: list[tuple[Node, Agent]] = await self.ask("nodes")
            return [node for node, _ in known if resources.items() <= node.resources.items()]

        (node,) = await until(found)
        return node

    async def worker(self, **resources: float) -> Worker:
        _, directory = await self.ask("identity")
        reader, writer = await asyncio.open_unix_connection(f"\0{self._socket}")
        told = {"memory": 0, "resources": resources, "directory": directory}
        writer.write(json.dumps(told).encode() + b"\n")
        return Worker((reader, writer))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[asyncio.Task[None]]:
        await self.start_scheduler()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self._socket}")
            listener.listen()
            listener.setblocking(False)
            process = AgentProcess(Hiring(self.scheduler.address, Security(), AgentFile(Path("/dev/null")), "here", {}))
            running = asyncio.create_task(process.run(listener))
            try:
                yield running
            finally:
                process._over.set()
                await asyncio.wait_for(running, WAIT_S)
                await self.scheduler.close()


async def until(reached: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(ShardUnavailableError):
                if answer := await reached():
                    return answer
            await asyncio.sleep(0.02)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[HeldLink]:
    monkeypatch.setattr(agent, "SchedulerLink", HeldLink)
    monkeypatch.setattr(links, "SETTLES_S", 0.2)
    HeldLink.gate, HeldLink.waits = asyncio.Event(), asyncio.Event()
    HeldLink.gate.set()
    return HeldLink


@pytest.mark.parametrize("closes", ["before-it-joins", "after-it-joined", "with-the-next-ones"])
def test_workers_that_close_for_want_of_their_scheduler_take_no_node_of_the_next_one(
    closes: str, held: type[HeldLink]
) -> None:
    async def scene() -> None:
        machine = Machine()
        async with machine.open() as running:
            worker = await machine.worker(disk=1.0)
            assert await worker.is_attached()
            before = await machine.node(disk=1.0)
            held.gate.clear()
            await machine.replace_scheduler()
            await asyncio.wait_for(held.waits.wait(), WAIT_S)
            if closes == "before-it-joins":
                await worker.closes()
            held.gate.set()
            assert await machine.node() == before
            if closes == "after-it-joined":
                await worker.closes()
            await machine.ask("keep", "a fact", b"1")  # an agent gets its orders one after another
            other = await machine.worker(disk=2.0)
            assert await other.is_attached()
            if closes == "with-the-next-ones":
                await machine.node(disk=3.0)
                await worker.closes()
            after = await machine.node(**({} if closes == "with-the-next-ones" else {"disk": 2.0}))
            assert (after.id, after.leaving) == (before.id, False)
            assert not running.done()
            closing = asyncio.create_task(other.closes())  # for good
            await asyncio.wait_for(running, WAIT_S)
            await closing

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))
