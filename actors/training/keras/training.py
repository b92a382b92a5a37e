"""A Keras training on TensorFlow that can be forked.

Rules
- A step is one compiled function: forward pass, loss, gradients, and the update by the model's own optimizer, as
  `model.fit` has them. Metrics are left out, and a `train_step` of the model's own is not called.
- A batch is a function of the step, the rank and the number of ranks, so where the data stand is no state.
- All ranks begin with rank 0's weights. Statistics and random states stay each rank's own.
- Each shape of a batch has a compiled step of its own, so that what is computed depends on the batch alone. On a CPU,
  TensorFlow's steps gave the same bits in each run of ours; where kernels do not (on GPUs), `build` says
  `tf.config.experimental.enable_op_determinism()`.
- Hooks are told of each tensor as soon as nothing in the step writes to it any more. A clone's first step waits for
  tensors in the order in which it reads them (see `hooks`).
- A step that fails may have updated some weights: there is no further step.
"""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
# (keras's and tensorflow's types are partial)

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from ....store.arrays import Array
from ...collective.group import Group
from ..training import Facts, Hooks, RankContext, TensorSpec
from .gradients import Gradients
from .hooks import Failure, Gates, Tells
from .state import KerasState

Batches = Callable[[int, int, int], Any]
"""Gives the batch of (step, rank, ranks): (x, y) or (x, y, sample weights)."""
RATE = "learning_rate"


