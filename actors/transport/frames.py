"""What goes over TCP (see `tcp`): messages, and the bytes of segments behind them.

Rules
- A message is a length (4 bytes, big-endian) and so much JSON, an object; nothing is pickled.
- A connection begins with the credential of the token (`rpc.greetings`), which `{}` answers. Then requests follow:
  `{"read": [[segment, slots], ...], "timeout": seconds, "digests": bool}`, answered by
  `{"rows": [[segment, slots, sizes], ...]}` and the bytes of these slots, each slot padded to 64. With `digests` comes
  last `{"digests": [[hash, ...], ...]}`, in the order of the rows.
- Instead of any answer can come `{"error": name in store.errors, "message": text}`.
- The other side's every length is checked, and so is every wait. Who takes what is sent more slowly than `LEAST_RATE`
  is let go.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, cast

from ...store import errors
from ...store.archive.directory import Bytes
from ...store.bounds import jsontext
from ...store.errors import CorruptDataError, ModelLostError, ShardUnavailableError, TensorVineError
from ...store.segments.segment import ALIGNMENT, SegmentId
from ...store.waiting import Deadline

MESSAGE_BYTES = 16 << 20
"""Longest message."""
ANSWER_S = 600.0
"""Longest time that a client may ask a server to spend on an answer."""
LEAST_RATE = 32 << 10
"""Bytes a second that who reads must take on the average of an answer: a quarter of what a link of 1 Mbit/s carries."""
CHUNK_BYTES = 1 << 20
"""Bytes that are received at once: they are copied while the cache has them."""
_VECTOR = 64
"""Pieces that are sent at once; the kernel takes at most 1024."""
_LENGTH = struct.Struct("!I")
_PADDING = memoryview(bytes(ALIGNMENT))

Slots = Mapping[SegmentId, Sequence[int]]
"""What is read: segment -> slots."""
Asked = Mapping[SegmentId, Sequence[int] | Mapping[int, int]]
"""What a reader asks for: as `Slots`, or mapped to their bytes. What is announced is compared with these before memory
is taken for it."""
Digests = Mapping[SegmentId, Sequence[str] | Mapping[int, str]]
"""Segment -> content hash of each of its slots, or slot -> content hash."""


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """Slots of a segment that have arrived."""

    offsets: Mapping[int, int]
    """Slot -> where it starts in the block."""
    block: Bytes
    """Read-only; small segments may share one."""
    digests: Mapping[int, str] | None = None
    """Slot -> its content hash as the server knows it, if it was asked for."""


class Row(NamedTuple):
    """A segment of an answer."""

    segment: SegmentId
    slots: list[int]
    """In the order of their bytes."""
    sizes: list[int]
    """Their bytes, without padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Slots of a segment at the server, in one block."""

    block: Bytes
    """What has them; it stays in place for as long as this array lives."""
    slots: Mapping[int, tuple[int, int]]
    """Slot -> (offset in the block, bytes)."""

    def row(self, segment: SegmentId) -> Row:
        """Describe what is served, in the order in which it lies there."""
        slots = sorted(self.slots, key=self.slots.__getitem__)
        return Row(segment, slots, [self.slots[slot][1] for slot in slots])

    def pieces(self, row: Row) -> Iterator[memoryview]:
        """Cut what is served into runs that lie together, and the padding between them."""
        whole = self.block.data
        start = end = follows = 0
        for slot in row.slots:
            offset, nbytes = self.slots[slot]
            if offset != follows or end == start:
                yield from _run(whole, start, end)
                start = offset
            end = offset + nbytes
            follows = end + -nbytes % ALIGNMENT
        yield from _run(whole, start, end)


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Slots of a segment to be, each in an array of its own.

    >>> import numpy as np
    >>> gathered = Gathered({0: np.frombuffer(b"abc", np.uint8), 1: np.zeros(0, np.uint8)})
    >>> [len(piece) for piece in gathered.pieces(gathered.row((0, 1)))]
    [3, 61]
    """

    slots: Mapping[int, Bytes]

    def row(self, segment: SegmentId) -> Row:
        """Describe what is served, in the order of the slots."""
        slots = sorted(self.slots)
        return Row(segment, slots, [self.slots[slot].nbytes for slot in slots])

    def pieces(self, row: Row) -> Iterator[memoryview]:
        """Give each array, and the padding behind it."""
        for slot in row.slots:
            yield from _run(self.slots[slot].data, 0, self.slots[slot].nbytes)


