"""A spike: Dask's actors behind the engine seam. It shows that the seam fits; it is no engine to run jobs on.

How it fits
- A name is a published dataset that holds an actor's future: it outlives its starter, and of two starters one wins.
- A hosted actor has one event loop, in a thread of its own, per concurrency group. Dask by itself awaits all
  asynchronous methods of all actors of a worker on the worker's one loop, and runs all others in one thread.
- A block stays in the process that put it as long as its handle there lives. An actor's handle travels as its
  actor's address and a key; a client, which nobody can call, sends the bytes themselves.

What does not fit (see docs/design/engine.md)
- An actor is never restarted: `restarted` is always False. A call to one that just died waits for Dask's timeout of
  connecting (`distributed.comm.timeouts.connect`, 30 s by default) until it fails.
- `kill` ends an actor, not its process, which others share: its threads go on, and calls in flight are still answered.
- There is no shared-memory object store: `put` copies within a process, `get` copies through a socket.
- A borrowed handle does not keep a block: Dask counts futures, but not those in messages of actors.
- The limits in `GROUPS` are not enforced.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from distributed import Actor, Client, get_client, get_worker
from tensorvine.actors.engine.engine import GROUPS, SERVICE, Lifetime, Node
from tensorvine.store.errors import ModelLostError, OperationTimeoutError, ShardUnavailableError, TensorVineError

START_TIMEOUT_S = 30.0

_GONE = (OSError, RuntimeError, KeyError)
"""What Dask raises for an actor that is no more. Errors of actors' methods come as answers, not as these."""
_Answer = concurrent.futures.Future[tuple[BaseException | None, Any]]


class DaskEngine:
    """The engine on Dask; a `Client` made with `direct_to_workers=True` must be this process's current one."""

    def __init__(self) -> None:
        self.host: Actor | None = None
        """The actor that this engine was given to; None in a client."""
        self.blocks: WeakValueDictionary[str, _Block] = WeakValueDictionary()
        """Those that were put here and whose handles live."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return DaskEngine, ()

    def nodes(self) -> list[Node]:
        workers = Client.current().scheduler_info(-1)["workers"]
        room: dict[str, int] = {}
        for address, machine in self._machines().items():
            room[machine] = room.get(machine, 0) + int(workers[address]["memory_limit"])
        here = self.this_node()
        return sorted((Node(machine, size) for machine, size in room.items()), key=lambda n: (n.id != here, n.id))

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        return True  # Dask knows of no memory that is set aside

    def unreserve(self, name: str) -> None: ...

    def reserved(self, prefix: str) -> dict[str, str | None]:
        return {}

    def this_node(self) -> str:
        return socket.gethostname()

    def address(self) -> str:
        return "127.0.0.1"  # a cluster of one machine

    def spawn(
        self, cls: type, name: str, arguments: Mapping[str, Any], node: str | None = None, lifetime: Lifetime = SERVICE
    ) -> Actor:
        """Start or find a published actor, whose `lifetime` is Dask's; Dask picks the worker with the fewest actors."""
        client = Client.current()
        if name in client.list_datasets():
            return self.find(name)
        workers = [address for address, machine in self._machines().items() if machine == node]
        place: dict[str, Any] = {"workers": workers, "allow_other_workers": True} if workers else {}
        key = f"{name}-{uuid.uuid4().hex}"
        future = client.submit(_Host, cls, dict(arguments), key, actor=True, key=key, **place)
        try:
            client.publish_dataset(future, name=name)
        except KeyError:  # another starter was faster; ours goes with its last future
            return self.find(name)
        return future.result(timeout=START_TIMEOUT_S)

    def find(self, name: str) -> Actor:
        try:
            return Client.current().get_dataset(name).result(timeout=START_TIMEOUT_S)
        except _GONE as exc:
            raise LookupError(f"no actor named {name!r} in this Dask cluster") from exc

    def kill(self, name: str) -> None:
        """Take an actor's name and have it answer no more; Dask drops it with its last handle."""
        try:
            actor = self.find(name)
        except LookupError:
            return
        Client.current().unpublish_dataset(name)
        _soon(actor.close).result(START_TIMEOUT_S)

    def restarted(self) -> bool:
        return False

    def keep(self, name: str, value: bytes | None) -> None:
        """Keep it in the scheduler, without which nothing runs."""
        Client.current().set_metadata(["tensorvine", name], value)

    def kept(self, prefix: str) -> dict[str, bytes]:
        known = Client.current().get_metadata(["tensorvine"], default={})
        return {name: value for name, value in known.items() if name.startswith(prefix) and value is not None}

    def call(self, actor: Actor, method: str, *arguments: Any) -> _Answer:
        return _soon(lambda: actor.invoke(method, *arguments))

    def result(self, future: _Answer, timeout: float, who: str) -> Any:
        with _translated(timeout, who, ShardUnavailableError):
            answer = future.result(max(timeout, 0.0))
        return _opened(answer)

    async def awaitable(self, future: _Answer, timeout: float, who: str) -> Any:
        with _translated(timeout, who, ShardUnavailableError):
            answer = await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        return _opened(answer)

    def put(self, block: np.ndarray) -> _Block:
        """Keep a copy of a block in this process."""
        kept = _Block(np.array(block), self.host, uuid.uuid4().hex)
        kept.array.flags.writeable = False
        self.blocks[kept.key] = kept
        return kept

    def get(self, handles: Sequence[Any], timeout: float, who: str) -> list[np.ndarray]:
        """Fetch blocks: those of this process as they are, others as copies."""

        async def all_of_them() -> list[np.ndarray]:
            return await asyncio.gather(*map(_block, handles))

        with _translated(timeout, who, ModelLostError):
            return _soon(all_of_them).result(max(timeout, 0.0))

    def _machines(self) -> dict[str, str]:
        """Return each worker's address and machine."""
        return Client.current().run(socket.gethostname)


