"""The records of the catalog's journal: its decisions, and what a snapshot keeps of many.

Rules
- A record has all that applying it needs: no clock, no random number and no order of a set has a say. So the state
  after a replay is the state before.
- Records are msgpack, by msgspec: nothing is pickled. Segments' numbers are bytes, as they may have more than 64 bits.
- Of the same kind of fact, the later record counts.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from ..errors import CorruptDataError
from ..graphs.index import PrefixQuery
from ..holders import Request
from ..refs import ModelRef
from ..segments.segment import File, SegmentId, file_name
from ..versions.manifest import Header
from ..versions.slots import runs_of, segment_bytes, segment_from

Ref = tuple[str, int]
"""A version."""
Done = tuple[str, int]
"""A request: client and number."""


class Began(msgspec.Struct, tag="term", array_like=True, frozen=True):
    """A term began. The first record of each stream."""

    term: int
    token: bytes
    start: str
    """Id of the start of the repository: shards of an earlier one have no memory."""
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
    """A version exists."""

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
    """Segments that it brought: serial number, how many slots, shards that have it, the keeper first."""

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
    """Versions exist, and none of their tensors does: in no shard and no file. They are named so until retired."""

    refs: tuple[Ref, ...]


class FileRecord(msgspec.Struct, array_like=True, frozen=True):
    """A segment's file, whose name follows from its segment and generation."""

    generation: int
    nbytes: int
    runs: tuple[tuple[int, int], ...]
    """Slots that it has: the first of each run, and how many."""
    bases: tuple[tuple[int, bytes, int], ...] = ()
    """Slot, serial number and slot of what it is encoded against."""

    @classmethod
    def of(cls, file: File) -> FileRecord:
        """Make the record of a file."""
        bases = tuple((slot, segment_bytes(base), at) for slot, (base, at) in sorted(file.bases.items()))
        return cls(file.generation, file.nbytes, tuple(runs_of(file.slots)), bases)

    def file(self, segment: SegmentId) -> File:
        """Return the file, of a segment."""
        bases = {slot: (segment_from(base), at) for slot, base, at in self.bases}
        slots = frozenset(slot for first, size in self.runs for slot in range(first, first + size))
        return File(file_name(segment, self.generation), self.generation, self.nbytes, slots, bases)

    def has(self, slot: int) -> bool:
        """Tell whether the file has a slot."""
        return any(first <= slot < first + size for first, size in self.runs)

    def base_slots(self) -> set[tuple[SegmentId, int]]:
        """Return what its slots are encoded against, each once."""
        return {(segment_from(base), at) for _, base, at in self.bases}


class Placed(msgspec.Struct, tag="placed", array_like=True, frozen=True):
    """Where segments are."""

    segments: tuple[tuple[bytes, int, int, tuple[int, ...], FileRecord | None], ...]
    """Serial number, how many slots, the keeper, shards that have copies, and the file."""


class Written(msgspec.Struct, tag="written", array_like=True, frozen=True):
    """Manifests of live versions are on the path, or headers of retired ones in their place."""

    refs: tuple[Ref, ...]


class Aliased(msgspec.Struct, tag="aliased", array_like=True, frozen=True):
    """An alias names a version from now on."""

    name: str
    alias: str
    version: int
    """0: the alias ends."""
    request: Done | None


class Name(msgspec.Struct, tag="name", array_like=True, frozen=True):
    """In a snapshot: what is known of a name besides its versions with records."""

    name: str
    next_version: int
    newest_ns: int
    lost: tuple[tuple[int, Ref | None, float | None], ...]
    """Lost versions: parent and quality."""
    unread: tuple[int, ...]
    """Versions whose manifests could not be read."""
    past: tuple[tuple[int, Ref | None, float | None], ...]
    """Retired ones that something derives from, if they are in no run: parent and quality."""
    runs: tuple[tuple[int, tuple[float | None, ...]], ...]
    """Runs of retired ones, each the child of the number before: the first, and the qualities."""
    aliases: tuple[tuple[str, int], ...] = ()


class Answers(msgspec.Struct, tag="answers", array_like=True, frozen=True):
    """In a snapshot: what the last requests were answered, the oldest first."""

    answers: tuple[tuple[str, int, Ref, int], ...]
    """Client, number, version, and its time."""


class End(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """The end of a snapshot: how many records it has, and the sequence number of the last decision in it."""

    records: int
    sequence: int


Record = Began | Graph | Version | Retired | Freed | Lost | Placed | Written | Aliased | Name | Answers | End

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


def done(request: Request | None) -> Done | None:
    """Return a request as records name it."""
    return (request.client, request.number) if request is not None else None
