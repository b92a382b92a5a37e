"""What an Arrow IPC file says that it holds, read before Arrow reads it.

Rules
- Arrow gives a compressed buffer as much memory as it claims to need. So footer and messages (flatbuffers, of which
  only a few numbers are needed) are read here first, with every place checked.
- Batches share no bytes, and the buffers of a batch none either: what a file says can then not be more than it has,
  but for what is compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import CorruptDataError

MOST_BATCHES = 1 << 14
MOST_BUFFERS = 1 << 12
"""Of one batch."""
_MAGIC = b"ARROW1"
_TAIL = 4 + len(_MAGIC)
_CONTINUES = 0xFFFFFFFF
_DICTIONARY, _BATCH = 2, 3
"""Kinds of messages."""


class Readable(Protocol):
    """A file of PyArrow's."""

    def size(self) -> int:
        """Return its length in bytes."""
        ...

    def read_at(self, nbytes: int, offset: int, /) -> bytes:
        """Read a part."""
        ...


@dataclass(frozen=True, slots=True)
class Stated:
    """What a file says that it holds."""

    batches: int
    dictionaries: int
    compressed: bool
    """Whether there is a batch or a dictionary with compressed buffers."""
    nbytes: int
    """Bytes of all buffers when none is compressed any more."""


class _Block(NamedTuple):
    offset: int
    head: int
    """Bytes of the message before its body."""
    body: int


def stated(file: Readable, what: str) -> Stated:
    """Read what an Arrow file says that it holds.

    Raises:
        CorruptDataError: it is no Arrow file, or contradicts itself.
    """
    size = file.size()
    footer = _footer(file, size, what)
    dictionaries, batches = (list(_blocks(footer, number, what)) for number in (2, 3))
    if len(dictionaries) + len(batches) > MOST_BATCHES:
        raise _wrong(what, f"at most {MOST_BATCHES} batches", f"{len(dictionaries) + len(batches)}")
    used, nbytes, compressed = 0, 0, False
    for kind, blocks in ((_DICTIONARY, dictionaries), (_BATCH, batches)):
        for block in blocks:
            used += block.head + block.body
            if min(block) < 0 or block.offset + block.head + block.body > size or used > size:
                raise _wrong(what, f"batches within its {size} bytes", f"{block.body} bytes at {block.offset}")
            packed, length = _buffers(file, block, kind, what)
            compressed, nbytes = compressed or packed, nbytes + length
    return Stated(len(batches), len(dictionaries), compressed, nbytes)


def _footer(file: Readable, size: int, what: str) -> _Table:
    if size < len(_MAGIC) + 2 + _TAIL:
        raise _wrong(what, "a whole Arrow file", f"{size} bytes")
    tail = file.read_at(_TAIL, size - _TAIL)
    length = int.from_bytes(tail[:4], "little", signed=True)
    if tail[4:] != _MAGIC or not 0 < length <= size - len(_MAGIC) - 2 - _TAIL:
        raise _wrong(what, "a whole Arrow file", "another end")
    return _root(file.read_at(length, size - _TAIL - length), 0, what)


def _blocks(footer: _Table, number: int, what: str) -> Iterator[_Block]:
    for at in footer.items(number, 24):
        yield _Block(*(footer.number(form, at + place) for form, place in (("<q", 0), ("<i", 8), ("<q", 16))))


def _buffers(file: Readable, block: _Block, kind: int, what: str) -> tuple[bool, int]:
    """Say whether a batch's buffers are compressed, and how many bytes they hold."""
    head = file.read_at(block.head, block.offset)
    message = _root(head, 8 if head[:4] == _CONTINUES.to_bytes(4, "little") else 4, what)
    found, body = message.field(1), message.field(3)
    length = message.number("<q", body) if body is not None else 0
    if found is None or message.number("<B", found) != kind or not 0 <= length <= block.body:
        raise _wrong(what, f"a batch with a body of {block.body} bytes", f"another one, or {length} bytes")
    batch = message.table(2)
    if kind == _DICTIONARY:
        batch = batch.table(1)
    places = batch.items(2, 16)
    if len(places) > MOST_BUFFERS:
        raise _wrong(what, f"at most {MOST_BUFFERS} buffers in a batch", f"{len(places)}")
    spans = batch.pairs(places)
    if any(min(span) < 0 or sum(span) > length for span in spans) or sum(span[1] for span in spans) > length:
        raise _wrong(what, f"buffers within the {length} bytes of their batch", "buffers outside it")
    if batch.field(3) is None:
        return False, sum(span[1] for span in spans)
    start = block.offset + block.head
    return True, sum(_inflated(file, start + offset, nbytes, what) for offset, nbytes in spans if nbytes)


def _inflated(file: Readable, at: int, nbytes: int, what: str) -> int:
    """Return how long a compressed buffer says that it is; -1 stands before one that is not compressed."""
    length = int.from_bytes(file.read_at(8, at), "little", signed=True) if nbytes >= 8 else -2
    if length < -1:
        raise _wrong(what, "the length of a compressed buffer at its start", f"{length} in {nbytes} bytes")
    return length if length >= 0 else nbytes - 8


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: bytes, at: int, what: str) -> None:
        self._data, self._at, self._what = data, at, what

    def number(self, form: str, at: int) -> int:
        """Return the number at a place."""
        if not 0 <= at <= len(self._data) - struct.calcsize(form):
            raise _wrong(self._what, f"an Arrow message of {len(self._data)} bytes", f"a reference to byte {at}")
        return struct.unpack_from(form, self._data, at)[0]

    def field(self, number: int) -> int | None:
        """Return where a field stands; None: it is not there."""
        fields = self._at - self.number("<i", self._at)
        place = 4 + 2 * number
        offset = self.number("<H", fields + place) if self.number("<H", fields) >= place + 2 else 0
        return self._at + offset if offset else None

    def table(self, number: int) -> _Table:
        """Return the table that is a field."""
        at = self.field(number)
        if at is None:
            raise _wrong(self._what, "an Arrow message of a batch", f"a message without field {number}")
        return _Table(self._data, at + self.number("<I", at), self._what)

    def items(self, number: int, size: int) -> range:
        """Return where the items of a field, which have `size` bytes each, stand."""
        at = self.field(number)
        if at is None:
            return range(0)
        start = at + self.number("<I", at)
        end = start + 4 + size * self.number("<I", start)
        if end > len(self._data):
            raise _wrong(self._what, f"an Arrow message of {len(self._data)} bytes", f"at least {end} bytes")
        return range(start + 4, end, size)

    def pairs(self, places: range) -> list[tuple[int, int]]:
        """Return the two numbers that each item of 16 bytes is."""
        return list(struct.iter_unpack("<qq", memoryview(self._data)[places.start : places.stop]))


def _root(data: bytes, at: int, what: str) -> _Table:
    return _Table(data, at + _Table(data, at, what).number("<I", at), what)


def _wrong(what: str, expected: str, found: str) -> CorruptDataError:
    return CorruptDataError(f"{what}: expected {expected}; found {found}")
