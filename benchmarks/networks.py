"""The papers' networks in Keras, at the sizes whose updates are measured, and a stand-in for their training.

Rules
- Shapes are those of the papers (docs/explanation/benchmarks.md). Values are random, because no byte is compressed.
- `Training.step` changes every element of every tensor in its place, as an optimizer does; nobody trains for real.
- Models are built without initial values: they are filled, or drawn, right after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .measure import Tensors, total_bytes

DECAY = np.float32(1 - 2**-10)
"""By which a step multiplies."""


@dataclass(frozen=True)
class Network:
    """A network that is built when it is needed, in whichever process that is."""

    name: str
    """As the tables call it."""
    build: Callable[[], Any]
    """Makes a Keras model."""
    input_shape: tuple[int, ...]
    """Of one sample."""

    def sample(self) -> np.ndarray[Any, Any]:
        """Draw a batch of one sample."""
        return np.random.default_rng(1).random((1, *self.input_shape), dtype=np.float32)


def nt3(name: str, units: int, features: int = 60483, filters: int = 128) -> Network:
    """NT3: two convolutions over a gene expression profile, three dense layers (CANDLE).

    Args:
        name: as the tables call it.
        units: of the first dense layer; 200 is NT3.A (591 MiB), 600 Viper's NT3.B (1.73 GiB).
        features: length of a profile.
        filters: of both convolutions.
    """
    return Network(name, partial(_nt3, units, features, filters), (features, 1))


def ptychonn(name: str, width: int, side: int = 64) -> Network:
    """PtychoNN: an encoder and two decoders of 3x3 convolutions.

    Args:
        name: as the tables call it.
        width: filters of the first layers; 32 is the original (4.4 MiB), 488 makes 1 GiB.
        side: of a pattern, in pixels.
    """
    return Network(name, partial(_ptychonn, width, side), (side, side, 1))


def _nt3(units: int, features: int, filters: int) -> Any:
    from keras import Input, Sequential, layers

    empty: Any = {"kernel_initializer": "zeros"}
    return Sequential(
        [
            Input((features, 1)),
            layers.Conv1D(filters, 20, activation="relu", **empty),
            layers.MaxPooling1D(1),
            layers.Conv1D(filters, 10, activation="relu", **empty),
            layers.MaxPooling1D(10),
            layers.Flatten(),
            layers.Dense(units, activation="relu", **empty),
            layers.Dropout(0.1),
            layers.Dense(20, activation="relu", **empty),
            layers.Dropout(0.1),
            layers.Dense(2, activation="softmax", **empty),
        ]
    )


def _ptychonn(width: int, side: int) -> Any:
    from keras import Input, Model, layers

    def convolved(inputs: Any, filters: int) -> Any:
        for _ in range(2):
            inputs = layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="zeros")(inputs)
        return inputs

    pattern = encoded = Input((side, side, 1))
    for scale in (1, 2, 4):
        encoded = layers.MaxPooling2D()(convolved(encoded, scale * width))
    outputs: list[Any] = []
    for _ in ("amplitude", "phase"):
        decoded = encoded
        for scale in (4, 2, 1):
            decoded = layers.UpSampling2D()(convolved(decoded, scale * width))
        outputs.append(layers.Conv2D(1, 3, padding="same", kernel_initializer="zeros")(decoded))
    return Model(pattern, outputs)


class Training:
    """A Keras model whose tensors change all at once.

    Args:
        network: what is built.

    >>> training = Training(nt3("tiny", units=3, features=60, filters=2))
    >>> before = [array.copy() for array in training.arrays.values()]
    >>> training.step()
    >>> all((now != old).all() for now, old in zip(training.arrays.values(), before))
    True
    """

    def __init__(self, network: Network) -> None:
        from tensorvine.store.keras_memory import WeightMemory

        self.network = network
        self.model = network.build()
        memory = WeightMemory(self.model)
        rng = np.random.default_rng(0)
        self.arrays: Tensors = {}
        """The model's tensors, which are its variables' own memory."""
        for name in memory.weights:
            array = memory.in_place(name)
            if array is None:
                raise RuntimeError(f"{network.name}: expected tensor {name!r} in memory that NumPy can write to")
            rng.random(dtype=np.float32, out=array)
            array -= np.float32(0.5)
            array *= np.float32(np.sqrt(12 / max(1, np.prod(array.shape[:-1]))))
            self.arrays[name] = array
        self.nbytes = total_bytes(self.arrays)

    def step(self) -> None:
        """Change everything."""
        for array in self.arrays.values():
            array *= DECAY

    def answer(self) -> Any:
        """Answer for the network's sample."""
        return self.model.predict_on_batch(self.network.sample())
