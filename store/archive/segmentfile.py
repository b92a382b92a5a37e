"""Segments as Arrow files: one row per tensor (docs/reference/format.md).

Rules
- Any Arrow tool opens the file: one record batch, whose last column, `data`, holds the stored bytes of each tensor,
  padded to 64 bytes; `stored` says how many of them count.
- The bytes of `data` start at a multiple of 64 in the file, and each tensor at a multiple of 64 from there: a
  memory-mapped read of one tensor touches its own pages only. Arrow aligns to 8 bytes, so the batch carries a filler.
- The schema's metadata says where `data` starts and has a checksum of all other columns; each row has a checksum of
  its stored bytes. So a reader takes bytes by position, and believes nothing that was not checked.
- A row may be encoded against another tensor, its base; `base` names that one's segment and slot.
- What a file says of itself is believed after it was compared with the bytes that there are (`store.bounds`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import xxhash

from ..arrays import nbytes_of
from ..bounds import jsontext
from ..bounds.allowance import allowed
from ..bounds.inflate import decompressed_bytes
from ..codecs.blocks import Encoded
from ..errors import CorruptDataError, StorageError
from ..segments.segment import SEGMENT_SLOTS, SegmentId, layout
from ..versions.manifest import check_nbytes, digest_of
from .directory import Bytes, Directory, OpenFile

pa: Any = pyarrow  # it has no types
FORMAT = 1
"""Version of the files that this code writes, and the newest that it reads."""
METADATA_KEY = b"tensorvine"
Slot = tuple[SegmentId, int]
"""A tensor's place: segment and slot."""

