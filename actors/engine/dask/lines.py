"""Lines: the connections of a process to actors, one for each concurrency group, and to owners of blocks.

Rules
- Calls of a line are sent in the order in which they came, also those that wait for its connection.
- Where an actor is, the directory says before each connection to it. While it starts for the first time, calls wait. A
  directory that does not answer stops no calls to an actor that was reached before.
- A connection that ends takes its calls with it: they are `LostError`, which says why, and who waits names the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeAlias, cast

from ....store.errors import ShardUnavailableError
from ....store.waiting import Backoff
from ..sockets.awaited import AwaitedConnection, ConnectionEndedError, connected
from ..sockets.framing import SocketAddress
from ..sockets.traffic import Packed
from .records import Reach, Standing, State
from .traffic import ENGINE_CALLS

CROWDED_S = 30.0
"""How long a process may leave those that want to connect waiting at its door."""

Answer: TypeAlias = Future[Any]


class LostError(Exception):
    """Who was called has ended, or is not there; says why."""


class Line:
    """A connection, which is made when it is needed; to be used in one event loop.

    Args:
        group: of the calls.
        find: says where to connect to, in the order in which to try; its errors are those of the calls.
    """

    def __init__(self, group: str, find: Callable[[str], Awaitable[Sequence[SocketAddress]]]) -> None:
        self._group = group
        self._find = find
        self._connection: AwaitedConnection | None = None
        self._waiting: deque[tuple[Packed, Answer]] = deque()
        self._connecting: asyncio.Task[None] | None = None

    def send(self, message: Packed, answer: Answer) -> None:
        """Send a call; its answer is set when it comes."""
        if self._connecting is None and self._connection is not None and self._connection.open:
            _send(self._connection, self._group, message, answer)
            return
        self._waiting.append((message, answer))
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def close(self) -> None:
        """End the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    async def _connect(self) -> None:
        try:
            self._connection = connection = await self._reached()
        except asyncio.CancelledError:
            self._fail(LostError("the engine was closed"))
            raise
        except Exception as exc:  # noqa: BLE001  of the calls that wait
            self._fail(exc)
        else:
            while self._waiting:
                _send(connection, self._group, *self._waiting.popleft())
        finally:
            self._connecting = None

    async def _reached(self) -> AwaitedConnection:
        reason: OSError | None = None
        for address in await self._find(self._group):
            try:
                return await _let_in(address)
            except OSError as exc:
                reason = exc
        raise LostError(f"it does not answer at its last address: {reason}")

    def _fail(self, error: Exception) -> None:
        while self._waiting:
            _settle(self._waiting.popleft()[1], error=error)


class Callee:
    """The lines to one actor.

    Args:
        key: the actor's.
        ask: asks the directory.
        here: tells this process's node; None: it is on none.
    """

    def __init__(self, key: str, ask: Callable[..., Awaitable[object]], here: Callable[[], str | None]) -> None:
        self._key = key
        self._ask = ask
        self._here = here
        self._lines: dict[str, Line] = {}
        self._last: Standing | None = None
        """Where the actor ran when it was looked up last."""

    def send(self, group: str, message: Packed, answer: Answer) -> None:
        """Send a call of a concurrency group."""
        if group not in self._lines:
            self._lines[group] = Line(group, self._find)
        self._lines[group].send(message, answer)

    async def close(self) -> None:
        """End the connections."""
        for line in self._lines.values():
            await line.close()

    async def _find(self, group: str) -> Sequence[SocketAddress]:
        try:
            standing = cast(Standing, await self._ask("where", self._key))
            while standing.state is State.STARTING:
                standing = cast(Standing, await self._ask("where", self._key))
        except ShardUnavailableError as exc:
            if self._last is None:
                raise LostError(f"its address is unknown: {exc}") from exc
            standing = self._last
        if standing.error is not None:
            raise pickle.loads(standing.error)  # noqa: S301  of the actor's process
        if standing.reach is None:
            raise LostError(standing.why or "it died and is being restarted")
        self._last = standing
        return addresses(standing.reach, group, is_near=standing.node == self._here())


def addresses(reach: Reach, group: str, *, is_near: bool) -> list[SocketAddress]:
    """Return where to call a process, the best way first."""
    return [*([reach.near[group]] if is_near else []), reach.away[group]]


async def _let_in(address: SocketAddress) -> AwaitedConnection:
    """Connect, and wait where others do before."""
    pauses = Backoff(0.01, 0.5)
    async with asyncio.timeout(CROWDED_S):
        while True:
            with contextlib.suppress(BlockingIOError):
                return await connected(address, ENGINE_CALLS)
            await pauses.wait_async()


def _send(connection: AwaitedConnection, group: str, message: Packed, answer: Answer) -> None:
    coming = connection.send_packed(message, group, "it")
    if coming is None:
        _settle(answer, error=LostError("it died or is being restarted"))
        return
    coming.add_done_callback(lambda came: _settle(answer, came))


def _settle(answer: Answer, came: asyncio.Future[object] | None = None, error: BaseException | None = None) -> None:
    """Give an answer to who waits for it, if somebody still does."""
    with contextlib.suppress(InvalidStateError):
        if came is not None and came.cancelled():
            error = LostError("the engine was closed")
        elif came is not None:
            found = came.exception()
            if found is None:
                answer.set_result(came.result())
                return
            error = LostError(str(found)) if isinstance(found, ConnectionEndedError) else found
        answer.set_exception(error)