# ---- messages -----------------------------------------------------------------------------------------


def message(facts: Mapping[str, object]) -> bytes:
    """Write a message.

    >>> message({"token": "a"})
    b'\\x00\\x00\\x00\\x0e{"token": "a"}'
    """
    text = json.dumps(facts).encode()
    return _LENGTH.pack(len(text)) + text


def error_facts(exc: TensorVineError) -> dict[str, object]:
    """Write an error into a message."""
    return {"error": type(exc).__name__, "message": str(exc)}


def accepted(facts: dict[str, object]) -> dict[str, object]:
    """Give a message back.

    Raises:
        TensorVineError: it brings this error instead of an answer.
    """
    if "error" not in facts:
        return facts
    kind: object = vars(errors).get(str(facts["error"]))
    if not isinstance(kind, type) or not issubclass(kind, TensorVineError):
        kind = ShardUnavailableError
    raise kind(str(facts.get("message")))


def request_of(facts: Mapping[str, object]) -> tuple[dict[SegmentId, list[int]], float, bool]:
    """Read a request: (slots, seconds, hashes too?).

    Raises:
        CorruptDataError: it is none.
    """
    try:
        asked = cast("Sequence[Sequence[object]]", facts["read"])
        slots = {_segment(segment): _naturals(numbers) for segment, numbers in asked}
        timeout = float(cast(float, facts["timeout"]))
    except (KeyError, OverflowError, TypeError, ValueError) as exc:
        raise CorruptDataError(f"TCP: expected a request to read slots of segments; found {exc!r}") from exc
    if math.isnan(timeout):
        raise CorruptDataError("TCP: expected a request with a timeout in seconds; found NaN")
    return slots, min(max(timeout, 0.0), ANSWER_S), bool(facts.get("digests"))


def rows_of(facts: Mapping[str, object], asked: Asked) -> list[Row]:
    """Read what an answer announces.

    Raises:
        CorruptDataError: it is not what was asked for.
    """
    try:
        announced = cast("Sequence[Sequence[object]]", facts["rows"])
        rows = [Row(_segment(segment), _naturals(slots), _naturals(sizes)) for segment, slots, sizes in announced]
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptDataError(f"TCP: expected an answer's segments, slots and sizes; found {exc!r}") from exc
    found = {row.segment: set(row.slots) for row in rows}
    whole = all(len(row.slots) == len(row.sizes) == len(found[row.segment]) for row in rows)
    if not whole or len(found) != len(rows) or found != {segment: set(slots) for segment, slots in asked.items()}:
        raise CorruptDataError(f"TCP: expected slots {dict(asked)}; found {found}")
    check_sizes(rows, asked, "TCP")
    return rows


def check_sizes(rows: Sequence[Row], asked: Asked, what: str) -> None:
    """Hold the sizes that are announced against those that are known, where they are.

    Raises:
        CorruptDataError: they differ.
    """
    for row in rows:
        known = asked[row.segment]
        found = dict(zip(row.slots, row.sizes, strict=True))
        if isinstance(known, Mapping) and found != dict(known):
            where = f"{what}: segment {row.segment}"
            raise CorruptDataError(f"{where}: expected slots of sizes {dict(known)}; found {found}")


def digest_facts(digests: Digests, rows: Sequence[Row]) -> dict[str, object]:
    """Write the content hashes of an answer's slots.

    Raises:
        ModelLostError: a segment was let go meanwhile.
    """
    lost = [row.segment for row in rows if row.segment not in digests]
    if lost:
        raise ModelLostError(f"segments {lost}: expected them to be kept until they were hashed; they were released")
    return {"digests": [[digests[row.segment][slot] for slot in row.slots] for row in rows]}


