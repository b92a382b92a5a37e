"""HDF5 files, as Keras writes its weights to them.

Rules
- HDF5 works in memory only: it crashes the process when it closes a file on a full disk.
- What a file claims is added up before a byte of it is read: datasets as they are stored have their bytes in the file,
  compressed ones may become as much as `store.bounds` allows. HDF5 itself gives a chunk, and what is packed in it, any
  memory that they claim.
- What points elsewhere is refused: other files, virtual datasets, and links by name, which may go in a circle.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array, as_bytes, as_numpy, from_bytes, read_only
from ..bounds.allowance import allowed
from ..errors import CorruptDataError, TensorMismatchError
from ..lazy import optional

HDF5_ERRORS = (OSError, RuntimeError, KeyError, OverflowError, TypeError, ValueError, MemoryError, RecursionError)
"""What h5py raises for a damaged file."""
_DEFLATE, _SHUFFLE, _FLETCHER, _LZF = 1, 2, 3, 32000
_EXPANSION = 1032
"""Bytes that deflate, which packs better than LZF, makes of one at most."""
_ATTRIBUTE_BYTES = 1 << 16
_SMALL_CHUNK = 1 << 15
"""Stored bytes of a chunk from which deflate makes no memory to speak of."""


class NamedBuffer(io.BytesIO):
    """Memory that Keras takes for a path: it looks at the suffix of its name, and opens it as a file."""

    def __str__(self) -> str:
        return "model.weights.h5"


def tensors_in(path: Path, content: bytes) -> dict[str, Array]:
    """Return the tensors of a file's content by HDF5 path."""
    return _read(path, content, _array)


def check(path: Path, content: bytes) -> None:
    """Refuse what another reader, which believes all, must not be given; errors as of `interchange.read`."""
    _read(path, content, None)


def _read(path: Path, content: bytes, use: Callable[[str, Any], Array] | None) -> dict[str, Array]:
    library = optional("h5py", path)
    try:
        with library.File(io.BytesIO(content), "r") as file:
            found = dict(_datasets(path, library, file))
            _check_sizes(path, library, found, len(content))
            if use is None:
                return {}
            return {name: read_only(use(f"{path}: tensor {name!r}", dataset)) for name, dataset in found.items()}
    except HDF5_ERRORS as exc:
        if isinstance(exc, (CorruptDataError, TensorMismatchError)):
            raise
        raise CorruptDataError(f"{path}: expected a whole HDF5 file; {exc}") from exc


def _datasets(path: Path, library: Any, file: Any) -> Iterator[tuple[str, Any]]:
    """Give the datasets by their names, each once."""
    seen: set[int] = set()
    groups: list[tuple[str, Any]] = [("", file)]
    while groups:
        prefix, group = groups.pop()
        _check_attributes(f"{path}: group {prefix!r}", library, group)
        for key in group:
            name = f"{prefix}{key}"
            if not isinstance(group.get(key, getlink=True), library.HardLink):
                raise CorruptDataError(f"{path}: {name!r}: expected it in this file; found a link to another place")
            item = group[key]
            address = library.h5o.get_info(item.id).addr
            if address in seen:
                continue
            seen.add(address)
            if isinstance(item, library.Group):
                groups.append((f"{name}/", item))
            elif isinstance(item, library.Dataset):
                _check_attributes(f"{path}: tensor {name!r}", library, item)
                yield name, item


def _check_attributes(where: str, library: Any, item: Any) -> None:
    """Refuse attributes that are longer than those that Keras writes."""
    for number in range(library.h5a.get_num_attrs(item.id)):
        attribute = library.h5a.open(item.id, index=number)
        nbytes = int(np.prod(attribute.shape, dtype=object)) * attribute.get_type().get_size()
        if nbytes > min(_ATTRIBUTE_BYTES, 4 * attribute.get_storage_size()):
            raise CorruptDataError(f"{where}: expected attributes of up to {_ATTRIBUTE_BYTES} bytes; found {nbytes}")


