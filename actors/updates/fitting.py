"""From Keras' batches to a publisher's steps: the callback behind `Publisher.callback` and `CheckpointCallback`.

Rules
- Keras reports the mean loss since the epoch began, in float32, and the place of an execution's last batch as if each
  execution were full. So the model's loss tracker also adds to sums of our own, which are reset before each execution:
  they give its loss and the number of its batches.
- The sums stay with the loss tracker until the model is compiled again, so that later fits share them. A train step
  that was traced without them is traced again, once.
- A `train_step` that does not use Keras' loss tracker adds nothing to the sums. Then what it reports as `loss` is taken
  as the batch's loss, and batches are counted by their place.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, cast

import keras

log = logging.getLogger(__name__)


class Steps(Protocol):
    """The methods of a publisher that the callback calls."""

    @property
    def iteration(self) -> int:
        """The last iteration."""
        ...

    def expect(self, *, stop: int | None = None, epoch: int | None = None) -> None:
        """Set the length of the training and of an epoch, in iterations."""
        ...

    def step(self, loss: float, model: Any, iteration: int | None = None) -> bool:
        """Record the loss of an iteration, and publish if an update is due."""
        ...

    def finish(self) -> object:
        """Wait until the last update is committed."""
        ...


class FitCallback(keras.callbacks.Callback):
    """A Keras callback that passes the loss of each batch to a publisher. The callback does not close the publisher.

    With `steps_per_execution` above 1, the callback passes the mean loss of each execution instead.

    Args:
        steps: The publisher: a `Publisher`, or an object with the same methods `expect`, `step` and `finish` and the
            same property `iteration`.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps
        self._batches = 0
        self._is_first = True
        self._sums: _Sums | None = None

    def set_model(self, model: keras.Model) -> None:
        """Set the model, and make its loss tracker (the metric "loss") also sum the losses of each execution.

        An execution trains `steps_per_execution` batches. If an earlier callback has changed the loss tracker in this
        way, the loss tracker is not changed again.
        """
        super().set_model(model)
        self._sums = _sums_of(model)

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Prepare for a call of `fit`."""
        self._is_first = True

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Pass the planned last iteration of `fit`, and the number of iterations per epoch, to the publisher.

        The numbers are passed only at the start of the first epoch, which is the epoch `initial_epoch` of `fit`. If
        Keras does not know the number of batches per epoch, nothing is passed.
        """
        self._batches = 0
        params = cast("dict[str, Any] | None", self.params) or {}
        steps, epochs = params.get("steps"), params.get("epochs")
        if self._is_first and steps and epochs:
            self._steps.expect(stop=self._steps.iteration + steps * (epochs - epoch), epoch=steps)
        self._is_first = False

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Reset the sums of the losses to 0. This removes the losses of earlier batches and of validation batches."""
        if self._sums is not None:
            self._sums.reset_state()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Pass the loss of the batch, or the mean loss of the execution, to the publisher.

        If an update is due, the publisher publishes a version.
        """
        total, weight, counted = self._sums.read() if self._sums is not None else [0.0] * 3
        loss, batches = total / weight if weight else math.nan, round(counted)
        if not batches:
            if self._sums is not None:
                log.info(
                    "fit of %r: its train_step does not update Keras' loss tracker; "
                    "the loss that it returns is used as the loss of each batch",
                    cast("Any", self.model).name,
                )
                self._sums = None
            loss, batches = float((logs or {}).get("loss", math.nan)), max(batch + 1 - self._batches, 1)
        self._batches += batches
        self._steps.step(loss, self.model, self._steps.iteration + batches)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Wait until the last update is committed."""
        self._steps.finish()


class _Sums(keras.metrics.Metric):
    """Sums over the batches of one execution.

    Args:
        update: the `update_state` of the model's loss tracker.
        replicas: over which a batch is distributed.
    """

    def __init__(self, update: Callable[..., object], replicas: int) -> None:
        super().__init__(name="execution")
        self._update = update
        self._replicas = replicas
        self._totals = self.add_variable((3,), "zeros", dtype="float32", name="totals")
        """Of losses times weights, of weights, and of batches."""
        self._zeros = cast("Any", keras.ops).zeros((3,), "float32")

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Update the loss tracker, then add to the sums."""
        self._update(values, sample_weight=sample_weight)
        ops = cast("Any", keras.ops)
        weight = ops.cast(1 if sample_weight is None else sample_weight, "float32")
        loss = ops.cast(ops.mean(values), "float32")
        self._totals.assign_add(ops.stack([loss * weight, weight, 1 / self._replicas]))

    def reset_state(self) -> None:
        """Set the sums to 0."""
        self._totals.assign(self._zeros)

    def read(self) -> list[float]:
        """Return the three sums."""
        return cast("list[float]", self._totals.numpy().tolist())


def _sums_of(model: keras.Model) -> _Sums | None:
    """Return the sums that the model's loss tracker adds to; None if the model has no loss tracker."""
    tracker = cast("Any", getattr(model, "_loss_tracker", None))
    if tracker is None:
        return None
    attached = getattr(tracker.update_state, "__self__", None)
    if isinstance(attached, _Sums):
        return attached
    strategy = cast("Any", getattr(model, "distribute_strategy", None))  # of TensorFlow
    with strategy.scope() if strategy is not None else nullcontext():
        sums = _Sums(tracker.update_state, strategy.num_replicas_in_sync if strategy is not None else 1)
    tracker.update_state = sums.update_state
    model.train_function = None
    return sums
