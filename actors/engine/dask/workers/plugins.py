"""What holds a machine's agent: the nannies of Dask's workers there, and the workers that have none.

Rules
- Each is attached to the agent of its machine by a connection, and the agent lives as long as there are such. A worker
  that its nanny starts anew does not matter: the nanny stays attached.
- A process that finds no agent of its user starts one, which runs as a daemon and ends by itself (`agent`). Others
  wait. An agent file (`agentfile`) has the name of the agent's socket.
- A machine without an agent is reported to the directory, with the reason.
- Who closes says so, and waits for a while: the last one's node is announced as leaving, so that it can be drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import pickle
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import dask.config
from distributed import Nanny, NannyPlugin, Security, Worker, WorkerPlugin

from .....store.waiting import Backoff, Deadline
from ...sockets.framing import credentials
from .agentfile import AgentFile, agent_file
from .memory import count_own_of, spare_worker_of

log = logging.getLogger(__name__)

AGENT = "tensorvine.actors.engine.dask.agent"
START_S = 30.0
"""How long an agent may take to start, and to find the directory."""
JOINED, MAY_GO = b"+", b"-"
"""What an agent says to who is attached: it is a node; who leaves need not wait any more."""
TRIMMING = "MALLOC_TRIM_THRESHOLD_"
"""By it the C library is told when to give memory back."""
ASK = "tensorvine_ask"
"""The handler of Dask's scheduler that answers questions to the directory."""
LEAVE_S = 15.0
"""How long who closes waits for that; a node that leaves is given less."""


@dataclass(frozen=True, slots=True)
class Hiring:
    """What an agent is started with."""

    scheduler: str
    security: Security = field(repr=False)
    """For connections to it."""
    file: AgentFile
    """Where it writes the name of the socket to which the machine's workers attach."""
    machine: str
    labels: dict[str, str]


def machine() -> str:
    """Name this machine, the same for all processes that can call each other by Unix sockets.

    Several nodes on one machine have different names in Dask's configuration, under `tensorvine.node`.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"  # such sockets are for one user's processes
    return f"{here}/{dask.config.get('tensorvine.node', '')}"


class NannysAgent(NannyPlugin):
    """Attaches nannies."""

    name = "tensorvine-agent-of-nannies"
    idempotent = True

    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def setup(self, nanny: Nanny) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  Dask awaits it
        """Attach a nanny; it calls this when it starts."""
        spare_worker_of(nanny)
        self._attachment = Attachment(nanny.scheduler, cast(Security, nanny.security), self._directory)
        told = cast("dict[str, object]", {"memory": nanny.memory_manager.memory_limit, "resources": nanny.resources})
        await self._attachment.begin(told)

    async def teardown(self, nanny: Nanny) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let go of the agent; a nanny calls this when it closes."""
        await self._attachment.leave()


class WorkersAgent(WorkerPlugin):
    """Attaches workers that have no nanny."""

    name = "tensorvine-agent-of-workers"
    idempotent = True

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._attachment: Attachment | None = None

    async def setup(self, worker: Worker) -> None:
        """Attach a worker; it calls this when it starts."""
        count_own_of(worker)
        if worker.nanny is None:
            self._attachment = Attachment(worker.scheduler, worker.security, self._directory)
            told = {"memory": worker.memory_manager.memory_limit, "resources": worker.state.total_resources}
            await self._attachment.begin(told)

    async def teardown(self, worker: Worker) -> None:
        """Let go of the agent; a worker calls this when it closes."""
        if self._attachment is not None:
            await self._attachment.leave()


