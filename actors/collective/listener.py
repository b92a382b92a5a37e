"""Where a member is reached by those who are to be of its group, until it is there.

Rules
- Within one machine it is a Unix-domain socket of an abstract name, which ends with it; otherwise TCP.
- It takes whoever knows the token of its endpoint, and the group's label; others are sent away. All who connect are
  heard at once (`rpc.greetings`), so that strangers keep no member waiting.
- A machine that vanished is noticed by keep-alive probes of TCP.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import socket
import struct
from collections.abc import Sequence, Sized
from typing import TypedDict, final

from ...store.errors import OperationTimeoutError, PeerLostError
from ...store.waiting import Deadline
from ..engine.choice import engine_here
from ..engine.sockets.refusals import Refusals
from ..rpc.greetings import SILENT, Greetings, Welcome, credential
from .links import Link
from .standing import ranks
from .timeouts import TIMEOUTS

_BACKLOG = 1024
_WHO = struct.Struct("<I32s")
"""Who connects, behind its credential: its rank, and what the group is called, hashed."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def address() -> str:
    """Return the address by which other machines reach this one: the engine's, where this process has one.

    Else it is that of the route to everywhere; no packet is sent to find it. Without such a route it is loopback's.
    """
    engine = engine_here()
    if engine is not None:
        return engine.address()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: only the route is looked up
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _listen(host: str) -> socket.socket:
    """Listen on a port of this machine that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


@final
class Here(TypedDict):
    """By what a member of this machine is reached, what it asks for, and its process."""

    socket: str
    process: int
    token: str


@final
class There(TypedDict):
    """The same of any machine."""

    host: str
    port: int
    token: str


Reached = Here | There


class Listener:
    """A socket of a member, to which the others of its group connect.

    Args:
        host: address of this machine, as the others reach it; None: they run on it.

    Raises:
        OSError: the host is no address of this machine, or the system has no such sockets.
    """

    def __init__(self, host: str | None = None) -> None:
        self._token = token = secrets.token_hex(16)
        self.endpoint: Reached
        """What the others need to connect."""
        if host is None:
            name = f"tensorvine-{secrets.token_hex(16)}"
            self._server = _listen_here(name)
            self.endpoint = {"socket": name, "process": os.getpid(), "token": token}
        else:
            self._server = _listen(host)
            self.endpoint = {"host": host, "port": self._server.getsockname()[1], "token": token}

    def meet(self, label: str, rank: int, endpoints: Sequence[Reached], deadline: Deadline) -> dict[int, Link]:
        """Connect to the lower ranks, and be connected to by the higher ones.

        Raises:
            OperationTimeoutError: some did not come in time; names them.
            PeerLostError: one of them is not there any more; names it.
        """
        met: dict[int, socket.socket] = {}
        missing = set(range(rank + 1, len(endpoints)))
        refusals = Refusals(f"{label}: rank {rank}")

        def welcome(connection: socket.socket, address: object, who: bytes) -> None:
            peer, called = _WHO.unpack(who)
            if peer in missing and called == _hashed(label):
                met[peer] = connection
                missing.remove(peer)
            else:
                connection.close()
                refusals.note(
                    f"{address}: expected a member of this group that has not connected yet; found rank {peer}"
                )

        try:
            for peer in range(rank):
                met[peer] = _connected(label, rank, peer, endpoints[peer], deadline)
            if missing:
                self._greet(welcome, refusals, missing, deadline)
            if missing:
                text = f"{label}: expected {ranks(sorted(missing))} to connect in time; found none"
                raise OperationTimeoutError(text)
        except BaseException:
            for connection in met.values():
                connection.close()
            raise
        return {peer: Link(_kept_alive(one), endpoints[peer].get("process")) for peer, one in met.items()}

    def _greet(self, welcome: Welcome, refusals: Refusals, missing: Sized, deadline: Deadline) -> None:
        """Hear those who connect until nobody is missing, or the time is over and all that has come was heard."""
        # Members may come all at once, and not get to say a word for a while: they are no strangers too many.
        silent, silent_s = SILENT + len(missing), TIMEOUTS.hello
        greetings = Greetings(
            self._server, self._token, welcome, refusals, more=_WHO.size, silent=silent, silent_s=silent_s
        )
        with contextlib.closing(greetings):
            left = math.inf
            while missing and left:
                left = deadline.left()
                greetings.attend(left)

    def close(self) -> None:
        """Listen no more; a second call does nothing."""
        self._server.close()


def hello_of(label: str, rank: int, endpoint: Reached) -> bytes:
    """Write what a member says first to a listener of this endpoint."""
    return credential(str(endpoint["token"])) + _WHO.pack(rank, _hashed(label))


def _connected(label: str, rank: int, peer: int, endpoint: Reached, deadline: Deadline) -> socket.socket:
    """Connect to a lower rank and say who this is."""
    local = "socket" in endpoint
    family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in endpoint["host"] else socket.AF_INET
    connection = socket.socket(family)
    connection.settimeout(max(deadline.left(), 1e-3))
    try:
        connection.connect(f"\0{endpoint['socket']}" if local else (endpoint["host"], endpoint["port"]))
        connection.sendall(hello_of(label, rank, endpoint))
    except TimeoutError as exc:
        connection.close()
        raise OperationTimeoutError(f"{label}: expected rank {peer} to answer in time; it did not") from exc
    except OSError as exc:
        connection.close()
        where = endpoint["socket"] if local else f"{endpoint['host']}:{endpoint['port']}"
        raise PeerLostError(f"{label}: expected rank {peer} at {where}; found {exc}") from exc
    return connection


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Have TCP send short frames at once, and notice a machine that vanished."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def _listen_here(name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(f"\0{name}")
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server


def _hashed(label: str) -> bytes:
    return hashlib.sha256(label.encode()).digest()
