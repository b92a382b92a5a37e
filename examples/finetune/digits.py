"""The data and the networks: scikit-learn's digits, and small convolutional networks that tell five of them apart."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from subject import Subject, Task

SEED = 7
MANY_IMAGES, FEW_IMAGES = 450, 50
BATCH = 16
MOMENTUM = 0.8
"""Of the moving statistics; an epoch is few batches long."""
TRUNK = ("conv1", "norm1", "conv2", "norm2", "conv3", "norm3", "features")
"""The layers with weights below the head."""


def digits() -> Subject:
    """Return the subject: the digits 0 to 4 from many images, and 5 to 9 from few."""
    first, later = (load_task(chosen, size) for chosen, size in ((range(5), MANY_IMAGES), (range(5, 10), FEW_IMAGES)))
    return Subject(first, later, network, network, TRUNK, BATCH, judged=1024)


def load_task(chosen: Sequence[int], train_size: int) -> Task:
    """Make the task of telling some digits apart from `train_size` images; all others are for the test."""
    images, labels = load_digits(return_X_y=True)
    which = np.isin(labels, chosen)
    images = (images[which] / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = np.searchsorted(chosen, labels[which])
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, train_size=train_size, stratify=labels, random_state=SEED
    )
    return Task(f"digits {chosen[0]} to {chosen[-1]}", (train_x, train_y), (test_x, test_y))


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
