"""Arrow files of plain tensors, as other tools read and write them.

Rules
- One batch, one row per tensor: name, layer, dtype, shape, nbytes, checksum (xxh3-128 of the bytes, hexadecimal), data.
  Facts are the schema's metadata.
- Other widths of the types, dictionaries and views of texts, more batches and compression, as other tools write them,
  are read as well; columns that were added are not read. Each tensor is checked against its checksum.
- What it would take when it is decompressed, and when no two rows share bytes any more, is added up before it is made.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (pyarrow has no types)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

from ..arrays import Array, as_bytes, dtype_name, from_bytes, read_only
from ..bounds.allowance import allowed
from ..bounds.inflate import decompressed_bytes
from ..errors import CorruptDataError, TensorMismatchError
from ..versions.manifest import digest_of
from .directory import Fill
from .segmentfile import METADATA_KEY

_SCHEMA: Any = pa.schema(
    [
        ("name", pa.utf8()),
        ("layer", pa.utf8()),
        ("dtype", pa.utf8()),
        ("shape", pa.list_(pa.int64())),
        ("nbytes", pa.int64()),
        ("checksum", pa.utf8()),
        ("data", pa.large_binary()),
    ]
)


def _is_dictionary(kind: Any) -> bool:
    return types.is_dictionary(kind) and (types.is_string(kind.value_type) or types.is_large_string(kind.value_type))


_TEXT = (types.is_string, types.is_large_string, types.is_string_view, _is_dictionary)
_LIST = (types.is_list, types.is_large_list, types.is_fixed_size_list)
_BYTES = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
_KINDS: Mapping[str, Sequence[Any]] = {
    "name": _TEXT,
    "dtype": _TEXT,
    "shape": _LIST,
    "nbytes": (types.is_integer, types.is_string),
    "checksum": _TEXT,
    "data": _BYTES,
}
"""Column -> what its type may be."""
_ROWS = 1 << 12
"""Rows that become Python's objects at one time."""


def filler(arrays: Mapping[str, Array], layers: Mapping[str, str], facts: Mapping[str, str]) -> Fill:
    """Return what writes one batch of all tensors."""
    starts = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([array.nbytes for array in arrays.values()], out=starts[1:])
    data = np.empty(starts[-1], np.uint8)
    parts = [data[start:end] for start, end in pairwise(starts)]
    for part, array in zip(parts, arrays.values(), strict=True):
        part[:] = as_bytes(array)
    columns: list[Any] = [
        list(arrays),
        [layers.get(name) for name in arrays],
        [dtype_name(array.dtype) for array in arrays.values()],
        [array.shape for array in arrays.values()],
        [array.nbytes for array in arrays.values()],
        [digest_of(part) for part in parts],
    ]
    columns = [pa.array(column, field.type) for column, field in zip(columns, list(_SCHEMA)[:-1], strict=True)]
    buffers: Any = [None, pa.py_buffer(cast(Any, starts)), pa.py_buffer(cast(Any, data))]
    columns.append(pa.Array.from_buffers(pa.large_binary(), len(arrays), buffers))
    batch: Any = pa.record_batch(columns, schema=_SCHEMA.with_metadata(dict(facts)))

    def fill(sink: object) -> None:
        with pa.ipc.new_file(sink, batch.schema) as writer:
            cast(Any, writer).write_batch(batch)

    return fill


