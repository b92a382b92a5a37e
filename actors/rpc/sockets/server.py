"""The actor's end of the sockets by which callers of its machine reach it (see `channel`).

Rules
- Calls are carried out in the event loop in which the server is made: where the engine carries out the same methods.
- A caller is served as long as it stays connected; a call whose caller has gone is brought to its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import socket
import traceback
from typing import cast

from ....store.errors import TensorVineError
from ..calls import socket_methods
from .framing import FULL, HEADER, WELCOME, SocketAddress, credentials, first_of

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""That one server serves at once; more are sent back to the engine."""


class LazyServer:
    """Opens an actor's server when somebody of its machine asks for it first.

    Args:
        actor: whose; what it `answers` by socket may be called.
        who: names the actor in the log.
    """

    def __init__(self, actor: object, who: str) -> None:
        self._actor = actor
        self._who = who
        self._server: CallServer | None = None
        self._refused = False

    def address(self) -> SocketAddress | None:
        """Return where it is; None where there can be none. To be called in the loop of the group `ctl`."""
        if self._server is None and not self._refused:
            try:
                self._server = CallServer(self._actor)
            except OSError as exc:
                log.warning("%s: no socket, all calls go by the engine: %s", self._who, exc)
                self._refused = True
        return self._server.address if self._server is not None else None


class CallServer:
    """Serves an actor's short calls in the event loop in which it is made.

    Args:
        target: the actor.

    Raises:
        OSError: no socket can be had.

    >>> from .blocking import BlockingConnections
    >>> from ..calls import answers, remote
    >>> class DoublingCalls:
    ...     @remote("ctl")
    ...     def double(self, value: int) -> int: ...
    >>> class Doubling:
    ...     @answers(DoublingCalls.double)
    ...     async def double(self, value: int) -> int:
    ...         return 2 * value
    >>> async def scene() -> int:
    ...     server = CallServer(Doubling())
    ...     caller = BlockingConnections(server.address)
    ...     answer = await asyncio.to_thread(lambda: caller.send(DoublingCalls.double(21)).result(10.0, "an example"))
    ...     caller.close()
    ...     await server.close()
    ...     return answer
    >>> asyncio.run(scene())
    42
    """

    def __init__(self, target: object) -> None:
        name = f"tensorvine-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self.address = SocketAddress(name, os.getpid())
        self._methods = socket_methods(type(target))
        self._target = target
        self._served: set[_Served] = set()
        self._was_full = False
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(loop.create_unix_server(lambda: _Served(self), sock=self._listener))

    async def close(self) -> None:
        """End all connections, and the calls under way."""
        server = await self._opening
        server.close()
        for served in list(self._served):
            served.end()
        while self._served:  # each leaves in one of the loop's next rounds
            await asyncio.sleep(0)

    def joined(self, served: _Served) -> bool:
        """Take a connection into the books, if there is room for one."""
        if len(self._served) >= CONNECTIONS:
            if not self._was_full:
                self._was_full = True
                log.warning("sockets: %d connections are served: more calls than these go by the engine", CONNECTIONS)
            return False
        self._served.add(served)
        return True

    def left(self, served: _Served) -> None:
        """Take a connection out of the books."""
        self._served.discard(served)

    async def answer(self, method: str, arguments: tuple[object, ...]) -> bytes:
        """Carry out a call, and return what to send."""
        try:
            if method not in self._methods:
                raise AttributeError(f"expected one of {sorted(self._methods)}; found {method!r}")
            outcome = True, await getattr(self._target, method)(*arguments)
        except TensorVineError as exc:
            outcome = False, exc
        except Exception as exc:  # noqa: BLE001  raised again where it was asked
            exc.add_note("".join(traceback.format_exception(exc)))
            outcome = False, exc
        try:
            return pickle.dumps(outcome, 5)
        except Exception as exc:  # noqa: BLE001  of any class's own making
            return pickle.dumps((False, TypeError(f"{method}: its answer cannot be sent: {exc}")), 5)


class _Served(asyncio.Protocol):
    """A connection, at the server."""

    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        _, user, _ = credentials(transport.get_extra_info("socket"))
        if user != os.geteuid():
            log.warning("sockets: a process of user %d is refused", user)
            transport.close()
        elif self._server.joined(self):
            transport.write(WELCOME)
        else:
            transport.write(FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (found := first_of(self._buffer)) is not None:
            number, message = found
            try:
                method, arguments = pickle.loads(message)  # noqa: S301  of the same user
            except Exception as exc:  # noqa: BLE001  whatever the bytes make of it
                log.warning("sockets: a call cannot be read, its connection ends: %r", exc)
                self._transport.close()
                return
            task = asyncio.get_running_loop().create_task(self._answer(number, method, arguments))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._transport.abort()

    async def _answer(self, number: int, method: str, arguments: tuple[object, ...]) -> None:
        answer = await self._server.answer(method, arguments)
        if not self._transport.is_closing():
            self._transport.write(HEADER.pack(len(answer), number) + answer)