def digests_of(facts: Mapping[str, object], rows: Sequence[Row]) -> dict[SegmentId, dict[int, str]]:
    """Read content hashes: segment -> slot -> hash.

    Raises:
        CorruptDataError: they do not fit the rows.
    """
    try:
        return {
            row.segment: {slot: str(text) for slot, text in zip(row.slots, texts, strict=True)}
            for row, texts in zip(rows, cast("Sequence[Sequence[object]]", facts["digests"]), strict=True)
        }
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptDataError(f"TCP: expected a content hash of each slot; found {exc!r}") from exc


# ---- bytes --------------------------------------------------------------------------------------------


class Pace:
    """Watches how fast the other side takes what is sent: what is sent stays in memory so long.

    Args:
        grace: seconds that it may be behind `LEAST_RATE`.
        clock: gives seconds.

    >>> seconds = iter([0.0, 1.0, 3600.0])
    >>> pace = Pace(30.0, lambda: next(seconds))
    >>> pace.took(1)
    >>> pace.took(60)
    Traceback (most recent call last):
    TimeoutError: expected it to read at least 32768 bytes a second; it read 61 in 3600 s
    """

    def __init__(self, grace: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace = grace
        self._clock = clock
        self._began = clock()
        self._bytes = 0

    def took(self, nbytes: int) -> None:
        """Count bytes that it took.

        Raises:
            TimeoutError: it is too far behind.
        """
        self._bytes += nbytes
        spent = self._clock() - self._began
        if spent - self._bytes / LEAST_RATE > self._grace:
            raise TimeoutError(
                f"expected it to read at least {LEAST_RATE} bytes a second; it read {self._bytes} in {spent:.0f} s"
            )


def send(connection: socket.socket, parts: Sequence[bytes | memoryview], pace: Pace | None = None) -> None:
    """Send parts one after another; each wait for the other side has the connection's timeout.

    Args:
        connection: to the other side.
        parts: bytes.
        pace: how fast it must take them; None: no matter how slowly.

    Raises:
        TimeoutError: it took nothing for so long, or does not keep pace.
    """
    pending = deque(memoryview(part) for part in parts if len(part))
    while pending:
        sent = connection.sendmsg(list(islice(pending, _VECTOR)))
        if pace is not None:
            pace.took(sent)
        while sent:
            first = pending.popleft()
            if sent < len(first):
                pending.appendleft(first[sent:])
            sent -= min(sent, len(first))


def receive(connection: socket.socket, limit: int, deadline: Deadline) -> dict[str, object]:
    """Receive a message of at most `limit` bytes.

    Raises:
        ConnectionResetError: the connection ended.
        TimeoutError: the deadline has passed.
        CorruptDataError: it is none, or longer.
    """
    (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size, deadline))
    if length > limit:
        raise CorruptDataError(f"TCP: expected a message of at most {limit} bytes; found one of {length}")
    text = receive_bytes(connection, length, deadline)
    return jsontext.mapping(text, "TCP: message")


def receive_bytes(connection: socket.socket, length: int, deadline: Deadline) -> bytearray:
    """Receive so many bytes; errors as in `fill`."""
    content = bytearray(length)
    fill(connection, memoryview(content), deadline)
    return content


def fill(connection: socket.socket, memory: memoryview, deadline: Deadline) -> None:
    """Receive as many bytes as `memory` takes.

    Raises:
        ConnectionResetError: the connection ended.
        TimeoutError: the deadline has passed.
    """
    done = 0
    while done < len(memory):
        left = deadline.left()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        connection.settimeout(left)
        count = connection.recv_into(memory[done : done + CHUNK_BYTES])
        if not count:
            raise ConnectionResetError(f"the connection ended after {done} of {len(memory)} bytes")
        done += count


def _run(whole: memoryview, start: int, end: int) -> Iterator[memoryview]:
    if end > start:
        yield whole[start:end]
        yield _PADDING[: -(end - start) % ALIGNMENT]


def _segment(value: object) -> SegmentId:
    shard, serial = _naturals(value)
    return shard, serial


def _naturals(values: object) -> list[int]:
    found = cast("Sequence[object]", values)  # what it is not raises a TypeError
    numbers = [value for value in found if isinstance(value, int) and value >= 0]
    if len(numbers) != len(found):
        raise ValueError(f"expected non-negative integers; found {values!r}")
    return numbers
