"""Safetensors files.

Rules
- A dtype that the format has no name for is refused, never converted.
- The format has no checksums: its parser finds damage to the structure of a file, not to its values.
- A header that says a thing twice is refused: readers differ in which one they take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ..arrays import Array, as_bytes, dtype_name, from_bytes, read_only
from ..bounds import jsontext
from ..bounds.allowance import allowed
from ..errors import CorruptDataError, TensorMismatchError
from ..lazy import optional
from .directory import Fill, Sink

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Our name of a dtype -> safetensors' name."""
_FACTS = "__metadata__"
_LONGEST_HEADER = 100_000_000
"""Bytes; the format allows no more."""
_AGAIN = 2
"""What a header says is there twice while it is read: as JSON, and as the library's rows."""


def filler(path: object, arrays: Mapping[str, Array], facts: Mapping[str, str]) -> Fill:
    """Return what writes the header and then the bytes, the widest elements first: each tensor is then aligned."""
    header: dict[str, Any] = {_FACTS: dict(facts)} if facts else {}
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    at = 0
    for name, array in ordered:
        dtype = dtype_name(array.dtype)
        if dtype not in _DTYPES or name == _FACTS:
            raise TensorMismatchError(
                f"{path}: tensor {name!r}: expected a dtype and a name that safetensors supports; found {dtype}"
            )
        offsets = [at, at := at + array.nbytes]
        header[name] = {"dtype": _DTYPES[dtype], "shape": array.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise TensorMismatchError(
            f"{path}: expected names and metadata of at most {_LONGEST_HEADER} bytes, the limit of safetensors; "
            f"found {len(text)}: write .arrow, which has no limit"
        )

    def fill(sink: Sink) -> None:
        sink.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            if array.nbytes:
                sink.write(as_bytes(array).data)

    return fill


def parsed(path: object, content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors and facts of a file's content.

    Raises:
        CorruptDataError: if the file is truncated or damaged.
        TensorMismatchError: if a tensor has a dtype that NumPy does not support.
        CodecUnavailableError: if the package safetensors is not installed.
    """
    safetensors = optional("safetensors", path, "files")

    header = _header(path, content)
    try:
        found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(content)
    except (safetensors.SafetensorError, MemoryError, OverflowError, ValueError) as exc:
        raise CorruptDataError(f"{path}: expected a whole safetensors file; found {exc}") from exc
    names = {theirs: ours for ours, theirs in _DTYPES.items()}
    tensors: dict[str, Array] = {}
    for name, row in found:
        where = f"{path}: tensor {name!r}"
        if row["dtype"] not in names:
            raise TensorMismatchError(f"{where}: expected a dtype that NumPy supports; found {row['dtype']}")
        data = np.frombuffer(row["data"], np.uint8)
        try:
            tensors[name] = read_only(from_bytes(data, names[row["dtype"]], row["shape"]))
        except TensorMismatchError as exc:
            raise CorruptDataError(f"{where}: {exc}") from exc
    order = {name: tensors[name] for name in header if name in tensors}
    return order, cast("dict[str, str]", header.get(_FACTS) or {})


def _header(path: object, content: bytes) -> dict[str, object]:
    """Read the header before the library does, which takes for it what it asks for."""
    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 8:
        raise CorruptDataError(f"{path}: expected a whole safetensors file; found only {len(content)} bytes")
    text = content[8 : 8 + length]
    jsontext.check(str(text, "utf-8", "replace"), str(path), allowed(len(content)) // _AGAIN)
    return jsontext.mapping(text, str(path), once=True)
