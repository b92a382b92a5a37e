"""The data and the networks: scikit-learn's digits, and small convolutional networks that tell five of them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 16
MOMENTUM = 0.8
"""Of the moving statistics; an epoch is few batches long."""
TRUNK = ("conv1", "norm1", "conv2", "norm2", "conv3", "norm3", "features")
"""The layers with weights below the head."""


@dataclass(frozen=True, slots=True)
class Task:
    """Telling some digits apart."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    """Images (N, 8, 8, 1) in 0 to 1, and labels (N,) that count from 0."""
    test: tuple[np.ndarray, np.ndarray]

    def accuracy(self, predictions: np.ndarray) -> float:
        """Return the share of test images whose most likely class is right."""
        return float(np.mean(predictions.argmax(axis=1) == self.test[1]))


def load_task(digits: Sequence[int], train_size: int, seed: int) -> Task:
    """Make the task of telling `digits` apart from `train_size` images; all others are for the test."""
    images, labels = load_digits(return_X_y=True)
    chosen = np.isin(labels, digits)
    images = (images[chosen] / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = np.searchsorted(digits, labels[chosen])
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, train_size=train_size, stratify=labels, random_state=seed
    )
    return Task(f"{digits[0]}-{digits[-1]}", (train_x, train_y), (test_x, test_y))


def network(extra: Sequence[int] = (), dropout: float = 0.0) -> keras.Model:
    """Build the network: a trunk that is always the same, and a head.

    Args:
        extra: widths of the head's dense layers before the last one.
        dropout: rate before the last layer; 0: no such layer.
    """
    layers = keras.layers
    head = [layers.Dense(width, activation="relu", name=f"extra{i}") for i, width in enumerate(extra, 1)]
    if dropout:
        head.append(layers.Dropout(dropout, name="dropout"))
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1"),
            layers.BatchNormalization(momentum=MOMENTUM, name="norm1"),
            layers.Conv2D(64, 3, padding="same", activation="relu", name="conv2"),
            layers.BatchNormalization(momentum=MOMENTUM, name="norm2"),
            layers.MaxPooling2D(name="pool"),
            layers.Conv2D(128, 3, padding="same", activation="relu", name="conv3"),
            layers.BatchNormalization(momentum=MOMENTUM, name="norm3"),
            layers.Flatten(name="flatten"),
            layers.Dense(256, activation="relu", name="features"),
            *head,
            layers.Dense(5, activation="softmax", name="head"),
        ]
    )


def train(
    model: keras.Model,
    task: Task,
    rate: float,
    epochs: int,
    each_batch: Callable[[], None],
    each_epoch: Callable[[], None],
) -> None:
    """Train the layers of `model` that are not frozen."""
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy")
    report = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: each_batch(), on_epoch_end=lambda epoch, logs: each_epoch()
    )
    model.fit(*task.train, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[report])


def predict(model: keras.Model, task: Task) -> np.ndarray:
    """Return the probabilities of the classes for each test image."""
    return np.asarray(model(task.test[0], training=False))
