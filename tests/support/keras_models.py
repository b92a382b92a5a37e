"""Keras models of many kinds for tests, each small: what Keras lets layers and models do, once."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers, ops


@keras.saving.register_keras_serializable("tests")
class Scale(layers.Layer):
    """A layer of one's own with a weight that has no name, and a layer inside."""

    def __init__(self, units: int = 2, **kwargs) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.first = layers.Dense(units)
        self.second = layers.Dense(units)

    def build(self, input_shape) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], self.units))

    def call(self, x):
        return self.second(self.first(x)) * self.factor

    def get_config(self) -> dict:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model whose graph Keras cannot know."""

    def __init__(self, units: int = 3, **kwargs) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.first = layers.Dense(units)
        self.blocks = [layers.Dense(units), keras.Sequential([layers.Dense(units), layers.ReLU()])]
        self.shift = self.add_weight(shape=(units,), name="shift")

    def call(self, x):
        for block in (self.first, *self.blocks):
            x = block(x)
        return x + self.shift

    def get_config(self) -> dict:
        return {**super().get_config(), "units": self.units}


def sequential() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def built_late() -> keras.Model:
    model = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    model.build((None, 5))
    return model


def residual() -> keras.Model:
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([inputs, x])))


def nested() -> keras.Model:
    inner_in = keras.Input((4,))
    inner = keras.Model(inner_in, layers.Dense(3)(layers.Dense(5)(inner_in)))
    middle = keras.Sequential([keras.Input((4,)), inner, layers.LayerNormalization()])
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1)(middle(layers.Dense(4)(inputs))))


def shared_layer() -> keras.Model:
    left, right = keras.Input((4,)), keras.Input((4,))
    dense = layers.Dense(3)
    return keras.Model([left, right], layers.Concatenate()([dense(left), dense(right)]))


def shared_model() -> keras.Model:
    tower = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.ReLU()])
    left, right = keras.Input((4,)), keras.Input((4,))
    return keras.Model([left, right], layers.Subtract()([tower(left), tower(right)]))


def many_in_many_out() -> keras.Model:
    image, words = keras.Input((6, 6, 1), name="image"), keras.Input((5,), name="words", dtype="int32")
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3)(image))
    y = layers.GRU(3)(layers.Embedding(10, 4, mask_zero=True)(words))
    both = layers.Multiply()([x, y])
    return keras.Model({"image": image, "words": words}, {"a": layers.Dense(1)(both), "b": layers.Dense(2)(x)})


def wrappers() -> keras.Model:
    block = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    return keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Bidirectional(layers.LSTM(2, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(4)),
            layers.TimeDistributed(block),
            layers.RNN([layers.LSTMCell(2), layers.GRUCell(3)], return_sequences=True),
            layers.Bidirectional(layers.GRU(2)),
        ]
    )


def attention() -> keras.Model:
    query, value = keras.Input((3, 4)), keras.Input((5, 4))
    return keras.Model([query, value], layers.MultiHeadAttention(2, 2)(query, value))


def operations() -> keras.Model:
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    x = ops.relu(x + inputs * 2.0)[:, 1:3]
    return keras.Model(inputs, ops.concatenate([x, ops.cast(x > 0, "float32")], axis=-1))


def states() -> keras.Model:
    inputs = keras.Input((5, 2))
    _, hidden, cell = layers.LSTM(3, return_state=True)(inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([cell, hidden])))


def custom() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Scale(2), Scale(3)])


def subclassed() -> keras.Model:
    model = Subclassed(3)
    model(np.ones((2, 4), "float32"))
    return model


def subclassed_inside() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(Subclassed(3)(inputs)))


MODELS: list[Callable[[], keras.Model]] = [
    sequential,
    built_late,
    residual,
    nested,
    shared_layer,
    shared_model,
    many_in_many_out,
    wrappers,
    attention,
    operations,
    states,
    custom,
    subclassed,
    subclassed_inside,
]
every_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
