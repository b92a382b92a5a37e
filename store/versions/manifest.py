"""Manifests: what a version is.

Rules
- Immutable. A version exists when its manifest does.
- The header is what a shard needs for its answers; the body, the table of tensors, travels and is stored as
  one JSON text by columns, which only readers open.
- The owner map is part of the table: per tensor, the version that last wrote it (EvoStore, section 4.1).
  In the body a tensor that the version wrote itself has no owner: its version number is not known yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..arrays import nbytes_of
from ..errors import CorruptDataError, OptionError, TensorMismatchError
from ..refs import ModelRef
from ..segments.segment import SegmentId

_NONE: Mapping[str, Any] = MappingProxyType({})
_COLUMNS = ("name", "dtype", "shape", "nbytes", "owner", "segment", "slot")
HeaderRow = tuple[str, int, tuple[str, int] | None, float | None, int, int, int, str | None]
"""Name, version, parent, quality, time in ns, bytes owned, bytes in all, codec."""
_Row = tuple[str, int, list[int], int, int, int, int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of a manifest's table."""

    dtype: str
    """NumPy's or ml_dtypes' name of the element type."""
    shape: tuple[int, ...]
    nbytes: int
    """Length in bytes, without padding."""
    owner: ModelRef | None
    """The version that last wrote the tensor; None in a body: the version that the body describes."""
    segment: SegmentId
    slot: int
    """Position within the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a shard knows of a version without opening its body."""

    ref: ModelRef
    parent: ModelRef | None
    quality: float | None
    metadata: str
    """The user's mapping as JSON text."""
    created_ns: int
    """UTC, nanoseconds since 1970."""
    graph_key: bytes
    """Which stored architecture is this version's."""
    bytes_owned: int
    """Bytes of the tensors that this version wrote."""
    bytes_total: int
    codec: str | None = None
    """Codec of the bytes that this version has on disk; None: as they are, or not on disk at all."""

    def row(self) -> HeaderRow:
        """Return the header without metadata and graph, as a tuple: many of them are sent at once."""
        parent = (self.parent.name, self.parent.version) if self.parent is not None else None
        return (
            *(self.ref.name, self.ref.version, parent, self.quality, self.created_ns),
            *(self.bytes_owned, self.bytes_total, self.codec),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Information about one version, returned by `Repository.info`."""

    ref: ModelRef
    parent: ModelRef | None
    quality: float | None
    metadata: Mapping[str, Any]
    created: datetime
    """Time of the save, in UTC."""
    bytes_owned: int
    """Size in bytes of the version's own tensors, without inherited tensors."""
    bytes_total: int
    """Size in bytes of all tensors of the version, including inherited tensors."""
    codec: str | None
    """Codec of the version's tensor files, such as "shuffle|zstd(3)". A codec that contains `quantize` is lossy.

    None if the tensors are stored without a codec or are not on disk.
    """

    @classmethod
    def of(cls, header: Header) -> ModelInfo:
        """Create a `ModelInfo` from the header of the manifest that describes a version."""
        return cls(
            ref=header.ref,
            parent=header.parent,
            quality=header.quality,
            metadata=json.loads(header.metadata),
            created=datetime.fromtimestamp(header.created_ns / 1e9, UTC),
            bytes_owned=header.bytes_owned,
            bytes_total=header.bytes_total,
            codec=header.codec,
        )

    @classmethod
    def of_row(cls, row: HeaderRow) -> ModelInfo:
        """Create a `ModelInfo` without metadata from the row of a header."""
        name, version, parent, quality, created_ns, bytes_owned, bytes_total, codec = row
        return cls(
            ref=ModelRef(name, version),
            parent=ModelRef(*parent) if parent is not None else None,
            quality=quality,
            metadata=_NONE,
            created=datetime.fromtimestamp(created_ns / 1e9, UTC),
            bytes_owned=bytes_owned,
            bytes_total=bytes_total,
            codec=codec,
        )


def metadata_nbytes(text: str) -> int:
    """Return the bytes of a version's metadata, JSON text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def check_metadata(name: str, text: str, most: int) -> None:
    """Check the size of a version's metadata.

    Args:
        name: of the model.
        text: the metadata, JSON text.
        most: bytes that it may have.

    Raises:
        OptionError: it has more.
    """
    if (found := metadata_nbytes(text)) > most:
        raise OptionError(
            f"save of {name!r}: metadata: expected at most {most} bytes as JSON; found {found}. Save large values as "
            "tensors, or start the repository with more metadata_bytes"
        )


def encode_body(entries: Mapping[str, TensorEntry]) -> bytes:
    """Write a table of tensors by columns."""
    owners: dict[ModelRef | None, int] = {None: 0}
    dtypes: dict[str, int] = {}
    segments: dict[SegmentId, int] = {}
    for entry in entries.values():
        owners.setdefault(entry.owner, len(owners))
        dtypes.setdefault(entry.dtype, len(dtypes))
        segments.setdefault(entry.segment, len(segments))
    rows = entries.values()
    body = {
        "owners": [str(owner) for owner in owners if owner],
        "dtypes": list(dtypes),
        "segments": list(segments),
        "name": list(entries),
        "dtype": [dtypes[e.dtype] for e in rows],
        "shape": [e.shape for e in rows],
        "nbytes": [e.nbytes for e in rows],
        "owner": [owners[e.owner] for e in rows],
        "segment": [segments[e.segment] for e in rows],
        "slot": [e.slot for e in rows],
    }
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode_body(body: bytes, ref: ModelRef) -> dict[str, TensorEntry]:
    """Read a table back, naming `ref` as the owner of what the version wrote itself.

    Raises:
        CorruptDataError: the text is not what `encode_body` wrote.
    """
    try:
        columns: dict[str, Any] = json.loads(body)
        # By number in a dict, not a list: a damaged, negative number must not count from the end.
        owners = dict(enumerate([ref, *(ModelRef.parse(text) for text in columns["owners"])]))
        segments: dict[int, SegmentId] = dict(enumerate((shard, serial) for shard, serial in columns["segments"]))
        dtypes = dict(enumerate(cast("list[str]", columns["dtypes"])))
        if {type(text) for text in dtypes.values()} - {str} or {type(n) for s in segments.values() for n in s} - {int}:
            raise TypeError(f"dtypes {dtypes} and segments {segments}")
        rows = cast("Iterable[_Row]", zip(*(columns[column] for column in _COLUMNS), strict=True))
        return {
            name: TensorEntry(dtypes[dtype], tuple(shape), nbytes, owners[owner], segments[segment], slot)
            for name, dtype, shape, nbytes, owner, segment, slot in rows
        }
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as exc:
        raise CorruptDataError(f"manifest of {ref}: expected a table of tensors; found {exc}") from exc


def check_nbytes(name: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
    """Hold the length of a tensor against its dtype and shape.

    Raises:
        CorruptDataError: they do not fit.
    """
    try:
        expected = nbytes_of(dtype, shape)
    except TensorMismatchError as exc:
        raise CorruptDataError(f"tensor {name!r}: {exc}") from exc
    if nbytes != expected:
        raise CorruptDataError(f"tensor {name!r}: expected {expected} bytes of {dtype} {tuple(shape)}; found {nbytes}")


def digest_of(tensor: NDArray[np.uint8]) -> str:
    """Return the content hash of a tensor's bytes: xxh3-128, hexadecimal.

    >>> digest_of(np.zeros(0, np.uint8))
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(tensor.data)


def sizes_of(entries: Iterable[TensorEntry]) -> dict[SegmentId, dict[int, int]]:
    """Group the slots that these rows name by segment, each with its bytes.

    Raises:
        CorruptDataError: two rows disagree.
    """
    grouped: dict[SegmentId, dict[int, int]] = {}
    for entry in entries:
        nbytes = grouped.setdefault(entry.segment, {}).setdefault(entry.slot, entry.nbytes)
        if nbytes != entry.nbytes:
            where = f"segment {entry.segment}: slot {entry.slot}"
            raise CorruptDataError(f"{where}: expected one length; found {nbytes} and {entry.nbytes} bytes")
    return grouped


def slots_of(entries: Iterable[TensorEntry]) -> dict[SegmentId, list[int]]:
    """Group the slots that these rows name by segment, each slot once."""
    grouped: dict[SegmentId, dict[int, None]] = {}
    for entry in entries:
        grouped.setdefault(entry.segment, {})[entry.slot] = None
    return {segment: list(slots) for segment, slots in grouped.items()}
