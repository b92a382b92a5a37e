"""The way to the directory in Dask's scheduler.

Rules
- A client's first question installs the directory where there is none. When the scheduler was started anew, that is
  left to the agents, which know of actors.
- A scheduler that does not answer is `ShardUnavailableError` within `CONNECT_S`, or `ASK_S` where it was connected.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Sequence
from typing import Any, cast

from distributed import Security
from distributed.comm import core
from distributed.comm.addressing import get_local_address_for, parse_address
from distributed.comm.core import Comm
from distributed.core import ConnectionPool

from ....store.errors import ShardUnavailableError
from ..sockets.framing import outcome_of
from .directory_plugin import ASK, JOIN, DirectoryPlugin
from .records import Agent, Copy, Report
from .workers.plugins import NannysAgent, WorkersAgent

log = logging.getLogger(__name__)

CONNECT_S = 2.0
ASK_S = 10.0
INSTALL_S = 60.0
"""How long the machines of all workers may take to start their agents."""
SETTLES_S = 3.0
"""How long agents have to find a scheduler that was started anew."""


def own_address(scheduler: str) -> str:
    """Return this machine's address, as the others of a cluster reach it."""
    return parse_address(get_local_address_for(scheduler))[1]


class SchedulerLink:
    """Asks the directory itself.

    Args:
        scheduler: its address.
        security: of connections to it.
        is_agent: an agent asks.
    """

    def __init__(self, scheduler: str, security: Security, is_agent: bool = False) -> None:
        role = "worker" if is_agent else "client"
        self._address = scheduler
        self._connection_args = cast("dict[str, Any]", security.get_connection_args(role))
        self._is_agent = is_agent
        self._installed = False
        """There was a directory."""
        self._installing: asyncio.Task[None] | None = None
        self._pool = ConnectionPool(connection_args=self._connection_args, timeout=CONNECT_S)

    async def ask(self, method: str, *arguments: object) -> object:
        """Ask the directory; see `switchboard.DirectoryLink`."""
        if not (self._installed or self._is_agent):
            await self._install(settles_s=0.0)
            self._installed = True
        return await self._ask(method, *arguments)

    async def _ask(self, method: str, *arguments: object) -> object:
        answer = await self._call(ASK, ASK_S, question=pickle.dumps((method, arguments), 5))
        if answer is None:
            raise ShardUnavailableError(f"{method}: the scheduler was restarted, and no agent has joined it yet")
        return outcome_of(cast(bytes, answer))

    async def join(self, agent: Agent, reports: Sequence[Report], copy: Copy) -> Comm:
        """Return a connection that stands for an agent as long as it lasts.

        Raises:
            OSError: the scheduler does not answer.
            ShardUnavailableError: as `OSError`.
        """
        if self._installed:  # else this agent was started for a directory
            await self._install(SETTLES_S)
        comm = cast(Comm, await core.connect(self._address, timeout=CONNECT_S, **self._connection_args))
        await comm.write({"op": JOIN, "agent": pickle.dumps((agent, reports, copy), 5), "reply": False})
        self._installed = True
        return comm

    async def close(self) -> None:
        """End the connections."""
        if self._installing is not None:
            self._installing.cancel()
        await self._pool.close()

    async def _install(self, settles_s: float) -> None:
        """Have the scheduler hold the directory, and its workers be attached to agents, unless it is so."""
        await self._register("register_scheduler_plugin", DirectoryPlugin(settles_s))
        _, directory = cast("tuple[str, str]", await self._ask("identity"))
        agents = asyncio.create_task(self._install_agents(directory))
        if not self._is_agent:  # else a nanny may wait for this very agent
            await agents
        self._installing = agents

    async def _install_agents(self, directory: str) -> None:
        try:
            await self._register("register_worker_plugin", WorkersAgent(directory))
            await self._register("register_nanny_plugin", NannysAgent(directory))
        except ShardUnavailableError as exc:
            if not self._is_agent:
                raise
            log.warning("workers that join from now on may have no agent: %s", exc)

    async def _register(self, handler: str, plugin: DirectoryPlugin | WorkersAgent | NannysAgent) -> None:
        await self._call(handler, INSTALL_S, plugin=pickle.dumps(plugin), name=plugin.name, idempotent=True)

    async def _call(self, handler: str, timeout: float, **arguments: object) -> object:
        try:
            async with asyncio.timeout(timeout):
                await self._pool.start()
                return await getattr(self._pool(self._address), handler)(**arguments)
        except (OSError, TimeoutError) as exc:
            raise ShardUnavailableError(
                f"the scheduler at {self._address}: expected an answer; {exc or f'timed out after {timeout:.0f} s'}"
            ) from exc
