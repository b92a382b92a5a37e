"""Manifests as Arrow files: one row per tensor, the header in the schema's metadata (docs/format.md).

Rules
- A manifest is whole in itself: it has the architecture and all that a repository must know to serve the version.
- It is written last, when all segments that it names are on disk: a version is on disk when its manifest is.
- The file has a checksum of all its bytes, which stands in the file itself, with zeros in its place while it is
  computed: any bit that flips is found.
- A retired version's manifest is replaced by a header without rows, so that its number is never used again and its
  descendants can still name it.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import xxhash

from ..errors import CorruptDataError, InvalidNameError
from ..refs import ModelRef
from ..segments.segment import SegmentId
from ..versions.manifest import Header, TensorEntry
from .segmentfile import FORMAT, METADATA_KEY, Makers, Slot, read_arrow, segment_of, segment_text, slot_of, slot_text

if TYPE_CHECKING:
    from typing_extensions import Buffer

pa: Any = pyarrow  # it has no types
_NAME = re.compile(r"manifests/(.+)@([1-9][0-9]{0,17})\.arrow", re.ASCII)
_NO_CHECKSUM = "0" * 32
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{32})"')
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
    architecture: tuple[str, str | None]
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
    ModelRef(name='nas/./7', version=3)
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
    packed = base64.b64encode(zlib.compress(json.dumps(manifest.architecture).encode(), 1)).decode()
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
        "architecture": "" if manifest.retired else packed,
    }
    schema = _SCHEMA.with_metadata({METADATA_KEY: json.dumps(facts)})
    entries: Mapping[str, TensorEntry] = {} if manifest.retired else manifest.entries
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_batch(schema, header.ref, entries, manifest.bases, layers))
    content = sink.getvalue().to_pybytes()
    checksum = xxhash.xxh3_128_hexdigest(content)
    return content.replace(f'"checksum": "{_NO_CHECKSUM}"'.encode(), f'"checksum": "{checksum}"'.encode())


def decode_manifest(content: Buffer, where: str, shards: Makers) -> Manifest:
    """Read a manifest.

    Args:
        content: the file's bytes.
        where: names the file.
        shards: see `segmentfile.Makers`.

    Raises:
        CorruptDataError: it is not what `encode_manifest` wrote, or of a format that this version does not know.
    """
    plain = _checked(bytes(content), where)
    facts, batch = read_arrow(pa.BufferReader(plain), where, "manifest")
    try:
        return _manifest(facts, batch, shards)
    except (CorruptDataError, KeyError, TypeError, ValueError, RecursionError, zlib.error) as exc:
        raise CorruptDataError(f"{where}: expected a manifest; found {exc}") from exc


def _manifest(facts: dict[str, Any], batch: Any, shards: Makers) -> Manifest:
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
    if facts["state"] == "retired":
        return Manifest(header, ("", None), {}, {}, retired=True)
    text, recipe = _architecture(facts["architecture"])
    columns = [column.to_pylist() for column in batch.columns]
    owners = {text: ModelRef.parse(text) if text != str(ref) else None for text in set(columns[5])}
    segments: dict[str, SegmentId] = {text: segment_of(text, shards) for text in set(columns[6])}
    entries: dict[str, TensorEntry] = {}
    bases: dict[Slot, tuple[Slot, ...]] = {}
    for name, _, dtype, shape, nbytes, owner, segment, slot, chain in zip(*columns, strict=True):
        entries[name] = TensorEntry(dtype, tuple(shape), nbytes, owners[owner], segments[segment], slot)
        if chain:
            bases[(segments[segment], slot)] = tuple(slot_of(base, shards) for base in chain)
    return Manifest(header, (text, recipe), entries, bases)


@lru_cache(maxsize=256)
def _architecture(packed: str) -> tuple[str, str | None]:
    """Unpack an architecture; many versions have the same."""
    text, recipe = json.loads(zlib.decompress(base64.b64decode(packed)))
    return text, recipe


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
        read_arrow(pa.BufferReader(content), where, "manifest")  # one of another kind or format says so
        raise CorruptDataError(f"{where}: expected content of checksum {checksum.decode()}; found {found}")
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
