"""The directory in Dask's scheduler: carries callers' questions and hosts' news to it, and its orders to hosts.

Rules
- Two handlers are added to the scheduler's: one answers a question, one takes a host's connection for as long as the
  host lives. A connection that ends is a host that has ended.
- The plugin installs those of nannies and workers. Clients wait until the hosts of all workers have joined.
- What `where` waits for is the start of an actor, what `kill` waits for the end of its processes; both for a while.
- Of a machine's workers, `adapt()` closes the one whose host is the node last. A worker that is retired is kept until
  its host has left: when its shard has moved its data. Only then a deployment ends its job.
- When the scheduler ends, the directory is lost, and hosts end their actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable
from typing import Any, cast

from distributed import Scheduler, SchedulerPlugin
from distributed.batched import BatchedSend
from distributed.comm.core import Comm
from distributed.core import Status

from .directory import Directory
from .hosts import ASK, DRAIN_S, JOIN, LEAVE_S, NannyHost, WorkerHost
from .records import Standing, State

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""How long a question may wait for news."""
RETIRED = "retire-workers"
"""How the reason begins for which the scheduler removes a worker that is retired."""
_ASKED = ("spawn", "find", "actors", "nodes", "keep", "keep_absent", "kept", "reserve", "unreserve", "reserved")


def client_owner(client: str) -> str:
    """Name a client of Dask, as an owner."""
    return f"client:{client}"


class DirectoryPlugin(SchedulerPlugin):
    """Holds the directory."""

    name = "tensorvine-directory"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Add the handlers, and have nannies and workers be hosts; the scheduler calls this."""
        scheduler.add_plugin(self, name=self.name)  # before anything is awaited: there is to be one
        self._scheduler = scheduler
        self._directory = Directory()
        self._orders: dict[str, BatchedSend] = {}
        """Host -> the way to it."""
        self._news: dict[str, asyncio.Event] = {}
        """What changes -> set when it does."""
        self._hosts = {address: worker.nanny or address for address, worker in scheduler.workers.items()}
        """Worker -> its nanny, or itself."""
        self._installed = asyncio.Event()
        self._known: dict[str, Callable[..., Any]] = {
            **{name: getattr(self._directory, name) for name in _ASKED},
            "where": self._where, "kill": self._kill, "cluster": self._cluster,
        }  # fmt: skip
        scheduler.handlers[ASK] = self._ask
        scheduler.handlers[JOIN] = self._serve_host
        try:
            nannys, workers = NannyHost(), WorkerHost()
            await scheduler.register_nanny_plugin(None, pickle.dumps(nannys), nannys.name, idempotent=True)
            await scheduler.register_worker_plugin(None, pickle.dumps(workers), workers.name, idempotent=True)
        except OSError as exc:
            log.warning("a worker has no host, because it did not answer: %s", exc)
        finally:
            self._installed.set()

    # ---- what the scheduler calls ---------------------------------------------------------------------

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End what a client owns."""
        self._directory.owner_ended(client_owner(client))
        self._tell()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note which nanny a worker has."""
        self._hosts[worker] = scheduler.workers[worker].nanny or worker

    async def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **_: Any) -> None:
        """Hold up who retires a worker until its host has left."""
        host = self._hosts.pop(worker, "")
        if stimulus_id.startswith(RETIRED) and await self._wait(host, lambda: not self._directory.stays(host), LEAVE_S):
            await self._wait(host, lambda: self._directory.stays(host) is None, DRAIN_S)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Leave out those whose hosts are nodes while there are other workers on their machines."""
        needed = self._directory.needed()
        return [worker for worker in workers if self._hosts.get(worker.address) not in needed]

    # ---- questions ------------------------------------------------------------------------------------

    async def _ask(self, question: bytes) -> bytes:
        try:
            method, arguments = pickle.loads(question)  # noqa: S301  the scheduler runs what its clients send it anyway
            answer = self._known[method](*arguments)
            self._tell()
            outcome = True, await answer if asyncio.iscoroutine(answer) else answer
        except Exception as exc:  # noqa: BLE001  raised again where it was asked
            outcome = False, exc
        return pickle.dumps(outcome, 5)

    async def _cluster(self) -> str:
        """Return the scheduler's address, as it says it itself, when the hosts of all workers have joined."""
        await self._installed.wait()
        return self._scheduler.address

    async def _where(self, key: str) -> Standing:
        await self._wait(key, lambda: self._directory.where(key).state is not State.STARTING, WAIT_S)
        return self._directory.where(key)

    async def _kill(self, name: str) -> None:
        key = self._directory.kill(name)
        self._tell()
        if key is not None and not await self._wait(key, lambda: self._directory.is_over(key), WAIT_S):
            log.warning("%s: killed, but its host did not report its end within %.0f s", name, WAIT_S)

    async def _wait(self, changes: str, done: Callable[[], bool], timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                while not done():
                    await self._news.setdefault(changes, asyncio.Event()).wait()
        except TimeoutError:
            return False
        return True

    # ---- hosts ----------------------------------------------------------------------------------------

    async def _serve_host(self, comm: Comm, host: bytes) -> Status:
        joined = pickle.loads(host)  # noqa: S301  of a host
        orders = self._orders[joined.id] = BatchedSend(interval=0)
        self._directory.join(joined)
        try:
            await comm.write(self._scheduler.address)
            orders.start(comm)
            self._tell()
            while True:
                for news in cast("list[bytes]", await comm.read()):
                    self._hear(*pickle.loads(news))  # noqa: S301  of a host
        except OSError:
            pass
        finally:
            del self._orders[joined.id]
            orders.abort()
            log.info("the host %s has ended", joined.process)
            self._directory.left(joined.id)
            self._tell()
        return Status.dont_reply

    def _hear(self, method: str, *arguments: Any) -> None:
        getattr(self._directory, method)(*arguments)
        if method == "leaves":
            asyncio.get_running_loop().call_later(LEAVE_S, self._be_late, *arguments)
        self._tell()

    def _be_late(self, host: str) -> None:
        self._directory.late(host)
        self._tell()

    def _tell(self) -> None:
        """Hand out what the directory has left for others."""
        for host, order in self._directory.orders:
            with contextlib.suppress(KeyError, OSError):  # it has ended: who reads from it learns that, too
                self._orders[host].send(pickle.dumps(order, 5))
        self._directory.orders.clear()
        for name in self._directory.changed & set(self._news):
            self._news.pop(name).set()
        self._directory.changed.clear()
