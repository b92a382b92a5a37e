"""Limits of what compressed input may hold: zlib streams, and the buffers of Arrow files.

PyArrow decompresses as many bytes as a buffer claims, without a limit, and does not check that a buffer lies in its
batch. So both are checked before it reads a file. All other structure is left to PyArrow to check; where it is damaged,
the numbers read here are arbitrary.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Protocol

from ..errors import CorruptDataError

MOST_BATCHES = 1 << 14
"""Dictionaries and record batches of an Arrow file."""
_TAIL = 10
"""Bytes at the end of an Arrow file: the footer's length and a magic number."""
_V5 = 4
"""Arrow's number of the metadata version in which a batch says itself whether it is compressed."""


class ArrowSource(Protocol):
    """A file as PyArrow reads it."""

    def size(self) -> int:
        """Return its length in bytes."""
        ...

    def read_at(self, nbytes: int, offset: int, /) -> bytes:
        """Read a part."""
        ...


def inflated(content: bytes, limit: int, what: str) -> bytes:
    """Decompress a whole zlib stream.

    Args:
        content: the stream, and nothing behind it.
        limit: bytes that it may hold.
        what: names it in errors.

    Raises:
        CorruptDataError: it is none, or holds more.

    >>> inflated(zlib.compress(b"abc"), 3, "m")
    b'abc'
    >>> inflated(zlib.compress(bytes(1000)), 999, "m")
    Traceback (most recent call last):
    tensorvine.store.errors.CorruptDataError: m: expected at most 999 bytes in a zlib stream of 17; found more
    """
    running = zlib.decompressobj()
    try:
        found = running.decompress(content, limit + 1)
    except zlib.error as exc:
        raise CorruptDataError(f"{what}: expected a zlib stream; found {exc}") from exc
    if len(found) > limit:
        raise CorruptDataError(f"{what}: expected at most {limit} bytes in a zlib stream of {len(content)}; found more")
    if not running.eof or running.unused_data:
        raise CorruptDataError(f"{what}: expected one whole zlib stream; found {len(content)} other bytes")
    return found


def decompressed_bytes(file: ArrowSource, what: str) -> int:
    """Return how many bytes the compressed buffers of an Arrow file claim to hold, 0 if none is compressed.

    Args:
        file: the file.
        what: names it in errors.

    Raises:
        CorruptDataError: the buffers cannot be found, lie outside of their batch, or share bytes; or there are too many
            batches.
    """
    try:
        return sum(_claims(file, what))
    except (struct.error, ValueError) as exc:
        raise CorruptDataError(f"{what}: expected a whole Arrow file; found {exc}") from exc


def _claims(file: ArrowSource, what: str) -> Iterator[int]:
    """Yield the uncompressed size that each compressed buffer begins with."""
    left = size = file.size()

    def read(at: int, nbytes: int) -> bytes:
        if not 0 <= at <= at + nbytes <= size:
            raise ValueError(f"{nbytes} bytes at {at} in a file of {size}")
        return file.read_at(nbytes, at)

    (length,) = struct.unpack_from("<i", read(size - _TAIL, _TAIL))
    footer = _Table(read(size - _TAIL - length, length), 0)
    blocks = [(number, *block) for number in (2, 3) for block in footer.items(number, "<qi4xq")]
    if len(blocks) > MOST_BATCHES:
        raise CorruptDataError(f"{what}: expected at most {MOST_BATCHES} batches; found {len(blocks)}")
    for number, start, head, body in blocks:
        left -= head + max(body, 0)
        if left < 0:
            raise ValueError("batches that share bytes, or are longer than the file")
        message = _Table(raw := read(start, head), 8 if raw[:4] == b"\xff\xff\xff\xff" else 4)
        batch = message.table(2) if number == 3 else message.table(2).table(1)
        spans = list(batch.items(2, "<qq"))
        length = message.number("<q", 3)
        if not sum(nbytes for _, nbytes in spans) <= length <= body or any(
            min(s) < 0 or sum(s) > length for s in spans
        ):
            raise ValueError(f"buffers that share bytes, or lie outside of the {body} bytes of their batch")
        # before V5, the metadata of the message itself may say that the buffers are compressed
        if batch.field(3) or (message.number("<h", 0) < _V5 and message.field(4)):
            for offset, nbytes in spans:
                if nbytes:
                    yield max(0, *struct.unpack_from("<q", read(start + head + offset, 8)))


class _Table:
    """A table of a flatbuffer, to which a reference points."""

    def __init__(self, data: bytes, reference: int) -> None:
        self._data = data
        self._at = reference + self._read("<I", reference)

    def _read(self, form: str, at: int) -> int:
        return struct.unpack_from(form, self._data, at)[0]

    def field(self, number: int) -> int:
        """Return where a field is, or 0 if the table does not have it."""
        fields = self._at - self._read("<i", self._at)
        place = 4 + 2 * number
        offset = self._read("<H", fields + place) if self._read("<H", fields) > place else 0
        return self._at + offset if offset else 0

    def number(self, form: str, number: int) -> int:
        """Return the number in a field, or 0 if the table does not have it."""
        at = self.field(number)
        return self._read(form, at) if at else 0

    def table(self, number: int) -> _Table:
        """Return the table that a field refers to."""
        return _Table(self._data, self.field(number))

    def items(self, number: int, form: str) -> Iterator[tuple[int, ...]]:
        """Return the items of a field, as `struct` unpacks them."""
        if not (at := self.field(number)):
            return iter(())
        start = at + self._read("<I", at)
        end = start + 4 + self._read("<I", start) * struct.calcsize(form)
        return struct.iter_unpack(form, self._data[start + 4 : end])
