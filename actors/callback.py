"""The Keras callback that hands a model over while `model.fit` trains it (Viper, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

from .due import ScheduleLike
from .publisher import Publisher, PublishReport
from .repository import Repository


class CheckpointCallback(keras.callbacks.Callback):
    """Publishes a model's versions during `model.fit`.

    Keras reports the mean loss since the epoch began; what the plan needs, the loss of each batch, is worked out from
    it. With `steps_per_execution` above 1 it is the mean of the batches of one execution.

    Args:
        repo: the repository.
        name: the model's name.
        schedule: as in `Publisher`; "epoch": at each epoch's end.
        warmup, transport, synchronous, keep: as in `Publisher`.

    >>> model.fit(x, y, epochs=5, callbacks=[CheckpointCallback(repo, "nt3")])     # doctest: +SKIP
    """

    def __init__(
        self,
        repo: Repository,
        name: str,
        schedule: ScheduleLike = None,
        warmup: int | None = None,
        *,
        transport: str = "auto",
        synchronous: bool = False,
        keep: int | None = None,
    ) -> None:
        super().__init__()
        options = {"warmup": warmup, "transport": transport, "synchronous": synchronous, "keep": keep}
        self.publisher = Publisher(repo, name, schedule, **options)
        self._owns = True
        self._batches = 0
        self._mean = 0.0

    @classmethod
    def of(cls, publisher: Publisher) -> CheckpointCallback:
        """Make one that publishes through a publisher, and leaves it open."""
        callback = cls.__new__(cls)
        keras.callbacks.Callback.__init__(callback)
        callback.publisher, callback._owns, callback._batches, callback._mean = publisher, False, 0, 0.0
        return callback

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Learn how long the training will be."""
        params: dict[str, Any] = self.params or {}
        steps, epochs = params.get("steps"), params.get("epochs")
        if steps and epochs:
            self.publisher.expect(stop=self.publisher.iteration + steps * epochs, epoch=steps)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Begin a new mean."""
        self._batches, self._mean = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Take the loss of a batch, and publish if it is time."""
        mean, batches = float((logs or {}).get("loss", math.nan)), batch + 1
        done = max(batches - self._batches, 1)
        loss = (mean * batches - self._mean * self._batches) / done
        self._batches, self._mean = batches, mean
        self.publisher.step(loss, self.model, self.publisher.iteration + done)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Wait until the last update exists."""
        self.publisher.finish()
        self.close()

    def close(self) -> None:
        """End what `fit` began and, having failed, did not end. A second call does nothing."""
        if self._owns:
            self.publisher.close()

    def __enter__(self) -> CheckpointCallback:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def report(self) -> PublishReport:
        """Tell what was published."""
        return self.publisher.report()
