"""What holds a machine's agent: the nannies of Dask's workers there, and the workers that have none.

Rules
- Each is attached to the agent of its machine by a connection, and the agent lives as long as there are such. A worker
  that its nanny starts anew does not matter: the nanny stays attached.
- Who finds no agent starts one, which becomes a process of nobody's: it ends by itself (`agent`). Others wait.
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
from .memory import count_own_of, spare_worker_of

log = logging.getLogger(__name__)

AGENT = "tensorvine.actors.engine.dask.agent"
START_S = 30.0
"""How long an agent may take to start, and to find the directory."""
JOINED, MAY_GO = b"+", b"-"
"""What an agent says to who is attached: it is a node; who leaves need not wait any more."""
TRIMMING = "MALLOC_TRIM_THRESHOLD_"
"""By it the C library is told when to give memory back."""
LEAVE_S = 15.0
"""How long who closes waits for that; a node that leaves is given less."""


@dataclass(frozen=True, slots=True)
class Hiring:
    """What an agent is started with."""

    scheduler: str
    security: Security = field(repr=False)
    """For connections to it."""
    socket: str
    """Where the machine's workers attach, in Linux' abstract namespace."""
    machine: str
    labels: dict[str, str]


def machine() -> str:
    """Name this machine, the same for all processes that can call each other by Unix sockets.

    Several nodes on one machine have different names in Dask's configuration, under `tensorvine.node`.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{dask.config.get('tensorvine.node', '')}"


class NannysAgent(NannyPlugin):
    """Attaches nannies."""

    name = "tensorvine-agent-of-nannies"
    idempotent = True

    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def setup(self, nanny: Nanny) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  Dask awaits it
        """Attach a nanny; it calls this when it starts."""
        spare_worker_of(nanny)
        scheduler = str(cast(Any, nanny).scheduler_addr)
        self._attachment = Attachment(scheduler, cast(Security, nanny.security), self._directory)
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
            scheduler = str(cast(Any, worker.scheduler).address)
            self._attachment = Attachment(scheduler, worker.security, self._directory)
            told = {"memory": worker.memory_manager.memory_limit, "resources": worker.state.total_resources}
            await self._attachment.begin(told)

    async def teardown(self, worker: Worker) -> None:
        """Let go of the agent; a worker calls this when it closes."""
        if self._attachment is not None:
            await self._attachment.leave()


class Attachment:
    """Keeps this process attached to its machine's agent for a cluster.

    Args:
        scheduler: the cluster's.
        security: of connections to it.
        directory: the id of the one that it holds.
    """

    def __init__(self, scheduler: str, security: Security, directory: str) -> None:
        here = machine()
        name = hashlib.sha256(f"{here} {scheduler}".encode()).hexdigest()[:24]
        labels = cast("dict[str, str]", dask.config.get("tensorvine.labels", {}))
        self._hiring = Hiring(scheduler, security, f"tensorvine-agent-{name}", here, labels)
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
            log.info("the agent of this machine did not let go: %r", exc)
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
                log.warning("the agent of this machine has ended: another one is started")
                pauses.reset()
            await self._try()
            if self._streams is None:
                await pauses.wait_async()

    async def _try(self) -> None:
        try:
            self._streams = await self._attached(Deadline.after(START_S))
        except (OSError, TimeoutError) as exc:
            log.warning("this machine has no agent, and is no node of %s: %r", self._hiring.scheduler, exc)

    async def _attached(self, deadline: Deadline) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Attach to the agent, which is started if there is none, and wait until it is a node."""
        reader, writer = await self._connected(deadline)
        try:
            user = credentials(writer.get_extra_info("socket"))[1]
            if user != os.geteuid():
                raise PermissionError(f"expected an agent of user {os.geteuid()}; found one of user {user}")
            writer.write(self._told)
            async with asyncio.timeout(deadline.left()):
                if await reader.read(1) != JOINED:
                    raise ConnectionResetError("expected an agent that is a node; it ended the connection")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _connected(self, deadline: Deadline) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pauses = Backoff(0.02, 0.2)
        while True:
            try:
                return await asyncio.open_unix_connection(f"\0{self._hiring.socket}")
            except OSError:
                await _start(self._hiring)
            if not await pauses.wait_async(deadline):
                raise TimeoutError(f"expected it to start within {START_S:.0f} s")


def environment_of_agents() -> dict[str, str]:
    """Return what an agent, and so its actors, have of this process's environment.

    Nannies set what their workers are to have, and with it that they give memory back to the system at once. Actors
    compute with arrays, which would then cost more page faults than arithmetic. What the user set stays.
    """
    given = cast("dict[str, object]", dask.config.get("distributed.nanny.pre-spawn-environ", {}))
    trimming = str(given.get(TRIMMING, ""))
    return {name: value for name, value in os.environ.items() if (name, value) != (TRIMMING, trimming)}


async def _start(hiring: Hiring) -> None:
    """Start an agent, unless another process is about to; gives back when it can be attached to."""
    with socket.socket(socket.AF_UNIX) as starting:
        try:
            starting.bind(f"\0{hiring.socket}-starting")
        except OSError:
            return
        command = (sys.executable, "-m", AGENT)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, env=environment_of_agents(), process_group=0
        )
        await process.communicate(pickle.dumps(hiring))
        if process.returncode:
            log.warning("an agent did not start; its process ended with %s", process.returncode)
