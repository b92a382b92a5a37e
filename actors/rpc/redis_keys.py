"""The keys in Redis and the texts stored under them; docs/reference/format.md describes them for other programs.

Rules
- All that belongs to one start of a repository stands under that start's id: what an earlier one left is never read.
- The number of a version is written with or after its manifest, so who reads the number finds the manifest.
- Nothing is pickled, and nothing here connects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...store.bounds import jsontext
from ...store.errors import CorruptDataError
from ...store.refs import ModelRef
from ...store.segments.segment import SEGMENT_SLOTS, SegmentId
from ...store.versions.manifest import Header, TensorEntry, check_nbytes, decode_body

SHARDS_MOST = 1 << 32
"""Numbers of shards are below that."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of keys and channels of one repository.

    >>> Keys("default").updates("nas/m")
    'tensorvine:default:updates:nas/m'
    >>> Keys("default").of("5f0c").model("nas/m")
    'tensorvine:default:5f0c:model:nas/m'
    """

    repository: str

    @property
    def start(self) -> str:
        """Key of the id of the repository's present start."""
        return f"tensorvine:{self.repository}:start"

    @property
    def question(self) -> str:
        """Key of a number that a consumer increments when it misses something: the catalog compares all again then."""
        return f"tensorvine:{self.repository}:question"

    def updates(self, name: str) -> str:
        """Channel on which new versions of `name` are told."""
        return f"tensorvine:{self.repository}:updates:{name}"

    def of(self, start: str) -> StartKeys:
        """Return the keys of one start."""
        return StartKeys(f"tensorvine:{self.repository}:{start}")


@dataclass(frozen=True, slots=True)
class StartKeys:
    """The names of keys of one start of a repository."""

    prefix: str

    @property
    def newest(self) -> str:
        """Hash: model's name -> number of its newest live version."""
        return f"{self.prefix}:newest"

    @property
    def shards(self) -> str:
        """Hash: shard's number -> where its TCP server is."""
        return f"{self.prefix}:shards"

    def model(self, name: str) -> str:
        """Hash: number of a live version -> its manifest."""
        return f"{self.prefix}:model:{name}"

    @property
    def graphs(self) -> str:
        """Hash: key of an architecture -> its JSON text."""
        return f"{self.prefix}:graphs"


class Address(NamedTuple):
    """Where a TCP server is.

    >>> Address("node-7", 4321, "secret")
    Address(host='node-7', port=4321)
    """

    host: str
    port: int
    token: str
    """What it asks for; whoever can read Redis can read the models. Messages do not show it."""

    def __repr__(self) -> str:
        return f"Address(host={self.host!r}, port={self.port})"

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps({"host": self.host, "port": self.port, "token": self.token})

    @classmethod
    def from_json(cls, text: str | bytes) -> Address:
        """Read what `to_json` wrote.

        Raises:
            CorruptDataError: the text is no such JSON.
        """
        try:
            fields = jsontext.mapping(text, "Redis: address")
            return cls(str(fields["host"]), int(fields["port"]), str(fields["token"]))
        except (CorruptDataError, KeyError, OverflowError, TypeError, ValueError) as exc:
            raise CorruptDataError(f"Redis: expected the address of a shard; found {exc!r}") from None


@dataclass(frozen=True, slots=True)
class Posted:
    """A version as it stands in Redis."""

    header: Header
    entries: dict[str, TensorEntry]
    places: dict[SegmentId, int]
    """The shard that has each segment, or had it when this was posted."""


def manifest_text(header: Header, body: bytes, places: Mapping[SegmentId, int]) -> bytes:
    """Write a version's manifest as JSON text.

    Args:
        header: of the version.
        body: its table.
        places: segment -> the shard that has it.
    """
    fields = {
        "ref": str(header.ref),
        "parent": str(header.parent) if header.parent is not None else None,
        "quality": header.quality,
        "metadata": header.metadata,
        "created_ns": header.created_ns,
        "places": {f"{segment[1]:x}": shard for segment, shard in places.items()},
        "graph_key": header.graph_key.hex(),
        "bytes_owned": header.bytes_owned,
        "bytes_total": header.bytes_total,
        "codec": header.codec,
    }
    return json.dumps(fields).encode()[:-1] + b',"table":' + body + b"}"


def read_manifest(text: bytes, ref: ModelRef) -> Posted:
    """Read what `manifest_text` wrote.

    Raises:
        CorruptDataError: the text is no such JSON, or another version's.
    """
    try:
        fields = jsontext.mapping(text, "Redis: manifest")
        jsontext.mapping(str(fields["metadata"]), "Redis: metadata")
        header = Header(
            ref=ModelRef.parse(fields["ref"]),
            parent=ModelRef.parse(fields["parent"]) if fields["parent"] is not None else None,
            quality=float(fields["quality"]) if fields["quality"] is not None else None,
            metadata=str(fields["metadata"]),
            created_ns=int(fields["created_ns"]),
            graph_key=bytes.fromhex(fields["graph_key"]),
            bytes_owned=int(fields["bytes_owned"]),
            bytes_total=int(fields["bytes_total"]),
            codec=str(fields["codec"]) if fields["codec"] is not None else None,
        )
        entries = decode_body(json.dumps(fields["table"]).encode(), ref)
        for name, entry in entries.items():
            _check(name, entry)
        shards = {int(serial, 16): shard for serial, shard in fields["places"].items()}
        if not all(type(shard) is int and 0 <= shard < SHARDS_MOST for shard in shards.values()):
            raise ValueError(f"the shards {list(shards.values())!r:.100}")
        places = {entry.segment: shards[entry.segment[1]] for entry in entries.values() if entry.segment[1] in shards}
    except (CorruptDataError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as exc:
        raise CorruptDataError(f"Redis: expected the manifest of {ref}; found {exc!r}") from None
    if header.ref != ref:
        raise CorruptDataError(f"Redis: expected the manifest of {ref}; found that of {header.ref}")
    return Posted(header, entries, places)


def _check(name: str, entry: TensorEntry) -> None:
    numbers = (*entry.shape, entry.nbytes, *entry.segment, entry.slot)
    if not all(type(number) is int and number >= 0 for number in numbers) or entry.slot >= SEGMENT_SLOTS:
        raise CorruptDataError(f"tensor {name!r}: expected its shape and place in numbers; found {entry}")
    check_nbytes(name, entry.dtype, entry.shape, entry.nbytes)
