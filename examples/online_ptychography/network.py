"""PtychoNN: from a diffraction pattern to the amplitude and the phase of the object.

Cherukara et al., *AI-enabled high-resolution scanning coherent diffraction imaging* (2020): 1,154,210 parameters at
width 32. Widths 8 and 16 learn on a CPU.
"""

from __future__ import annotations

import math

import keras

layers = keras.layers


def ptychonn(width: int) -> keras.Model:
    """Build the network: patterns (N, 64, 64, 1) to amplitudes, 0 to 1, and phases, -pi to pi, of the same shape.

    Args:
        width: channels of the first convolution.
    """
    pattern = inside = keras.Input((64, 64, 1), name="pattern")
    for level, channels in enumerate((width, 2 * width, 4 * width)):
        inside = _convolve(inside, channels, f"encoder{level}")
        inside = layers.MaxPooling2D(name=f"pool{level}")(inside)
    amplitude = layers.Activation("sigmoid", name="amplitude")(_decode(inside, width, "amplitude"))
    turns = layers.Activation("tanh", name="turns")(_decode(inside, width, "phase"))
    return keras.Model(pattern, [amplitude, layers.Rescaling(math.pi, name="phase")(turns)], name="ptychonn")


def _decode(inside: keras.KerasTensor, width: int, name: str) -> keras.KerasTensor:
    for level, channels in enumerate((4 * width, 2 * width, width)):
        inside = _convolve(inside, channels, f"{name}{level}")
        inside = layers.UpSampling2D(name=f"{name}{level}_up")(inside)
    return layers.Conv2D(1, 3, padding="same", name=f"{name}_last")(inside)


def _convolve(inside: keras.KerasTensor, channels: int, name: str) -> keras.KerasTensor:
    for half in "ab":
        inside = layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"{name}{half}")(inside)
    return inside
