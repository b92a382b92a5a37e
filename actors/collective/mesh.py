"""Connections between all members of a group: who died, who left, and short messages.

Rules
- Each two members have one TCP connection for the life of the group. It ends when the process does, so that its end
  says who died; a member that leaves says so first. A machine that vanished is noticed by keep-alive probes.
- No data goes here: messages are short JSON objects, one per line, in order. Who sends does not wait: what a member
  does not read yet is kept until it does, and goes with the connection.
- A listener takes whoever knows the token of its card, and a group's label; others are sent away.
- What happens is told by one thread, the mesh's: whoever is told must not keep it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ...store.errors import OperationTimeoutError, PeerLostError

Loss = Literal["died", "left"]
Told = Callable[[int, Mapping[str, Any]], None]
"""Is given a rank and its message."""
Lost = Callable[[int, Loss], None]
"""Is given a rank and how it was lost; after that no message of it comes."""

HELLO_S = 5.0
"""A connection that has not said by then who it is is none of ours."""
LINE_BYTES = 1 << 16
"""Longest message."""
_LEAVING = {"leaving": True}
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def address() -> str:
    """Return the address by which other machines reach this one; no packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: only the route is looked up
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class Door:
    """A member's open ear, before the group is there.

    Args:
        host: address of this machine, as the others reach it.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=256)
        self._token = secrets.token_hex(16)

    @property
    def card(self) -> dict[str, Any]:
        """What the others need to connect."""
        host, port = self._server.getsockname()[:2]
        return {"host": host, "port": port, "token": self._token}

    def meet(self, label: str, rank: int, cards: Sequence[Mapping[str, Any]], deadline: float) -> dict[int, Link]:
        """Connect to the lower ranks, and be connected to by the higher ones.

        Raises:
            OperationTimeoutError: some did not come until `deadline` (of `time.monotonic`); names them.
            PeerLostError: one of them is not there any more; names it.
        """
        links: dict[int, Link] = {}
        try:
            for peer in range(rank):
                links[peer] = _connected(label, rank, peer, cards[peer], deadline)
            while missing := [peer for peer in range(rank + 1, len(cards)) if peer not in links]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise OperationTimeoutError(f"{label}: expected ranks {missing} to connect; they did not")
                self._server.settimeout(left)
                try:
                    connection, _ = self._server.accept()
                except TimeoutError:
                    continue
                link = Link(connection)
                peer = self._welcomed(link, label, min(deadline, time.monotonic() + HELLO_S))
                if peer in missing:
                    links[peer] = link
                else:
                    connection.close()
        except BaseException:
            for link in links.values():
                link.socket.close()
            raise
        return links

    def _welcomed(self, link: Link, label: str, deadline: float) -> int | None:
        """Read who has connected; None: a stranger."""
        try:
            link.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            while not (lines := link.receive()):
                link.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            hello, *link.early = lines
            known = hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode())
            return int(hello["rank"]) if known and hello.get("label") == label else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        """Listen no more; a second call does nothing."""
        self._server.close()


class Mesh:
    """The connections of one member.

    Args:
        links: by rank, from `Door.meet`.
        told: gets the messages.
        lost: hears once of each member that died or left.
    """

    def __init__(self, links: Mapping[int, Link], told: Told, lost: Lost) -> None:
        self._links = dict(links)
        self._told = told
        self._lost = lost
        self._lock = threading.Lock()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for peer, link in self._links.items():
            link.socket.setblocking(False)
            self._selector.register(link.socket, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="collective-mesh", daemon=True)
        self._thread.start()

    def tell(self, peer: int, message: Mapping[str, Any]) -> None:
        """Send a member a message; one that is lost gets none."""
        if not self._links[peer].send(message):
            self._rouse()

    def tell_all(self, message: Mapping[str, Any]) -> None:
        """Send all members a message."""
        for peer in self._links:
            self.tell(peer, message)

    def close(self) -> None:
        """Say that this member leaves, and disconnect; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.tell_all(_LEAVING)
        self._rouse()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _rouse(self) -> None:
        """Let the thread look for what has changed; a full pipe says so already."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _run(self) -> None:
        self._wake.setblocking(False)
        with self._selector, self._wake, self._woken:
            for peer, link in self._links.items():
                self._take(peer, link.early)
            while not self._closed:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._woken.recv(LINE_BYTES)
                    else:
                        self._read(key.data)
                for peer, link in self._links.items():
                    self._write(peer, link)
            for link in self._links.values():
                link.socket.close()

    def _write(self, peer: int, link: Link) -> None:
        """Send what is left unsent, as soon as the peer reads."""
        key = self._selector.get_map().get(link.socket)
        if key is None:
            return
        events = selectors.EVENT_READ if link.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        if events != key.events:
            self._selector.modify(link.socket, events, peer)

    def _read(self, peer: int) -> None:
        try:
            messages = self._links[peer].receive()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._gone(peer, "died")
            return
        self._take(peer, messages)

    def _take(self, peer: int, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            if message == _LEAVING:
                self._gone(peer, "left")
                return
            self._told(peer, message)

    def _gone(self, peer: int, loss: Loss) -> None:
        self._selector.unregister(self._links[peer].socket)
        self._lost(peer, loss)


class Link:
    """One connection: lines out, lines in."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.early: list[dict[str, Any]] = []
        """What came with the first message."""
        self._lock = threading.Lock()
        self._rest = b""
        self._unsent = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a line; gives whether all has gone. What has not is for `flush`; a peer that is gone gets nothing."""
        with self._lock:
            self._unsent += json.dumps(message).encode() + b"\n"
        return self.flush()

    def flush(self) -> bool:
        """Send what is unsent; gives whether all has gone."""
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()
            return True

    def receive(self) -> list[dict[str, Any]]:
        """Receive what there is.

        Raises:
            OSError: the connection has ended, or there is nothing yet.
            ValueError: what came is no message.
        """
        part = self.socket.recv(LINE_BYTES)
        if not part:
            raise ConnectionResetError("the connection ended")
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            raise ValueError(f"expected a message of at most {LINE_BYTES} bytes")
        found = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in found):
            raise ValueError("expected JSON objects")
        return found


def _connected(label: str, rank: int, peer: int, card: Mapping[str, Any], deadline: float) -> Link:
    """Connect to a lower rank and say who this is."""
    left = deadline - time.monotonic()
    try:
        connection = socket.create_connection((card["host"], card["port"]), timeout=max(left, 0.001))
    except TimeoutError as exc:
        raise OperationTimeoutError(f"{label}: expected rank {peer} to answer; it did not in time") from exc
    except OSError as exc:
        raise PeerLostError(f"{label}: expected rank {peer} at {card['host']}:{card['port']}; found {exc}") from exc
    link = Link(connection)
    link.send({"label": label, "rank": rank, "token": card["token"]})
    return link
