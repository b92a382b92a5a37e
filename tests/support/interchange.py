"""Files of other tools for tests: tensors and a model that are written, and whether what was read is the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
from tensorvine.store.archive.interchange import format_of, write, write_keras
from tensorvine.store.arrays import Array, as_bytes

PLAIN = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64")
EXTENDED = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
TENSORS: Mapping[str, Array] = {
    "odd": np.arange(3, dtype=np.uint8),
    "kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scale": np.array(1.5, ml_dtypes.bfloat16),
}


def same(a: Array, b: Array) -> bool:
    """Equal to the bit, whatever the byte order and the strides."""
    native = a.astype(a.dtype.newbyteorder("="))
    return native.dtype == b.dtype and a.shape == b.shape and as_bytes(native).tolist() == as_bytes(b).tolist()


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, array in expected.items() if not same(array, found[name])] == []


def model(units: int = 2) -> keras.Model:
    made = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, dtype="bfloat16"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(units),
        ]
    )
    for variable in made.weights:
        variable.assign(np.random.default_rng(3).normal(size=variable.shape))
    return made


def write_any(path: Path) -> None:
    if format_of(path) == "keras":
        write_keras(path, model())
    else:
        write(path, TENSORS, layers={"kernel": "dense"}, facts={"ref": "m@1"})
