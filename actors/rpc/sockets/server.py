"""The actor's end of the sockets by which callers reach it past the engine (see `channel`).

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
from collections.abc import Mapping
from typing import cast

from ....store.errors import TensorVineError
from ...engine.engine import GROUPS
from ..calls import socket_methods
from ..refusals import Refusals
from .entrance import Entrance
from .framing import ANSWER_BYTES, FULL, HEADER, MESSAGE_BYTES, PING, AnswerTooLargeError, SocketAddress, first_of

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""That one server serves at once; more are sent back to the engine."""
UNREAD_BYTES = ANSWER_BYTES
"""Of answers that a caller may leave unread; with another answer its connection ends."""


class LazyServer:
    """Opens an actor's server when somebody asks for it first.

    Args:
        actor: whose; what it `answers` by socket may be called.
        who: names the actor in the log.
    """

    def __init__(self, actor: object, who: str) -> None:
        self._actor = actor
        self._who = who
        self._server: CallServer | None = None
        self._refused = set[str | None]()
        """Hosts at which no socket could be had; None stands for this machine."""
        self._closed = False

    def address(self, host: str | None = None) -> SocketAddress | None:
        """Return where it is; None where there can be none. To be called in the loop of the group `ctl`.

        Args:
            host: this machine's address, as other machines reach it, for callers there; None: for callers of this one.
        """
        if self._closed or host in self._refused:
            return None
        try:
            if self._server is None:
                self._server = CallServer(self._actor, self._who)
            return self._server.address if host is None else self._server.address_at(host)
        except OSError as exc:
            whose = "all calls" if host is None else "calls of other machines"
            log.warning("%s: no socket, %s go by the engine: %s", self._who, whose, exc)
            self._refused.add(host)
            return None

    async def close(self) -> None:
        """End all connections, for good. To be called in the loop of the group `ctl`."""
        server, self._server, self._closed = self._server, None, True
        if server is not None:
            await server.close()


class CallServer:
    """Serves an actor's short calls in the event loop in which it is made.

    Args:
        target: the actor.
        who: names the actor in the log.

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
    ...     server = CallServer(Doubling(), "an example")
    ...     caller = BlockingConnections(server.address)
    ...     answer = await asyncio.to_thread(lambda: caller.send(DoublingCalls.double(21)).result(10.0, "an example"))
    ...     caller.close()
    ...     await server.close()
    ...     return answer
    >>> asyncio.run(scene())
    42
    """

    def __init__(self, target: object, who: str) -> None:
        self.methods: Mapping[str, str] = socket_methods(type(target))
        """What may be called -> its group."""
        self.refusals = Refusals(f"{who}: its socket")
        self._target = target
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
        if len(self._served) < CONNECTIONS:
            served = _Served(self, welcome)
            self._served.add(served)
            welcoming = asyncio.get_running_loop().create_task(self._welcome(served, visitor))
            self._welcoming.add(welcoming)
            welcoming.add_done_callback(self._welcoming.discard)
            return
        if not self._was_full:
            self._was_full = True
            log.warning("sockets: %d connections are served: more calls than these go by the engine", CONNECTIONS)
        with visitor, contextlib.suppress(OSError):
            visitor.send(FULL)

    async def _welcome(self, served: _Served, visitor: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: served, visitor)
        except BaseException:  # such as: it is cancelled, with all that its loop has begun
            visitor.close()
            self.left(served)
            raise

    async def answer(self, method: str, arguments: tuple[object, ...]) -> bytes:
        """Carry out a call, and return what to send."""
        try:
            if method not in self.methods:
                raise AttributeError(f"expected one of {sorted(self.methods)}; found {method!r}")
            outcome = True, await getattr(self._target, method)(*arguments)
        except TensorVineError as exc:
            outcome = False, exc
        except Exception as exc:  # noqa: BLE001  raised again where it was asked
            exc.add_note("".join(traceback.format_exception(exc)))
            outcome = False, exc
        try:
            message = pickle.dumps(outcome, 5)
        except Exception as exc:  # noqa: BLE001  of any class's own making
            return pickle.dumps((False, TypeError(f"{method}: its answer cannot be sent: {exc}")), 5)
        if len(message) > ANSWER_BYTES:
            why = f"{method}: expected an answer of at most {ANSWER_BYTES} bytes by a socket; it has {len(message)}"
            return pickle.dumps((False, AnswerTooLargeError(why)), 5)
        return message


class _Served(asyncio.Protocol):
    """A connection, at the server. It has shown the secret."""

    def __init__(self, server: CallServer, welcome: bytes) -> None:
        self._server = server
        self._welcome = welcome
        self._buffer = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = dict.fromkeys(GROUPS, 0)
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

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while not self._refused and (found := first_of(self._buffer, MESSAGE_BYTES)) is not None:
                self._begin(*found)
        except ConnectionAbortedError as exc:
            self._refuse(str(exc))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._transport.abort()

    def _begin(self, number: int, message: bytes) -> None:
        if not number and not message:
            self._transport.write(PING)
            return
        try:
            method, arguments = pickle.loads(message)  # noqa: S301  of who knows the secret
            group = self._server.methods.get(method, "ctl")
        except Exception as exc:  # noqa: BLE001  whatever the bytes make of it
            self._refuse(f"a call cannot be read, its connection ends: {exc!r}")
            return
        if self._under_way[group] == GROUPS[group]:
            self._refuse(f"expected at most {GROUPS[group]} calls of {group!r} under way on a connection; found more")
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
        if unread > UNREAD_BYTES:
            self._refuse(f"expected a caller that reads its answers; {unread} bytes of them are unread")
            return
        self._transport.write(HEADER.pack(len(answer), number) + answer)

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._transport.pause_reading()
        self._buffer.clear()
        asyncio.get_running_loop().call_later(self._server.refusals.note(reason), self._transport.abort)
