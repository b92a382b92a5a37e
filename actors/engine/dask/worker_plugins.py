"""What holds a machine's agent: the nannies of Dask's workers there, and the workers that have none.

Rules
- Each is attached to the agent of its machine by a connection, and the agent lives as long as there are such. A worker
  that its nanny starts anew does not matter: the nanny stays attached.
- Who finds no agent starts one, which becomes a process of nobody's: it ends by itself (`agent`). Others wait.
- Who closes says so, and waits for a while: the last one's node is announced as leaving, so that it can be drained.
"""

from __future__ import annotations

import asyncio
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

from ....store.errors import ShardUnavailableError
from ....store.waiting import Backoff, Deadline
from ..sockets.framing import credentials

log = logging.getLogger(__name__)

AGENT = "tensorvine.actors.engine.dask.agent"
START_S = 30.0
"""How long an agent may take to start, and to find the directory."""
JOINED, MAY_GO = b"+", b"-"
"""What an agent says to who is attached: it is a node; who leaves need not wait any more."""
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

    def __init__(self) -> None:
        self._attached: Attached | None = None

    async def setup(self, nanny: Nanny) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  Dask awaits it
        """Attach a nanny; it calls this when it starts."""
        told: dict[str, Any] = {"memory": nanny.memory_manager.memory_limit, "resources": nanny.resources}
        self._attached = await attach(str(nanny.scheduler_addr), cast(Security, nanny.security), told)

    async def teardown(self, nanny: Nanny) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let go of the agent; a nanny calls this when it closes."""
        if self._attached is not None:
            await self._attached.leave()


class WorkersAgent(WorkerPlugin):
    """Attaches workers that have no nanny."""

    name = "tensorvine-agent-of-workers"
    idempotent = True

    def __init__(self) -> None:
        self._attached: Attached | None = None

    async def setup(self, worker: Worker) -> None:
        """Attach a worker; it calls this when it starts."""
        if worker.nanny is None:
            told = {"memory": worker.memory_manager.memory_limit, "resources": worker.state.total_resources}
            self._attached = await attach(str(cast(Any, worker.scheduler).address), worker.security, told)

    async def teardown(self, worker: Worker) -> None:
        """Let go of the agent; a worker calls this when it closes."""
        if self._attached is not None:
            await self._attached.leave()


class Attached:
    """A connection to the agent of this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def leave(self) -> None:
        """Say that this process closes, and wait until its node may end, for a while."""
        try:
            async with asyncio.timeout(LEAVE_S):
                self._writer.write(b'{"leaving": true}\n')
                await self._writer.drain()
                await self._reader.read(1)
        except (OSError, TimeoutError) as exc:
            log.info("the agent of this machine did not let go: %r", exc)
        self._writer.close()


async def attach(scheduler: str, security: Security, told: Mapping[str, object]) -> Attached:
    """Attach this process to its machine's agent for a cluster, which is started where there is none.

    Args:
        scheduler: the cluster's.
        security: of connections to it.
        told: what this process may take, "memory" in bytes, and the "resources" that it has.

    Raises:
        ShardUnavailableError: there is no agent, and none could be started.
    """
    here = machine()
    where = f"tensorvine-agent-{hashlib.sha256(f'{here} {scheduler}'.encode()).hexdigest()[:24]}"
    labels = dask.config.get("tensorvine.labels", {})
    hiring = Hiring(scheduler, security, where, here, labels)
    deadline, pauses = Deadline.after(START_S), Backoff(0.02, 0.2)
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(f"\0{where}")
            break
        except OSError:
            await _start(hiring)
        if not await pauses.wait_async(deadline):
            raise ShardUnavailableError(f"expected an agent on this machine within {START_S:.0f} s; none started")
    user = credentials(writer.get_extra_info("socket"))[1]
    if user != os.geteuid():
        writer.close()
        raise ShardUnavailableError(f"expected an agent of user {os.geteuid()} at {where}; found one of user {user}")
    writer.write(json.dumps(told).encode() + b"\n")
    try:
        async with asyncio.timeout(deadline.left()):
            joined = await reader.read(1)
    except (OSError, TimeoutError):
        joined = b""
    if joined != JOINED:
        log.warning("the agent of this machine is no node of %s yet", scheduler)
    return Attached(reader, writer)


async def _start(hiring: Hiring) -> None:
    """Start an agent, unless another process is about to; gives back when it can be attached to."""
    with socket.socket(socket.AF_UNIX) as starting:
        try:
            starting.bind(f"\0{hiring.socket}-starting")
        except OSError:
            return
        command = (sys.executable, "-m", AGENT)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, start_new_session=True)
        await process.communicate(pickle.dumps(hiring))
        if process.returncode:
            log.warning("an agent did not start; its process ended with %s", process.returncode)
