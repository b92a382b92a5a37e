"""What is added to Dask's nannies, and to workers that have none: each is a host, which starts and watches actors.

Rules
- A host has one connection to the scheduler. It tells of deaths and is given orders by it, in their order. When it
  ends, the directory counts the host as ended; the host ends its actors, and joins anew as another.
- Actors are processes that are forked from one of the host's (`template`). They end with the host. They ask the
  directory through it, so they need no connection to the scheduler, and no Dask.
- A worker that its nanny starts anew does not matter.
- Who closes says so, and waits until the directory lets it go: first its actors can be drained.
- A `LocalCluster` closes the nanny whose worker has not come back within 15 s, as it may on a busy machine. With the
  nanny actors would end that have nothing to do with the worker. So nannies, which are in its process, have it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import dask.config
from dask.utils import parse_timedelta
from distributed import Nanny, NannyPlugin, Worker, WorkerPlugin
from distributed.batched import BatchedSend
from distributed.comm import core
from distributed.comm.addressing import get_local_address_for, parse_address

from ....store.errors import ShardUnavailableError
from ....store.waiting import Backoff
from ..room import available
from ..sockets.server import CallServer
from .records import Boot, End, Host, Kill, Life, Start
from .template import Template, end_group
from .worker_memory import count_own_of, spare_worker_of

log = logging.getLogger(__name__)

ASK, JOIN = "tensorvine_ask", "tensorvine_join"
"""Handlers of Dask's scheduler: for a question to the directory, and for a host's connection."""
CONNECT_S = 5.0
ASK_S = 10.0
JOIN_S = 30.0
"""How long a nanny or worker waits for its host to join when it starts."""
LEAVE_S = 10.0
"""How long a host may leave on which no memory is reserved."""
DRAIN_S = 300.0
"""How long any host may leave."""
END_S = 10.0
"""How long the kernel may take to end killed processes."""
RETURN, RETURN_S = "distributed.deploy.lost-worker-timeout", 300.0
"""Dask's option, and how long a local cluster waits at least for a worker that its nanny starts anew."""
TRIMMING = "MALLOC_TRIM_THRESHOLD_"
"""By it the C library is told when to give memory back."""
_SIGNALS = {-one: one.name for one in signal.Signals}
"""Exit status -> the signal that ended a process."""


class NannyHost(NannyPlugin):
    """Makes nannies hosts."""

    name = "tensorvine-nanny-host"
    idempotent = True

    async def setup(self, nanny: Nanny) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  Dask awaits it
        """Make a nanny a host; it calls this when it starts."""
        spare_worker_of(nanny)
        if parse_timedelta(dask.config.get(RETURN)) < RETURN_S:
            dask.config.set({RETURN: RETURN_S})
        self._host = ActorHost(nanny, nanny.memory_manager.memory_limit, cast(Any, nanny).resources)
        await self._host.begin()

    async def teardown(self, nanny: Nanny) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """End the host; a nanny calls this when it closes."""
        await self._host.leave()


class WorkerHost(WorkerPlugin):
    """Makes workers without nannies hosts."""

    name = "tensorvine-worker-host"
    idempotent = True
    _host: ActorHost | None = None

    async def setup(self, worker: Worker) -> None:
        """Make a worker a host; it calls this when it starts."""
        count_own_of(worker)
        if worker.nanny is None:
            self._host = ActorHost(worker, worker.memory_manager.memory_limit, worker.state.total_resources)
            await self._host.begin()

    async def teardown(self, worker: Worker) -> None:
        """End the host; a worker calls this when it closes."""
        if self._host is not None:
            await self._host.leave()


async def ask(scheduler: Any, question: bytes) -> bytes:
    """Ask the directory, and return the pickled outcome.

    Args:
        scheduler: calls the scheduler.
        question: the method and its arguments, pickled.

    Raises:
        ShardUnavailableError: the scheduler does not answer, or was started anew.
    """
    try:
        async with asyncio.timeout(ASK_S):
            answer = await getattr(scheduler, ASK)(question=question)
    except (OSError, TimeoutError) as exc:
        reason = exc or f"timed out after {ASK_S:.0f} s"
        raise ShardUnavailableError(f"the scheduler at {scheduler.address}: expected an answer; {reason}") from None
    if answer is None:
        raise ShardUnavailableError(
            f"the scheduler at {scheduler.address}: expected the directory of its actors; it was restarted, and its "
            "actors have ended: connect another client, and start the repository again"
        )
    return answer


def machine() -> str:
    """Name this machine, the same for all processes that can call each other by Unix sockets.

    Several nodes on one machine have different names in Dask's configuration, under `tensorvine.node`.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"  # such sockets are for one user's processes
    return f"{here}/{dask.config.get('tensorvine.node', '')}"


def own_address(scheduler: str) -> str:
    """Return this machine's address, as the others of a cluster reach it."""
    return parse_address(get_local_address_for(scheduler))[1]


@dataclass(slots=True)
class _Process:
    """The process of a life, from the pause before it until its end."""

    killed: asyncio.Event = field(default_factory=asyncio.Event)
    pid: int | None = None

    def kill(self) -> None:
        self.killed.set()
        if self.pid is not None:
            end_group(self.pid)


