"""Keras models that are as large as in the papers and are filled instead of trained."""

from __future__ import annotations

from typing import Any

from keras import Input, Model, Sequential, layers


def keras_nt3(units: int, features: int = 60483, filters: int = 128, *, seeds: tuple[int, int] | None = None) -> Any:
    """Build NT3: two convolutions over a gene expression profile, three dense layers (CANDLE).

    Args:
        units: Of the first dense layer; 200 is NT3.A (591 MiB), 600 Viper's NT3.B (1.73 GiB).
        features: Length of a profile.
        filters: Of both convolutions.
        seeds: Of the dropout layers. Without them, kernels are zero until they are filled.
    """
    given: Any = {} if seeds else {"kernel_initializer": "zeros"}
    one, two = seeds or (None, None)
    return Sequential(
        [
            Input((features, 1)),
            layers.Conv1D(filters, 20, activation="relu", **given),
            layers.MaxPooling1D(1),
            layers.Conv1D(filters, 10, activation="relu", **given),
            layers.MaxPooling1D(10),
            layers.Flatten(),
            layers.Dense(units, activation="relu", **given),
            layers.Dropout(0.1, seed=one),
            layers.Dense(20, activation="relu", **given),
            layers.Dropout(0.1, seed=two),
            layers.Dense(2, activation="softmax", **given),
        ]
    )


def keras_ptychonn(width: int, side: int = 64) -> Any:
    """Build PtychoNN: an encoder and two decoders of 3x3 convolutions, with kernels of zeros.

    Args:
        width: Filters of the first layers; 32 is the original (4.4 MiB), 488 makes 1 GiB.
        side: Pixels of a pattern's side.
    """

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
