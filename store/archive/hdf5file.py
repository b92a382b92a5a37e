"""HDF5 files, as Keras writes its weights to them.

Rules
- HDF5 works in memory only: it crashes the process when it closes a file on a full disk.
- What points to another file, or claims more bytes than it stores, is refused.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array, as_bytes, as_numpy, from_bytes, read_only
from ..errors import CorruptDataError, TensorMismatchError
from ..lazy import optional

HDF5_ERRORS = (OSError, RuntimeError, KeyError, OverflowError, TypeError, ValueError)
"""What h5py raises for a damaged file."""
_HDF5_EXPANSION = 2000
"""A dataset that claims more bytes than this times what it stores is refused; deflate reaches 1032."""


class NamedBuffer(io.BytesIO):
    """Memory that Keras takes for a path: it looks at the suffix of its name, and opens it as a file."""

    def __str__(self) -> str:
        return "model.weights.h5"


def tensors_in(path: Path, content: bytes) -> dict[str, Array]:
    """Return the tensors of a file's content by HDF5 path."""
    library = optional("h5py", path)
    tensors: dict[str, Array] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, library.Dataset):
            tensors[name] = read_only(_hdf5_array(f"{path}: tensor {name!r}", item))

    try:
        with library.File(io.BytesIO(content), "r") as file:
            file.visititems(visit)
    except HDF5_ERRORS as exc:
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
