"""Manifests as Arrow files: one row per tensor, the header in the schema's metadata (docs/reference/format.md).

Rules
- A manifest is whole in itself: it has the architecture and all that a repository must know to serve the version.
- It is written last, when all segments that it names are on disk: a version is on disk when its manifest is.
- The file has a checksum of all its bytes, which stands in the file itself, with zeros in its place while it is
  computed: any bit that flips is found.
- A retired version's manifest is replaced by a header without rows, so that its number is never used again and its
  descendants can still name it.
- What a manifest says is believed after it was compared with the bytes that there are (`store.bounds`): its
  architecture is unpacked so far, and its segments have slots that lists have room for. What is written keeps to that.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import xxhash

from ..bounds import jsontext
from ..bounds.allowance import FACTOR, SPARE_BYTES
from ..errors import CorruptDataError, InvalidNameError
from ..refs import ModelRef
from ..segments.segment import SegmentId
from ..versions.architectures import Architecture, packed, unpacked
from ..versions.manifest import Header, TensorEntry, check_nbytes
from .segmentfile import (
    FORMAT,
    METADATA_KEY,
    Slot,
    check_slot,
    read_arrow,
    segment_of,
    segment_text,
    slot_of,
    slot_text,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

pa: Any = pyarrow  # it has no types
_NAME = re.compile(r"manifests/(.+)@([1-9][0-9]{0,17})\.arrow", re.ASCII)
_NO_CHECKSUM = "0" * 32
_SLOT_BYTES = 24
"""What a slot takes in a segment's lists."""
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{32})"')
_DECODING = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What raises while a file is decoded that is whole but not what was written."""
_SCHEMA: Any = pa.schema(
    [
        ("name", pa.utf8()),
        ("layer", pa.utf8()),
        ("dtype", pa.utf8()),
        ("shape", pa.list_(pa.int64())),
        ("nbytes", pa.int64()),
        ("owner", pa.utf8()),
        ("segment", pa.utf8()),
        ("slot", pa.int32()),
        ("bases", pa.list_(pa.utf8())),
    ]
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version as it is on disk."""

    header: Header
    architecture: Architecture
    """The graph's JSON and the framework's recipe."""
    entries: Mapping[str, TensorEntry]
    bases: Mapping[Slot, tuple[Slot, ...]]
    """Tensors that are encoded against others -> these, the nearest first, up to one that stands alone."""
    retired: bool = False


def manifest_name(ref: ModelRef) -> str:
    """Return the name of a version's manifest.

    >>> manifest_name(ModelRef("nas/candidate", 3))
    'manifests/nas/candidate@3.arrow'
    """
    parts = [{"": "%", ".": "%2E"}.get(part, part) for part in ref.name.split("/")]  # these mean something in a path
    return f"manifests/{'/'.join(parts)}@{ref.version}.arrow"