class ActorHost:
    """A host; to be made in the event loop of its nanny or worker.

    Args:
        server: the nanny or worker.
        limit: bytes that its worker may take; None: as many as it likes.
        resources: what its worker has.
    """

    def __init__(self, server: Any, limit: int | None, resources: Mapping[str, float] | None) -> None:
        self._server = server
        self._limit = limit or 0
        self._resources = resources or {}
        self._available = available().nbytes
        self._address = own_address(server.scheduler.address)
        self._template = Template(environment_of_actors())
        self._calls = CallServer({"ask": "watch", "tell": "ctl"}, self._carry_out, "a host of actors")
        self._processes: dict[tuple[str, int], _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that live an actor's life."""
        self._news = BatchedSend(interval=0)
        self._id = self._cluster = ""
        self._joined = asyncio.Event()
        self._leaving = False
        self._serving: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Join the directory, and be a host from now on."""
        self._serving = asyncio.create_task(self._serve())
        try:
            async with asyncio.timeout(JOIN_S):
                await self._joined.wait()
        except TimeoutError:
            log.warning("%s is not yet a host of actors: the scheduler did not answer in time", self._server)

    async def leave(self) -> None:
        """Say that this host leaves, wait until it may, and end."""
        self._leaving = True
        if self._serving is not None:
            self._tell("leaves", self._id)
            await asyncio.wait([self._serving], timeout=DRAIN_S if self._joined.is_set() else 0.0)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._calls.close()
        self._template.close()

    # ---- what actors ask ------------------------------------------------------------------------------

    async def _carry_out(self, method: str, arguments: tuple[Any, ...]) -> bytes | None:
        if method == "ask":
            return await ask(self._server.scheduler, *arguments)
        self._tell(*arguments)
        return None

    # ---- the directory --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Be a host, and another whenever the connection has ended, until the directory lets it go."""
        pauses = Backoff(0.1, 5.0)
        while True:
            try:
                connecting = self._server.security.get_connection_args("worker")
                address = self._server.scheduler.address
                comm = cast(core.Comm, await core.connect(address, timeout=CONNECT_S, **connecting))
                try:
                    await self._join(comm)
                    pauses.reset()
                    await self._obey(comm)
                finally:
                    self._joined.clear()
                    self._news.abort()
                    await self._kill_all()
                    comm.abort()
            except (OSError, TimeoutError) as exc:
                log.info("no connection to the directory: %s", exc)
            if self._leaving:
                return
            await pauses.wait_async()

    async def _join(self, comm: core.Comm) -> None:
        self._id = uuid.uuid4().hex
        await comm.write({"op": JOIN, "host": pickle.dumps(self._described(), 5), "reply": False})
        async with asyncio.timeout(JOIN_S):
            self._cluster = cast(str, await comm.read())
        self._news = BatchedSend(interval=0)
        self._news.start(comm)
        self._joined.set()

    def _described(self) -> Host:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return Host(
            id=self._id,
            process=self._server.address,
            address=self._address,
            machine=machine(),
            memory=self._available,
            cpus=float(len(os.sched_getaffinity(0))),
            limit=self._limit,
            gpus=_gpus() if visible is None else tuple(gpu for gpu in visible.split(",") if gpu),
            resources=self._resources,
            labels=cast("dict[str, str]", dask.config.get("tensorvine.labels", {})),
        )

    async def _obey(self, comm: core.Comm) -> None:
        """Carry out orders until this host may end."""
        while True:
            for order in cast("list[bytes]", await comm.read()):
                match pickle.loads(order):  # noqa: S301  of the scheduler
                    case Start(life, after_s):
                        process = self._processes[life.plan.key, life.number] = _Process()
                        task = asyncio.create_task(self._live(life, process, after_s), name=life.plan.name)
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                    case Kill(key, number) if (key, number) in self._processes:
                        self._processes[key, number].kill()
                    case End():
                        return
                    case _:
                        pass  # it has ended already

    def _tell(self, *news: object) -> None:
        with contextlib.suppress(OSError):  # who reads learns it, too, and ends all
            self._news.send(pickle.dumps(news, 5))

    # ---- processes ------------------------------------------------------------------------------------

    async def _live(self, life: Life, process: _Process, after_s: float) -> None:
        """Have an actor's process run, from the pause before it until its end, and tell of that."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.killed.wait(), after_s)
        began = time.monotonic()
        why = "it was killed" if process.killed.is_set() else await self._run(life, process)
        del self._processes[life.plan.key, life.number]
        self._tell("died", life.plan.key, life.number, why, time.monotonic() - began)

    async def _run(self, life: Life, process: _Process) -> str:
        """Start a process, wait for its end, and say why it has ended."""
        boot = Boot(life, self._calls.address, self._cluster, self._id, self._address)
        try:
            forked = await self._template.fork(life.plan.module, pickle.dumps(boot, 5))
        except OSError as exc:
            return f"its process could not be started: {exc}"
        process.pid = forked.pid
        if process.killed.is_set():
            end_group(forked.pid)
        code = await forked.ended()
        end_group(forked.pid)  # what it has started
        return f"its process ended with {_SIGNALS.get(code, code)}"

    async def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_S)


def environment_of_actors() -> dict[str, str]:
    """Return what actors have of this process's environment.

    Nannies set what their workers are to have, and with it that they give memory back to the system at once. Actors
    compute with arrays, which would then cost more page faults than arithmetic. What the user set stays.
    """
    given = cast("dict[str, object]", dask.config.get("distributed.nanny.pre-spawn-environ", {}))
    trimming = str(given.get(TRIMMING, ""))
    return {name: value for name, value in os.environ.items() if (name, value) != (TRIMMING, trimming)}


def _gpus() -> tuple[str, ...]:
    found = Path("/proc/driver/nvidia/gpus")
    return tuple(str(number) for number, _ in enumerate(found.iterdir())) if found.is_dir() else ()
