"""Assemble the messages of a connection from the bytes that arrive.

Rules
- Announced buffers are received where they will stay, so that a large array is not copied after its arrival. They are
  unpickled as read-only arrays.
- Only authenticated peers announce buffers. Their memory is allocated then, and touched as the bytes arrive.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from .framing import HEADER

SPACE_BYTES = 1 << 16
"""Most bytes of headers and pickles that one read receives."""


class Message(NamedTuple):
    """A message that has come."""

    number: int
    pickled: bytes
    buffers: tuple[memoryview, ...] = ()


class Incoming:
    """The bytes that arrived on a connection.

    >>> incoming = Incoming()
    >>> incoming.take(bytes([2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]) + b"ab")
    >>> incoming.first()
    Message(number=7, pickled=b'ab', buffers=())
    """

    def __init__(self) -> None:
        self._space = memoryview(bytearray(SPACE_BYTES))
        self._gathered = bytearray()
        self._sizes: tuple[int, ...] = ()
        """Of the buffers that stand behind the next message."""
        self._begun: tuple[int, bytes] | None = None
        """A message whose buffers have not all come."""
        self._buffers: list[memoryview] = []
        self._filled = 0
        """Bytes of the buffer that comes now, which is the first without all of its bytes."""
        self._place = 0
        """Which that is."""

    def __len__(self) -> int:
        """Return how many bytes have been gathered and are no message yet."""
        return len(self._gathered)

    def space(self) -> memoryview:
        """Return where the next bytes are to be received."""
        if self._begun is not None and not self._gathered:
            return self._buffers[self._place][self._filled :]
        return self._space

    def came(self, nbytes: int) -> None:
        """Take so many bytes, which were received in `space`."""
        if self._begun is not None and not self._gathered:
            self._fill(nbytes)
        else:
            self._gathered += self._space[:nbytes]

    def take(self, data: bytes) -> None:
        """Take bytes that were received elsewhere."""
        self._gathered += data

    def clear(self) -> None:
        """Let go of what has come."""
        self._gathered.clear()
        self._begun, self._buffers = None, []

    def first(self) -> Message | None:
        """Take the first whole message; None: there is none yet.

        Raises:
            ConnectionAbortedError: the bytes are no message, or there is no memory for its buffers.
        """
        while self._begun is None:
            found = self._gathered_message()
            if found is None:
                return None
            number, pickled = found
            if not number and pickled:
                self._sizes = _sizes_in(pickled)
            elif not self._sizes:
                return Message(number, pickled)
            else:
                self._begin(found)
        while self._place < len(self._buffers) and self._gathered:
            part = self._buffers[self._place][self._filled :]
            taken = min(len(part), len(self._gathered))
            part[:taken] = self._gathered[:taken]
            del self._gathered[:taken]
            self._fill(taken)
        if self._place < len(self._buffers):
            return None
        (number, pickled), buffers = self._begun, tuple(buffer.toreadonly() for buffer in self._buffers)
        self._begun, self._buffers = None, []
        return Message(number, pickled, buffers)

    def _gathered_message(self) -> tuple[int, bytes] | None:
        if len(self._gathered) < HEADER.size:
            return None
        length, number = HEADER.unpack_from(self._gathered)
        end = HEADER.size + length
        if len(self._gathered) < end:
            return None
        pickled = bytes(self._gathered[HEADER.size : end])
        del self._gathered[:end]
        return number, pickled

    def _begin(self, message: tuple[int, bytes]) -> None:
        try:
            self._buffers = [np.empty(size, np.uint8).data for size in self._sizes]
        except (MemoryError, ValueError) as exc:
            raise ConnectionAbortedError(f"expected memory for {sum(self._sizes)} announced bytes; {exc}") from exc
        self._begun, self._sizes, self._place, self._filled = message, (), 0, 0
        self._fill(0)

    def _fill(self, nbytes: int) -> None:
        self._filled += nbytes
        while self._place < len(self._buffers) and self._filled == len(self._buffers[self._place]):
            self._place, self._filled = self._place + 1, 0


def _sizes_in(announcement: bytes) -> tuple[int, ...]:
    try:
        return tuple(size for (size,) in struct.iter_unpack("<Q", announcement))
    except struct.error as exc:
        raise ConnectionAbortedError(f"expected the sizes of buffers; found {len(announcement)} bytes") from exc
