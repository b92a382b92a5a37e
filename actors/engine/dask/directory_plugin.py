"""The directory in Dask's scheduler: carries callers' questions and agents' news to it, and its orders to agents.

Rules
- Two handlers are added to the scheduler's: one answers a question, one takes an agent's connection for as long as the
  agent lives. A connection that ends is a node that has ended.
- A page at /tensorvine on the scheduler's dashboard shows what the directory knows (`directory/page.py`).
- What `where` waits for is the start of an actor, what `kill` waits for the end of its processes; both for a while.
- A directory that an agent installs has lost what the one before it knew: the scheduler was started anew. It refuses
  all questions until agents had time to tell it of their actors, and of what is kept (`directory.facts`). What was
  reserved is lost; a line says so.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable
from typing import Any, cast

from distributed import Scheduler, SchedulerPlugin
from distributed.comm.core import Comm
from distributed.core import Status
from tornado.web import RequestHandler

from ....store.errors import ShardUnavailableError
from ..engine import Node
from .directory.directory import Directory
from .directory.page import page
from .records import Agent, Order, Standing, State
from .workers.plugins import ASK

log = logging.getLogger(__name__)

JOIN = "tensorvine_join"
"""The handler of agents' connections."""
PAGE = r"/(?:.*/)?tensorvine"
"""Where the page is; a dashboard may have a prefix."""
WAIT_S = 5.0
"""How long a question may wait for news."""
TELL_S = 1.0
"""How long an agent that does not take its orders holds up who keeps something."""
CLIENTS_S = 30.0
"""How long clients have to come back to a scheduler that was started anew; what they own ends then."""


def client_owner(client: str) -> str:
    """Name a client of Dask, as an owner."""
    return f"client:{client}"


