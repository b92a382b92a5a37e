"""Slots of segments as the messages of a group: what a shard sends, and where it goes at a reader.

Rules
- As over TCP, large segments get a memory of their own each, small ones share one: a parcel. A reader lays slots
  out one after another, padded, in the order in which they lie at the shard.
- What lies together there is one message, straight from its memory; only what is small is copied together.
- The shard tells the messages' lengths beforehand, so both ends know what comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...store.archive.directory import Bytes
from ...store.errors import CorruptDataError
from ...store.segments.segment import SegmentId
from .frames import Asked, Row, Served, Slots, check_sizes
from .targets import groups, length_of

COPIED_BYTES = 64 << 10
"""Pieces below this are copied together into one message."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Segments that arrive in one memory."""

    rows: tuple[Row, ...]
    """What they are, in the order of their bytes."""
    lengths: tuple[int, ...]
    """Bytes of each message."""

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class PairQuestion:
    """What a reader asks of a shard with which it has, or will have, a group of two."""

    places: Slots
    timeout: float
    """Seconds."""
    pair: str | None
    """Name of the group that the reader has; None: it has none."""


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """How the bytes come; they are being sent."""

    pair: str
    """They come by the group of this name, to which the reader connects unless it has it."""
    parcels: tuple[Parcel, ...]


def packed(served: Mapping[SegmentId, Served]) -> tuple[tuple[Parcel, ...], list[Bytes]]:
    """Make messages of what a shard has.

    >>> block = np.arange(256, dtype=np.uint8)
    >>> (parcel,), messages = packed({(0, 1): Served(block, {0: (0, 100), 3: (128, 5)})})
    >>> parcel.rows, parcel.lengths, messages[0][128:133].tolist()
    ((Row(segment=(0, 1), slots=[0, 3], sizes=[100, 5]),), (192,), [128, 129, 130, 131, 132])
    """
    parcels: list[Parcel] = []
    messages: list[Bytes] = []
    for rows in groups([found.row(segment) for segment, found in served.items()]):
        part = list(_messages(piece for row in rows for piece in served[row.segment].pieces(row)))
        parcels.append(Parcel(tuple(rows), tuple(message.nbytes for message in part)))
        messages += part
    return tuple(parcels), messages


def check_parcels(parcels: Sequence[Parcel], asked: Asked, what: str) -> None:
    """Hold what a shard announces against what it was asked for.

    Raises:
        CorruptDataError: it is something else.
    """
    rows = [row for parcel in parcels for row in parcel.rows]
    found = {row.segment: sorted(row.slots) for row in rows}
    fits = all(len(row.slots) == len(row.sizes) for row in rows)
    fits = fits and all(length_of(p.rows) == p.nbytes for p in parcels)
    if (
        not fits
        or len(found) != len(rows)
        or found != {segment: sorted(set(slots)) for segment, slots in asked.items()}
    ):
        raise CorruptDataError(f"{what}: expected slots {dict(asked)}; found {found} in messages {parcels}")
    check_sizes(rows, asked, what)


def cut(memory: memoryview, lengths: Sequence[int]) -> Iterator[Bytes]:
    """Return the part of a parcel's memory that each of its messages fills."""
    start = 0
    for length in lengths:
        yield np.frombuffer(memory[start : start + length], np.uint8)
        start += length


def _messages(parts: Iterator[memoryview]) -> Iterator[Bytes]:
    """Copy small pieces together; give large ones as they are."""
    small: list[memoryview] = []
    for part in parts:
        if len(part) < COPIED_BYTES:
            small += [part] if len(part) else []
            continue
        yield from _joined(small)
        small = []
        yield np.frombuffer(part, np.uint8)
    yield from _joined(small)


def _joined(small: Sequence[memoryview]) -> Iterator[Bytes]:
    if small:
        yield np.frombuffer(b"".join(small), np.uint8)
