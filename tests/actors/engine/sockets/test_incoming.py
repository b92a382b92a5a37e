"""Messages are assembled from bytes that arrive in any pieces: pickles, and announced buffers."""

from __future__ import annotations

import struct
from random import Random

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.actors.engine.sockets.framing import HEADER
from tensorvine.actors.engine.sockets.incoming import SPACE_BYTES, Incoming, Message
from tensorvine.actors.engine.sockets.packing import Packed


def stream(messages: list[tuple[int, Packed]]) -> bytes:
    return b"".join(bytes(part) for number, packed in messages for part in packed.parts(number))


def received(incoming: Incoming, data: bytes, dice: Random) -> list[Message]:
    """Receive as an event loop does: into the given space, a random number of bytes at a time."""
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
def test_messages_arrive_whole_in_any_pieces(seed: int) -> None:
    dice = Random(seed)  # noqa: S311  no secret
    messages: list[tuple[int, Packed]] = []
    for number in range(1, 8):
        sizes = [dice.choice((0, 1, 5, 3 * SPACE_BYTES)) for _ in range(dice.randrange(4))]
        buffers = [memoryview(dice.randbytes(size)) for size in sizes]
        messages.append((number, Packed(dice.randbytes(dice.choice((0, 3, SPACE_BYTES + 1))), buffers)))
    found = received(Incoming(), stream(messages), dice)
    assert [(message.number, message.pickled) for message in found] == [
        (number, packed.pickled) for number, packed in messages
    ]
    for message, (_, packed) in zip(found, messages, strict=True):
        assert [bytes(buffer) for buffer in message.buffers] == [bytes(buffer) for buffer in packed.buffers]
        assert all(buffer.readonly for buffer in message.buffers)


def test_an_announced_buffer_is_received_in_place() -> None:
    incoming = Incoming()
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
def test_an_invalid_announcement_is_an_error(announced: bytes, reason: str) -> None:
    incoming = Incoming()
    incoming.take(HEADER.pack(len(announced), 0) + announced + HEADER.pack(1, 1) + b"p")
    with pytest.raises(ConnectionAbortedError, match=reason):
        incoming.first()


def test_memory_of_a_buffer_is_touched_as_its_bytes_arrive() -> None:
    incoming = Incoming()
    before = psutil.Process().memory_info().rss
    incoming.take(HEADER.pack(8, 0) + struct.pack("<Q", 1 << 30) + HEADER.pack(1, 1) + b"p" + b"begin")
    assert incoming.first() is None
    assert len(incoming.space()) == (1 << 30) - len(b"begin")
    assert psutil.Process().memory_info().rss - before < 1 << 28


@given(st.lists(st.tuples(st.integers(1, 2**64 - 1), st.binary(max_size=50)), max_size=6), st.data())
def test_bytes_that_were_received_elsewhere_are_messages_in_any_pieces(
    messages: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    rest = b"".join(HEADER.pack(len(content), number) + content for number, content in messages)
    incoming, found = Incoming(), []
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        incoming.take(rest[:cut])
        rest = rest[cut:]
        while (message := incoming.first()) is not None:
            found.append(message)
    assert found == [Message(number, content) for number, content in messages]
    assert len(incoming) == 0
