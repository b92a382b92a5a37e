"""From Keras' batches to a publisher's steps: the callback behind `Publisher.callback` and `CheckpointCallback`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

import keras


class Steps(Protocol):
    """What is asked of a publisher."""

    @property
    def iteration(self) -> int:
        """Steps of the training that it was told of."""
        ...

    def expect(self, *, stop: int | None = None, epoch: int | None = None) -> None:
        """Take how long the training will be, and how long an epoch is."""
        ...

    def step(self, loss: float, model: Any, iteration: int | None = None) -> bool:
        """Take the loss of an iteration, and publish if it is time."""
        ...

    def finish(self) -> object:
        """Wait until the last update exists."""
        ...


class FitCallback(keras.callbacks.Callback):
    """Publishes through a publisher, and leaves it open.

    Args:
        steps: the publisher.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps
        self._batches = 0
        self._mean = 0.0

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Learn how long the training will be."""
        params = cast("dict[str, Any] | None", self.params) or {}
        steps, epochs = params.get("steps"), params.get("epochs")
        if steps and epochs:
            self._steps.expect(stop=self._steps.iteration + steps * epochs, epoch=steps)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Begin a new mean."""
        self._batches, self._mean = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Take the loss of a batch, and publish if it is time."""
        mean, batches = float((logs or {}).get("loss", math.nan)), batch + 1
        done = max(batches - self._batches, 1)
        loss = (mean * batches - self._mean * self._batches) / done
        self._batches, self._mean = batches, mean
        self._steps.step(loss, self.model, self._steps.iteration + done)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Wait until the last update exists."""
        self._steps.finish()
