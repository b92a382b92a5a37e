"""The actor's end of the sockets by which callers reach it.

Rules
- The server's event loop reads calls and writes answers. A call runs in the event loop of its concurrency group, at
  most `GROUPS[group]` of them at once, so that a slow group delays no other.
- `Entrance` authenticates callers. A connection is served until it ends or breaks the format. A call whose caller has
  disconnected runs to its end.
- A caller that does not read its answers is not read from until it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import cast

from ....store.errors import TensorVineError
from ..groups import GROUPS
from .entrance import Entrance
from .framing import FULL, PING, SocketAddress
from .incoming import Incoming, Message
from .packing import Packed, pack
from .refusals import Refusals

log = logging.getLogger(__name__)

CONNECTIONS = 8192
"""Most connections that a server accepts at once."""


class CallServer:
    """Serves an actor's calls, from the event loop in which it is made.

    Args:
        methods: name of each method that may be called -> its concurrency group.
        carry_out: runs a method with arguments.
        who: name of the actor in the log.
        loops: event loop of each group that has another one than the server.

    Raises:
        OSError: the socket could not be opened.
    """

    def __init__(
        self,
        methods: Mapping[str, str],
        carry_out: Callable[[str, tuple[object, ...]], Awaitable[object]],
        who: str,
        loops: Mapping[str, asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self.refusals = Refusals(f"{who}: its socket")
        self._methods = methods
        self._carry_out = carry_out
        self._loops = loops or {}
        self._places = {group: asyncio.Semaphore(most) for group, most in GROUPS.items()}
        self._served: set[_Served] = set()
        self._welcoming: set[asyncio.Task[None]] = set()
        self._was_full = False
        self._entrances = [Entrance(self._admit, self.refusals)]
        self.address = self._entrances[0].address

    def address_at(self, host: str) -> SocketAddress:
        """Return the address for callers of other machines; listen there from now on.

        Args:
            host: address of an interface of this machine.

        Raises:
            OSError: the port could not be opened.
        """
        for entrance in self._entrances:
            if entrance.address.place is not None and entrance.address.place[0] == host:
                return entrance.address
        self._entrances.append(Entrance(self._admit, self.refusals, host))
        return self._entrances[-1].address

    async def close(self) -> None:
        """End all connections, and cancel the calls that run."""
        for entrance in self._entrances:
            entrance.close()
        await asyncio.gather(*self._welcoming, return_exceptions=True)
        for served in list(self._served):
            served.end()
        while self._served:  # each leaves in one of the loop's next rounds
            await asyncio.sleep(0)

    def left(self, served: _Served) -> None:
        """Forget a connection that has ended."""
        self._served.discard(served)

    def _admit(self, visitor: socket.socket, welcome: bytes) -> None:
        if len(self._served) < CONNECTIONS:
            served = _Served(self, welcome)
            self._served.add(served)
            welcoming = asyncio.get_running_loop().create_task(self._welcome(served, visitor))
            self._welcoming.add(welcoming)
            welcoming.add_done_callback(self._welcoming.discard)
            return
        if not self._was_full:
            self._was_full = True
            log.warning(
                "sockets: %d connections are open, which is the limit: new ones are refused until clients are closed",
                CONNECTIONS,
            )
        with visitor, contextlib.suppress(OSError):
            visitor.send(FULL)

    async def _welcome(self, served: _Served, visitor: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: served, visitor)
        except BaseException:  # such as a cancellation
            visitor.close()
            self.left(served)
            raise

    async def answer(self, method: str, arguments: tuple[object, ...]) -> Packed:
        """Run a call in its group's loop, and return its packed answer."""
        group = self._methods.get(method)
        if group is None:
            return pack((False, AttributeError(f"expected one of {sorted(self._methods)}; found {method!r}")))
        async with self._places[group]:
            call = self._answer(method, arguments)
            loop = self._loops.get(group)
            return await (call if loop is None else _run_in(loop, call))

    async def _answer(self, method: str, arguments: tuple[object, ...]) -> Packed:
        try:
            outcome = True, await self._carry_out(method, arguments)
        except TensorVineError as exc:
            outcome = False, exc
        except Exception as exc:  # noqa: BLE001  raised again at the caller
            exc.add_note("".join(traceback.format_exception(exc)))
            outcome = False, exc
        try:
            return pack(outcome)
        except Exception as exc:  # noqa: BLE001  of any class's own making
            return pack((False, TypeError(f"{method}: its answer cannot be sent: {exc}")))


class _Served(asyncio.BufferedProtocol):
    """A connection to an authenticated caller."""

    def __init__(self, server: CallServer, welcome: bytes) -> None:
        self._server = server
        self._welcome = welcome
        self._incoming = Incoming()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._welcome)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if not self._refused:
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.came(nbytes)
        try:
            while not self._refused and (found := self._incoming.first()) is not None:
                self._begin(found)
        except ConnectionAbortedError as exc:
            self._refuse(str(exc))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._transport.abort()

    def _begin(self, message: Message) -> None:
        number, pickled, buffers = message
        if not number and not pickled:
            self._transport.write(PING)
            return
        try:
            method, arguments = _call_of(pickle.loads(pickled, buffers=buffers))  # noqa: S301  the caller knows the secret
        except (pickle.UnpicklingError, EOFError) as exc:
            self._refuse(f"a call cannot be read, its connection is closed: {exc!r}")
            return
        except Exception as exc:  # noqa: BLE001  such as the class of an argument that this process cannot import
            self._send(
                number, pack((False, TypeError(f"expected arguments that the actor can unpickle; found {exc!r}")))
            )
            return
        task = asyncio.get_running_loop().create_task(self._answer(number, method, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, arguments: tuple[object, ...]) -> None:
        self._send(number, await self._server.answer(method, arguments))

    def _send(self, number: int, answer: Packed) -> None:
        if not (self._refused or self._transport.is_closing()):
            for part in answer.parts(number):
                self._transport.write(part)

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._transport.pause_reading()
        self._incoming.clear()
        asyncio.get_running_loop().call_later(self._server.refusals.note(reason), self._transport.abort)


def _call_of(content: object) -> tuple[str, tuple[object, ...]]:
    """Return the method and the arguments of an unpickled call.

    Raises:
        pickle.UnpicklingError: it is no call.
    """
    match content:
        case (str() as method, tuple()):
            return method, cast(tuple[object, ...], content[1])
        case _:
            raise pickle.UnpicklingError(f"expected a method's name and its arguments; found {type(content).__name__}")


async def _run_in(loop: asyncio.AbstractEventLoop, call: Coroutine[object, None, Packed]) -> Packed:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))
