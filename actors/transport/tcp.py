"""Blocks of segments over TCP, from the process that has them to one that does not share its memory.

Rules
- Needs `store/`, the standard library and NumPy: an edge consumer imports it without any engine.
- One verb: read slots of segments; `frames` says how, and `tcp_server` is the other side. Bytes are received straight
  into the memory where they stay, which the client's `Target` names.
- No thread of a read is at work when it has returned or raised: the memory may be somebody else's then.
- What goes wrong at the server is raised again here. A connection that cannot be made, ends or breaks is
  `ShardUnavailableError`: another transport may work. The first is `UnreachableError`.
- The kernel ends a connection whose other machine confirms nothing for 20 s (`framing.watch`), so a network that is cut
  does not keep a read until its timeout.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace

from ...store.errors import CorruptDataError, OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.segments.segment import SegmentId
from ...store.versions.manifest import digest_of
from ...store.waiting import Deadline
from ..engine.opened import Opened
from ..engine.sockets.framing import watch
from ..memory.buffers import Buffers
from ..rpc.greetings import credential
from .frames import (
    MESSAGE_BYTES,
    Asked,
    Received,
    accepted,
    digests_of,
    fill,
    message,
    receive,
    rows_of,
    send,
)
from .targets import NewMemory, Target, received

log = logging.getLogger(__name__)

CONNECT_S = 5.0
LANES_FROM = 4
"""From so many segments on, two connections share a read: each end has a core for each."""
_GONE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""The kernel's errors of a connection to a machine that it cannot reach."""


class UnreachableError(ShardUnavailableError):
    """No connection to a server could be made: it is not there, or does not greet who asks."""


class TcpClient:
    """Reads from one server. It connects when it is first asked, and may be used by several threads.

    Args:
        address: (host, port) of the server.
        token: the server's.
        timeout: seconds to wait for a connection.
        target: where what arrives is put; None: in new memory.

    >>> import numpy as np
    >>> from .frames import Served
    >>> from .tcp_server import TcpServer
    >>> block = np.arange(100, dtype=np.uint8)
    >>> server = TcpServer(lambda slots, timeout, hashed: ({(0, 7): Served(block, {2: (64, 3)})}, None), "127.0.0.1")
    >>> client = TcpClient(server.address, server.token)
    >>> found = client.read({(0, 7): [2]}, timeout=10.0, what="an example")[(0, 7)]
    >>> start = found.offsets[2]
    >>> found.block[start : start + 3].tolist()
    [64, 65, 66]
    >>> client.close(), server.close()
    (None, None)
    """

    def __init__(
        self, address: tuple[str, int], token: str, timeout: float = CONNECT_S, target: Target | None = None
    ) -> None:
        self.address = address
        self._token = token
        self._timeout = timeout
        self._target = target if target is not None else NewMemory(Buffers())
        self._idle: deque[socket.socket] = deque()
        self._opened = Opened(f"connections to TCP server {address[0]}:{address[1]}")

    def read(self, places: Asked, timeout: float, what: str, digests: bool = False) -> dict[SegmentId, Received]:
        """Read slots of segments.

        Args:
            places: segment -> slots; if they are mapped to their bytes, no others are received.
            timeout: seconds, for all of it.
            what: names the read in errors.
            digests: have the server tell the content hashes, too; see `check_content`.

        Raises:
            ShardUnavailableError: no connection, or it broke.
            OperationTimeoutError: it took longer.
            CorruptDataError: what came is no answer, or not what the target is for.
            ClosedError: this is a forked child of the process that made this client.
            TensorVineError: what the server raised.
        """
        self._opened.check_process()
        reading = _Reading(digests, Deadline.after(timeout), what)
        if len(places) < LANES_FROM:
            return self._read(places, reading) if places else {}
        halves = [dict(list(places.items())[start::2]) for start in (0, 1)]
        found: dict[SegmentId, Received] = {}
        failed: list[BaseException] = []

        def read(half: Asked) -> None:
            try:
                found.update(self._read(half, reading))
            except BaseException as exc:  # noqa: BLE001  raised again below, in the caller's thread
                failed.append(exc)
                reading.give_up()

        lane = threading.Thread(target=read, args=(halves[1],), daemon=True)
        lane.start()
        read(halves[0])
        lane.join()
        if failed:
            raise failed[0]
        return found

    def greet(self, timeout: float) -> None:
        """Connect, and find out whether the server knows the token.

        Raises:
            UnreachableError: nobody is there, or who is does not know it.
        """
        self._connected(Deadline.after(timeout), "greeting").close()

    def close(self) -> None:
        """End the connections; a read under way goes on, and then ends its own."""
        self._opened.close()
        self._end_idle()

    def _end_idle(self) -> None:
        while (connection := self._reusable()) is not None:
            connection.close()

    def _reusable(self) -> socket.socket | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _read(self, places: Asked, reading: _Reading) -> dict[SegmentId, Received]:
        connection = self._reusable()
        if connection is not None:
            try:
                return self._ask(connection, places, reading)
            except _StaleError:
                log.debug("%s: an idle connection had ended; making a new one", self._where(reading.what))
                self._end_idle()  # the others have most likely ended, too, and each may take 20 s to show it
        return self._ask(self._connected(reading.deadline, reading.what), places, reading)

    def _connected(self, deadline: Deadline, what: str) -> socket.socket:
        limit = max(deadline.left(self._timeout), 0.001)
        try:
            connection = socket.create_connection(self.address, limit)
        except OSError as exc:
            raise UnreachableError(f"{self._where(what)}: expected a connection; {exc}") from exc
        try:
            with self._breaking(connection, what):
                watch(connection)
                send(connection, [credential(self._token)])
                accepted(receive(connection, MESSAGE_BYTES, Deadline.after(limit)))
        except (CorruptDataError, OperationTimeoutError, ShardUnavailableError) as exc:  # its own limit: time is left
            raise UnreachableError(str(exc)) from exc
        return connection

    def _ask(self, connection: socket.socket, places: Asked, reading: _Reading) -> dict[SegmentId, Received]:
        deadline = reading.deadline
        left = max(deadline.left(), 0.001)
        request = {
            "read": [(segment, list(slots)) for segment, slots in places.items()],
            "timeout": left,
            "digests": reading.digests,
        }
        with self._breaking(connection, reading.what), reading.by(connection):
            connection.settimeout(left)
            try:
                send(connection, [message(request)])
                answer = receive(connection, MESSAGE_BYTES, deadline)
            except OSError as exc:
                if not _has_ended(exc):
                    raise
                raise _StaleError(f"{self._where(reading.what)}: expected an answer; {exc}") from exc
            rows = rows_of(accepted(answer), places)
            found: dict[SegmentId, Received] = {}
            for run, memory in self._target.runs(rows):
                fill(connection, memory, deadline)
                found.update(received(run, self._target.block(memory)))
            if reading.digests:
                known = digests_of(accepted(receive(connection, MESSAGE_BYTES, deadline)), rows)
                found = {segment: replace(part, digests=known[segment]) for segment, part in found.items()}
        self._idle.append(connection)
        if self._opened.closed:
            self.close()
        return found

    @contextlib.contextmanager
    def _breaking(self, connection: socket.socket, what: str) -> Generator[None]:
        """Close a connection in which something went wrong: nobody knows what it would bring next."""
        try:
            yield
        except BaseException as exc:
            connection.close()
            if isinstance(exc, MemoryError) and not isinstance(exc, TensorVineError):
                raise CorruptDataError(f"{self._where(what)}: expected an answer that fits in memory; {exc}") from exc
            if isinstance(exc, TensorVineError) or not isinstance(exc, OSError):
                raise
            if isinstance(exc, TimeoutError) and not _has_ended(exc):
                raise OperationTimeoutError(
                    f"{self._where(what)}: expected the whole answer within its timeout; {exc}"
                ) from exc
            raise ShardUnavailableError(f"{self._where(what)}: expected a whole answer; {exc}") from exc

    def _where(self, what: str) -> str:
        return f"{what}: TCP server {self.address[0]}:{self.address[1]}"


