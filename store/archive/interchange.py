"""Files that other tools read and write: safetensors, Keras `.weights.h5`, Arrow.

Rules
- The suffix says the format. A file is written under another name beside it, synced and renamed (`LocalDirectory`):
  what stood there before stays whole until then, and nothing half-written is left.
- Values are stored as they are, without codecs. A dtype that a format has no name for is refused, never converted.
- What is read was read whole and does not depend on the file any more. Arrow has a checksum per tensor; the other
  formats have none, so their parsers find damage to the structure of a file, not to its values.
- A Keras file is laid out by Keras, which needs the model; without one, `read` gives its tensors by HDF5 path.
  HDF5 works in memory only: it crashes the process when it closes a file on a full disk.
- The Arrow file is one batch, one row per tensor: name, layer, dtype, shape, nbytes, checksum (xxh3-128 of the bytes,
  hexadecimal), data. Facts are the schema's metadata. Columns that were added, other widths of the types, more
  batches and compression, as other tools write them, are read as well.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (pyarrow has no types; siblings of one package may share a helper)

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa

from ..arrays import Array, as_bytes, as_numpy, dtype_name, from_bytes, read_only
from ..errors import CodecUnavailableError, CorruptDataError, StorageError, TensorMismatchError
from ..versions.manifest import digest_of
from .directory import Fill, LocalDirectory, _naming
from .segmentfile import METADATA_KEY

Format = Literal["safetensors", "keras", "arrow"]

_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".weights.h5": "keras",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_SAFETENSORS = {
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
_SAFETENSORS_FACTS = "__metadata__"
_ARROW: Any = pa.schema(
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
_HDF5_ERRORS = (OSError, RuntimeError, KeyError, OverflowError, TypeError, ValueError)
"""What h5py raises for a damaged file."""
_HDF5_EXPANSION = 2000
"""A dataset that claims more bytes than this times what it stores is refused; deflate reaches 1032."""


def format_of(path: str | os.PathLike[str]) -> Format:
    """Say which format a file has by its suffix.

    Raises:
        StorageError: none that is known.

    >>> format_of("digits.weights.h5"), format_of("digits.feather")
    ('keras', 'arrow')
    """
    for suffix, found in _SUFFIXES.items():
        if os.fspath(path).endswith(suffix):
            return found
    raise StorageError(f"{os.fspath(path)}: expected a name that ends in one of {', '.join(_SUFFIXES)}")


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, object],
    *,
    layers: Mapping[str, str] = {},
    facts: Mapping[str, str] = {},
) -> None:
    """Write tensors to a safetensors or Arrow file. It is on the disk when this returns.

    Args:
        path: ends in `.safetensors`, `.arrow` or `.feather`; its folder exists. A file of that name is replaced.
        tensors: name -> array of any shape.
        layers: tensor -> the layer that it belongs to; a column of the Arrow file.
        facts: what else the file shall say, as text.

    Raises:
        TensorMismatchError: a tensor whose dtype or name the format cannot express.
        StorageError: the file cannot be written, or is a Keras file: `write_keras` writes those.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/m.arrow", {"kernel": np.ones((2, 1), "float16")}, facts={"ref": "m@1"})
    ...     tensors, facts = read(f"{folder}/m.arrow")
    >>> tensors["kernel"].tolist(), facts
    ([[1.0], [1.0]], {'ref': 'm@1'})
    """
    path = Path(path)
    form = format_of(path)
    if form == "keras":
        raise StorageError(f"{path}: expected a model to write a Keras file from; found tensors only")
    arrays = {name: as_numpy(value, f"{path}: tensor {name!r}") for name, value in tensors.items()}
    for name in arrays:
        _check_text(path, f"tensor {name!r}", name, layers.get(name, ""))
    for key, value in facts.items():
        _check_text(path, f"fact {key!r}", key, value)
    if form == "safetensors":
        _write_safetensors(path, arrays, facts)
    else:
        _write_arrow(path, arrays, layers, facts)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Read the tensors of a file.

    Returns:
        Tensors by name (in a Keras file by HDF5 path, such as "layers/dense/vars/0"), read-only; and the facts that
        the file says about them.

    Raises:
        CorruptDataError: the file is truncated, damaged, or of another format than its name says.
        TensorMismatchError: a tensor of a dtype that cannot be stored here.
        CodecUnavailableError: the package that reads the format is not installed.
        StorageError: there is no such file, or it cannot be read.
    """
    path = Path(path)
    form = format_of(path)
    content = _content(path)
    if form == "safetensors":
        return _read_safetensors(path, content)
    return _read_arrow(path, content) if form == "arrow" else (_read_hdf5(path, content), {})


