"""Targets: what comes over TCP, to a server and to a client, and what members of a group say to each other.

Rules
- The real server and the real client are at one end of a real connection. Where an input begins with `TOKEN`, the
  server's credential stands there.
- An input ends with the end of what is sent: nobody waits for more.
- Threads that an input started have ended when its reading is over.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tensorvine.actors.collective.connections import Connections
from tensorvine.actors.collective.links import OWN, Frame, Link
from tensorvine.actors.collective.listener import Listener, hello_of
from tensorvine.actors.rpc.greetings import CREDENTIAL_BYTES, credential
from tensorvine.actors.transport.frames import Row, Served, Slots, message, rows_of
from tensorvine.actors.transport.parcels import Parcel, check_parcels
from tensorvine.actors.transport.tcp import TcpClient
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store.errors import CorruptDataError
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.waiting import Deadline

from tests.fuzz.mutations import of_bytes, of_json
from tests.fuzz.target import Read, Target

TOKEN = b"T" * CREDENTIAL_BYTES
LIMIT_S = 50.0
BLOCK = np.arange(1000, dtype=np.uint8)
ASKED: dict[SegmentId, dict[int, int]] = {(0, 1): {0: 100, 2: 5}, (1, 9): {4: 64}}
"""With the lengths that a manifest says, as readers ask."""
SLOTS = {0: (0, 100), 2: (128, 5), 4: (192, 64)}
ROWS = [[[0, 1], [0, 2], [100, 5]], [[1, 9], [4], [64]]]
_DATA = bytes(BLOCK[:192]) + bytes(BLOCK[192:256])


def messages_damaged(dice: Random, valid: Sequence[bytes]) -> bytes:
    """Damage bytes, or what a message says: its length then is right."""
    content = dice.choice(valid)
    if dice.random() < 0.4:
        return of_bytes(dice, content, valid)
    head = TOKEN if content.startswith(TOKEN) else b""
    places: list[tuple[int, int]] = []
    at = len(head)
    while at + 4 <= len(content) and content[at + 4 : at + 5] == b"{":
        end = at + 4 + int.from_bytes(content[at : at + 4], "big")
        places.append((at, end))
        at = end
    if not places:
        return of_bytes(dice, content, valid)
    start, end = dice.choice(places)
    said = json.dumps(of_json(dice, json.loads(content[start + 4 : end]))).encode()
    return content[:start] + len(said).to_bytes(4, "big") + said + content[end:]


# ---- a server -----------------------------------------------------------------------------------------


def _requests(folder: Path) -> list[bytes]:
    plain = message(
        {"read": [(segment, list(slots)) for segment, slots in ASKED.items()], "timeout": 5.0, "digests": False}
    )
    hashed = message({"read": [[[0, 1], [2]]], "timeout": 5, "digests": True})
    return [TOKEN + plain + hashed, TOKEN + hashed, TOKEN]


def _answer(slots: Slots, timeout: float, hashed: bool) -> Any:
    served = {s: Served(BLOCK, {n: SLOTS.get(n, (0, 1)) for n in numbers}) for s, numbers in slots.items()}
    digests = {segment: dict.fromkeys(numbers, "digest") for segment, numbers in slots.items()}
    return served, (lambda: digests) if hashed else None


@contextmanager
def _server_reading(folder: Path) -> Iterator[Read]:
    server = TcpServer(_answer, "127.0.0.1")
    known = set(threading.enumerate())

    def read(content: bytes) -> None:
        if content.startswith(TOKEN):
            content = credential(server.token) + content[len(TOKEN) :]
        with socket.create_connection(server.address, LIMIT_S) as connection:
            exchanged(connection, content)
        _join(known)

    with contextlib.closing(server):
        yield read


def exchanged(connection: socket.socket, content: bytes) -> None:
    """Send what there is, and read until the other side ends it."""
    with contextlib.suppress(ConnectionError):  # it may end it at any time
        sender = threading.Thread(target=_send, args=(connection, content)) if len(content) > 1 << 16 else None
        if sender is None:
            _send(connection, content)
        else:
            sender.start()
        while connection.recv(1 << 16):
            pass
    if sender is not None:
        sender.join()


def _send(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)


def _join(known: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - known:
        thread.join(LIMIT_S)


# ---- a client -----------------------------------------------------------------------------------------


def _answers(folder: Path) -> list[bytes]:
    digests = [["a", "b"], ["c"]]
    first = message({}) + message({"rows": ROWS}) + _DATA + message({"digests": digests})
    data = _DATA[192:] + _DATA[:192]
    return [first, message({}) + message({"rows": ROWS[::-1]}) + data + message({"digests": digests[::-1]})]


def _damaged_answer(dice: Random, valid: Sequence[bytes]) -> bytes:
    return messages_damaged(dice, [*valid, message({}) + message({"error": "ModelLostError", "message": "it is lost"})])


@contextmanager
def answering(
    listener: socket.socket, ahead: int | None = None, greeting: int = 0
) -> Iterator[Callable[[bytes], None]]:
    """Have a thread answer whoever connects to a listener with what it is told, and then end the connection.

    Args:
        listener: the socket.
        ahead: how many bytes are said before anything but `greeting` bytes was heard; None: all.
        greeting: how many bytes callers begin with.
    """
    said = b""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(LIMIT_S)
                if ahead is not None:
                    _say_ahead(connection, said[:ahead], greeting)
                exchanged(connection, said[ahead or 0 :])

    def tell(content: bytes) -> None:
        nonlocal said
        said = content

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)
        listener.close()


def _say_ahead(connection: socket.socket, said: bytes, greeting: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(said)
        left = greeting + 1
        while left and (heard := connection.recv(left)):
            left -= len(heard)


@contextmanager
def _client_reading(folder: Path) -> Iterator[Read]:
    listener = socket.create_server(("127.0.0.1", 0))
    with answering(listener) as tell:

        def read(content: bytes) -> None:
            tell(content)
            client = TcpClient(listener.getsockname(), "token", LIMIT_S)
            with contextlib.closing(client):
                for part in client.read(ASKED, LIMIT_S, "a read", digests=True).values():
                    part.block.sum()

        yield read


def _parcels_input(rows: Sequence[Any], lengths: Sequence[Any]) -> bytes:
    return json.dumps({"rows": rows, "lengths": lengths}).encode()


@contextmanager
def _parcels_reading(folder: Path) -> Iterator[Read]:
    """Messages of a group are announced in Python's objects, so of the right types."""

    def read(content: bytes) -> None:
        try:
            said = json.loads(content)
            lengths = [int(length) for length in said["lengths"]]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise CorruptDataError("no answer") from exc
        check_parcels([Parcel(tuple(Row(*row) for row in rows_of(said, ASKED)), tuple(lengths))], ASKED, "a read")

    yield read