ROW_BYTES = 1 << 10
"""What a row of one of our files takes as Python's objects, at most, beside its texts."""
_FILLER = "filler"
_SCHEMA: Any = pa.schema(
    [
        ("slot", pa.int32()),
        ("name", pa.utf8()),
        ("layer", pa.utf8()),
        ("dtype", pa.utf8()),
        ("shape", pa.list_(pa.int64())),
        ("nbytes", pa.int64()),
        ("codec", pa.utf8()),
        ("stored", pa.int64()),
        ("checksum", pa.utf8()),
        ("digest", pa.utf8()),
        ("error", pa.float64()),
        ("base", pa.utf8()),
        ("data", pa.large_binary()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor of a segment file."""

    slot: int
    name: str
    layer: str | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the tensor."""
    codec: str
    """What `store.codecs.codec.decode` needs to know; empty: the bytes are the tensor's."""
    stored: int
    """Bytes of it in the file."""
    checksum: str
    """xxh3-128 of the stored bytes."""
    digest: str
    """xxh3-128 of the bytes that decoding gives; empty where a lossy codec left that unknown."""
    error: float
    """Worst absolute error of an element; 0.0: lossless."""
    base: Slot | None
    """What the row was encoded against."""


def segment_text(segment: SegmentId) -> str:
    """Write a segment's serial number, which no other segment has.

    >>> segment_text((0, 255))
    'ff'
    """
    return f"{segment[1]:x}"


def segment_of(text: str) -> SegmentId:
    """Read what `segment_text` wrote.

    Raises:
        CorruptDataError: it is something else.

    >>> segment_of("ff")
    (0, 255)
    """
    if re.fullmatch(r"[0-9a-f]{1,64}", text) is None:
        raise CorruptDataError(f"expected a segment's number in hexadecimal; found {text[:100]!r}")
    return 0, int(text, 16)


def slot_text(slot: Slot) -> str:
    """Write a tensor's place.

    >>> slot_text(((0, 255), 7))
    'ff/7'
    """
    return f"{segment_text(slot[0])}/{slot[1]}"


def slot_of(text: str) -> Slot:
    """Read what `slot_text` wrote; errors as in `segment_of`."""
    segment, _, slot = text.partition("/")
    if re.fullmatch(r"[0-9]{1,9}", slot) is None:
        raise CorruptDataError(f"expected a tensor's place such as 'ff/7'; found {text[:100]!r}")
    check_slot(int(slot), text)
    return segment_of(segment), int(slot)


def row_of(slot: int, name: str, layer: str | None, encoded: Encoded, digest: str | None, base: Slot | None) -> Row:
    """Describe an encoded tensor.

    Args:
        slot: its number in the segment.
        name: the tensor's.
        layer: the layer's that it belongs to, if it does.
        encoded: its stored form.
        digest: content hash of the tensor, if it is known.
        base: what it was encoded against, if it was.
    """
    checksum = digest if digest and not encoded.codec else digest_of(encoded.data)
    lossy = "quantize" in encoded.codec  # even without an error: -0.0 comes back as 0.0
    known = checksum if not encoded.codec else "" if lossy else digest or ""
    return Row(
        slot=slot,
        name=name,
        layer=layer,
        dtype=encoded.dtype,
        shape=encoded.shape,
        nbytes=nbytes_of(encoded.dtype, encoded.shape),
        codec=encoded.codec,
        stored=encoded.nbytes,
        checksum=checksum,
        digest=known,
        error=encoded.error,
        base=base if encoded.codec.startswith("delta") else None,
    )


def write_segment(directory: Directory, name: str, segment: SegmentId, rows: Sequence[Row], payloads: Bytes) -> int:
    """Write a segment file.

    Args:
        directory: where.
        name: of the file.
        segment: its id.
        rows: its tensors, in the order of their bytes.
        payloads: their stored bytes, each padded to 64, in one block.

    Returns:
        Length of the file in bytes.

    Raises:
        StorageError: it could not be written; nothing of it is left.
    """
    offsets, length = layout([row.stored for row in rows])
    columns = _columns(rows)
    header = {"format": FORMAT, "kind": "segment", "segment": segment_text(segment), "rows": _rows_checksum(rows)}
    starts = np.array([*offsets, length], np.int64)
    at, filler = _position(header, columns, len(rows))
    batch = _batch(header, at, columns, starts, payloads)

    def fill(sink: object) -> None:
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch, custom_metadata={_FILLER: " " * filler})

    return directory.write(name, fill)


class SegmentFile:
    """A segment file that is open for reading.

    Args:
        directory: where it is.
        name: its name there.

    Raises:
        CorruptDataError: it is truncated, damaged, of another format, or no segment file.
        StorageError: it cannot be read.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        self.where = f"{directory.uri}/{name}"
        self._file: OpenFile = directory.open(name)
        try:
            self.segment, self._at, rows = _read_rows(self._file, self.where)
        except BaseException:
            self._file.close()
            raise
        self.rows: Mapping[int, Row] = {row.slot: row for row in rows}
        """Slot -> its row."""
        self.nbytes = self._file.nbytes
        offsets, length = layout([row.stored for row in rows])
        if self._at + length > self.nbytes:
            self._file.close()
            raise CorruptDataError(f"{self.where}: expected {self._at + length} bytes; found {self.nbytes}")
        self._offsets = {row.slot: offset for row, offset in zip(rows, offsets, strict=True)}

    def row(self, slot: int) -> Row:
        """Return what describes a tensor.

        Raises:
            CorruptDataError: there is no such row.
        """
        row = self.rows.get(slot)
        if row is None:
            raise CorruptDataError(f"{self.where}: expected slot {slot}; found slots {sorted(self.rows)}")
        return row

    def encoded(self, slot: int, into: Bytes | None = None) -> Encoded:
        """Read a tensor's stored form and check it against its checksum.

        Args:
            slot: which.
            into: memory to read it into, as many bytes as are stored, which may hold anything after an error; None:
                new memory.

        Raises:
            CorruptDataError: there is no such row, or its bytes are not what was written.
        """
        row = self.row(slot)
        data = self._file.part(self._at + self._offsets[slot], row.stored, into)
        found = digest_of(data)
        if found != row.checksum:
            raise CorruptDataError(
                f"{self.where}: tensor {row.name!r} (slot {slot}): expected bytes of checksum {row.checksum}; "
                f"found {found}"
            )
        return Encoded(row.codec, row.dtype, row.shape, data, row.error)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def pack(encoded: Sequence[Encoded]) -> Bytes:
    """Lay stored bytes out as a segment file has them: each padded to 64 bytes."""
    offsets, length = layout([part.nbytes for part in encoded])
    block = np.empty(length, np.uint8)
    end = 0
    for offset, part in zip(offsets, encoded, strict=True):
        block[end:offset] = 0
        end = offset + part.nbytes
        block[offset:end] = part.data
    block[end:] = 0
    return block


def read_arrow(opened: Any, where: str, kind: str, schema: Any, columns: int) -> tuple[dict[str, Any], Any]:
    """Read an Arrow file of ours: its header, and its only batch.

    Args:
        opened: what PyArrow reads through.
        where: names the file.
        kind: what the header must say the file is.
        schema: the columns that such a file has.
        columns: how many of them to read.

    Raises:
        CorruptDataError: it is no such file, or of a format that this version does not know.
        StorageError: the disk does not give it.
    """
    options: Any = pa.ipc.IpcReadOptions(included_fields=list(range(columns)))
    try:
        compressed = decompressed_bytes(opened, where)
        reader: Any = pa.ipc.open_file(opened, options=options)
        metadata: dict[bytes, bytes] = reader.schema.metadata or {}
        found = jsontext.parsed(metadata.get(METADATA_KEY, b"{}"), where)
        if not isinstance(found, dict) or cast("dict[str, Any]", found).get("kind") != kind:
            raise CorruptDataError(f"{where}: expected a {kind} of a TensorVine repository; found another Arrow file")
        header = cast("dict[str, Any]", found)
        if header.get("format") != FORMAT:
            raise CorruptDataError(f"{where}: expected format {FORMAT}; found {header.get('format')!r}")
        if compressed or reader.num_record_batches != 1:
            found = f"{reader.num_record_batches} batches, {compressed} bytes of them compressed"
            raise CorruptDataError(f"{where}: expected a whole Arrow file of one batch, not compressed; found {found}")
        if (reader.schema.names, reader.schema.types) != (schema.names[:columns], schema.types[:columns]):
            raise CorruptDataError(f"{where}: expected the columns of a {kind}; found {reader.schema.names}")
        batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, MemoryError) as exc:
        if isinstance(exc, CorruptDataError):
            raise
        of_system = isinstance(exc, OSError) and exc.errno is not None  # PyArrow's own have no number
        kind_of_error = StorageError if of_system else CorruptDataError
        raise kind_of_error(f"{where}: expected a whole Arrow file; found {exc}") from exc
    if ROW_BYTES * batch.num_rows > allowed(opened.size()):
        raise CorruptDataError(f"{where}: expected rows of tensors in {opened.size()} bytes; found {batch.num_rows}")
    return header, batch


def _read_rows(file: OpenFile, where: str) -> tuple[SegmentId, int, list[Row]]:
    header, batch = read_arrow(file.arrow(), where, "segment", _SCHEMA, len(_SCHEMA) - 1)
    try:
        rows = [_row(row, where) for row in batch.to_pylist()]
        segment, at = segment_of(header["segment"]), int(header["data_at"])
        checksum = _rows_checksum(rows)
    except (CorruptDataError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CorruptDataError(f"{where}: expected the header and columns of a segment file; found {exc}") from exc
    if at < 0 or checksum != header.get("rows") or len({row.slot for row in rows}) != len(rows):
        raise CorruptDataError(f"{where}: expected rows with checksum {header.get('rows')}; found {checksum}")
    return segment, at, rows


def _row(values: dict[str, Any], where: str) -> Row:
    base = values.pop("base")
    place = slot_of(base) if base is not None else None
    row = Row(shape=tuple(values.pop("shape")), base=place, **values)
    if any(values[column] is None for column in values.keys() - {"layer"}) or row.stored < 0:
        raise CorruptDataError(f"{where}: expected whole rows; found {row}")
    check_slot(row.slot, where)
    check_nbytes(row.name, row.dtype, row.shape, row.nbytes)
    return row


def check_slot(slot: int, where: str) -> None:
    """Refuse a slot that no segment has: lists are as long as the largest one.

    Raises:
        CorruptDataError: it is such a one.
    """
    if not 0 <= slot < SEGMENT_SLOTS:
        raise CorruptDataError(f"{where}: expected a slot below {SEGMENT_SLOTS}; found {slot}")


def _columns(rows: Sequence[Row]) -> list[Any]:
    values: dict[str, list[Any]] = {
        field.name: [getattr(row, field.name) for row in rows] for field in list(_SCHEMA)[:-1]
    }
    values["base"] = [slot_text(row.base) if row.base is not None else None for row in rows]
    return [pa.array(values[field.name], field.type) for field in list(_SCHEMA)[:-1]]


def _rows_checksum(rows: Sequence[Row]) -> str:
    fields = [field.name for field in list(_SCHEMA)[:-2]]
    facts = [[*(getattr(row, f) for f in fields), slot_text(row.base) if row.base else None] for row in rows]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode("utf-8", "surrogatepass"))


def _batch(header: Mapping[str, Any], at: int, columns: Sequence[Any], starts: Any, payloads: Any) -> Any:
    text = json.dumps({**header, "data_at": f"{at:016d}"})
    schema = _SCHEMA.with_metadata({METADATA_KEY: text})
    buffers = [None, pa.py_buffer(starts), pa.py_buffer(payloads)]
    data = pa.Array.from_buffers(pa.large_binary(), len(starts) - 1, cast(Any, buffers))
    return pa.record_batch([*columns, data], schema=schema)


def _position(header: Mapping[str, object], columns: Sequence[object], count: int) -> tuple[int, int]:
    """Find where `data` would start, and the filler that moves it to a multiple of 64.

    A batch without data is as long as one with, up to there; each 8 characters of filler add 8 bytes.
    """

    def start(filler: int) -> int:
        sink = pa.BufferOutputStream()
        batch = _batch(header, 0, columns, np.zeros(count + 1, np.int64), b"")
        writer = pa.ipc.new_file(sink, batch.schema)
        writer.write_batch(batch, custom_metadata={_FILLER: " " * filler})
        return sink.tell()

    filler = -start(0) % 64
    return start(filler), filler
