"""The records of the catalog's journal: its decisions, and what a snapshot keeps of many.

Rules
- A record says what was decided, with all that applying it needs: no clock, no random number, and no order of a set has a
  say. So the state after a replay is the state before.
- Records are msgpack, by msgspec: nothing is pickled. Segments' numbers are bytes, as they may have more than 64 bits.
- Of the same kind of fact, the later record counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from ..errors import CorruptDataError
from ..graphs.index import PrefixQuery
from ..holders import Request
from ..refs import ModelRef
from ..segments.segment import File, SegmentId
from ..versions.manifest import Header
from ..versions.slots import segment_bytes, segment_from

Ref = tuple[str, int]
"""A version."""
Done = tuple[str, int]
"""A request: client and number."""


class Began(msgspec.Struct, tag="term", array_like=True, frozen=True):
    """A term began. The first record of each stream."""

    term: int
    token: bytes
    floor: int
    """No name gets a number up to this that it has not used."""


class Graph(msgspec.Struct, tag="graph", array_like=True, frozen=True):
    """An architecture that versions are about to have."""

    key: bytes
    packed: bytes
    fingerprints: tuple[bytes, ...]
    inputs: tuple[tuple[int, ...], ...]

    @property
    def query(self) -> PrefixQuery:
        """The graph, as prefix queries need it."""
        return PrefixQuery(self.fingerprints, self.inputs)


class Version(msgspec.Struct, tag="version", array_like=True, frozen=True):
    """A version exists; `retired`, in a snapshot: it is retired, and its tensors are not freed yet."""

    ref: Ref
    parent: Ref | None
    quality: float | None
    metadata: str
    created_ns: int
    graph_key: bytes
    bytes_owned: int
    bytes_total: int
    codec: str | None
    body: bytes
    slots: bytes
    save: Done | None
    """The save that brought it; None: a manifest on the path did."""
    placed: tuple[tuple[bytes, int, tuple[int, ...]], ...]
    """Segments that it brought: serial number, slots, shards that have it, the keeper first."""
    written: bool = False
    """Its manifest is on the path."""
    retired: bool = False

    @property
    def header(self) -> Header:
        """The header of the version."""
        return Header(
            ref=ModelRef(*self.ref),
            parent=ModelRef(*self.parent) if self.parent is not None else None,
            quality=self.quality,
            metadata=self.metadata,
            created_ns=self.created_ns,
            graph_key=self.graph_key,
            bytes_owned=self.bytes_owned,
            bytes_total=self.bytes_total,
            codec=self.codec,
        )


class Retired(msgspec.Struct, tag="retired", array_like=True, frozen=True):
    """A version exists no more. Its tensors stay until it is `Freed`."""

    ref: Ref
    request: Done | None


class Freed(msgspec.Struct, tag="freed", array_like=True, frozen=True):
    """Nobody needs the tensors of retired versions any more: no pin, and no manifest that is live on the path."""

    refs: tuple[Ref, ...]


class Lost(msgspec.Struct, tag="lost", array_like=True, frozen=True):
    """Versions exist, and some of their tensors are in no shard, no copy and no file. They are named so until retired."""

    refs: tuple[Ref, ...]


class Placed(msgspec.Struct, tag="placed", array_like=True, frozen=True):
    """Where segments are: shards that have copies, the keeper first, and the file."""

    segments: tuple[tuple[bytes, int, tuple[int, ...], FileRecord | None], ...]
    """Serial number, slots, shards, file."""


class FileRecord(msgspec.Struct, array_like=True, frozen=True):
    """A segment's file."""

    name: str
    generation: int
    nbytes: int
    slots: tuple[int, ...]
    bases: tuple[tuple[int, bytes, int], ...]
    """Slot, serial number and slot of what it is encoded against."""

    @classmethod
    def of(cls, file: File) -> FileRecord:
        """Make the record of a file."""
        bases = tuple((slot, segment_bytes(base), at) for slot, (base, at) in sorted(file.bases.items()))
        return cls(file.name, file.generation, file.nbytes, tuple(sorted(file.slots)), bases)

    @property
    def file(self) -> File:
        """The file."""
        bases = {slot: (segment_from(base), at) for slot, base, at in self.bases}
        return File(self.name, self.generation, self.nbytes, frozenset(self.slots), bases)


class Written(msgspec.Struct, tag="written", array_like=True, frozen=True):
    """Manifests of live versions are on the path, or headers of retired ones in their place."""

    refs: tuple[Ref, ...]


class Forgotten(msgspec.Struct, tag="forgotten", array_like=True, frozen=True):
    """A client's answers to repeated requests are needed no more: it declared these over, or its session ended."""

    client: str
    numbers: tuple[int, ...] | None
    """None: all of them."""


class Name(msgspec.Struct, tag="name", array_like=True, frozen=True):
    """In a snapshot: what is known of a name besides its versions with records."""

    name: str
    next_version: int
    newest_ns: int
    lost: tuple[tuple[int, Ref | None], ...]
    """Lost versions without a record, and their parents."""
    past: tuple[tuple[int, Ref | None, float | None], ...]
    """Retired ones that something derives from, if they are in no run: parent and quality."""
    runs: tuple[tuple[int, tuple[float | None, ...]], ...]
    """Runs of retired ones, each the child of the number before: the first, and the qualities."""


class Answers(msgspec.Struct, tag="answers", array_like=True, frozen=True):
    """In a snapshot: what requests of a client were answered."""

    client: str
    answers: tuple[tuple[int, Ref, int], ...]
    """Number, version, and its time."""


class End(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """The end of a snapshot: how many records it has, and the sequence number of the last decision in it."""

    records: int
    sequence: int


Record = Began | Graph | Version | Retired | Freed | Lost | Placed | Written | Forgotten | Name | Answers | End

_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(cast(Any, Record))


def encoded(record: Record) -> bytes:
    """Return a record as bytes.

    >>> decoded(encoded(Freed((("m", 1),))))
    Freed(refs=(('m', 1),))
    """
    return _encoder.encode(record)


def decoded(content: bytes | memoryview) -> Record:
    """Read what `encoded` wrote.

    Raises:
        CorruptDataError: it is something else.
    """
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as exc:
        raise CorruptDataError(f"journal: expected a record; found {exc}") from exc


def placed(segment: SegmentId, slots: int, shards: Sequence[int], file: File | None) -> Placed:
    """Make the record of where one segment is."""
    stored = FileRecord.of(file) if file is not None else None
    return Placed(((segment_bytes(segment), slots, tuple(shards), stored),))


def done(request: Request | None) -> Done | None:
    """Return a request as records name it."""
    return (request.client, request.number) if request is not None else None