class _Host:
    """What Dask sees as the actor: it gives the hosted one a loop per group and the blocks behind its arguments."""

    def __init__(self, cls: type, arguments: Mapping[str, Any], key: str) -> None:
        get_client()  # from now on it is the current client of all threads of this process
        self._engine: DaskEngine = arguments["engine"]
        self._engine.host = Actor(_Host, get_worker().address, key)
        self._loops = {name: asyncio.new_event_loop() for name in GROUPS}
        for name, loop in self._loops.items():
            threading.Thread(target=loop.run_forever, name=f"group-{name}", daemon=True).start()
        self._closed = False
        self._hosted = cls(**arguments)

    async def invoke(self, method: str, *arguments: Any) -> tuple[BaseException | None, Any]:
        """Call the hosted actor; gives its error, or None and its answer."""
        if self._closed:
            raise RuntimeError("it was killed")
        given = [await _block(argument) if isinstance(argument, _Handle) else argument for argument in arguments]
        bound = getattr(self._hosted, method)
        started = asyncio.run_coroutine_threadsafe(bound(*given), self._loops[bound.concurrency_group])
        ended = asyncio.wrap_future(started)
        await asyncio.wait([ended])
        error = ended.exception()
        return error, None if error is not None else ended.result()

    async def close(self) -> None:
        self._closed = True

    async def block(self, key: str) -> np.ndarray:
        return self._engine.blocks[key].array


@dataclass(frozen=True, slots=True)
class _Handle:
    """A block of another process."""

    owner: Actor
    key: str


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class _Block:
    """A block of this process, which lives as long as this."""

    array: np.ndarray
    owner: Actor | None
    key: str

    def __reduce__(self) -> tuple[Any, ...]:
        return (np.asarray, (self.array,)) if self.owner is None else (_Handle, (self.owner, self.key))


async def _block(handle: Any) -> np.ndarray:
    """Return the bytes behind a handle, read-only."""
    if isinstance(handle, _Block):
        return handle.array
    array: np.ndarray = await handle.owner.block(handle.key) if isinstance(handle, _Handle) else handle
    array.flags.writeable = False
    return array


def _soon(function: Callable[[], Awaitable[Any]]) -> concurrent.futures.Future[Any]:
    """Have Dask's loop call and await `function`: its proxies of actors work only there."""

    async def run() -> Any:
        return await function()

    return asyncio.run_coroutine_threadsafe(run(), Client.current().loop.asyncio_loop)


def _opened(answer: tuple[BaseException | None, Any]) -> Any:
    error, value = answer
    if error is not None:
        raise error
    return value


@contextmanager
def _translated(timeout: float, who: str, gone: type[TensorVineError]) -> Iterator[None]:
    """Raise what an error of Dask's means in the one tree."""
    try:
        yield
    except TimeoutError as exc:
        raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; none came") from exc
    except _GONE as exc:
        raise gone(f"{who}: expected an answer; its actor is gone ({exc})") from exc