def _check_sizes(path: Path, library: Any, datasets: dict[str, Any], content: int) -> None:
    """Hold what the datasets claim against the bytes that there are."""
    plain = packed = 0
    for name, dataset in datasets.items():
        where = f"{path}: tensor {name!r}"
        if dataset.external or dataset.is_virtual:
            raise CorruptDataError(f"{where}: expected its bytes in this file; found a reference to another one")
        if dataset.shape is None or dataset.dtype.kind not in "biufcV" or dataset.dtype.names:
            as_numpy(np.empty(0, object), where)  # says that it is no array of numbers
        stored = dataset.id.get_storage_size()
        if dataset.chunks is None:
            if dataset.nbytes != stored:
                raise CorruptDataError(f"{where}: expected {dataset.nbytes} bytes; found {stored} stored")
            plain += dataset.nbytes
        else:
            packed += dataset.nbytes + _check_chunks(where, library, dataset, content)
    if plain > content:
        raise CorruptDataError(f"{path}: expected tensors with bytes of their own; found {plain} in {content}")
    if packed > allowed(content):
        raise CorruptDataError(
            f"{path}: expected at most {allowed(content)} bytes, compressed, in a file of {content}; found {packed}: "
            "write it without compression"
        )


def _check_chunks(where: str, library: Any, dataset: Any, content: int) -> int:
    """Return the memory that reading a chunked dataset takes beside its array."""
    filters = dataset.id.get_create_plist()
    kinds = [filters.get_filter(number)[0] for number in range(filters.get_nfilters())]
    known = {_DEFLATE, _SHUFFLE, _FLETCHER, _LZF}
    if set(kinds) - known or len(set(kinds)) != len(kinds) or {_DEFLATE, _LZF} <= set(kinds):
        raise CorruptDataError(f"{where}: expected it plain, or compressed once by gzip or lzf; found filters {kinds}")
    chunk = int(np.prod(dataset.chunks, dtype=object)) * dataset.dtype.itemsize
    count = dataset.id.get_num_chunks()
    stored = dataset.id.get_storage_size()
    if stored > content or dataset.nbytes > max(1, _EXPANSION if kinds else 1) * stored:
        raise CorruptDataError(f"{where}: expected {dataset.nbytes} bytes; found {stored} stored")
    if 2 * chunk > allowed(content):
        raise CorruptDataError(f"{where}: expected chunks of a part of it; found one of {chunk} bytes")
    for number in range(count):
        info = dataset.id.get_chunk_info(number)
        if info.size > content:
            raise CorruptDataError(f"{where}: expected chunks within {content} bytes; found one of {info.size}")
        if _DEFLATE in kinds and info.size > _SMALL_CHUNK:
            _, raw = dataset.id.read_direct_chunk(info.chunk_offset)
            _check_deflated(where, raw, chunk)
    return 2 * chunk


def _check_deflated(where: str, raw: bytes, nbytes: int) -> None:
    """Refuse a packed chunk that holds more than a chunk: HDF5 would take memory for all of it."""
    running, left = zlib.decompressobj(), nbytes + 4  # a checksum of four bytes may stand behind
    data = raw
    try:
        while data and not running.eof:
            left -= len(running.decompress(data, 1 << 20))
            data = running.unconsumed_tail
            if left < 0:
                raise CorruptDataError(f"{where}: expected {nbytes} bytes in a chunk; found more")
    except zlib.error as exc:
        raise CorruptDataError(f"{where}: expected a chunk packed by gzip; found {exc}") from exc


def _array(where: str, dataset: Any) -> Array:
    """Read a dataset. Keras stores bfloat16 as two opaque bytes and says so in an attribute."""
    array = np.asarray(dataset[()])
    # The attribute is asked for only where it matters: HDF5 can loop for ever on a damaged one.
    if array.dtype == "V2" and dataset.attrs.get("dtype") == "bfloat16":
        return from_bytes(as_bytes(array), "bfloat16", array.shape)
    return as_numpy(array, where)