class KerasTraining:
    """One rank of a data-parallel Keras training run on TensorFlow. Implements `Training`.

    Each step is one compiled function: forward pass, loss, gradients, and the update by the model's optimizer. A step
    does not compute metrics and does not call a custom `train_step`. All ranks begin with the weights of rank 0. Layer
    statistics, such as those of batch normalization, and states of random generators can differ between ranks.

    In our tests on CPUs, the same state and data always gave bit-for-bit equal results. For equal results on GPUs,
    call `tf.config.experimental.enable_op_determinism()` in the `build` function passed to `start_trainers`. Do not use
    TensorFlow's own random operations (`tf.random.*`), because their state cannot be read. Keras layers do not use
    these operations. The states of stateful recurrent layers are not part of the training state.

    Args:
        context: The argument of the `build` function. `KerasTraining` applies "learning_rate" from `context.options` to
            the optimizer, unless the optimizer has a learning-rate schedule. The `build` function must apply all other
            options.
        model: A built model, compiled with an optimizer and a loss.
        batches: Function that returns a batch: `(step, rank, size) -> (x, y)` or `(x, y, sample_weights)`. Steps are
            numbered from 1, and `size` is the number of ranks. The batch must depend only on the arguments. Use the
            same batch size on all ranks, because all ranks have equal influence on the average of the gradients.
        options: Function that takes a mapping of option names to values. `configure` calls the function with all
            options except "learning_rate". If the optimizer has a learning-rate schedule, "learning_rate" is included.

    Raises:
        ValueError: if the model is not compiled with an optimizer, does not use the TensorFlow backend or uses several
            devices, or if the learning rate is not a finite number of at least 0.
        GraphError: if the model has no weights yet because its input shape is unknown.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    >>> training = KerasTraining(
    ...     RankContext("docs", 0, 1, None, {"learning_rate": 0.05}),
    ...     model,
    ...     batches=lambda step, rank, size: (np.eye(2, dtype="float32"), np.ones((2, 1), "float32")),
    ... )
    >>> first, second = training.step(), training.step()
    >>> training.steps_done, second < first
    (2, True)
    >>> [spec.name for spec in training.specs()][:2]
    ['optimizer/sgd/dense/bias/momentum', 'dense/bias']
    """

    def __init__(
        self,
        context: RankContext,
        model: keras.Model,
        batches: Batches,
        *,
        options: Callable[[Mapping[str, object]], None] | None = None,
    ) -> None:
        self._where = f"training {context.run!r}, rank {context.rank}"
        self.context, self.model = context, model
        self._batches, self._options = batches, options
        self._state = KerasState(model, self._where)
        self._told = {name: value for name, value in context.options.items() if name in self._known_options()}
        """Options that the user set."""
        self._configure(self._told)
        self._failure = Failure()
        self._tells = Tells(self._state, self._failure)
        self._gates = Gates(self._state, self._failure)
        self._gradients: Gradients | None = None
        self._torn = False
        """A step failed."""
        if context.group is not None and context.size > 1:
            self._begin_alike(context.group)
            self._gradients = Gradients(self._state, context.group, self._failure)
        self._compiled = tf.function(self._traced, autograph=False)

    @property
    def steps_done(self) -> int:
        """Number of steps trained so far. In a clone, this number includes the steps trained before the fork."""
        return self._state.steps_done

    def step(self) -> float:
        """Train one step and return the loss of this rank's batch.

        Raises:
            RuntimeError: if an earlier step failed.
            PeerLostError: if another rank died or left the group.
            OperationTimeoutError: if another rank does not respond in time.
        """
        number = self.steps_done + 1
        if self._torn:
            raise RuntimeError(f"{self._where}: step {number}: expected consistent weights; an earlier step failed")
        x, y, weights = keras.utils.unpack_x_y_sample_weight(
            self._batches(number, self.context.rank, self.context.size)
        )
        self._tells.begin(number)
        self._torn = True
        with self._failure.told():
            if self._gradients is not None:
                self._gradients.begin()
            loss = float(self._compiled(_tensors(x), _tensors(y), _tensors(weights)))
            if self._gradients is not None:
                self._gradients.finish()
        self._torn = False
        self._gates.set(None)
        self._state.settle()
        self._state.steps_done = number
        self._tells.end(number)
        return loss

    def hook(self, hooks: Hooks | None) -> None:
        """Set the hooks that each step calls. None removes the hooks."""
        self._tells.hooks = hooks

    def configure(self, options: Mapping[str, object]) -> None:
        """Change options of the training.

        "learning_rate" is set on the optimizer. All other options are passed to the function that the constructor
        received as `options`. If the optimizer has a learning-rate schedule, "learning_rate" is also passed to this
        function, and is not set on the optimizer.

        Raises:
            ValueError: if an option is unknown, or if the learning rate is not a finite number of at least 0.
        """
        known = self._known_options()
        others = {name: value for name, value in options.items() if name not in known}
        if others and self._options is None:
            raise ValueError(f"{self._where}: options: expected some of {known}; found {sorted(others)}")
        told = {name: value for name, value in options.items() if name in known}
        self._configure(told)
        self._told |= told
        if others and self._options is not None:
            self._options(others)

    def knows(self, option: str) -> bool:
        """Return whether `configure` accepts an option with this name."""
        return self._options is not None or option in self._known_options()

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the training state, in the order in which a step updates the tensors."""
        return self._state.specs()

    def forward_order(self) -> Sequence[str]:
        """List the names of all tensors, in the order in which the next step reads the tensors."""
        return self._state.forward_order()

    def tensor(self, name: str) -> Array:
        """Return a snapshot of a tensor's current value. Later steps do not change the snapshot."""
        return self._state.tensor(name)

    def facts(self) -> Facts:
        """Return the non-tensor part of the training state.

        It includes the step count, the current learning rates, the option "learning_rate" if it was set, and the states
        of Python's and NumPy's random generators.
        """
        return {"options": self._told, **self._state.facts()}

    def memory(self, name: str) -> Array:
        """Return a writable buffer for the new value of a tensor."""
        return self._state.memory(name)

    def filled(self, name: str) -> None:
        """Set a tensor to the value in the buffer that `memory` returned."""
        self._state.filled(name)

    def restore(self, facts: Facts) -> None:
        """Restore the non-tensor part of the training state from the `facts` of another rank.

        By default, this includes the learning rate. However, if the option "learning_rate" is set only on this rank,
        or has different values on the two ranks, the value of this rank is used.

        Raises:
            ValueError: if the other rank uses a different optimizer.
        """
        self._state.restore(facts)
        other = facts["options"]
        self._configure({name: value for name, value in self._told.items() if other.get(name) != value})

    def gate(self, wait: Callable[[str], None] | None) -> None:
        """Set a function that the next step calls as `wait(name)` for each tensor, before it reads the tensor.

        None removes the function.
        """
        self._gates.set(wait)

    def close(self) -> None:
        """Remove the hooks and stop averaging gradients. Do not call `step` afterwards."""
        self._tells.hooks = None
        if self._gradients is not None:
            self._gradients.close()

    def _traced(self, x: object, y: object, sample_weight: object) -> tf.Tensor:
        """Do one step; as `keras.Model.train_step` without metrics, so that the bits are the same."""
        model, optimizer = cast(Any, self.model), cast(Any, self.model.optimizer)
        training = {"training": True} if model._call_has_training_arg else {}
        with tf.GradientTape() as tape:
            predicted = model(x, **training)
            loss = model._compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)
            scaled = optimizer.scale_loss(loss)
        weights = model.trainable_weights
        gradients = cast("list[tf.Tensor | tf.IndexedSlices | None]", tape.gradient(scaled, weights))
        if self._gradients is not None:
            gradients = self._gradients.trace(gradients, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self._tells.trace()
        self._gates.trace()
        return loss

    def _known_options(self) -> list[str]:
        return [RATE] if self._state.rates else []

    def _configure(self, options: Mapping[str, object]) -> None:
        """Set options that are known, all or none."""
        if RATE not in options:
            return
        rate = options[RATE]
        if isinstance(rate, bool) or not isinstance(rate, (int, float, np.integer, np.floating)):
            raise ValueError(f"{self._where}: option {RATE!r}: expected a number from 0; found {rate!r}")
        if not 0 <= rate < math.inf:
            raise ValueError(f"{self._where}: option {RATE!r}: expected a number from 0; found {rate!r}")
        self.model.optimizer.learning_rate = float(cast(float, rate))

    def _begin_alike(self, group: Group) -> None:
        """Set the weights of all ranks to rank 0's."""
        names = [spec.name for spec in self.specs() if not spec.local]
        arrays = {name: np.array(self.tensor(name)) for name in names}
        works = [group.ibroadcast(array) for array in arrays.values()]
        for (name, array), work in zip(arrays.items(), works, strict=True):
            work.wait()
            if group.rank:
                self._state.variables[name].assign(array)


def _tensors(batch: object) -> object:
    """Make tensors of what a batch is made of; None stays."""

    def made(part: object) -> object:
        return None if part is None else cast(object, tf.convert_to_tensor(cast(Any, part)))

    return cast(object, keras.tree.map_structure(made, batch))
