"""Files that other tools read and write: safetensors, Keras `.weights.h5`, Arrow.

Rules
- The suffix says the format. A file is read whole and replaced whole, here or elsewhere (`opening.Place`): what
  stood there before stays whole until then, and nothing half-written is left.
- Values are stored as they are, without codecs. A dtype that a format has no name for is refused, never converted.
- What is read was read whole and does not depend on the file any more. Arrow has a checksum per tensor; the other
  formats have none, so their parsers find damage to the structure of a file, not to its values.
- A Keras file is laid out by Keras, which needs the model; without one, `read` gives its tensors by HDF5 path.
- The formats themselves: `safetensorsfile`, `hdf5file`, `arrowfile`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, cast

from ..arrays import Array, as_numpy
from ..errors import CorruptDataError, GraphError, StorageError, TensorMismatchError
from . import arrowfile, hdf5file, safetensorsfile
from .opening import Place

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
        StorageError: none that is known, or no path and no URI.

    >>> format_of("digits.weights.h5"), format_of("s3://bucket/digits.feather?region=us-east-1")
    ('keras', 'arrow')
    """
    return _format_of(Place(path))


def _format_of(place: Place) -> Format:
    for suffix, found in _SUFFIXES.items():
        if place.name.endswith(suffix):
            return found
    raise StorageError(f"{place}: expected a name that ends in one of {', '.join(_SUFFIXES)}")


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path or a URI as messages may show it: without what is secret.

    >>> shown("s3://key:secret@bucket/m.arrow")
    's3://bucket/m.arrow'
    """
    return str(Place(path))


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, object],
    *,
    layers: Mapping[str, str] = {},
    facts: Mapping[str, str] = {},
) -> None:
    """Write tensors to a safetensors or Arrow file. It is on the disk when this returns.

    Args:
        path: ends in `.safetensors`, `.arrow` or `.feather`; a path whose folder exists, or a URI of `pyarrow.fs`. A
            file of that name is replaced.
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
    place = Place(path)
    form = _format_of(place)
    if form == "keras":
        raise StorageError(f"{place}: expected a model for a Keras file; found only tensors")
    arrays = {name: as_numpy(value, f"{place}: tensor {name!r}") for name, value in tensors.items()}
    for name in arrays:
        _check_text(place, f"tensor {name!r}", name, layers.get(name, ""))
    for key, value in facts.items():
        _check_text(place, f"fact {key!r}", key, value)
    if form == "safetensors":
        place.replace(safetensorsfile.filler(place, arrays, facts))
    else:
        place.replace(arrowfile.filler(arrays, layers, facts))


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
    place = Place(path)
    form = _format_of(place)
    if form == "keras":
        with place.opened() as file:
            return hdf5file.tensors_in(place, file), {}
    return (safetensorsfile if form == "safetensors" else arrowfile).parsed(place, place.read())


def write_keras(path: str | os.PathLike[str], model: Any) -> None:
    """Write a model's weights as Keras does, with the optimizer's state where it is compiled.

    Args:
        path: ends in `.weights.h5`; a path whose folder exists, or a URI. A file of that name is replaced.
        model: a `keras.Model` that is built.

    Raises:
        GraphError: it is no Keras model.
        TensorMismatchError: the model has no weights yet.
        StorageError: the file cannot be written, or its name has another suffix.
    """
    place = _keras_place(path)
    if not hasattr(model, "save_weights"):
        raise GraphError(
            f"{place}: expected a Keras model; found {type(model).__qualname__}: write .safetensors or .arrow"
        )
    content = hdf5file.NamedBuffer()
    try:
        model.save_weights(content)
    except ValueError as exc:
        raise TensorMismatchError(f"{place}: expected a model whose weights Keras can save; {exc}") from exc
    place.replace(lambda sink: sink.write(content.getbuffer()))


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
    place = _keras_place(path)
    with place.opened() as file:
        content = hdf5file.copy_of(place, file)
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    before = [as_numpy(variable, variable.path).copy() for variable in variables]
    try:
        model.load_weights(content)
    except hdf5file.HDF5_ERRORS as exc:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        if isinstance(exc, ValueError):
            raise TensorMismatchError(f"{place}: expected the weights of model {model.name!r}; {exc}") from exc
        raise CorruptDataError(f"{place}: expected a whole Keras weights file; {exc}") from exc


def _keras_place(path: str | os.PathLike[str]) -> Place:
    place = Place(path)
    if _format_of(place) != "keras":
        raise StorageError(f"{place}: expected a name that ends in .weights.h5")
    return place


def _check_text(place: Place, what: str, *texts: object) -> None:
    """Refuse what is no text of UTF-8: lone surrogates have no place in these formats."""
    for text in texts:
        try:
            cast(str, text).encode()
        except (AttributeError, UnicodeEncodeError) as exc:
            raise TensorMismatchError(f"{place}: {what}: expected text that UTF-8 can encode; found {text!r}") from exc
