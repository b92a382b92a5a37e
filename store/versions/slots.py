"""Slots of segments in few bytes, as records, messages and journals keep them.

Rules
- A segment takes 1 byte for the length of its serial number, that number, and a count of runs; a run of slots takes 8
  bytes. A version that wrote all its tensors takes some 20 bytes, however many they are.
- The first part of a segment's id is not kept: it has no meaning, and is 0 in what is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import CorruptDataError
from ..segments.segment import SEGMENT_SLOTS, SegmentId

_COUNT = struct.Struct("<BI")
_RUN = struct.Struct("<II")
_LONGEST = 32
"""Bytes of a serial number."""


def segment_bytes(segment: SegmentId) -> bytes:
    """Return a segment's serial number as bytes.

    >>> segment_bytes((0, 258))
    b'\\x02\\x01'
    """
    serial = segment[1]
    return serial.to_bytes((serial.bit_length() + 7) // 8 or 1, "little")


def segment_from(content: bytes) -> SegmentId:
    """Return the segment of `segment_bytes`.

    Raises:
        CorruptDataError: it is empty, or too long.
    """
    if not 0 < len(content) <= _LONGEST:
        raise CorruptDataError(f"segment: expected 1 to {_LONGEST} bytes; found {len(content)}")
    return 0, int.from_bytes(content, "little")


def packed_slots(slots: Mapping[SegmentId, Sequence[int]]) -> bytes:
    """Pack slots by segment.

    >>> unpacked_slots(packed_slots({(0, 255): [0, 1, 2, 9]}))
    {(0, 255): [0, 1, 2, 9]}
    """
    parts: list[bytes] = []
    for segment, chosen in slots.items():
        serial, runs = segment_bytes(segment), list(runs_of(chosen))
        parts += [_COUNT.pack(len(serial), len(runs)), serial, *(_RUN.pack(*run) for run in runs)]
    return b"".join(parts)


def unpacked_slots(content: bytes) -> dict[SegmentId, list[int]]:
    """Return what `packed_slots` packed, the slots in ascending order.

    Raises:
        CorruptDataError: it is something else.
    """
    found: dict[SegmentId, list[int]] = {}
    at = 0
    try:
        while at < len(content):
            length, count = _COUNT.unpack_from(content, at)
            at += _COUNT.size + length
            segment = segment_from(content[at - length : at])
            slots = found.setdefault(segment, [])
            for _ in range(count):
                first, size = _RUN.unpack_from(content, at)
                at += _RUN.size
                end = first + size
                if end > SEGMENT_SLOTS or len(slots) + size > SEGMENT_SLOTS:
                    raise CorruptDataError(f"slots: expected numbers below {SEGMENT_SLOTS}; found {first} to {end}")
                slots.extend(range(first, end))
    except struct.error as exc:
        raise CorruptDataError(f"slots: expected packed slots; found {exc}") from exc
    return found


def runs_of(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Give the runs of numbers without a gap: the first, and how many."""
    first: int | None = None
    size = 0
    for slot in sorted(set(slots)):
        if first is not None and slot == first + size:
            size += 1
            continue
        if first is not None:
            yield first, size
        first, size = slot, 1
    if first is not None:
        yield first, size