class DirectoryPlugin(SchedulerPlugin):
    """Holds the directory.

    Args:
        settles_s: how long agents have to tell of their actors; 0: there are none yet.
    """

    name = "tensorvine-directory"
    idempotent = True

    def __init__(self, settles_s: float = 0.0) -> None:
        self._settles_s = settles_s
        self._settled = self._clients_are_known = not settles_s

    async def start(self, scheduler: Scheduler) -> None:
        """Add the handlers; the scheduler calls this."""
        if ASK in scheduler.handlers:  # two installed it at the same moment
            return
        self._scheduler = scheduler
        self._directory = Directory()
        self._orders: dict[str, asyncio.Queue[Order]] = {}
        """Agent -> what it has not been told yet."""
        self._news: dict[str, asyncio.Event] = {}
        """Actor -> set when it changes."""
        self._failed: dict[str, str] = {}
        """Machine on which no agent could be started or joined -> why."""
        self._known: dict[str, Callable[..., Any]] = {
            name: getattr(self._directory, name)
            for name in ("spawn", "find", "actors", "kept", "reserve", "unreserve", "reserved")
        } | {
            "where": self._where,
            "kill": self._kill,
            "keep": self._keep,
            "keep_absent": self._keep_absent,
            "identity": self._identity,
        }
        self._known |= {"nodes": self._nodes, "no_agent": self._failed.__setitem__}
        scheduler.handlers[ASK] = self._ask
        scheduler.handlers[JOIN] = self._serve_agent
        scheduler.http_application.add_handlers(".*$", [(PAGE, Page, {"directory": self._directory})])
        if self._settles_s:
            asyncio.get_running_loop().call_later(self._settles_s, self._settle)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End what a client owns; the scheduler calls this."""
        self._directory.owner_ended(client_owner(client))
        self._tell()

    # ---- questions ------------------------------------------------------------------------------------

    async def _ask(self, question: bytes) -> bytes:
        try:
            method, arguments = pickle.loads(question)  # noqa: S301  the scheduler runs what its clients send it anyway
            if not self._settled and method != "identity":
                raise ShardUnavailableError(f"{method}: the scheduler was restarted, and does not yet know its actors")
            answer = self._known[method](*arguments)
            self._tell()
            outcome = True, await answer if asyncio.iscoroutine(answer) else answer
        except Exception as exc:  # noqa: BLE001  raised again where it was asked
            outcome = False, exc
        return pickle.dumps(outcome, 5)

    def _identity(self) -> tuple[str, str]:
        """Return the scheduler's address, as it says it itself, and the directory's id."""
        return self._scheduler.address, self._directory.id

    def _nodes(self) -> list[tuple[Node, Agent]]:
        """List the nodes; raise an error if all machines failed to have an agent."""
        nodes = self._directory.nodes()
        if self._failed and not nodes:
            reasons = "; ".join(f"{machine}: {why}" for machine, why in self._failed.items())
            raise ShardUnavailableError(
                f"nodes: expected an agent on a machine of a worker; found none: {reasons:.1000}"
            )
        return nodes

    async def _where(self, key: str) -> Standing:
        await self._wait(key, lambda: self._directory.where(key).state is not State.STARTING)
        return self._directory.where(key)

    async def _kill(self, name: str) -> None:
        key = self._directory.kill(name)
        self._tell()
        if key is not None and not await self._wait(key, lambda: self._directory.is_over(key)):
            log.warning("%s: killed, but its agent did not report its end within %.0f s", name, WAIT_S)

    async def _keep(self, name: str, value: bytes | None) -> None:
        """Keep some bytes, and give back when agents have been told: from them the next scheduler has it."""
        self._directory.keep(name, value)
        self._tell()
        told = [asyncio.create_task(orders.join()) for orders in self._orders.values()]
        if told:
            _, late = await asyncio.wait(told, timeout=TELL_S)
            for one in late:
                one.cancel()

    async def _keep_absent(self, name: str, value: bytes) -> bool:
        """Keep some bytes unless the name is kept: nothing else runs between the look and the change."""
        if name in self._directory.kept(name):
            return False
        await self._keep(name, value)
        return True

    async def _wait(self, key: str, done: Callable[[], bool]) -> bool:
        try:
            async with asyncio.timeout(WAIT_S):
                while not done():
                    await self._news.setdefault(key, asyncio.Event()).wait()
        except TimeoutError:
            return False
        return True

    # ---- agents ---------------------------------------------------------------------------------------

    async def _serve_agent(self, comm: Comm, agent: bytes) -> Status:
        joined, reports, copy = pickle.loads(agent)  # noqa: S301  of an agent
        orders: asyncio.Queue[Order] = asyncio.Queue()
        self._orders[joined.id] = orders
        self._failed.clear()
        self._directory.join(joined, reports, copy)
        if self._clients_are_known:
            self._check_owners()
        self._tell()
        sending = asyncio.create_task(_send(comm, orders))
        try:
            while True:
                self._hear(joined, cast(bytes, await comm.read()))
        except OSError:
            pass
        finally:
            sending.cancel()
            if self._orders.get(joined.id) is orders:  # else it has come back already
                del self._orders[joined.id]
                log.info("node %s at %s has ended", joined.id, joined.address)
                self._directory.left(joined.id)
                self._tell()
        return Status.dont_reply

    def _hear(self, agent: Agent, news: bytes) -> None:
        method, arguments = pickle.loads(news)  # noqa: S301  of an agent
        if method not in ("join", "leaves", "ready", "failed", "died"):
            raise ValueError(f"agent {agent.id}: expected news; found {method!r}")
        getattr(self._directory, method)(*arguments)
        self._tell()

    def _tell(self) -> None:
        """Hand out what the directory has left for others."""
        for agent, order in self._directory.orders:
            if agent in self._orders:
                self._orders[agent].put_nowait(order)
        self._directory.orders.clear()
        for key in self._directory.changed & set(self._news):
            self._news.pop(key).set()
        self._directory.changed.clear()

    # ---- a scheduler that was started anew -------------------------------------------------------------

    def _settle(self) -> None:
        self._settled = True
        log.warning(
            "the scheduler was restarted: %d actors on %d nodes and the values copied to agents are restored; memory "
            "reservations are not",
            len(self._directory),
            len(self._orders),
        )
        asyncio.get_running_loop().call_later(CLIENTS_S, self._check_owners)

    def _check_owners(self) -> None:
        self._clients_are_known = True
        self._directory.check_owners(map(client_owner, self._scheduler.clients))
        self._tell()


class Page(RequestHandler):
    """Serves the page."""

    def initialize(self, directory: Directory) -> None:
        """Take what it is about; tornado calls this."""
        self._directory = directory

    def get(self) -> None:
        """Answer."""
        self.write(page(self._directory))


async def _send(comm: Comm, orders: asyncio.Queue[Order]) -> None:
    while True:
        order = await orders.get()
        try:
            await comm.write(pickle.dumps(order, 5))
        except OSError:  # who reads from it learns it, too
            return
        orders.task_done()
