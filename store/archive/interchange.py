"""Files that other tools read and write: safetensors, Keras `.weights.h5`, Arrow.

Rules
- The suffix says the format. A file is written under another name beside it, synced and renamed (`LocalDirectory`):
  what stood there before stays whole until then, and nothing half-written is left. It is for others: who may read it
  says the process's umask, as of any file.
- Values are stored as they are, without codecs. A dtype that a format has no name for is refused, never converted.
- What is read was read whole and does not depend on the file any more. Arrow has a checksum per tensor; the other
  formats have none, so their parsers find damage to the structure of a file, not to its values.
- A Keras file is laid out by Keras, which needs the model; without one, `read` gives its tensors by HDF5 path.
- The formats themselves: `safetensorsfile`, `hdf5file`, `arrowfile`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal, cast

from ..arrays import Array, as_numpy
from ..errors import CorruptDataError, StorageError, TensorMismatchError
from . import arrowfile, hdf5file, safetensorsfile
from .directory import Fill, naming
from .local import LocalDirectory

Format = Literal["safetensors", "keras", "arrow"]

_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".weights.h5": "keras",
    ".arrow": "arrow",
    ".feather": "arrow",
}


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
    >>> import numpy as np
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
        _replace(path, safetensorsfile.filler(path, arrays, facts))
    else:
        _replace(path, arrowfile.filler(arrays, layers, facts))


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
    if form == "keras":
        with _opened(path) as file:
            return hdf5file.tensors_in(path, file), {}
    content = _content(path)
    return (safetensorsfile if form == "safetensors" else arrowfile).parsed(path, content)


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
    content = hdf5file.NamedBuffer()
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
    with _opened(path) as file:
        content = hdf5file.copy_of(path, file)
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    before = [as_numpy(variable, variable.path).copy() for variable in variables]
    try:
        model.load_weights(content)
    except hdf5file.HDF5_ERRORS as exc:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        if isinstance(exc, ValueError):
            raise TensorMismatchError(f"{path}: expected the weights of model {model.name!r}; {exc}") from exc
        raise CorruptDataError(f"{path}: expected a whole Keras weights file; {exc}") from exc


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


def _opened(path: Path) -> IO[bytes]:
    with naming(path, "read"):
        return path.open("rb")


def _content(path: Path) -> bytes:
    with naming(path, "read"):
        return path.read_bytes()


def _replace(path: Path, fill: Fill) -> None:
    if not os.path.isdir(path.parent):
        raise StorageError(f"{path}: expected a folder to write it to; found none at {path.parent}")
    LocalDirectory(path.parent, create=False, private=False).write(path.name, fill)