def version_of(name: str) -> ModelRef | None:
    """Return the version that a manifest's file is named after; None where no version's is.

    >>> version_of(manifest_name(ModelRef("nas/./7", 3)))
    ModelRef('nas/./7@3')
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    parts = "/".join({"%": "", "%2E": "."}.get(part, part) for part in match[1].split("/"))
    try:
        return ModelRef(parts, int(match[2]))
    except InvalidNameError:
        return None


def encode_manifest(manifest: Manifest, layers: Mapping[str, str]) -> bytes:
    """Write a manifest.

    Args:
        manifest: what to write; of a retired version only the header is.
        layers: tensor -> the layer that it belongs to, for those who read the file with other tools.
    """
    header = manifest.header
    facts = {
        "format": FORMAT,
        "kind": "manifest",
        "checksum": _NO_CHECKSUM,
        "ref": str(header.ref),
        "state": "retired" if manifest.retired else "live",
        "parent": str(header.parent) if header.parent is not None else None,
        "quality": header.quality,
        "metadata": header.metadata,
        "created_ns": header.created_ns,
        "graph_key": header.graph_key.hex(),
        "bytes_owned": header.bytes_owned,
        "bytes_total": header.bytes_total,
        "codec": header.codec,
        "architecture": "" if manifest.retired else base64.b64encode(packed(manifest.architecture)).decode(),
    }
    schema = _SCHEMA.with_metadata({METADATA_KEY: json.dumps(facts)})
    entries: Mapping[str, TensorEntry] = {} if manifest.retired else manifest.entries
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_batch(schema, header.ref, entries, manifest.bases, layers))
    content = sink.getvalue().to_pybytes()
    checksum = xxhash.xxh3_128_hexdigest(content)
    return content.replace(f'"checksum": "{_NO_CHECKSUM}"'.encode(), f'"checksum": "{checksum}"'.encode())


def decode_manifest(content: Buffer, where: str) -> Manifest:
    """Read a manifest.

    Args:
        content: the file's bytes.
        where: names the file.

    Raises:
        CorruptDataError: it is not what `encode_manifest` wrote, or of a format that this version does not know.
    """
    plain = _checked(bytes(content), where)
    facts, batch = _read(plain, where)
    try:
        manifest = _manifest(facts, batch)
        SlotLists().add(manifest, len(plain))
    except (CorruptDataError, *_DECODING) as exc:
        raise CorruptDataError(f"{where}: expected a manifest; found {exc}") from exc
    return manifest


class SlotLists:
    """The lists that segments become in memory: as long as the largest slot that a manifest names.

    Most lists are short for what was read; those that are not share `SPARE_BYTES`.
    """

    def __init__(self) -> None:
        self._lengths: dict[SegmentId, int] = {}
        self._left = SPARE_BYTES

    def add(self, manifest: Manifest, nbytes: int) -> None:
        """Count the lists that a manifest makes longer.

        Args:
            manifest: what is read.
            nbytes: of its file.

        Raises:
            CorruptDataError: they are too long; nothing is counted.
        """
        longer: dict[SegmentId, int] = {}
        for segment, slot in chain(((e.segment, e.slot) for e in manifest.entries.values()), *manifest.bases.values()):
            if slot >= longer.get(segment, 0):
                longer[segment] = slot + 1
        more = sum(max(0, length - self._lengths.get(segment, 0)) for segment, length in longer.items())
        beyond = max(0, _SLOT_BYTES * more - FACTOR * nbytes)
        if beyond > self._left:
            where = f"manifest of {manifest.header.ref}"
            raise CorruptDataError(f"{where}: expected consecutive slots; found {more} new slots in {nbytes} bytes")
        self._left -= beyond
        self._lengths.update({s: max(length, self._lengths.get(s, 0)) for s, length in longer.items()})


def _read(plain: bytes, where: str) -> tuple[dict[str, Any], Any]:
    return read_arrow(pa.BufferReader(plain), where, "manifest", _SCHEMA, len(_SCHEMA))


def _manifest(facts: dict[str, Any], batch: Any) -> Manifest:
    ref = ModelRef.parse(facts["ref"])
    header = Header(
        ref=ref,
        parent=ModelRef.parse(facts["parent"]) if facts["parent"] is not None else None,
        quality=facts["quality"],
        metadata=facts["metadata"],
        created_ns=facts["created_ns"],
        graph_key=bytes.fromhex(facts["graph_key"]),
        bytes_owned=facts["bytes_owned"],
        bytes_total=facts["bytes_total"],
        codec=facts["codec"],
    )
    _check_header(facts)
    _check_older(ref, "parent", header.parent)
    if facts["state"] == "retired":
        return Manifest(header, ("", None), {}, {}, retired=True)
    if facts["state"] != "live":
        raise CorruptDataError(f"the state {facts['state']!r}")
    text, recipe = _architecture(facts["architecture"])
    columns: list[list[Any]] = [column.to_pylist() for column in batch.columns]
    for dtype, shape, nbytes in set(zip(columns[2], [tuple(shape) for shape in columns[3]], columns[4], strict=True)):
        check_nbytes(f"of {dtype}", dtype, shape, nbytes)
    owners = {text: ModelRef.parse(text) if text != str(ref) else None for text in set(columns[5])}
    for owner in owners.values():
        _check_older(ref, "owner of a tensor", owner)
    segments: dict[str, SegmentId] = {text: segment_of(text) for text in set(columns[6])}
    entries: dict[str, TensorEntry] = {}
    bases: dict[Slot, tuple[Slot, ...]] = {}
    for name, _, dtype, shape, nbytes, owner, segment, slot, against in zip(*columns, strict=True):
        check_slot(slot, name)
        entries[name] = TensorEntry(dtype, tuple(shape), nbytes, owners[owner], segments[segment], slot)
        if against:
            bases[(segments[segment], slot)] = _bases_of((segments[segment], slot), against)
    if None in columns[0] or len(entries) < batch.num_rows:
        raise CorruptDataError(f"{batch.num_rows} rows with {len(entries)} names")
    return Manifest(header, (text, recipe), entries, bases)


def _check_header(facts: Mapping[str, Any]) -> None:
    numbers = [facts[fact] for fact in ("created_ns", "bytes_owned", "bytes_total")]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise CorruptDataError(f"created_ns, bytes_owned and bytes_total {numbers}")
    if not isinstance(facts["quality"], float | int | None) or not isinstance(facts["codec"], str | None):
        raise CorruptDataError(f"the quality {facts['quality']!r} and the codec {facts['codec']!r}")
    jsontext.mapping(facts["metadata"], "metadata")


def _check_older(ref: ModelRef, what: str, other: ModelRef | None) -> None:
    """Refuse a version that derives from itself, or from a later one of its name."""
    if other is not None and other.name == ref.name and other.version >= ref.version:
        raise CorruptDataError(f"{other} as {what} of {ref}, which is not newer")


def _bases_of(place: Slot, against: Sequence[str]) -> tuple[Slot, ...]:
    bases = tuple(slot_of(base) for base in against)
    if len({place, *bases}) <= len(bases):
        raise CorruptDataError(f"a cycle in the bases of {slot_text(place)}: {against}")
    return bases


@lru_cache(maxsize=256)
def _architecture(text: str) -> Architecture:
    """Unpack an architecture; many versions have the same."""
    return unpacked(base64.b64decode(text))


def _checked(content: bytes, where: str) -> bytes:
    """Hold a file's bytes against the checksum that it names; give them as they were when it was computed.

    A tensor may be named like the checksum's place: so these bytes are read, not those with the checksum. The first
    such place is the header's.
    """
    named = _CHECKSUM.search(content)
    checksum = named[1] if named is not None else b""
    plain = content.replace(b'"checksum": "' + checksum + b'"', f'"checksum": "{_NO_CHECKSUM}"'.encode())
    found = xxhash.xxh3_128_hexdigest(plain)
    if found.encode() != checksum:
        _read(content, where)  # one of another kind or format says so
        raise CorruptDataError(f"{where}: expected content with checksum {checksum.decode()}; found {found}")
    return plain


def _batch(
    schema: Any,
    ref: ModelRef,
    entries: Mapping[str, TensorEntry],
    bases: Mapping[Slot, tuple[Slot, ...]],
    layers: Mapping[str, str],
) -> Any:
    rows: Sequence[TensorEntry] = list(entries.values())
    columns: list[Iterable[Any]] = [
        list(entries),
        [layers.get(name) for name in entries],
        [row.dtype for row in rows],
        [row.shape for row in rows],
        [row.nbytes for row in rows],
        [str(row.owner or ref) for row in rows],
        [segment_text(row.segment) for row in rows],
        [row.slot for row in rows],
        [[slot_text(base) for base in bases.get((row.segment, row.slot), ())] for row in rows],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, list(schema), strict=True)]
    return pa.record_batch(arrays, schema=schema)