def write_keras(path: str | os.PathLike[str], model: Any) -> None:
    """Write a model's weights as Keras does, with the optimizer's state where it is compiled.

    Args:
        path: ends in `.weights.h5`; its folder exists. A file of that name is replaced.
        model: a `keras.Model` that is built.

    Raises:
        TensorMismatchError: the model has no weights yet.
        StorageError: the file cannot be written, or its name has another suffix.
    """
    path = _keras_path(path)
    content = _NamedBuffer()
    try:
        model.save_weights(content)
    except ValueError as exc:
        raise TensorMismatchError(f"{path}: expected a model whose weights Keras can save; {exc}") from exc
    _replace(path, lambda sink: sink.write(content.getbuffer()))


def read_keras(path: str | os.PathLike[str], model: Any) -> None:
    """Set a model's weights from a file, as Keras does.

    Args:
        path: ends in `.weights.h5`.
        model: a `keras.Model` that is built. If the file does not fit it, it stays as it was.

    Raises:
        CorruptDataError: the file is truncated, damaged, or no HDF5 file.
        TensorMismatchError: layers or shapes of the file are not the model's.
        StorageError: there is no such file, or it cannot be read.
    """
    path = _keras_path(path)
    content = _NamedBuffer(_content(path))
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    before = [as_numpy(variable, variable.path).copy() for variable in variables]
    try:
        model.load_weights(content)
    except _HDF5_ERRORS as exc:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        if isinstance(exc, ValueError):
            raise TensorMismatchError(f"{path}: expected the weights of model {model.name!r}; {exc}") from exc
        raise CorruptDataError(f"{path}: expected a whole Keras weights file; {exc}") from exc


def _write_safetensors(path: Path, arrays: Mapping[str, Array], facts: Mapping[str, str]) -> None:
    """Write the header and then the bytes, the widest elements first: each tensor is then aligned."""
    header: dict[str, Any] = {_SAFETENSORS_FACTS: dict(facts)} if facts else {}
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    at = 0
    for name, array in ordered:
        dtype = dtype_name(array.dtype)
        if dtype not in _SAFETENSORS or name == _SAFETENSORS_FACTS:
            raise TensorMismatchError(
                f"{path}: tensor {name!r}: expected a dtype and a name that safetensors has; found {dtype}"
            )
        offsets = [at, at := at + array.nbytes]
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": array.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def fill(sink: Any) -> None:
        sink.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            if array.nbytes:
                sink.write(as_bytes(array))

    _replace(path, fill)


