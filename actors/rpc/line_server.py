"""The actor's end of its lines: it carries out what callers of its machine send (see `line`).

Rules
- Calls are carried out in the event loop in which the server is made: where the engine carries out the same methods.
- Whoever calls is served as long as it stays connected; a call whose caller has gone is brought to its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import socket
import traceback
from typing import Any

from ...store.errors import TensorVineError
from ..engine.engine import methods_by_line
from .line import FULL, HEADER, WELCOME, LineAddress, credentials, first_of

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""That one server serves at once; more are sent back to the engine."""


class LineDoor:
    """Opens an actor's line when somebody of its machine asks for it first.

    Args:
        actor: whose; see `engine.group` for which of its methods may be called.
        who: names the actor in the log.
    """

    def __init__(self, actor: Any, who: str) -> None:
        self._actor = actor
        self._who = who
        self._server: LineServer | None = None
        self._refused = False

    def address(self) -> LineAddress | None:
        """Return where the line is; None where there can be none. To be called in the loop of the group `ctl`."""
        if self._server is None and not self._refused:
            try:
                self._server = LineServer(self._actor, methods_by_line(type(self._actor)))
            except OSError as exc:
                log.warning("%s: no line, all calls go by the engine: %s", self._who, exc)
                self._refused = True
        return self._server.address if self._server is not None else None


class LineServer:
    """Serves an actor's short calls in the event loop in which it is made.

    Args:
        target: the actor.
        methods: which of its coroutine methods.

    Raises:
        OSError: no socket can be had.

    >>> from .line import Line
    >>> class Doubling:
    ...     async def double(self, value: int) -> int:
    ...         return 2 * value
    >>> async def scene() -> int:
    ...     server = LineServer(Doubling(), frozenset({"double"}))
    ...     line = Line(server.address)
    ...     found = await asyncio.to_thread(lambda: line.send("double", (21,)).result(10.0, "an example"))
    ...     line.close()
    ...     await server.close()
    ...     return found
    >>> asyncio.run(scene())
    42
    """

    def __init__(self, target: Any, methods: frozenset[str]) -> None:
        name = f"tensorvine-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self.address = LineAddress(name, os.getpid(), methods)
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
                log.warning("line: %d connections are served: more calls than these go by the engine", CONNECTIONS)
            return False
        self._served.add(served)
        return True

    def left(self, served: _Served) -> None:
        """Take a connection out of the books."""
        self._served.discard(served)

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> bytes:
        """Carry out a call, and give what to send."""
        try:
            if method not in self.address.methods:
                raise AttributeError(f"expected one of {sorted(self.address.methods)}; found {method!r}")
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

    def __init__(self, server: LineServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        _, user, _ = credentials(transport.get_extra_info("socket"))
        if user != os.geteuid():
            log.warning("line: a process of user %d is refused", user)
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
                log.warning("line: a call cannot be read, its connection ends: %r", exc)
                self._transport.close()
                return
            task = asyncio.get_running_loop().create_task(self._answer(number, method, arguments))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._transport.abort()

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        answer = await self._server.answer(method, arguments)
        if not self._transport.is_closing():
            self._transport.write(HEADER.pack(len(answer), number) + answer)
