"""Keras callbacks that make a plain `model.fit` one that can be forked.

Rules
- The compiled train step, also one of the model's own, gets operations at its end that tell of tensors as soon as
  nothing writes to them any more (`hooks`); what it computes is the same. It is compiled anew for that, once.
- The state has the names that it has in a `KerasTraining` of the same model and optimizer: that is what its clones are.
- Steps are batches, counted over all fits with the same callback. Metrics are no part of the state, nor is the place in
  the data: a clone's batches are a function of the step.
- One device, one step per execution, no XLA: such steps cannot call Python.
"""

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import keras

from ....store.arrays import Array
from ...collective.connect import connect
from ...collective.rendezvous import ActorRendezvous
from ...engine.choice import EngineChoice, engine_for
from ..fork.fork_hooks import ForkHooks
from ..loop import LAST_STEPS
from ..mailbox import MailboxServer
from ..outside_rank import OutsideRank
from ..training import Facts, Hooks, TensorSpec, Training
from .hooks import Failure, Tells
from .state import KerasState


class FitHooks(keras.callbacks.Callback):
    """A Keras callback that calls the methods of a `Hooks` object in each step of `model.fit`.

    Pass the `Hooks` object to the method `hook`. Use the callback in a `with` block, or call `close` after use.

    Args:
        model: A built model that uses the TensorFlow backend and a single device. The model must be compiled with an
            optimizer, `jit_compile=False` and `steps_per_execution=1`.
        steps_done: Number of steps trained before the first call of `fit` with this callback.

    Raises:
        ValueError: if the model is not compiled in this way, does not use the TensorFlow backend, or uses several
            devices.
        GraphError: if the model has no weights yet because its input shape is unknown.
    """

    def __init__(self, model: keras.Model, *, steps_done: int = 0) -> None:
        super().__init__()
        self._where = f"fit of {model.name!r}"
        _check(model, self._where)
        self.state = KerasState(model, self._where)
        """The state to fork."""
        self.state.steps_done = steps_done
        self._fitted = model
        self._tells = Tells(self.state, Failure())
        self._step: Any = None
        """The model's own `train_step`, while it is replaced."""
        self._lock = threading.Lock()
        """Held while a step begins or ends, and while a state is captured between two steps."""

    def hook(self, hooks: Hooks | None) -> None:
        """Set the hooks that each step calls. None removes the hooks."""
        self._tells.hooks = hooks

    def set_model(self, model: keras.Model) -> None:
        """Add the hooks to the train step of the model. Keras calls this method in `fit`.

        In the first call of `fit` with this callback, Keras rebuilds the train function of the model.

        Raises:
            ValueError: if `model` is not the model of this callback, or if `model.compile` was called again and enabled
                XLA or several steps per execution.
        """
        if model is not self._fitted:
            raise ValueError(f"{self._where}: expected the model of this callback; found another one, {model.name!r}")
        _check(model, self._where)
        super().set_model(model)
        if self._step is None:
            self._step = model.train_step
            model.train_step = self._train_step
            model.train_function = None

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Notify the hooks of the start of a step."""
        with self._lock:
            self._tells.begin(self.state.steps_done + 1)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Count the step, and notify the hooks of the end of the step."""
        with self._lock:
            self.state.steps_done += 1
            self._tells.end(self.state.steps_done)

    def close(self) -> None:
        """Restore the original train step of the model. Further calls do nothing."""
        self._tells.hooks = None
        if self._step is not None:
            del self._fitted.train_step
            self._fitted.train_function = None
            self._step = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _train_step(self, data: object) -> object:
        logs = self._step(data)
        self._tells.trace()
        return logs


class ForkCallback(OutsideRank, FitHooks):
    """A Keras callback that makes a training run with `model.fit` forkable.

    Create a `ForkCallback` in each process of the training run, and use it in a `with` block. While this block runs,
    any process of the cluster can find the ranks with `find_trainers` and fork the run with `fork`. The forked state
    contains the weights, the optimizer state, and the random states of the layers, Python and NumPy. It does not
    contain the metrics or the states of stateful recurrent layers. Each batch is one step. Steps are counted over all
    calls of `fit` with the same callback.

    Args:
        run: Name of the run. Two runs cannot use the same name at the same time.
        model: A built model that uses the TensorFlow backend and a single device. The model must be compiled with an
            optimizer, `jit_compile=False` and `steps_per_execution=1`. The optimizer can be a wrapper that averages the
            gradients over the ranks.
        rank: Number of this rank, from 0 to `size - 1`.
        size: Number of ranks in the run.
        steps_done: Number of steps trained before the first call of `fit` with this callback.
        engine: Engine of the cluster, as in `Repository.connect`. Defaults to the engine running in this process.

    Raises:
        ForkError: if the same run name and rank are already registered.
        ValueError: if the model is not compiled in this way, does not use the TensorFlow backend, or uses several
            devices; or if `rank` or `steps_done` is out of range.
        GraphError: if the model has no weights yet because its input shape is unknown.
        RepositoryNotFoundError: if no cluster of the engine is running.

    >>> with ForkCallback("resnet", model) as forkable:
    ...     model.fit(x, y, callbacks=[forkable])                                # doctest: +SKIP
    """

    def __init__(
        self,
        run: str,
        model: keras.Model,
        *,
        rank: int = 0,
        size: int = 1,
        steps_done: int = 0,
        engine: EngineChoice = None,
    ) -> None:
        if not 0 <= rank < size or steps_done < 0:
            raise ValueError(
                f"rank of {run!r}: expected a rank below {size} and steps_done from 0; found {rank} and {steps_done}"
            )
        super().__init__(model, steps_done=steps_done)
        self.run, self.rank, self.size = run, rank, size
        self._engine = engine_for(engine)
        self._inside = False
        """Whether a step is in progress."""
        self._counted = 0
        self._ends: deque[float] = deque(maxlen=LAST_STEPS)
        joins = partial(connect, rendezvous=ActorRendezvous(self._engine))
        self._fork_hooks = ForkHooks(cast("Training", self), run, rank, size, joins)  # it reads the state, and no more
        self.hook(self._fork_hooks)
        self._node = self._engine.this_node()
        self._mailbox = MailboxServer(self._engine, run, rank, self)

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Notify the hooks of the start of a step."""
        self._inside = True
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Count the step, and notify the hooks of the end of the step."""
        super().on_train_batch_end(batch, logs)
        self._inside = False
        self._counted += 1
        self._ends.append(time.monotonic())

    # ---- what the hooks read --------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Number of steps trained so far, including the constructor argument `steps_done`."""
        return self.state.steps_done

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the training state."""
        return self.state.specs()

    def tensor(self, name: str) -> Array:
        """Return a snapshot of a tensor's current value. Later steps do not change the snapshot."""
        return self.state.tensor(name)

    def facts(self) -> Facts:
        """Return the non-tensor part of the training state, as an argument for `KerasTraining.restore`.

        It includes the step count, the learning rates, and the states of Python's and NumPy's random generators.
        """
        return {"options": {}, **self.state.facts()}

    def _read_order(self) -> Sequence[str]:
        return self.state.forward_order()

    def _unhook(self) -> None:
        FitHooks.close(self)


def _check(model: keras.Model, where: str) -> None:
    executions, compiled = cast(int, model.steps_per_execution), cast(bool, model.jit_compile)
    if executions != 1 or compiled:
        raise ValueError(
            f"{where}: expected model.compile(..., steps_per_execution=1, jit_compile=False); found "
            f"steps_per_execution={executions}, jit_compile={compiled}"
        )