class Attachment:
    """Keeps this process attached to its machine's agent for a cluster.

    Args:
        scheduler: calls the scheduler of the cluster.
        security: of connections to it.
        directory: the id of the one that it holds.
    """

    def __init__(self, scheduler: object, security: Security, directory: str) -> None:
        self._scheduler = cast(Any, scheduler)
        here, address = machine(), str(self._scheduler.address)
        name = hashlib.sha256(f"{here} {address}".encode()).hexdigest()[:24]
        labels = cast("dict[str, str]", dask.config.get("tensorvine.labels", {}))
        self._hiring = Hiring(address, security, agent_file(name), here, labels)
        self._directory = directory
        self._told = b""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def begin(self, told: Mapping[str, object]) -> None:
        """Attach, and again whenever the agent has ended; a machine of which that fails has no node.

        Args:
            told: what this process may take, "memory" in bytes, and the "resources" that it has.
        """
        self._told = json.dumps({**told, "directory": self._directory}).encode() + b"\n"
        await self._try()
        self._keeping = asyncio.create_task(self._keep())

    async def leave(self) -> None:
        """Say that this process closes, and wait until its node may end, for a while."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._streams is None:
            return
        reader, writer = self._streams
        try:
            async with asyncio.timeout(LEAVE_S):
                writer.write(b'{"leaving": true}\n')
                await writer.drain()
                await reader.read(1)
        except (OSError, TimeoutError) as exc:
            log.info("the agent of this machine did not confirm the departure: %r", exc)
        writer.close()

    async def _keep(self) -> None:
        pauses = Backoff(0.5, 30.0)
        while True:
            if self._streams is not None:
                reader, writer = self._streams
                with contextlib.suppress(OSError):
                    await reader.read()
                writer.close()
                self._streams = None
                log.warning("the agent of this machine has ended; starting another one")
                pauses.reset()
            await self._try()
            if self._streams is None:
                await pauses.wait_async()

    async def _try(self) -> None:
        try:
            self._streams = await self._attached(Deadline.after(START_S))
        except (OSError, TimeoutError) as exc:
            log.warning("this machine has no agent, so it is not a node of %s: %s", self._hiring.scheduler, exc)
            with contextlib.suppress(OSError):  # a nanny's or worker's own calls find out that its scheduler is gone
                report = "no_agent", (socket.gethostname(), str(exc))
                await self._scheduler.tensorvine_ask(question=pickle.dumps(report, 5))

    async def _attached(self, deadline: Deadline) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Attach to the agent, which is started if there is none, and wait until it is a node."""
        reader, writer = await self._connected(deadline)
        try:
            writer.write(self._told)
            async with asyncio.timeout(deadline.left()):
                if await reader.read(1) != JOINED:
                    raise ConnectionResetError("expected the agent to be a node; it closed the connection")
        except TimeoutError:
            writer.close()
            raise TimeoutError(f"expected the agent to join the directory within {START_S:.0f} s") from None
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _connected(self, deadline: Deadline) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to this user's agent; start it if there is none."""
        pauses = Backoff(0.02, 0.2)
        while True:
            name = self._hiring.file.read()
            with contextlib.suppress(ConnectionError):  # it has ended
                if name:
                    reader, writer = await asyncio.open_unix_connection(f"\0{name}")
                    if credentials(writer.get_extra_info("socket"))[1] == os.geteuid():
                        return reader, writer
                    writer.close()  # another user has taken the name since it has ended
            await _start(self._hiring, name)
            if not await pauses.wait_async(deadline):
                raise TimeoutError(f"expected an agent to start within {START_S:.0f} s")


def environment_of_agents() -> dict[str, str]:
    """Return what an agent, and so its actors, have of this process's environment.

    Nannies set what their workers are to have, and with it that they give memory back to the system at once. Actors
    compute with arrays, which would then cost more page faults than arithmetic. What the user set stays.
    """
    given = cast("dict[str, object]", dask.config.get("distributed.nanny.pre-spawn-environ", {}))
    trimming = str(given.get(TRIMMING, ""))
    return {name: value for name, value in os.environ.items() if (name, value) != (TRIMMING, trimming)}


async def _start(hiring: Hiring, ended: str) -> None:
    """Start an agent in place of an ended one, unless another process does or did; return when it can be attached to.

    Args:
        hiring: what it is started with.
        ended: the name of the socket of the ended one; "" if there was none.
    """
    with hiring.file.locked() as mine:
        if not mine or hiring.file.read() != ended:
            return
        command = (sys.executable, "-m", AGENT)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, env=environment_of_agents(), process_group=0
        )
        await process.communicate(pickle.dumps(hiring))
        if process.returncode:
            log.warning("an agent did not start; its process ended with %s", process.returncode)
