"""A PyTorch training that can be forked.

Rules
- A parameter is updated as soon as its gradient is final, while the backward pass goes on, several small ones at once.
  It is so in all steps, whether somebody forks or not: a fork changes no bit. It may be, because autograd hands a
  parameter its gradient when all of its uses have been differentiated: nobody reads it any more. Whoever does, by a
  detached use of a weight, gets autograd's error, not a wrong gradient; `overlap=False` is for that.
- Optimizers that do not treat each parameter by itself, step hooks of a user's, and parameters that lie in the same
  memory have all updates follow the backward pass (see `optimizer`).
- A batch is a function of the step, the rank and the number of ranks, so where the data stand is no state.
- All ranks begin with rank 0's model. Buffers, such as statistics of batches, stay each rank's own.
- A model that derives values from its weights when it is loaded does so before the step that follows a fork.
- A step that fails after it has begun to update leaves a state that is none: there is no further step.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ....store.arrays import Array, as_numpy
from ....store.torch.loading import loads_itself
from ...collective.group import Group, Work
from ..training import Facts, Hooks, RankContext, TensorSpec
from .gradients import Gradients
from .optimizer import steps_apart
from .reads import Reads, can_be_watched
from .state import Scheduler, TorchState
from .updates import Updates, overlapping

log = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""Gives the loss of a model on a batch."""
Batches = Callable[[int, int, int], Any]
"""Gives the batch of (step, rank, ranks)."""


