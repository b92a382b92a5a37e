"""The agent of a machine: a node of the engine on Dask. It starts actors' processes, and notices when they end.

Rules
- It is a process group of its own without a parent, so it survives the process that started it. There is one per
  cluster, machine and user. Its socket has a random name, which it writes to a file for its workers
  (`workers.agentfile`).
- It ends with its actors when nobody is attached (`attendance`): at once where they were killed. Where they close, it
  is announced as leaving, and ends when the directory says so, after `LEAVE_S` at the latest.
- The directory hears from it by one connection, and orders it by the same. When that ends it connects again and tells
  of its actors: they are not in the way of a scheduler that was started anew. Workers close when their scheduler has
  gone, so without one, and until those of the next one come, it lives for `LOST_S` with nobody attached.
- Actors ask the directory through it, so they need no connection to the scheduler, and no Dask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import socket
import sys
import uuid
from pathlib import Path
from typing import cast

from distributed.comm.core import Comm

from ....store.errors import ShardUnavailableError
from ....store.logs import to_stderr
from ....store.waiting import Backoff
from ..room import available
from ..sockets.server import CallServer
from .attendance import Attendance
from .children import Children
from .links import SchedulerLink, own_address
from .records import Agent, Boot, Copy, End, Keep, Kill, Order, Reach, Report, Start
from .workers.plugins import Hiring

log = logging.getLogger(__name__)

LEAVE_S = 10.0
"""How long a node may leave."""
LOST_S = 60.0
"""How long an agent whose scheduler has ended lives without workers."""


class AgentProcess:
    """The agent; to be made in its event loop.

    Args:
        hiring: what it was started with.
    """

    def __init__(self, hiring: Hiring) -> None:
        self._hiring = hiring
        self._id = uuid.uuid4().hex
        self._memory = available().nbytes
        self._link = SchedulerLink(hiring.scheduler, hiring.security, is_agent=True)
        self._over = asyncio.Event()
        self._news: asyncio.Queue[tuple[str, tuple[object, ...]]] = asyncio.Queue()
        """For the directory."""
        self._copy = Copy()
        """Of what the directory keeps."""
        self._cluster = ""
        self._connected = False
        self._ending: asyncio.TimerHandle | None = None
        self._address = own_address(hiring.scheduler)
        self._children = Children(self._boot, self._note_death)
        self._attendance = Attendance(self._attend, self._over.set)
        self._server = CallServer({"ask": "watch"}, self._carry_out, "an agent")

    async def run(self, listener: socket.socket) -> None:
        """Be an agent, until nobody needs it.

        Args:
            listener: the socket where workers attach.
        """
        server = await asyncio.start_unix_server(self._attendance.serve, sock=listener)
        connecting = asyncio.create_task(self._keep_connected())
        await self._over.wait()
        server.close()
        await self._children.kill_all()
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
        self._attendance.let_go()
        await self._attendance.close()
        await self._server.close()
        await self._link.close()

    def _boot(self, report: Report) -> Boot:
        return Boot(report, self._server.address, self._cluster, self._id, self._address)

    def _note_death(self, key: str, life: int, why: str, lived_s: float) -> None:
        self._news.put_nowait(("died", (key, life, why, lived_s)))

    # ---- what actors ask ------------------------------------------------------------------------------

    async def _carry_out(self, ask: str, question: tuple[object, ...]) -> object:
        method, arguments = cast("tuple[str, tuple[object, ...]]", question)
        if method not in ("ready", "failed"):
            try:
                return await self._link.ask(method, *arguments)
            except Exception as exc:  # noqa: BLE001  raised again
                exc.__context__ = exc.__cause__ = None  # Dask has errors pickled with these, which are its own
                raise exc.with_traceback(None) from None
        if method == "ready":
            self._children.ready(*cast("tuple[str, int, Reach]", arguments))
        self._news.put_nowait((method, arguments))
        return None

    # ---- the directory --------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        pauses = Backoff(0.1, 1.0)
        await self._attendance.somebody.wait()
        while True:
            try:
                comm = await self._link.join(self._introduced(), self._reports(), self._copy)
                try:
                    identity = cast("tuple[str, str]", await self._link.ask("identity"))
                    self._cluster, self._attendance.directory = identity
                    pauses.reset()
                    self._attendance.joined()
                    await self._talk(comm)
                finally:
                    comm.abort()
                    self._note_connected(False)
            except (OSError, ShardUnavailableError) as exc:
                log.info("no connection to the directory: %s", exc)
            await pauses.wait_async()

    def _reports(self) -> list[Report]:
        """Tell of all lives; news of before stand in it."""
        while not self._news.empty():
            self._news.get_nowait()
        return self._children.reports()

    def _introduced(self) -> Agent:
        """Say what the node has."""
        own = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [gpu for gpu in own.split(",") if gpu] if own is not None else _gpus()
        return Agent(
            id=self._id,
            address=self._address,
            machine=self._hiring.machine,
            memory=self._attendance.memory(self._memory),
            cpus=float(len(os.sched_getaffinity(0))),
            gpus=tuple(gpus),
            resources=self._attendance.resources(),
            labels=self._hiring.labels,
        )

    async def _talk(self, comm: Comm) -> None:
        """Carry out orders and send news, until the connection ends."""
        self._note_connected(True)
        sending = asyncio.create_task(self._send(comm))
        try:
            while True:
                self._obey(pickle.loads(cast(bytes, await comm.read())))  # noqa: S301  of the scheduler
        finally:
            sending.cancel()

    def _obey(self, order: Order) -> None:
        match order:
            case Start():
                self._children.start(order)
            case Kill(key, life):
                self._children.kill(key, life)
            case End():
                if self._attendance.leaves:  # else somebody has come meanwhile
                    self._over.set()
            case Keep():
                self._copy = self._copy.after(order)
            case Copy():
                self._copy = order

    async def _send(self, comm: Comm) -> None:
        while True:
            news = await self._news.get()
            with contextlib.suppress(OSError):  # who reads learns it, too; it is told again with the reports
                await comm.write(pickle.dumps(news, 5))

    def _note_connected(self, connected: bool) -> None:
        self._connected = connected
        self._attend()

    def _attend(self) -> None:
        """Say what the node has now, or that it leaves; a directory that is joined later learns it then."""
        if self._connected and self._attendance.leaves:
            self._news.put_nowait(("leaves", (self._id,)))
        elif self._connected and not self._attendance.is_closing:
            self._news.put_nowait(("join", (self._introduced(),)))
        self._be_patient()

    def _be_patient(self) -> None:
        """Decide how long this agent lives when those who were attached close."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if not self._attendance.is_closing:
            return
        patience = LEAVE_S if self._connected and self._attendance.leaves else LOST_S
        self._ending = asyncio.get_running_loop().call_later(patience, self._over.set)
        if not self._connected:  # nobody can drain it
            self._attendance.let_go()


def _gpus() -> list[str]:
    found = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number, _ in enumerate(found.iterdir())] if found.is_dir() else []


def main() -> None:
    """Be the agent of this machine, as a daemon; its starter has locked the file of its name."""
    hiring: Hiring = pickle.loads(sys.stdin.buffer.read())  # noqa: S301  of who started it
    name = f"tensorvine-agent-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        hiring.file.write(name)
        if os.fork():
            return
        to_stderr(name)
        listener.setblocking(False)

        async def run() -> None:
            await AgentProcess(hiring).run(listener)

        try:
            asyncio.run(run())
        finally:
            hiring.file.delete(name)


if __name__ == "__main__":
    main()
