"""What connections of one kind carry: the limits to which both ends hold each other, and how a message is packed.

There are two kinds: short calls, which go by the engine where a connection does not take them, and those of an engine
of our own, for which there is no other way.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..engine import GROUPS
from .framing import ANSWER_BYTES, HEADER, MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Packed:
    """A message to send."""

    pickled: bytes
    buffers: Sequence[memoryview] = ()
    """What stands beside the pickle; each is sent from where it lies."""

    def parts(self, number: int) -> Iterator[bytes | memoryview]:
        """Give what to send under a number, piece by piece."""
        begin = HEADER.pack(len(self.pickled), number) + self.pickled
        if self.buffers:
            sizes = struct.pack(f"<{len(self.buffers)}Q", *(buffer.nbytes for buffer in self.buffers))
            begin = HEADER.pack(len(sizes), 0) + sizes + begin
        yield begin
        yield from self.buffers


def pack(value: object) -> Packed:
    """Pack a value of short calls."""
    return Packed(pickle.dumps(value, 5))


@dataclass(frozen=True, slots=True)
class Traffic:
    """What connections carry; as it stands, short calls."""

    call_bytes: int = MESSAGE_BYTES
    """Of the pickle of a call."""
    answer_bytes: int = ANSWER_BYTES
    """Of the pickle of an answer."""
    buffers: bool = False
    """Buffers may stand beside the pickle, of any size."""
    under_way: Mapping[str, int] = field(default_factory=lambda: GROUPS)
    """Calls of one connection that are not answered, by group."""
    connections: int = 256
    """That one server serves at once."""
    unread_bytes: int = ANSWER_BYTES
    """Of answers that a caller may leave unread; with another answer its connection ends."""
    unsent_bytes: int = 8 << 20
    """Of calls that the server has not taken yet; more are not sent."""
    asks_for_life: bool = True
    """A loop asks another machine for signs of life, and sends nothing to one that gives none."""
    welcome_s: float = 5.0
    """How long a server may take to say whether it has room for a connection."""
    pack: Callable[[object], Packed] = pack


SHORT_CALLS = Traffic()


class Remote(Protocol):
    """The declaration of a call (see `rpc.calls`)."""

    @property
    def name(self) -> str:
        """The method."""
        ...

    @property
    def group(self) -> str:
        """The concurrency group."""
        ...

    @property
    def by_socket(self) -> bool:
        """Whether it is a short call."""
        ...


class Request(Protocol):
    """A call with its arguments."""

    @property
    def remote(self) -> Remote:
        """What is called."""
        ...

    @property
    def arguments(self) -> tuple[object, ...]:
        """What with."""
        ...


def packed(request: Request) -> Packed | None:
    """Return a short call as a message; None: it is none, or too large."""
    if not request.remote.by_socket:
        return None
    message = pack((request.remote.name, request.arguments))
    return message if len(message.pickled) <= SHORT_CALLS.call_bytes else None