class TorchTraining:
    """One rank of a data-parallel PyTorch training run. Implements `Training`.

    All ranks begin with the model of rank 0. Later, buffers such as batch statistics can differ between ranks.

    Args:
        context: The argument of the `build` function. `TorchTraining` applies "learning_rate", "momentum",
            "weight_decay" and "seed" from `context.options`. The `build` function must apply all other options.
        model: The model. The mode of the model (training or evaluation) is not changed.
        optimizer: A `torch.optim.Optimizer` other than LBFGS. To clip gradients by their norm, register a step pre-hook
            on the optimizer.
        loss: Function `(model, batch) -> loss` that returns a scalar tensor.
        batches: Function `(step, rank, size) -> batch`. Steps are numbered from 1. The result must depend only on the
            arguments.
        scheduler: Learning-rate scheduler, which `step` advances after each training step. None means no scheduler.
        options: Function that takes a mapping of option names to values. `configure` calls the function with the
            options that `TorchTraining` does not apply.
        overlap: Whether to update each parameter during the backward pass, as soon as its gradient is final. Use False
            if the backward pass reads parameters after their update, for example through detached weights. With True,
            `step` raises a `RuntimeError` for such a model.

    Raises:
        ValueError: if the optimizer is LBFGS, has parameters that the model does not have, or keeps state other than
            tensors and JSON-like values; if the scheduler is ReduceLROnPlateau; or if an option has an invalid value.

    >>> model = nn.Linear(2, 1)
    >>> training = TorchTraining(
    ...     RankContext("docs", 0, 1, None, {"learning_rate": 0.01, "seed": 7}),
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ...     batches=lambda step, rank, size: torch.full((4, 2), 1.0 + rank),
    ... )
    >>> first, second = training.step(), training.step()
    >>> training.steps_done, second < first
    (2, True)
    """

    def __init__(
        self,
        context: RankContext,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        batches: Batches,
        *,
        scheduler: Scheduler | None = None,
        options: Callable[[Mapping[str, object]], None] | None = None,
        overlap: bool = True,
    ) -> None:
        self._where = f"training {context.run!r}, rank {context.rank}"
        self.context, self.model, self.optimizer = context, model, optimizer
        self._loss, self._batches, self._scheduler, self._options = loss, batches, scheduler, options
        self._state = TorchState(model, optimizer, scheduler, context.rank, self._where)
        known = self._state.known_options()
        self._told = {name: _plain(value) for name, value in context.options.items() if name in known}
        """Options that the user set."""
        self._state.configure(self._told)
        self._state.settled()
        self._overlap = overlap and not overlapping(self._state.trained.values())
        self._names = {id(parameter): name for name, parameter in self._state.trained.items()}
        self._loads_itself = loads_itself(model)
        self._loaded_past_it = False
        """The model's tensors were set, and its own code that is run by `load_state_dict` was not."""
        self._watched = can_be_watched(model) and not self._loads_itself
        self._done = 0
        self._hooks: Hooks | None = None
        self._read: list[str] | None = None
        """Names in the order in which a forward pass read them; None: not seen yet."""
        self._wait: Callable[[str], None] | None = None
        self._gated: dict[str, None] = {}
        """Tensors that the gate has not let through yet, in order."""
        self._updates: Updates | None = None
        """Those of the backward pass that is under way."""
        self._torn = False
        """A step failed when it had begun to update."""
        self._gradients: Gradients | None = None
        if context.group is not None and context.size > 1:
            self._begin_alike(context.group)
            self._gradients = Gradients(context.group, list(self._state.trained), list(self._state.trained.values()))
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in self._state.trained.values()
            if parameter.requires_grad
        ]

    @property
    def steps_done(self) -> int:
        """Number of steps trained so far. In a clone, this number includes the steps trained before the fork."""
        return self._done

    def step(self) -> float:
        """Train one step and return the loss of this rank's batch.

        Raises:
            RuntimeError: if an earlier step failed and left inconsistent parameters, or the model needs
                `overlap=False`.
            PeerLostError: if another rank died or disconnected.
            OperationTimeoutError: if another rank does not respond in time.
        """
        if self._torn:
            raise RuntimeError(
                f"{self._where}: expected consistent parameters; step {self._done + 1} failed during their update"
            )
        number, hooks = self._done + 1, self._hooks
        telling = hooks is not None and hooks.step_begins(number)
        self.let_through([name for name in self._gated if not self._watched or name.startswith("random/")])
        self._state.settled()
        self._load_own()
        self.optimizer.zero_grad()
        batch = self._batches(number, self.context.rank, self.context.size)
        loss = self._forward(batch)
        updates = Updates(self, self.optimizer, hooks, telling, self._overlap and steps_apart(self.optimizer))
        try:
            self._backward(loss, updates)
        except BaseException:
            self._torn = updates.begun or self._gradients is not None
            if self._gradients is not None:
                self._gradients.close()
            raise
        if self._scheduler is not None:
            self._scheduler.step()
        self.let_through()
        self._done = number
        if hooks is not None:
            hooks.step_ended(number)
        return float(loss.detach())

    def hook(self, hooks: Hooks | None) -> None:
        """Set the hooks that each step calls. None removes the hooks."""
        self._hooks = hooks

    def configure(self, options: Mapping[str, object]) -> None:
        """Change the values of the given options.

        "learning_rate" applies to all parameter groups. With a scheduler, "learning_rate" sets the initial rate (for
        OneCycleLR, the peak rate), and the scheduler continues at its current position. "momentum" and "weight_decay"
        are options only if the optimizer has these settings. "seed" seeds the random generators of Python, NumPy and
        PyTorch, differently on each rank. All other options are passed to the function that the constructor received as
        `options`.

        Raises:
            ValueError: if an option is unknown, or one of the four options above is not a finite number of at least 0
                (for "seed", an integer of at least 0).
        """
        known = self._state.known_options()
        others = {name: value for name, value in options.items() if name not in known}
        if others and self._options is None:
            raise ValueError(f"{self._where}: options: expected some of {known}; found {sorted(others)}")
        told = {name: _plain(value) for name, value in options.items() if name in known}
        self._state.configure(told)
        self._told |= told
        if others and self._options is not None:
            self._options(others)

    def knows(self, option: str) -> bool:
        """Return whether `configure` accepts an option with this name."""
        return self._options is not None or option in self._state.known_options()

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the training state.

        Trained parameters come first, in reverse order of registration, each followed by its optimizer state.
        """
        return self._state.specs()

    def forward_order(self) -> Sequence[str]:
        """List the names of the tensors that a forward pass can read, in the order in which the first pass read them.

        Tensors that the first forward pass did not read come last. Before the first forward pass, and always for
        compiled models and models with custom loading code, the names are in the order of registration.
        """
        order = self._state.read_order()
        return order if self._read is None else list(dict.fromkeys([*order[:1], *self._read, *order]))

    def tensor(self, name: str) -> Array:
        """Return the current value of a tensor. Buffers, states of random generators and GPU tensors are copied."""
        return self._state.view(name)[0]

    def facts(self) -> Facts:
        """Return the non-tensor part of the training state.

        It includes the step count, the options that were set, the state of the scheduler, and the states of Python's
        and NumPy's random generators.
        """
        return {"steps_done": self._done, "read": self._read, "options": self._told, **self._state.facts()}

    def memory(self, name: str) -> Array:
        """Return a writable buffer for the new value of a tensor."""
        return self._state.memory(name)

    def filled(self, name: str) -> None:
        """Set a tensor to the value in the buffer that `memory` returned."""
        self._state.filled(name)

    def restore(self, facts: Facts) -> None:
        """Restore the non-tensor part of the training state from the `facts` of another rank.

        Options that were set on this rank, in `context.options` or with `configure`, keep their values.

        Raises:
            ValueError: if the other rank has a different number of parameter groups, or only one of the two ranks has a
                scheduler.
        """
        self._state.restore(facts)
        self._loaded_past_it = True
        self._done, self._read = int(facts["steps_done"]), facts["read"]
        other = facts["options"]
        self._state.configure({name: value for name, value in self._told.items() if other.get(name) != value})

    def gate(self, wait: Callable[[str], None] | None) -> None:
        """Set a function that the next step calls once per tensor, as `wait(name)`. None removes the function.

        The call is made before the step first uses the tensor, and for unused tensors before the step ends.
        """
        self._wait = wait
        self._gated = {} if wait is None else {spec.name: None for spec in self.specs()}

    def close(self) -> None:
        """Remove the hooks and stop averaging gradients. Do not call `step` afterwards."""
        self._hooks = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._gradients is not None:
            self._gradients.close()

    def let_through(self, names: Iterable[str] | None = None) -> None:
        """Wait until the given tensors are received. None means all. Only the first step of a clone needs to wait."""
        wait = self._wait
        if wait is None or not self._gated:
            return
        for name in list(self._gated) if names is None else names:
            if name in self._gated:
                wait(name)
                self._gated.pop(name, None)

    def parts(self, parameter: nn.Parameter) -> list[str]:
        """List the names of the tensors that an update changes: the given parameter and its optimizer state."""
        return self._state.parts(self._names[id(parameter)])

    def view(self, name: str) -> tuple[Array, bool]:
        """Return the current value of a tensor, and whether the value is a copy."""
        return self._state.view(name)

    def _begin_alike(self, group: Group) -> None:
        """Set the model of all ranks to rank 0's."""
        works: list[tuple[torch.Tensor, torch.Tensor, Work]] = []
        for name, tensor in (self._state.parameters | self._state.buffers).items():
            memory = tensor.detach().contiguous().cpu()
            works.append((tensor, memory, group.ibroadcast(as_numpy(memory, f"{self._where}: {name!r}"))))
        for tensor, memory, work in works:
            work.wait()
            if tensor.data_ptr() != memory.data_ptr():
                tensor.detach().copy_(memory)
        self._loaded_past_it = True

    def _load_own(self) -> None:
        """Have a model that derives values from its weights when it is loaded do so, once all of them are set."""
        if self._loads_itself and self._loaded_past_it:
            self.model.load_state_dict(self.model.state_dict())
        self._loaded_past_it = False

    def _forward(self, batch: object) -> torch.Tensor:
        """Return the loss; what is read is waited for, and, in the first step, noted."""
        order: list[str] = []

        def read(name: str) -> None:
            order.append(name)
            self.let_through((name,))

        looking = self._watched and (self._read is None or bool(self._gated))
        with Reads(self._readable(), read) if looking else nullcontext():
            loss = self._loss(self.model, batch)
        if looking and self._read is None:
            self._read = order
        return loss

    def _readable(self) -> dict[int, str]:
        """Name the tensors that a forward pass may read, by their ids: buffers may be others than at first."""
        tensors = (*self._state.parameters.items(), *self.model.named_buffers())
        return {id(tensor): f"model/{name}" for name, tensor in tensors}

    def _backward(self, loss: torch.Tensor, updates: Updates) -> None:
        """Compute gradients and update parameters."""
        if self._gradients is not None:
            self._gradients.begin(updates.final)
        self._updates = updates
        try:
            loss.backward()
            for parameter in self._state.trained.values():  # whose hook could not be: they were frozen at first
                if parameter.grad is not None and not updates.counts(parameter):
                    self._accumulated(parameter)
        except RuntimeError as exc:
            if updates.begun and "modified by an inplace operation" in str(exc):
                raise RuntimeError(
                    f"{self._where}: the backward pass reads a parameter after its update, perhaps a detached weight: "
                    "use TorchTraining(overlap=False) for this model"
                ) from exc
            raise
        finally:
            self._updates = None
        if self._gradients is not None:
            self._gradients.finish()
        updates.finish()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Take a parameter's gradient: autograd calls it during the backward pass."""
        updates = self._updates
        if updates is None or not isinstance(parameter, nn.Parameter):
            return
        updates.count(parameter, self._names[id(parameter)])
        if self._gradients is not None:
            self._gradients.came(parameter)
        else:
            updates.final(parameter)


def _plain(value: object) -> object:
    """Return a NumPy number as Python's: options are among the facts."""
    return cast(Any, value).item() if isinstance(value, np.generic) else value
