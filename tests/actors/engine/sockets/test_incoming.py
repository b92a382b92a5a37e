"""What comes on a connection, in any pieces: pickles, and the buffers that were announced beside them."""

from __future__ import annotations

import struct
from random import Random

import pytest
from tensorvine.actors.engine.sockets.framing import HEADER, MESSAGE_BYTES
from tensorvine.actors.engine.sockets.incoming import SPACE_BYTES, Incoming, Message
from tensorvine.actors.engine.sockets.traffic import Packed


def stream(messages: list[tuple[int, Packed]]) -> bytes:
    return b"".join(bytes(part) for number, packed in messages for part in packed.parts(number))


def received(incoming: Incoming, data: bytes, dice: Random) -> list[Message]:
    """Receive as a loop does: in the space that is given, as many bytes as happen to come."""
    found: list[Message] = []
    while data:
        space = incoming.space()
        count = min(len(space), len(data), dice.choice((1, 7, 1000, SPACE_BYTES)))
        space[:count] = data[:count]
        data = data[count:]
        incoming.came(count)
        while (message := incoming.first()) is not None:
            found.append(message)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_messages_come_whole_in_whatever_pieces(seed: int) -> None:
    dice = Random(seed)  # noqa: S311  a game
    messages: list[tuple[int, Packed]] = []
    for number in range(1, 8):
        sizes = [dice.choice((0, 1, 5, 3 * SPACE_BYTES)) for _ in range(dice.randrange(4))]
        buffers = [memoryview(dice.randbytes(size)) for size in sizes]
        messages.append((number, Packed(dice.randbytes(dice.choice((0, 3, SPACE_BYTES + 1))), buffers)))
    found = received(Incoming(MESSAGE_BYTES, buffers=True), stream(messages), dice)
    assert [(message.number, message.pickled) for message in found] == [
        (number, packed.pickled) for number, packed in messages
    ]
    for message, (_, packed) in zip(found, messages, strict=True):
        assert [bytes(buffer) for buffer in message.buffers] == [bytes(buffer) for buffer in packed.buffers]
        assert all(buffer.readonly for buffer in message.buffers)


def test_what_has_been_announced_is_received_where_it_stays() -> None:
    incoming = Incoming(MESSAGE_BYTES, buffers=True)
    incoming.take(stream([(1, Packed(b"p", [memoryview(bytes(10 * SPACE_BYTES))]))])[: -10 * SPACE_BYTES])
    assert incoming.first() is None
    space = incoming.space()
    assert len(space) == 10 * SPACE_BYTES
    space[:] = b"x" * len(space)
    incoming.came(len(space))
    message = incoming.first()
    assert message is not None
    space[0] = ord("y")
    assert message.buffers[0][:2].tobytes() == b"yx"


@pytest.mark.parametrize(
    ("announced", "reason"),
    [(b"12345", "expected the sizes of buffers; found 5 bytes"), (struct.pack("<Q", 1 << 63), "expected memory for")],
)
def test_an_announcement_that_is_none_ends_the_connection(announced: bytes, reason: str) -> None:
    incoming = Incoming(MESSAGE_BYTES, buffers=True)
    incoming.take(HEADER.pack(len(announced), 0) + announced + HEADER.pack(1, 1) + b"p")
    with pytest.raises(ConnectionAbortedError, match=reason):
        incoming.first()


def test_without_leave_nothing_is_announced() -> None:
    incoming = Incoming(MESSAGE_BYTES)
    incoming.take(HEADER.pack(8, 0) + struct.pack("<Q", 1 << 40))
    assert incoming.first() == Message(0, struct.pack("<Q", 1 << 40))