def _read_safetensors(path: Path, content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    library = _package("safetensors", path)
    try:
        found: list[tuple[str, dict[str, Any]]] = library.deserialize(content)
    except library.SafetensorError as exc:
        raise CorruptDataError(f"{path}: expected a whole safetensors file; {exc}") from exc
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # the parser has accepted it
    names = {theirs: ours for ours, theirs in _SAFETENSORS.items()}
    tensors: dict[str, Array] = {}
    for name, row in found:
        if row["dtype"] not in names:
            raise TensorMismatchError(
                f"{path}: tensor {name!r}: expected a dtype that NumPy can hold; found {row['dtype']}"
            )
        tensors[name] = read_only(from_bytes(np.frombuffer(row["data"], np.uint8), names[row["dtype"]], row["shape"]))
    order = {name: tensors[name] for name in header if name in tensors}
    return order, header.get(_SAFETENSORS_FACTS) or {}


def _write_arrow(path: Path, arrays: Mapping[str, Array], layers: Mapping[str, str], facts: Mapping[str, str]) -> None:
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
    columns = [pa.array(column, field.type) for column, field in zip(columns, list(_ARROW)[:-1], strict=True)]
    buffers: Any = [None, pa.py_buffer(cast(Any, starts)), pa.py_buffer(cast(Any, data))]
    columns.append(pa.Array.from_buffers(pa.large_binary(), len(arrays), buffers))
    batch: Any = pa.record_batch(columns, schema=_ARROW.with_metadata(dict(facts)))

    def fill(sink: Any) -> None:
        with pa.ipc.new_file(sink, batch.schema) as writer:
            cast(Any, writer).write_batch(batch)

    _replace(path, fill)


def _read_arrow(path: Path, content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    try:
        reader: Any = pa.ipc.open_file(pa.BufferReader(content))
        schema: Any = reader.schema
        if METADATA_KEY in (schema.metadata or {}) and "codec" in schema.names:
            raise CorruptDataError(
                f"{path}: expected an Arrow file of plain tensors; found a segment file of a TensorVine repository"
            )
        missing = [name for name in _ARROW.names if name not in schema.names and name != "layer"]
        if missing:
            raise CorruptDataError(f"{path}: expected the columns {_ARROW.names}; found none named {missing}")
        table = reader.read_all()
        table.validate(full=True)
        columns = {
            field.name: table[field.name].cast(field.type)
            for field in cast("Sequence[Any]", _ARROW)
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


def _read_hdf5(path: Path, content: bytes) -> dict[str, Array]:
    library = _package("h5py", path)
    tensors: dict[str, Array] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, library.Dataset):
            tensors[name] = read_only(_hdf5_array(f"{path}: tensor {name!r}", item))

    try:
        with library.File(io.BytesIO(content), "r") as file:
            file.visititems(visit)
    except _HDF5_ERRORS as exc:
        if isinstance(exc, (CorruptDataError, TensorMismatchError)):
            raise
        raise CorruptDataError(f"{path}: expected a whole HDF5 file; {exc}") from exc
    return tensors


def _hdf5_array(where: str, dataset: Any) -> Array:
    """Read a dataset. Keras stores bfloat16 as two opaque bytes and says so in an attribute."""
    if dataset.external or dataset.is_virtual:
        raise CorruptDataError(f"{where}: expected its bytes in this file; found a reference to another one")
    if dataset.nbytes > _HDF5_EXPANSION * dataset.id.get_storage_size():
        stored = dataset.id.get_storage_size()
        raise CorruptDataError(f"{where}: expected {dataset.nbytes} bytes; found {stored} stored")
    array = np.asarray(dataset[()])
    # The attribute is asked for only where it matters: HDF5 can loop for ever on a damaged one.
    if array.dtype == "V2" and dataset.attrs.get("dtype") == "bfloat16":
        return from_bytes(as_bytes(array), "bfloat16", array.shape)
    return as_numpy(array, where)


def _keras_path(path: str | os.PathLike[str]) -> Path:
    if format_of(path) != "keras":
        raise StorageError(f"{os.fspath(path)}: expected a name that ends in .weights.h5")
    return Path(path)


def _check_text(path: Path, what: str, *texts: object) -> None:
    """Refuse what is no text of UTF-8: lone surrogates have no place in these formats."""
    for text in texts:
        try:
            cast(str, text).encode()
        except (AttributeError, UnicodeEncodeError) as exc:
            raise TensorMismatchError(f"{path}: {what}: expected text that UTF-8 can express; found {text!r}") from exc


class _NamedBuffer(io.BytesIO):
    """Memory that Keras takes for a path: it looks at the suffix of its name, and opens it as a file."""

    def __str__(self) -> str:
        return "model.weights.h5"


def _content(path: Path) -> bytes:
    with _naming(path, "read"):
        return path.read_bytes()


def _replace(path: Path, fill: Fill) -> None:
    if not os.path.isdir(path.parent):
        raise StorageError(f"{path}: expected a folder to write it to; found none at {path.parent}")
    LocalDirectory(path.parent, create=False).write(path.name, fill)


def _package(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise CodecUnavailableError(
            f"{path}: expected the package {name!r}, which reads it; it is not installed"
        ) from exc
