"""Serves blocks of segments over TCP (see `tcp`).

Rules
- Bytes are sent straight from the memory where they lie, which stays locked until they are sent. So a client that
  stalls, or takes them at less than `frames.LEAST_RATE`, is let go.
- Content hashes, where they are asked for, are computed while the bytes are sent.
- One thread greets all who connect (`rpc.greetings`); only who has shown the token gets a thread, and counts among
  `CONNECTIONS`. That thread goes on whatever cannot be had just now: it is the only one that lets anybody in.
- A forked child serves nothing, and holds no socket of its parent's servers: who waits for one hears when it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from ...store.errors import ShardUnavailableError, TensorVineError
from ...store.segments.segment import SegmentId
from ...store.waiting import Deadline
from ..engine.sockets.refusals import Refusals
from ..rpc.greetings import PAUSE_S, Greetings
from .frames import (
    MESSAGE_BYTES,
    Digests,
    Gathered,
    Pace,
    Served,
    Slots,
    digest_facts,
    error_facts,
    message,
    receive,
    request_of,
    send,
)

log = logging.getLogger(__name__)

CONNECTIONS = 512
"""Connections that one server serves at once, a thread for each."""
IDLE_S = 60.0
"""How long a connection may wait for its next request."""
STALL_S = 30.0
"""How long a client may take no byte, and be behind the least rate at which it must take an answer."""

_BACKLOG = 1024
"""Connections that the system makes ahead of those that are taken, so that a crowd leaves room for others."""

Answer = Callable[
    [Slots, float, bool], tuple[Mapping[SegmentId, Served] | Mapping[SegmentId, Gathered], Callable[[], Digests] | None]
]
"""(slots, seconds, hashes too?) -> what has them, and what waits for the hashes. Called in a connection's thread."""


class TcpServer:
    """Serves reads until it is closed. Its threads are daemons, one per connection.

    Args:
        answer: gives what is asked for, or raises an error of the tree.
        host: address of an interface of this machine.
        clock: gives the seconds by which clients must keep pace.

    Raises:
        OSError: nothing can listen there.
    """

    def __init__(self, answer: Answer, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._answer = answer
        self._clock = clock
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        bound = self._listener.getsockname()
        self.address: tuple[str, int] = (bound[0], bound[1])
        """(host, port)."""
        self.token = secrets.token_hex(16)
        """Whoever shows it may read."""
        name = f"TCP server {self.address[0]}:{self.address[1]}"
        self._refusals = Refusals(name)
        refused = ShardUnavailableError(f"{name}: expected its token; found another")
        self._greetings = Greetings(
            self._listener, self.token, self._welcome, self._refusals, refusal=message(error_facts(refused))
        )
        self._connections: dict[socket.socket, threading.Thread] = {}
        """Those of who has shown the token."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="tensorvine-tcp", daemon=True)
        _forking.watch(self)
        self._thread.start()

    def close(self) -> None:
        """End all connections, also in the middle of an answer."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(STALL_S)
        self._greetings.close()
        self._listener.close()
        with self._lock:
            left = dict(self._connections)
        for connection, thread in left.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(STALL_S)

    def forsake(self) -> None:
        """Let go of the sockets in a child that was forked, where no thread serves them. Takes no lock."""
        for held in (self._listener, *self._greetings.connections, *self._connections):
            held.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                self._greetings.attend()
            except Exception as exc:  # noqa: BLE001  such as: no thread can be started just now
                self._refusals.note(f"expected to serve one more connection; found {exc!r}")
                self._closing.wait(PAUSE_S)

    def _welcome(self, connection: socket.socket, peer: object, _: bytes) -> None:
        """Have a thread serve who has shown the token."""
        with self._lock:
            full = self._closing.is_set() or len(self._connections) >= CONNECTIONS
            if not full:
                serve = threading.Thread(target=self._serve, args=(connection, peer), daemon=True)
                self._connections[connection] = serve
                try:
                    serve.start()
                except BaseException:
                    del self._connections[connection]
                    raise
        if full:
            connection.close()
            self._refusals.note(f"{peer}: expected at most {CONNECTIONS} connections; found one more")

    def _serve(self, connection: socket.socket, peer: object) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(STALL_S)
                send(connection, [message({})])
                while True:
                    request = receive(connection, MESSAGE_BYTES, Deadline.after(IDLE_S))
                    connection.settimeout(STALL_S)
                    self._respond(connection, request)
        except OSError as exc:  # the errors of the tree that can occur here are such, too
            log.debug("TCP server %s: the connection of %s ended: %s", self.address, peer, exc)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _respond(self, connection: socket.socket, request: dict[str, object]) -> None:
        try:
            slots, timeout, hashed = request_of(request)
            served, hashes = self._answer(slots, timeout, hashed)
        except TensorVineError as exc:
            send(connection, [message(error_facts(exc))])
            return
        except Exception as exc:
            log.exception("TCP server %s: an answer failed", self.address)
            failed = ShardUnavailableError(f"TCP server {self.address}: expected an answer; it failed: {exc!r}")
            send(connection, [message(error_facts(failed))])
            return
        rows = [found.row(segment) for segment, found in served.items()]
        parts = [part for row in rows for part in served[row.segment].pieces(row)]
        send(connection, [message({"rows": rows}), *parts], Pace(STALL_S, self._clock))
        if hashes is not None:
            try:
                facts = digest_facts(hashes(), rows)
            except TensorVineError as exc:
                facts = error_facts(exc)
            send(connection, [message(facts)])


class _Forking:
    """Tells the servers of a process that its child is not to have them."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[TcpServer] = weakref.WeakSet()
        self._registered = False

    def watch(self, server: TcpServer) -> None:
        self._all.add(server)
        if not self._registered:
            self._registered = True
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        for server in list(self._all):
            server.forsake()


_forking = _Forking()
