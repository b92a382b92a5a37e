"""The memory of a Keras model's weights, for filling a model that answers again and again.

Rules
- `Variable.assign` takes fresh memory each time, which costs three times the copy. So each weight gets one buffer of
  ours, through DLPack, and keeps it: what is copied into the buffer is the weight's value from then on.
- A weight that is written to in another way (a training step, `assign`) leaves its buffer; `in_place` notices that.
- TensorFlow on the CPU only, and only the dtypes that NumPy hands to DLPack; other weights are left out.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's and tensorflow's types are partial)

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from .arrays import Array
from .keras import weights_of

ALIGNMENT = 64
"""What TensorFlow's kernels expect of a tensor's address."""
_KINDS = "biufc"


class VariableMemory:
    """Buffers that are the values of variables.

    Args:
        variables: Keras variables by name. Nobody else may write to them.
    """

    def __init__(self, variables: Mapping[str, keras.Variable]) -> None:
        self._variables = variables
        self._buffers: dict[str, Array] = {}

    def in_place(self, name: str) -> Array | None:
        """Return the writable memory of a variable; None where it has none that NumPy could write to.

        The caller writes all of it: a buffer that is given for the first time holds anything.
        """
        variable = self._variables[name]
        buffer = self._buffers.get(name)
        if buffer is not None and _address(variable) == buffer.ctypes.data:
            return buffer
        buffer = _aligned(variable)
        if buffer is None:
            return None
        import tensorflow as tf

        variable.value.assign(tf.experimental.dlpack.from_dlpack(buffer.__dlpack__()))
        if _address(variable) != buffer.ctypes.data:
            return None  # it was copied after all
        self._buffers[name] = buffer
        return buffer


class WeightMemory(VariableMemory):
    """Buffers that are the weights of a model which only answers.

    Args:
        model: a built Keras model. Nobody may train it.

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="out")])
    >>> memory = WeightMemory(model)
    >>> memory.in_place("out/bias")[...] = 7
    >>> [float(b) for b in model.layers[0].bias.value]
    [7.0, 7.0]
    """

    def __init__(self, model: keras.Model) -> None:
        self.weights: dict[str, keras.Variable] = weights_of(model)
        """Name -> variable, as in `store.keras.tensors_of`."""
        super().__init__(self.weights)


def _aligned(variable: keras.Variable) -> Array | None:
    """Make an aligned array like a variable that lies in the memory of the CPU; None where DLPack has no way."""
    if keras.backend.backend() != "tensorflow" or "CPU" not in str(getattr(variable.value, "device", "")):
        return None
    try:
        dtype = np.dtype(variable.dtype)
    except TypeError:
        return None
    shape = tuple(variable.shape)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if dtype.kind not in _KINDS or not nbytes:
        return None
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _address(variable: keras.Variable) -> int:
    return int(np.from_dlpack(variable.value.read_value()).ctypes.data)
