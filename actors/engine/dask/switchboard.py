"""Connections of one engine to the directory and to owners of blocks, in an event loop of its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ..sockets.framing import SocketAddress
from ..sockets.lines import Line
from ..sockets.packing import Packed
from ..sockets.server import CallServer
from .blocks import GROUP, Owner
from .records import Reach

LONGEST_S = 300.0
"""How long the directory may take in all, where the agents of a large cluster are to be started first."""

LOOK_S = 1.0
"""How often it is looked whether a client is open: Dask tells nobody that it closes one."""

_R = TypeVar("_R")


class DirectoryLink(Protocol):
    """Asks the directory; to be used in one event loop."""

    async def ask(self, method: str, *arguments: object) -> object:
        """Return the directory's answer.

        Raises:
            ShardUnavailableError: it does not answer.
            Exception: what it raised.
        """
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


class Switchboard:
    """Connections to the directory and to owners of blocks.

    Args:
        link: makes what asks the directory; called in the event loop.
        is_open: whether the client is that it works for, and ends with; None: it works until `close`.
    """

    def __init__(self, link: Callable[[], DirectoryLink], is_open: Callable[[], bool] | None = None) -> None:
        self.node: str | None = None
        """Where this process is; there it is near."""
        self._is_open = is_open
        self._owners: dict[str, Line] = {}
        self._server: CallServer | None = None
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        made: Future[DirectoryLink] = Future()
        self._thread = threading.Thread(target=self._work, args=(link, made), name="tensorvine-engine", daemon=True)
        self._thread.start()
        self._link = made.result(LONGEST_S)

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(RuntimeError):  # its client was closed, and so it has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(LONGEST_S)

    def ask(self, method: str, *arguments: object) -> Any:
        """Ask the directory; see `DirectoryLink.ask`."""
        return self._run(self._link.ask(method, *arguments))

    def call_owner(self, owner: Owner, message: Packed) -> Future[Any]:
        """Send a call to a process that has blocks; does not wait."""
        answer: Future[Any] = Future()
        self._loop.call_soon_threadsafe(lambda: self._line(owner).send(message, answer))
        return answer

    def serve(self, carry_out: Callable[[str, tuple[object, ...]], Awaitable[object]], host: str) -> Reach:
        """Have callers get blocks of this process.

        Args:
            carry_out: carries out the call `block`.
            host: this machine's address.
        """
        return self._run(self._serve(carry_out, host))

    def _run(self, coroutine: Coroutine[object, None, _R]) -> _R:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LONGEST_S)

    def _work(self, make: Callable[[], DirectoryLink], made: Future[DirectoryLink]) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._until_closed(make, made))

    async def _until_closed(self, make: Callable[[], DirectoryLink], made: Future[DirectoryLink]) -> None:
        try:
            link = make()
        except BaseException as exc:  # noqa: BLE001  raised where the link is waited for
            made.set_exception(exc)
            return
        made.set_result(link)
        while self._is_open is None or self._is_open():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self._is_open is not None else None):
                    await self._closing.wait()
                break
        await self._end(link)

    def _line(self, owner: Owner) -> Line:
        async def found() -> list[SocketAddress]:
            return owner.reach.addresses(is_near=owner.node == self.node)

        if owner.id not in self._owners:
            self._owners[owner.id] = Line(found)
        return self._owners[owner.id]

    async def _serve(self, carry_out: Callable[[str, tuple[object, ...]], Awaitable[object]], host: str) -> Reach:
        self._server = CallServer({"block": GROUP}, carry_out, "blocks")
        return Reach(self._server.address, self._server.address_at(host))

    async def _end(self, link: DirectoryLink) -> None:
        for line in self._owners.values():
            line.close()
        if self._server is not None:
            await self._server.close()
        await link.close()
        await asyncio.sleep(0)  # what was closed ends in the loop's next round
