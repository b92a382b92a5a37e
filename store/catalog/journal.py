"""The journal as bytes: streams of frames, each a record with a checksum.

Rules
- A stream begins with a snapshot, from `Began` to `End`, and goes on with decisions. A stream whose snapshot is not
  whole counts for nothing.
- A frame that is cut or damaged ends the stream: nobody saw what it says, nor what follows.
- Of several streams the one of the highest term counts, of these the one with the highest number, and of copies of one
  stream the longest.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from ..errors import CorruptDataError
from .records import Began, End, Record, decoded, encoded
from .state import CatalogState, Effects

FOLDER = "catalog"
"""Folder of streams, below the path or in a private folder."""
_FRAME = struct.Struct("<IQ")
_NAME = re.compile(rf"{FOLDER}/(\d{{1,18}})\.(\d{{1,9}})\.journal", re.ASCII)
LONGEST = 1 << 30
"""Bytes of a record."""


@dataclass(frozen=True, slots=True, order=True)
class Stream:
    """Which stream: of two the greater one counts.

    >>> Stream.parse(Stream(3, 1).name) == Stream(3, 1), Stream.parse("catalog/README") is None
    (True, True)
    """

    term: int
    number: int
    """Within the term, from 1."""

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{FOLDER}/{self.term}.{self.number}.journal"

    @property
    def mark(self) -> str:
        """Name of the file next to a stream below the path that exists while the stream is complete."""
        return f"{FOLDER}/{self.term}.{self.number}.current"

    @classmethod
    def parse(cls, name: str) -> Stream | None:
        """Return the stream that a file is named after; None: it is none."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match is not None else None


def frame(content: bytes) -> bytes:
    """Return a record's bytes as a frame.

    >>> [bytes(found) for found, _ in frames(frame(b"a") + frame(b"b")[:-1])]
    [b'a']
    """
    return _FRAME.pack(len(content), xxhash.xxh3_64_intdigest(content)) + content


def frames(content: bytes | memoryview, start: int = 0) -> Iterator[tuple[memoryview, int]]:
    """Give the whole frames of a stream from an offset on: the record's bytes, and where the frame ends."""
    view = memoryview(content)
    at = start
    while at + _FRAME.size <= len(view):
        length, checksum = _FRAME.unpack_from(view, at)
        end = at + _FRAME.size + length
        if length > LONGEST or end > len(view):
            return
        found = view[at + _FRAME.size : end]
        if xxhash.xxh3_64_intdigest(found) != checksum:
            return
        yield found, end
        at = end


def snapshot_of(records: Iterable[Record | bytes]) -> Iterator[bytes]:
    """Give the frames of a snapshot; see `CatalogState.snapshot`."""
    for record in records:
        yield frame(record if isinstance(record, bytes) else encoded(record))


class Scan:
    """Follows a stream that comes in pieces, such as a copy of one.

    >>> scan = Scan()
    >>> scan.feed(frame(encoded(End(0, 7)))[:5])
    >>> scan.whole
    False
    >>> scan.feed(frame(encoded(End(0, 7)))[5:])
    >>> scan.whole
    True
    """

    def __init__(self) -> None:
        self.whole = False
        """The snapshot is whole."""
        self._rest = b""

    def feed(self, content: bytes) -> None:
        """Take the next bytes."""
        if self.whole:
            return
        rest, at = self._rest + content, 0
        for found, end in frames(rest):
            at = end
            if _is_end(found):
                self.whole, self._rest = True, b""
                return
        self._rest = rest[at:]


def whole(content: bytes | memoryview) -> bool:
    """Tell whether the snapshot of a stream is whole."""
    return any(_is_end(found) for found, _ in frames(content))


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found."""

    began: Began
    length: int
    """Bytes of the stream up to the last whole frame."""
    decisions: int
    """Records after the snapshot."""


def replay(state: CatalogState, content: bytes | memoryview) -> Replayed:
    """Apply a stream to a new state.

    Raises:
        CorruptDataError: its snapshot is not whole, or it is none, or its records do not follow from one another.
    """
    began: Began | None = None
    length, seen, snapshot = 0, 0, False
    for found, end in frames(content):
        record = decoded(found)
        if began is None:
            if not isinstance(record, Began):
                raise CorruptDataError(f"journal: expected the begin of a term; found {type(record).__name__}")
            began = record
        if isinstance(record, End):
            if record.records != seen:
                raise CorruptDataError(f"journal: expected a snapshot of {record.records} records; found {seen}")
            snapshot, seen = True, -1
        try:
            state.apply(record, bytes(found))
        except (LookupError, OverflowError, ValueError) as exc:  # it was made by somebody else
            raise CorruptDataError(
                f"journal: expected records that follow from those before; found a {type(record).__name__} of what is "
                f"not there ({exc!r})"
            ) from exc
        seen, length = seen + 1, end
    if began is None or not snapshot:
        raise CorruptDataError("journal: expected a whole snapshot; found its begin only")
    state.effects = Effects()
    state.references.freed.clear()
    return Replayed(began, length, seen)


def _is_end(content: memoryview) -> bool:
    return bytes(content[1:5]) == b"\xa3end"  # an array of three, whose first element is the tag
