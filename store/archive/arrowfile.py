"""Arrow files of plain tensors, as other tools read and write them.

Rules
- One batch, one row per tensor: name, layer, dtype, shape, nbytes, checksum (xxh3-128 of the bytes, hexadecimal), data.
  Facts are the schema's metadata.
- Columns that were added, other widths of the types, more batches and compression, as other tools write them, are read
  as well. Each tensor is checked against its checksum.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (pyarrow has no types)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from ..arrays import Array, as_bytes, dtype_name, from_bytes, read_only
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


def parsed(path: Path, content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors and facts of a file's content."""
    try:
        reader: Any = pa.ipc.open_file(pa.BufferReader(content))
        schema: Any = reader.schema
        if METADATA_KEY in (schema.metadata or {}) and "codec" in schema.names:
            raise CorruptDataError(
                f"{path}: expected an Arrow file of plain tensors; found a segment file of a TensorVine repository"
            )
        missing = [name for name in _SCHEMA.names if name not in schema.names and name != "layer"]
        if missing:
            raise CorruptDataError(f"{path}: expected the columns {_SCHEMA.names}; found none named {missing}")
        table = reader.read_all()
        table.validate(full=True)
        columns = {
            field.name: table[field.name].cast(field.type)
            for field in cast("Sequence[Any]", _SCHEMA)
            if field.name != "layer"
        }
        facts = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        return _tensors_of(path, columns), facts
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as exc:
        if isinstance(exc, CorruptDataError):
            raise
        raise CorruptDataError(f"{path}: expected a whole Arrow file of tensors; {exc}") from exc


def _tensors_of(path: Path, columns: Mapping[str, Any]) -> dict[str, Array]:
    """View the rows of an Arrow file as the tensors that they are, each checked."""
    tensors: dict[str, Array] = {}
    texts = (columns[column].to_pylist() for column in ("name", "dtype", "shape", "nbytes", "checksum"))
    for name, dtype, shape, nbytes, checksum, data in zip(*texts, columns["data"], strict=True):
        where = f"{path}: tensor {name!r}"
        found = np.frombuffer(data.as_buffer() or b"", np.uint8)
        if found.nbytes != nbytes:
            raise CorruptDataError(f"{where}: expected {nbytes} bytes; found {found.nbytes}")
        if name is None or name in tensors:
            raise CorruptDataError(f"{where}: expected a name that no other row has")
        if digest_of(found) != checksum:
            raise CorruptDataError(f"{where}: expected bytes of checksum {checksum}; found {digest_of(found)}")
        try:
            array = from_bytes(found, dtype, shape)
        except (TensorMismatchError, TypeError) as exc:
            raise CorruptDataError(f"{where}: {exc}") from exc
        tensors[name] = read_only(array if array.flags.aligned else array.copy())
    return tensors