def parsed(path: object, content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors and facts of a file's content."""
    try:
        nbytes = decompressed_bytes(pa.BufferReader(content), str(path))
        if nbytes > (most := allowed(len(content)) // 2):  # there may be a copy, to align it
            raise CorruptDataError(
                f"{path}: expected at most {most} uncompressed bytes in a compressed file of {len(content)} bytes; "
                f"found {nbytes}: write it without compression"
            )
        whole: Any = pa.ipc.open_file(pa.BufferReader(content)).schema
        if METADATA_KEY in (whole.metadata or {}) and "codec" in whole.names:
            raise CorruptDataError(
                f"{path}: expected an Arrow file of plain tensors; found a segment file of a TensorVine repository"
            )
        missing = [name for name in _SCHEMA.names if name not in whole.names and name != "layer"]
        if missing:
            raise CorruptDataError(f"{path}: expected the columns {_SCHEMA.names}; found none named {missing}")
        columns = _columns(path, content, whole)
        facts = {key.decode(): value.decode() for key, value in (whole.metadata or {}).items()}
        return _tensors_of(path, columns), facts
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, MemoryError, OverflowError) as exc:
        if isinstance(exc, CorruptDataError):
            raise
        raise CorruptDataError(f"{path}: expected a whole Arrow file of tensors; found {exc}") from exc


def _columns(path: object, content: bytes, whole: Any) -> dict[str, Any]:
    """Read the columns that say what the tensors are, as the types that they have in files of ours."""
    wanted = [number for number, name in enumerate(whole.names) if name in _SCHEMA.names and name != "layer"]
    options: Any = pa.ipc.IpcReadOptions(included_fields=wanted)
    table: Any = cast(Any, pa.ipc.open_file(pa.BufferReader(content), options=options)).read_all()
    table.validate(full=True)
    columns = {field.name: table[field.name] for field in cast("Sequence[Any]", _SCHEMA) if field.name != "layer"}
    expanded = 0
    for name, column in columns.items():
        if not any(is_kind(column.type) for is_kind in _KINDS[name]):
            raise CorruptDataError(f"{path}: column {name!r}: expected {_SCHEMA.field(name).type}; found {column.type}")
        expanded += sum(map(_expanded, column.chunks))
    if expanded > allowed(len(content)):
        raise CorruptDataError(f"{path}: expected rows that share no bytes; found {expanded} bytes without sharing")
    return {name: column.cast(_SCHEMA.field(name).type) for name, column in columns.items()}


def _expanded(chunk: Any) -> int:
    """Return the bytes of a column in which rows may share them, when they do not any more."""
    if types.is_string_view(chunk.type) or types.is_binary_view(chunk.type):
        views = np.frombuffer(chunk.buffers()[1], np.uint8)[16 * chunk.offset :][: 16 * len(chunk)]
        return int(views.reshape(-1, 16)[:, :4].copy().view("<i4").astype(np.int64).sum())
    if types.is_dictionary(chunk.type):
        return len(chunk) * (cast(Any, compute).max(cast(Any, compute).binary_length(chunk.dictionary)).as_py() or 0)
    return 0


def _tensors_of(path: object, columns: Mapping[str, Any]) -> dict[str, Array]:
    """View the rows of an Arrow file as the tensors that they are, each checked; a few at a time become objects."""
    tensors: dict[str, Array] = {}
    count = len(columns["name"])
    for start in range(0, count, _ROWS):
        some = {name: column.slice(start, _ROWS) for name, column in columns.items()}
        texts = (some[column].to_pylist() for column in ("name", "dtype", "shape", "nbytes", "checksum"))
        for name, dtype, shape, nbytes, checksum, data in zip(*texts, some["data"], strict=True):
            where = f"{path}: tensor {name!r}"
            found = np.frombuffer(data.as_buffer() or b"", np.uint8)
            if found.nbytes != nbytes:
                raise CorruptDataError(f"{where}: expected {nbytes} bytes; found {found.nbytes}")
            if name is None or name in tensors:
                raise CorruptDataError(f"{where}: expected a name that no other row has; found it twice or null")
            if digest_of(found) != checksum:
                raise CorruptDataError(f"{where}: expected bytes of checksum {checksum}; found {digest_of(found)}")
            try:
                array = from_bytes(found, dtype, shape)
            except (TensorMismatchError, TypeError) as exc:
                raise CorruptDataError(f"{where}: {exc}") from exc
            tensors[name] = read_only(array if array.flags.aligned else array.copy())
    return tensors
