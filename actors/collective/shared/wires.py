"""Connections between the members of a group on one machine: frames, and who died or left.

Rules
- Each two members have one Unix-domain socket that keeps frames whole and in order (SOCK_SEQPACKET), of an abstract
  name that ends with its listener. Who connects must know the token of the listener's card.
- Who posts a frame never waits: what a peer's socket does not take is sent when it does.
- A member that leaves says so. One that dies is known by the end of its socket, or of its process: a child of it that
  was forked may still hold the socket.
- One thread per member reads and tells; whoever is told must not wait for what only it could tell.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ....store.errors import OperationTimeoutError, PeerLostError

INLINE_BYTES = 8 << 10
"""Most bytes that a frame carries."""
LINGER_S = 1.0
"""How long a peer that does not read keeps who leaves."""
HELLO_S = 5.0
"""A connection that has not said by then who it is is none of ours."""
INLINE, AT, TOOK, REFUSED, PART, GAVE_UP, LEAVING = range(7)
"""Kinds of frames."""

Loss = Literal["died", "left"]
_HEADER = struct.Struct("<BxxxIQQQ")
_FRAME_BYTES = _HEADER.size + INLINE_BYTES
_HELLO = struct.Struct("<I32s")


class Frame(NamedTuple):
    """What members tell each other."""

    kind: int
    """One of the kinds of frames."""
    number: int
    """Which message, or which collective, it is about."""
    nbytes: int = 0
    """Size of the message."""
    address: int = 0
    """Where it lies in the sender's memory."""
    signature: int = 0
    """What the collective is; must be the same on all ranks."""
    payload: bytes = b""

    def pack(self) -> bytes:
        """Write it."""
        return _HEADER.pack(self.kind, self.signature, self.number, self.nbytes, self.address) + self.payload

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Read it.

        Raises:
            struct.error: it is none.
        """
        kind, signature, number, nbytes, address = _HEADER.unpack_from(data)
        return cls(kind, number, nbytes, address, signature, data[_HEADER.size :])


class Door:
    """A member's open ear, before the group is there."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        name = f"tensorvine-{secrets.token_hex(16)}"
        self._server = _socket()
        try:
            self._server.bind(f"\0{name}")
            self._server.listen(1024)
        except BaseException:
            self._server.close()
            raise
        self.card: dict[str, Any] = {"socket": name, "token": self._token}
        """What the others need to connect."""

    def meet(
        self, label: str, rank: int, cards: Sequence[Mapping[str, Any]], deadline: float
    ) -> dict[int, socket.socket]:
        """Connect to the lower ranks, and be connected to by the higher ones.

        Raises:
            OperationTimeoutError: some did not come until `deadline` (of `time.monotonic`); names them.
            PeerLostError: one of them is not there any more; names it.
        """
        met: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                met[peer] = _connected(label, rank, peer, cards[peer])
            while missing := [peer for peer in range(rank + 1, len(cards)) if peer not in met]:
                self._server.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    connection, _ = self._server.accept()
                except TimeoutError as exc:
                    text = f"{label}: expected rank {', '.join(map(str, missing))} to connect in time; found none"
                    raise OperationTimeoutError(text) from exc
                peer = self._welcomed(connection, deadline)
                if peer in missing:
                    met[peer] = connection
                else:
                    connection.close()
        except BaseException:
            for connection in met.values():
                connection.close()
            raise
        return met

    def _welcomed(self, connection: socket.socket, deadline: float) -> int | None:
        """Read who has connected; None: a stranger."""
        connection.settimeout(max(min(deadline - time.monotonic(), HELLO_S), 1e-3))
        try:
            rank, token = _HELLO.unpack(connection.recv(_FRAME_BYTES))
        except (OSError, struct.error):
            return None
        return rank if hmac.compare_digest(token, self._token.encode()) else None

    def close(self) -> None:
        """Listen no more; a second call does nothing."""
        self._server.close()