def check_content(
    tensors: Iterable[tuple[str, SegmentId, int, int]], found: Mapping[SegmentId, Received], by: str
) -> None:
    """Hold tensors that have arrived against their content hashes.

    Args:
        tensors: (name, segment, slot, bytes) of each.
        found: what has them, with its hashes.
        by: says in errors how they came.

    Raises:
        CorruptDataError: one is not what the shard has; names it.
    """
    for name, segment, slot, nbytes in tensors:
        part = found[segment]
        expected = part.digests.get(slot) if part.digests is not None else None
        start = part.offsets[slot]
        content = digest_of(part.block[start : start + nbytes])
        if content != expected:
            raise CorruptDataError(f"tensor {name!r} by {by}: expected content {expected}; found {content}")


def _has_ended(exc: OSError) -> bool:
    """Whether the connection has ended, in contrast to an answer that is late."""
    return isinstance(exc, (BrokenPipeError, ConnectionResetError)) or exc.errno in _GONE


class _StaleError(ShardUnavailableError):
    """A connection ended before its answer began: one that was idle may, and nothing is wrong with the server."""


class _Reading:
    """A read under way, by one thread or two."""

    def __init__(self, digests: bool, deadline: Deadline, what: str) -> None:
        self.digests = digests
        self.deadline = deadline
        self.what = what
        self._connections: set[socket.socket] = set()
        self._given_up = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def by(self, connection: socket.socket) -> Generator[None]:
        """Note that a connection is used meanwhile."""
        with self._lock:
            if self._given_up:
                raise ConnectionAbortedError("another connection of this read has failed")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def give_up(self) -> None:
        """End the connections that are used: who waits for one must not wait until the deadline."""
        with self._lock:
            self._given_up = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
