"""The actor's end of the sockets by which callers reach it.

Rules
- Calls are carried out in the event loop in which the server is made: where the engine carries out the same methods.
- Who is let in, `Entrance` decides. A caller is served as long as it stays connected and keeps to the framing; a call
  whose caller has gone is brought to its end.
- A caller that leaves its answers unread is not read from, either, and takes bounded memory: what it sent stays with
  it, what it has under way is counted, and so are the bytes that wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from ....store.errors import TensorVineError
from .entrance import Entrance
from .framing import FULL, PING, AnswerTooLargeError, SocketAddress
from .incoming import Incoming, Message
from .refusals import Refusals
from .traffic import SHORT_CALLS, Packed, Traffic

log = logging.getLogger(__name__)


class CallServer:
    """Serves an actor's calls in the event loop in which it is made.

    Args:
        methods: what may be called -> its group.
        carry_out: carries out a call: of a method, with arguments.
        who: names the actor in the log.
        traffic: what its connections carry.

    Raises:
        OSError: no socket can be had.
    """

    def __init__(
        self,
        methods: Mapping[str, str],
        carry_out: Callable[[str, tuple[object, ...]], Awaitable[object]],
        who: str,
        traffic: Traffic = SHORT_CALLS,
    ) -> None:
        self.methods = methods
        self.traffic = traffic
        self.refusals = Refusals(f"{who}: its socket")
        self._carry_out = carry_out
        self._served: set[_Served] = set()
        self._welcoming: set[asyncio.Task[None]] = set()
        self._was_full = False
        self._entrances = [Entrance(self._admit, self.refusals)]
        self.address = self._entrances[0].address

    def address_at(self, host: str) -> SocketAddress:
        """Return where callers of other machines reach it.

        Args:
            host: this machine's address there.

        Raises:
            OSError: nothing can listen there.
        """
        for entrance in self._entrances:
            if entrance.address.place is not None and entrance.address.place[0] == host:
                return entrance.address
        self._entrances.append(Entrance(self._admit, self.refusals, host))
        return self._entrances[-1].address

    async def close(self) -> None:
        """End all connections, and the calls under way."""
        for entrance in self._entrances:
            entrance.close()
        await asyncio.gather(*self._welcoming, return_exceptions=True)
        for served in list(self._served):
            served.end()
        while self._served:  # each leaves in one of the loop's next rounds
            await asyncio.sleep(0)

    def left(self, served: _Served) -> None:
        """Take a connection out of the books."""
        self._served.discard(served)

    def _admit(self, visitor: socket.socket, welcome: bytes) -> None:
        """Take a connection into the books, if there is room for one."""
        if len(self._served) < self.traffic.connections:
            served = _Served(self, welcome)
            self._served.add(served)
            welcoming = asyncio.get_running_loop().create_task(self._welcome(served, visitor))
            self._welcoming.add(welcoming)
            welcoming.add_done_callback(self._welcoming.discard)
            return
        if not self._was_full:
            self._was_full = True
            log.warning(
                "sockets: %d connections are open, which is the limit: further ones are refused",
                self.traffic.connections,
            )
        with visitor, contextlib.suppress(OSError):
            visitor.send(FULL)

    async def _welcome(self, served: _Served, visitor: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: served, visitor)
        except BaseException:  # such as: it is cancelled, with all that its loop has begun
            visitor.close()
            self.left(served)
            raise

    async def answer(self, method: str, arguments: tuple[object, ...]) -> Packed:
        """Carry out a call, and return what to send."""
        try:
            if method not in self.methods:
                raise AttributeError(f"expected one of {sorted(self.methods)}; found {method!r}")
            outcome = True, await self._carry_out(method, arguments)
        except TensorVineError as exc:
            outcome = False, exc
        except Exception as exc:  # noqa: BLE001  raised again where it was asked
            exc.add_note("".join(traceback.format_exception(exc)))
            outcome = False, exc
        try:
            message = self.traffic.pack(outcome)
        except Exception as exc:  # noqa: BLE001  of any class's own making
            return self.traffic.pack((False, TypeError(f"{method}: its answer cannot be sent: {exc}")))
        if (size := len(message.pickled)) > self.traffic.answer_bytes:
            why = f"{method}: expected an answer of at most {self.traffic.answer_bytes} bytes by a socket; found {size}"
            return self.traffic.pack((False, AnswerTooLargeError(why)))
        return message


class _Served(asyncio.BufferedProtocol):
    """A connection, at the server. It has shown the secret."""

    def __init__(self, server: CallServer, welcome: bytes) -> None:
        self._server = server
        self._welcome = welcome
        self._incoming = Incoming(server.traffic.call_bytes, server.traffic.buffers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = dict.fromkeys(server.traffic.under_way, 0)
        """By group, as the caller counts them."""
        self._refused = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._welcome)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)

    def pause_writing(self) -> None:
        self._transport.pause_reading()  # who does not read its answers gets no further ones

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
            method, arguments = pickle.loads(pickled, buffers=buffers)  # noqa: S301  of who knows the secret
            group = self._server.methods.get(method, "ctl")
        except Exception as exc:  # noqa: BLE001  whatever the bytes make of it
            self._refuse(f"a call cannot be read, its connection is closed: {exc!r}")
            return
        if self._under_way[group] == (most := self._server.traffic.under_way[group]):
            self._refuse(f"expected at most {most} calls of {group!r} under way on a connection; found more")
            return
        self._under_way[group] += 1
        task = asyncio.get_running_loop().create_task(self._answer(number, group, method, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, group: str, method: str, arguments: tuple[object, ...]) -> None:
        answer = await self._server.answer(method, arguments)
        self._under_way[group] -= 1
        if self._refused or self._transport.is_closing():
            return
        unread = self._transport.get_write_buffer_size()
        if unread > self._server.traffic.unread_bytes:
            self._refuse(f"expected a caller that reads its answers; {unread} bytes of them are unread")
            return
        for part in answer.parts(number):
            self._transport.write(part)

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._transport.pause_reading()
        self._incoming.clear()
        asyncio.get_running_loop().call_later(self._server.refusals.note(reason), self._transport.abort)
