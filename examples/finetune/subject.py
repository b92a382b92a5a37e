"""What is fine-tuned: a task to begin with, a task that comes later, and networks for both with the same trunk.

Rules
- A network has its trunk first, with the same names in all, and ends with the layer `head`.
- What a network makes of samples takes memory: they are trained on and judged in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import keras
import numpy as np


@dataclass(frozen=True, slots=True)
class Task:
    """Telling classes apart."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    """Samples (N, ...), and labels (N,) that count from 0."""
    test: tuple[np.ndarray, np.ndarray]

    def accuracy(self, predictions: np.ndarray) -> float:
        """Return the share of test samples whose most likely class is right."""
        return float(np.mean(predictions.argmax(axis=1) == self.test[1]))


class Network(Protocol):
    """Builds a network."""

    def __call__(self, extra: Sequence[int] = (), dropout: float = 0.0) -> keras.Model:
        """Build the trunk and a head.

        Args:
            extra: widths of the head's dense layers before the last one.
            dropout: rate before the last layer; 0: no such layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Subject:
    """Two tasks and their networks."""

    first: Task
    later: Task
    root: Callable[[], keras.Model]
    """Builds the network for the first task."""
    network: Network
    """Builds networks for the later task."""
    trunk: tuple[str, ...]
    """The layers with weights below the head."""
    batch: int
    """Samples that are trained on at once."""
    judged: int
    """Samples that are judged at once."""

    def train(
        self,
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
        model.fit(*task.train, batch_size=self.batch, epochs=epochs, verbose=0, callbacks=[report])

    def predict(self, model: keras.Model, task: Task) -> np.ndarray:
        """Return the probabilities of the classes for each test sample."""
        samples = task.test[0]
        parts = [samples[start : start + self.judged] for start in range(0, len(samples), self.judged)]
        return np.concatenate([np.asarray(model(part, training=False)) for part in parts])