# ---- a group ------------------------------------------------------------------------------------------


def _hellos(folder: Path) -> list[bytes]:
    hello = hello_of("a group", 1, {"token": ""})
    return [TOKEN + hello[CREDENTIAL_BYTES:], TOKEN + hello_of("another", 7, {"token": ""})[CREDENTIAL_BYTES:]]


@contextmanager
def _hello_reading(folder: Path) -> Iterator[Read]:
    """The other member comes behind the stranger, and is met."""

    def read(content: bytes) -> None:
        with contextlib.closing(Listener()) as listener, contextlib.ExitStack() as opened:
            if content.startswith(TOKEN):
                content = credential(str(listener.endpoint["token"])) + content[len(TOKEN) :]
            for said in (content[: 1 << 16], hello_of("a group", 1, listener.endpoint)):
                connection = opened.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(LIMIT_S)
                connection.connect(f"\0{listener.endpoint['socket']}")
                _send(connection, said)
            met = listener.meet("a group", 0, [listener.endpoint, {}], Deadline.after(LIMIT_S))
            met[1].close()

    yield read


def _frames(folder: Path) -> list[bytes]:
    frames = [Frame(OWN, 1, 100, 1 << 40, 7, b"payload"), Frame(OWN + 1), Frame(2, 3), Frame(1, payload=b"why")]
    return [b"".join(frame.pack() for frame in frames), Frame(0).pack()]


@contextmanager
def _frames_reading(folder: Path) -> Iterator[Read]:
    def read(content: bytes) -> None:
        near, far = socket.socketpair()
        lost = threading.Event()
        connections = Connections({1: Link(near)}, lambda peer, frame: None, lambda peer, loss: lost.set())
        connections.start()
        with far:
            far.settimeout(LIMIT_S)
            _send(far, content)
            if not lost.wait(LIMIT_S):
                raise TimeoutError("expected the end of the connection to be told; it was not")
        connections.close()

    yield read


WIRE = (
    Target("tcp-server", _requests, _server_reading, messages_damaged),
    Target("tcp-client", _answers, _client_reading, _damaged_answer),
    Target("parcels", lambda folder: [_parcels_input(ROWS, [256])], _parcels_reading),
    Target("hello", _hellos, _hello_reading),
    Target("frames", _frames, _frames_reading),
)
