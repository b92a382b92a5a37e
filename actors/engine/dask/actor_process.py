"""The process of an actor. It is forked from the agent's template, and tells the agent when it is ready.

Rules
- Each concurrency group has an event loop in a thread, where its calls are carried out, as many at once as `GROUPS`
  says, and a server there: what blocks one group, or fills its connections, is in no other's way.
- What the constructor raises is told to who calls the actor; the process ends then.
- It asks the directory through its agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import NoReturn

import cloudpickle

from ....store.errors import ShardUnavailableError
from .. import process
from ..engine import GROUPS
from ..sockets.framing import SocketAddress
from ..sockets.server import CallServer
from .blocks import Block, BlockHandle
from .engine import DaskEngine
from .lines import Answer, Line, LostError
from .records import Boot, Reach, Seat, life_of
from .switchboard import Switchboard
from .traffic import ENGINE_CALLS, pack

AGENT_S = 120.0
"""How long an agent may take to answer; the directory's own limits are shorter."""


class AgentLink:
    """Asks the directory through the agent; see `switchboard.DirectoryLink`."""

    def __init__(self, agent: SocketAddress) -> None:
        async def found(group: str) -> list[SocketAddress]:
            return [agent]

        self._line = Line("watch", found)

    async def ask(self, method: str, *arguments: object) -> object:
        """Ask the directory; the agent hears what is told on the way."""
        answer = Answer()
        self._line.send(pack(("ask", (method, arguments))), answer)
        coming = asyncio.wrap_future(answer)
        await asyncio.wait([coming], timeout=AGENT_S)
        if not coming.done():
            raise ShardUnavailableError(f"{method}: expected an answer from this machine's agent; the call timed out")
        try:
            return coming.result()
        except LostError as exc:
            raise ShardUnavailableError(f"{method}: expected an answer from this machine's agent; {exc}") from exc

    async def close(self) -> None:
        """End the connection."""
        await self._line.close()


class Stage:
    """One concurrency group of an actor, in an event loop of its own thread.

    Args:
        actor: the actor.
        group: the group.
        methods: those of the group -> the group.
        engine: gets blocks that are arguments.
        name: the actor's.
    """

    def __init__(self, actor: object, group: str, methods: dict[str, str], engine: DaskEngine, name: str) -> None:
        self._actor = actor
        self._engine = engine
        self._methods = methods
        self._name = name
        self._places = asyncio.Semaphore(GROUPS[group])
        self._loop = _new_loop()
        threading.Thread(target=self._loop.run_forever, name=f"group-{group}", daemon=True).start()

    def serve(self, host: str) -> tuple[SocketAddress, SocketAddress]:
        """Answer calls from now on; says where callers of this node and of others do so."""
        return asyncio.run_coroutine_threadsafe(self._serve(host), self._loop).result(AGENT_S)

    async def _serve(self, host: str) -> tuple[SocketAddress, SocketAddress]:
        server = CallServer(self._methods, self._carry_out, self._name, ENGINE_CALLS)
        return server.address, server.address_at(host)

    async def _carry_out(self, method: str, arguments: tuple[object, ...]) -> object:
        async with self._places:
            given = [await self._opened(argument) for argument in arguments]
            return await getattr(self._actor, method)(*given)

    async def _opened(self, argument: object) -> object:
        if not isinstance(argument, (Block, BlockHandle)):
            return argument
        return await self._engine.awaitable(self._engine.fetch(argument), AGENT_S, "a block that is an argument")


def _new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop: uvloop's where that is installed, as Ray does for its actors."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(boot: Boot) -> NoReturn:
    """Be an actor, until this process ends."""
    report = boot.report
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(report.gpus)
    plan, life = report.plan, report.life
    seat = Seat(boot.cluster, life_of(plan.key, life), boot.address, "", boot.node, life)
    engine = DaskEngine(seat, Switchboard(lambda: AgentLink(boot.agent)))
    process.belongs_to(engine)
    try:
        path, made_of = pickle.loads(plan.start)  # noqa: S301  of who started it
        sys.path += [entry for entry in path if entry not in sys.path]
        cls, arguments = pickle.loads(made_of)  # noqa: S301
        actor = cls(**arguments)
    except Exception as exc:
        logging.getLogger(__name__).exception("%s: its constructor failed", plan.name)
        engine._ask("failed", plan.key, life, _pickled(exc), f"its constructor failed: {exc!r}")
        os._exit(1)
    near: dict[str, SocketAddress] = {}
    away: dict[str, SocketAddress] = {}
    for group in GROUPS:
        methods = {name: of for name, of in plan.methods.items() if of == group}
        near[group], away[group] = Stage(actor, group, methods, engine, plan.name).serve(boot.address)
    engine._ask("ready", plan.key, life, Reach(near, away))
    while True:
        signal.pause()


def _pickled(error: Exception) -> bytes:
    error.add_note("".join(traceback.format_exception(error)))
    try:
        return cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001  of any class's own making
        return cloudpickle.dumps(RuntimeError(repr(error)))
