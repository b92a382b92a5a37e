"""The process of an actor. It is forked from the agent's template, and reports to the agent when it is ready.

Rules
- An error of the constructor is reported to the callers of the actor, and ends the process.
- It asks the directory through its agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
import traceback
from typing import NoReturn

import cloudpickle

from ....store.errors import ShardUnavailableError
from ....store.logs import to_stderr
from .. import process
from ..sockets.framing import SocketAddress
from ..sockets.hosting import Host
from ..sockets.lines import Line, LostError
from ..sockets.packing import pack
from .engine import DaskEngine
from .records import Boot, Reach, Seat, life_of
from .switchboard import Switchboard

AGENT_S = 120.0
"""How long an agent may take to answer; the directory's own limits are shorter."""


class AgentLink:
    """Asks the directory through the agent; see `switchboard.DirectoryLink`."""

    def __init__(self, agent: SocketAddress) -> None:
        async def found() -> list[SocketAddress]:
            return [agent]

        self._line = Line(found)

    async def ask(self, method: str, *arguments: object) -> object:
        """Ask the directory; the agent hears what is told on the way."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._line.send(pack(("ask", (method, arguments))), answer)
        await asyncio.wait([answer], timeout=AGENT_S)
        if not answer.done():
            raise ShardUnavailableError(f"{method}: expected an answer from this machine's agent; the call timed out")
        try:
            return answer.result()
        except LostError as exc:
            raise ShardUnavailableError(f"{method}: expected an answer from this machine's agent; {exc}") from exc

    async def close(self) -> None:
        """End the connection."""
        self._line.close()


def run(boot: Boot) -> NoReturn:
    """Be an actor, until this process ends."""
    report = boot.report
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(report.gpus)
    plan, life = report.plan, report.life
    seat = Seat(boot.cluster, life_of(plan.key, life), boot.address, "", boot.node, life)
    engine = DaskEngine(seat, Switchboard(lambda: AgentLink(boot.agent)))
    process.belongs_to(engine)
    to_stderr(plan.name)
    try:
        path, made_of = pickle.loads(plan.start)  # noqa: S301  of who started it
        sys.path += [entry for entry in path if entry not in sys.path]
        cls, arguments = pickle.loads(made_of)  # noqa: S301
        actor = cls(**arguments)
    except Exception as exc:
        logging.getLogger(__name__).exception("%s: its constructor failed", plan.name)
        engine._ask("failed", plan.key, life, _pickled(exc), f"its constructor failed: {exc!r}")
        os._exit(1)
    host = Host(actor, plan.name)
    engine._ask("ready", plan.key, life, Reach(host.address, host.address_at(boot.address)))
    while True:
        signal.pause()


def _pickled(error: Exception) -> bytes:
    error.add_note("".join(traceback.format_exception(error)))
    try:
        return cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001  of any class's own making
        return cloudpickle.dumps(RuntimeError(repr(error)))
