"""Serve an actor: its sockets, and an event loop for each concurrency group.

Rules
- Each group's loop runs in a thread of its own; the socket server shares the loop of short calls (`ctl`).
- Methods are coroutines, and run in the loop of their group however they are called.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from ....store.logs import calling
from ..groups import GROUPS
from .framing import SocketAddress
from .server import CallServer

log = logging.getLogger(__name__)

START_S = 60.0
"""How long a busy machine may take to open the socket."""

_R = TypeVar("_R")


class Host:
    """Serves an actor until the process ends or `close` is called.

    Args:
        actor: has the methods.
        who: name of the actor in the log.

    Raises:
        OSError: the socket could not be opened.

    >>> class Counter:
    ...     async def add(self, number: int) -> int:
    ...         return 40 + number
    >>> host = Host(Counter(), "an example")
    >>> host.run("ctl", host.actor.add(2))
    42
    >>> host.close()
    """

    def __init__(self, actor: Any, who: str) -> None:
        self.actor = actor
        self._loops = {group: _running_loop(group) for group in GROUPS}
        others = {group: loop for group, loop in self._loops.items() if group != "ctl"}
        self._server = self.run("ctl", _served(actor, who, others))
        self.address = self._server.address

    def address_at(self, host: str) -> SocketAddress:
        """Return the address for callers of other machines; see `CallServer.address_at`."""

        async def opened() -> SocketAddress:
            return self._server.address_at(host)

        return self.run("ctl", opened())

    def loop_of(self, group: str) -> asyncio.AbstractEventLoop:
        """Return the event loop of a group."""
        return self._loops[group]

    def run(self, group: str, work: Coroutine[object, None, _R]) -> _R:
        """Run a coroutine in a group's loop, and wait for it in this thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loops[group]).result(START_S)

    def close(self) -> None:
        """End all connections, and the loops."""
        self.run("ctl", self._server.close())
        for loop in self._loops.values():
            loop.call_soon_threadsafe(loop.stop)


@cache
def methods_of(cls: type) -> Mapping[str, str]:
    """Return the methods that actors of a class can be called by -> their concurrency group."""
    found = inspect.getmembers(cls, inspect.iscoroutinefunction)
    return {name: getattr(method, "concurrency_group", "ctl") for name, method in found}


async def _served(actor: Any, who: str, loops: Mapping[str, asyncio.AbstractEventLoop]) -> CallServer:
    def called(method: str, given: Sequence[object]) -> Coroutine[object, None, object]:
        return calling(method, given, getattr(actor, method)(*given))

    return CallServer(methods_of(actor.__class__), called, who, loops)


def _running_loop(group: str) -> asyncio.AbstractEventLoop:
    """Start an event loop in a daemon thread: one of uvloop where that is installed, which answers sooner."""
    try:
        import uvloop
    except ModuleNotFoundError:
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name=f"group-{group}", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left))
    loop.close()
