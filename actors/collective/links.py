"""One connection between two members: what they tell each other, in frames.

Rules
- Frames come whole and in order, over TCP or a Unix-domain socket alike.
- Who sends never waits: what the peer's socket does not take is kept, and sent by `flush`.
- A peer that runs on this machine is known by its process, too: a forked child of it may hold its socket.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from typing import NamedTuple

from .timeouts import TIMEOUTS

PAYLOAD_BYTES = 8 << 10
"""Most bytes that a frame carries, but for a back end that says otherwise: at most 16 MiB fit."""
WORDS_BYTES = 512
"""Most bytes of what a member brings to a collective, in words."""
LEAVING, GAVE_UP, ASKED, BEGUN = range(4)
"""Kinds of frames: the sender leaves; the group is broken, and why; how many collectives have you begun; so many."""
OWN = 16
"""Kinds from here on are those of a back end."""

_HEADER = struct.Struct("<IIQQQ")
_KIND = 24
"""Bits of a payload's length; the kind stands above them."""
_HEADER_BYTES = _HEADER.size
_READ_BYTES = 64 << 10


class Frame(NamedTuple):
    """What members tell each other."""

    kind: int
    """One of the kinds of frames."""
    number: int = 0
    """Which message, or which collective, it is about."""
    nbytes: int = 0
    """Size of the message."""
    address: int = 0
    """Where it lies in the sender's memory, or in the payload."""
    code: int = 0
    """The dtype of the message; see `brought.code_of`."""
    payload: bytes = b""

    def pack(self) -> bytes:
        """Write it.

        >>> len(Frame(OWN, payload=b"abc").pack())
        35
        """
        size = len(self.payload)
        first = self.kind << _KIND | size
        return _HEADER.pack(first, self.code, self.number, self.nbytes, self.address) + self.payload


class Link:
    """One connection. One thread receives; any may send.

    Args:
        connection: to the peer.
        process: the peer's id, where it runs on this machine; None: it does not.
    """

    def __init__(self, connection: socket.socket, process: int | None = None) -> None:
        self.socket = connection
        self.gone = False
        """Whether nothing comes of it any more."""
        self.exit = _exit_of(process) if process is not None else None
        """Readable when the peer's process has ended."""
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._rest = bytearray()
        connection.setblocking(False)

    def send(self, frame: Frame) -> bool:
        """Send a frame. Return False where the peer's socket has just become full; the rest is for `flush`."""
        with self._lock:
            self._unsent.append(frame.pack())
            return len(self._unsent) > 1 or self._flush()

    def flush(self) -> bool:
        """Send what is unsent; tell whether nothing is any more."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = self.socket.send(first)
            except (BlockingIOError, TimeoutError):
                return False
            except OSError:  # the peer is gone, which reading tells
                self._unsent.clear()
                return True
            if sent < len(first):
                self._unsent[0] = first[sent:]
            else:
                self._unsent.popleft()
        return True

    def receive(self) -> list[Frame]:
        """Receive the frames that have come whole.

        Raises:
            BlockingIOError: there is nothing yet.
            EOFError: the connection has ended.
            OSError: so it has, and not in order.
        """
        data: bytes | bytearray = self.socket.recv(_READ_BYTES)
        if not data:
            raise EOFError
        if self._rest:
            self._rest += data
            data = self._rest
        frames: list[Frame] = []
        at, first, end = 0, _HEADER_BYTES, len(data)
        while first <= end:
            length, code, number, nbytes, address = _HEADER.unpack_from(data, at)
            kind, size = length >> _KIND, length & (1 << _KIND) - 1
            if first + size > end:
                break
            at = first + size
            frames.append(Frame(kind, number, nbytes, address, code, bytes(data[first:at])))
            first = at + _HEADER_BYTES
        self._rest = bytearray(data[at:]) if at or data is not self._rest else self._rest
        return frames

    def close(self) -> None:
        """Send what is unsent, and end it; forked children that hold the socket do not keep it open for the peer."""
        try:
            self.socket.settimeout(TIMEOUTS.linger)
            self.flush()
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first
        self.socket.close()
        if self.exit is not None:
            os.close(self.exit)
            self.exit = None


def _exit_of(process: int) -> int | None:
    """Open what tells a process's end; None: it is this one, the system has no such thing, or it has ended."""
    if process == os.getpid():
        return None
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):  # the socket will tell
        return None
