"""A spike: Dask's actors behind the engine seam. It shows that the seam fits; it is no engine to run jobs on.

How it fits
- A name is a published dataset that holds an actor's future: it outlives its starter, and of two starters one wins.
- A hosted actor has one event loop, in a thread of its own, per concurrency group. Dask by itself awaits all
  asynchronous methods of all actors of a worker on the worker's one loop, and runs all others in one thread.
- A block is scattered data of the worker that put it; its handle is a Dask future, and Dask counts those.

What does not fit (see docs/design/engine.md)
- An actor is never restarted: `restarted` is always False, and what was named after it stays dead.
- `kill` takes the name and the handle, not the process: what threads an actor started go on in its worker.
- There is no shared-memory object store: `put` copies within a process, `get` copies through a socket, and a client's
  block crosses two sockets before an actor has it.
- A handle on its way in a message is not counted: its sender must keep the block until the receiver has it.
- The limits in `GROUPS` are not enforced.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as Answer
from typing import Any, NoReturn

import numpy as np
from distributed import Client, Future, get_client
from tensorvine.actors.engine import GROUPS, Node
from tensorvine.store.errors import ModelLostError, OperationTimeoutError, ShardUnavailableError

START_TIMEOUT_S = 30.0

_GONE = (OSError, RuntimeError, KeyError, CancelledError, asyncio.CancelledError)
"""What Dask raises for an actor or a block that is no more. Errors of actors' methods come as answers, not here."""


class DaskEngine:
    """The engine on Dask; a `Client` made with `direct_to_workers=True` must be this process's current one."""

    worker: contextvars.Context | None = None
    """In a worker's process, the context by which Dask knows its worker in whatever thread."""

    def nodes(self) -> list[Node]:
        """List machines, this one first."""
        workers = self._run(Client.current().scheduler_info, -1)["workers"]
        room: dict[str, int] = {}
        for address, host in self._hosts().items():
            room[host] = room.get(host, 0) + int(workers[address]["memory_limit"])
        here = self.this_node()
        return sorted((Node(host, size) for host, size in room.items()), key=lambda n: (n.id != here, n.id))

    def this_node(self) -> str:
        """Give this machine's name."""
        return socket.gethostname()

    def spawn(self, cls: type, name: str, arguments: Mapping[str, Any], node: str | None = None) -> Any:
        """Start or find a published actor; Dask picks the worker with the fewest actors."""
        client = Client.current()
        if name in self._run(client.list_datasets):
            return self.find(name)
        workers = None if node is None else [a for a, host in self._hosts().items() if host == node]
        future = client.submit(
            _Host,
            cls,
            dict(arguments),
            actor=True,
            key=f"{name}-{uuid.uuid4().hex}",
            workers=workers or None,
            allow_other_workers=bool(workers),
        )
        try:
            self._run(client.publish_dataset, future, name=name)
        except KeyError:  # another starter was faster; ours goes with its last future
            return self.find(name)
        return self._run(future.result, timeout=START_TIMEOUT_S)

    def find(self, name: str) -> Any:
        """Find a published actor."""
        try:
            future = self._run(Client.current().get_dataset, name)
            return self._run(future.result, timeout=START_TIMEOUT_S)
        except _GONE as exc:
            raise LookupError(f"no actor named {name!r} in this Dask cluster") from exc

    def kill(self, name: str) -> None:
        """Take an actor's name and its handle."""
        client = Client.current()
        try:
            future = self._run(client.get_dataset, name)
        except KeyError:
            return
        self._run(client.unpublish_dataset, name)
        self._run(client.cancel, [future], force=True)

    def restarted(self) -> bool:
        """Tell that no actor has two lives."""
        return False

    def call(self, actor: Any, method: str, *arguments: Any) -> Answer[tuple[BaseException | None, Any]]:
        """Send a call."""

        async def ask() -> Any:
            return await actor.invoke(method, *arguments)

        return asyncio.run_coroutine_threadsafe(ask(), Client.current().loop.asyncio_loop)

    def result(self, future: Answer[Any], timeout: float, who: str) -> Any:
        """Wait for an answer."""
        try:
            error, value = future.result(max(timeout, 0.0))
        except (TimeoutError, *_GONE) as exc:
            _translate(exc, timeout, who)
        if error is not None:
            raise error
        return value

    async def awaitable(self, future: Answer[Any], timeout: float, who: str) -> Any:
        """Wait for an answer on whatever loop."""
        try:
            error, value = await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except (TimeoutError, *_GONE) as exc:
            _translate(exc, timeout, who)
        if error is not None:
            raise error
        return value

    def put(self, block: np.ndarray) -> Future:
        """Keep a copy of a block in this worker's memory, or, for a client, in that of some worker."""
        kept = np.array(block)
        kept.flags.writeable = False
        return self._run(Client.current().scatter, kept, hash=False)

    def get(self, handles: Sequence[Future], timeout: float, who: str) -> list[np.ndarray]:
        """Fetch copies of blocks."""

        async def gather() -> Any:
            return await Client.current().gather(list(handles), asynchronous=True)

        waiting = asyncio.run_coroutine_threadsafe(gather(), Client.current().loop.asyncio_loop)
        try:
            blocks: list[np.ndarray] = waiting.result(max(timeout, 0.0))
        except TimeoutError as exc:
            _translate(exc, timeout, who)
        except _GONE as exc:
            raise ModelLostError(f"{who}: expected bytes in its memory; they went when it died ({exc})") from exc
        for block in blocks:
            block.flags.writeable = False
        return blocks

    def _hosts(self) -> dict[str, str]:
        return self._run(Client.current().run, socket.gethostname)

    def _run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call Dask with the worker that this process is in context: it forgets it in threads of others."""
        context = self.worker.copy() if self.worker is not None else contextvars.copy_context()
        return context.run(function, *arguments, **options)


class _Host:
    """What Dask sees as the actor: it gives the hosted one a loop per group and the blocks behind its arguments."""

    def __init__(self, cls: type, arguments: Mapping[str, Any]) -> None:
        get_client()  # from now on it is the current client of all threads of this process
        DaskEngine.worker = contextvars.copy_context()
        self._engine = DaskEngine()
        self._loops = {name: asyncio.new_event_loop() for name in GROUPS}
        for name, loop in self._loops.items():
            threading.Thread(target=loop.run_forever, name=f"group-{name}", daemon=True).start()
        self._hosted = cls(**arguments)

    async def invoke(self, method: str, *arguments: Any) -> tuple[BaseException | None, Any]:
        """Call the hosted actor; gives its error, or None and its answer."""
        blocks = [await _block(argument) for argument in arguments]
        bound = getattr(self._hosted, method)
        work = asyncio.run_coroutine_threadsafe(bound(*blocks), self._loops[bound.concurrency_group])
        ended = asyncio.wrap_future(work)
        await asyncio.wait([ended])
        error = ended.exception()
        return error, None if error is not None else ended.result()


async def _block(argument: Any) -> Any:
    """Give the block behind a handle; anything else is itself."""
    if not isinstance(argument, Future):
        return argument
    return await Client.current().gather(argument, asynchronous=True)


def _translate(exc: BaseException, timeout: float, who: str) -> NoReturn:
    """Raise what an error of Dask's means in the one tree."""
    if isinstance(exc, TimeoutError):
        raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; none came") from exc
    raise ShardUnavailableError(f"{who}: expected an answer; its actor is gone ({exc})") from exc