class _Wire:
    """One connection."""

    def __init__(self, peer: int, connection: socket.socket, process: int) -> None:
        self.peer = peer
        self.socket = connection
        self.lock = threading.Lock()
        self.unsent: deque[bytes] = deque()
        self.gone = False
        self.exit: int | None = None
        """Readable when the peer's process has ended."""
        if process != os.getpid():
            try:
                self.exit = os.pidfd_open(process)
            except (AttributeError, OSError):  # the system has none, or it has ended: the socket will tell
                self.exit = None
        connection.setblocking(False)

    def flush(self) -> bool:
        """Send what waits; tells whether nothing does any more. The lock is held."""
        while self.unsent:
            try:
                self.socket.send(self.unsent[0])
            except (BlockingIOError, TimeoutError):
                return False
            except OSError:  # the peer is gone, which reading tells
                self.unsent.clear()
                return True
            self.unsent.popleft()
        return True

    def close(self) -> None:
        """Send what waits, and end it; forked children that hold the socket do not keep it open for the peer."""
        try:
            self.socket.settimeout(LINGER_S)
            self.flush()
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first
        self.socket.close()
        if self.exit is not None:
            os.close(self.exit)


class Wires:
    """The connections of one member.

    Args:
        sockets: by rank, from `Door.meet`.
        processes: ids, by rank.
        told: gets each frame and the rank that it is from.
        lost: hears once of each member that died or left; after that no frame of it comes.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        processes: Sequence[int],
        told: Callable[[int, Frame], None],
        lost: Callable[[int, Loss], None],
    ) -> None:
        self._told, self._lost = told, lost
        self._wires = {peer: _Wire(peer, one, processes[peer]) for peer, one in sockets.items()}
        self._closing = False
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for wire in self._wires.values():
            self._selector.register(wire.socket, selectors.EVENT_READ, wire)
            if wire.exit is not None:
                self._selector.register(wire.exit, selectors.EVENT_READ, wire)
        self._thread = threading.Thread(target=self._run, name="collective-wires", daemon=True)
        if sockets:
            self._thread.start()

    def post(self, peer: int, frame: Frame) -> None:
        """Send a frame; one to a member that is gone is lost."""
        wire = self._wires[peer]
        with wire.lock:
            wire.unsent.append(frame.pack())
            blocked = len(wire.unsent) == 1 and not wire.flush()
        if blocked:
            self._nudge()

    def post_all(self, frame: Frame) -> None:
        """Send all members a frame."""
        for peer in self._wires:
            self.post(peer, frame)

    def close(self) -> None:
        """Say that this member leaves, and disconnect; called once, and not by the thread that tells."""
        self.post_all(Frame(LEAVING, 0))
        self._closing = True
        self._nudge()
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        for wire in self._wires.values():
            wire.close()
        self._wake.close()
        self._woken.close()

    def _nudge(self) -> None:
        self._wake.send(b"x")

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                wire: _Wire | None = key.data
                if wire is None:
                    self._woken.recv(64)
                    self._watch_blocked()
                elif key.fileobj == wire.exit:
                    self._exited(wire)
                else:
                    if events & selectors.EVENT_WRITE:
                        self._flush(wire)
                    if events & selectors.EVENT_READ:
                        self._read(wire)

    def _watch_blocked(self) -> None:
        for wire in self._wires.values():
            with wire.lock:
                if wire.unsent and not wire.gone:
                    self._selector.modify(wire.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, wire)

    def _flush(self, wire: _Wire) -> None:
        with wire.lock:
            if not wire.gone and wire.flush():
                self._selector.modify(wire.socket, selectors.EVENT_READ, wire)

    def _read(self, wire: _Wire) -> bool:
        """Take one frame; tells whether there may be more."""
        if wire.gone:
            return False
        try:
            data = wire.socket.recv(_FRAME_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # said once, ahead of what was sent before
            return True
        except OSError:
            data = b""
        if not data:
            return self._gone(wire, "died")
        frame = Frame.unpack(data)
        if frame.kind == LEAVING:
            return self._gone(wire, "left")
        self._told(wire.peer, frame)
        return True

    def _exited(self, wire: _Wire) -> None:
        while self._read(wire):
            continue
        self._gone(wire, "died")

    def _gone(self, wire: _Wire, loss: Loss) -> bool:
        if not wire.gone:
            wire.gone = True
            self._selector.unregister(wire.socket)
            if wire.exit is not None:
                self._selector.unregister(wire.exit)
            self._lost(wire.peer, loss)
        return False


def _connected(label: str, rank: int, peer: int, card: Mapping[str, Any]) -> socket.socket:
    """Connect to a lower rank and say who this is."""
    connection = _socket()
    try:
        connection.connect(f"\0{card['socket']}")
        connection.send(_HELLO.pack(rank, str(card["token"]).encode()))
    except OSError as exc:
        connection.close()
        raise PeerLostError(f"{label}: expected rank {peer} to listen; it does not any more ({exc})") from exc
    return connection


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
