"""What one rank does and holds: a training step by step, and its state as tensors and facts.

Rules
- Steps are counted from 1. The state "at step k" is that after the k-th update; the next step is k + 1.
- The whole state is tensors and facts: what a training with the same state and the same data does next is the same,
  bit for bit. So a batch is a function of the step, the rank and the number of ranks, or its position is in the facts.
- A framework's training is one class of this interface; what it has to call is in `hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..collective.group import Group

Facts = Mapping[str, Any]
"""The part of a training's state that is not tensors, as JSON-like values."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a training's state."""

    name: str
    dtype: str
    """Name of the dtype, such as "float32"."""
    shape: tuple[int, ...]
    nbytes: int
    local: bool = False
    """Whether ranks may have different values, as in batch statistics and random states. A fork sends the whole tensor
    from one rank to its clone."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """The argument of the function that builds a rank's training: the `build` of `start_trainers` and `fork`."""

    run: str
    """Name of the run."""
    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks of the run."""
    group: Group | None
    """Collective group of the ranks. None for a single rank."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options passed to `start_trainers`, such as learning rate and seed. A fork may change them for its clones."""


class Hooks(Protocol):
    """The methods that a `Training` calls in each step. They cost little while there is no fork."""

    def step_begins(self, step: int) -> bool:
        """Receive the number of the step that is about to begin. Return whether to call `updated` in it."""
        ...

    def before_update(self) -> None:
        """Prepare for in-place changes of tensors: copy those that a fork is still sending.

        Call it before the first update of a step. It is not needed if all tensors are passed to `updated` as `stable`.
        """
        ...

    def updated(self, name: str, array: object, stable: bool = False) -> None:
        """Receive a tensor's final value of the step.

        Call it at most once per tensor and step, from any thread and in any order.

        Args:
            name: Name of the tensor, as in `specs`.
            array: A NumPy array, or an object that provides DLPack or a buffer without a copy.
            stable: Whether the array's memory never changes while the array is referenced.
        """
        ...

    def step_ended(self, step: int) -> None:
        """Receive the end of the step. Tensors not passed to `updated` are read with `Training.tensor`."""
        ...


class Training(Protocol):
    """The interface of one rank of a training that can be forked. Implement it for a training of your own.

    Steps count from 1. Two trainings with the same state and the same data must compute the same next step, bit for
    bit. So let a batch depend only on the step, the rank and the number of ranks, or include its position in `facts`.
    """

    def step(self) -> float:
        """Train one step, call the hooks, and return the loss of this rank's batch."""
        ...

    @property
    def steps_done(self) -> int:
        """Number of steps since the training began, including those before a fork."""
        ...

    def hook(self, hooks: Hooks | None) -> None:
        """Set the hooks to call in each step. None removes them."""
        ...

    def configure(self, options: Mapping[str, object]) -> None:
        """Change the given options. The others keep their values.

        Raises:
            ValueError: if the training does not have an option, or the value is invalid.
        """
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the state, in the order in which a step updates them (the order of the backward pass).

        Tensors that are not passed to `Hooks.updated` follow, such as counters, statistics and random states.
        """
        ...

    def forward_order(self) -> Sequence[str]:
        """List the names of the tensors, in the order in which the next forward pass reads them.

        Tensors that it does not read follow.
        """
        ...

    def tensor(self, name: str) -> object:
        """Return the current value of a tensor, without a copy if possible."""
        ...

    def facts(self) -> Facts:
        """Return the part of the state that is not tensors, as JSON-like values: steps, schedule, random states."""
        ...

    def memory(self, name: str) -> object:
        """Return contiguous memory to receive a tensor into. All of it will be written.

        It is the memory of the tensor itself if possible, else a buffer from which `filled` assigns the tensor.
        """
        ...

    def filled(self, name: str) -> None:
        """Take over a tensor whose `memory` has been written completely."""
        ...

    def restore(self, facts: Facts) -> None:
        """Apply the `facts` of another rank. The tensors may be received later."""
        ...

    def gate(self, wait: Callable[[str], None] | None) -> None:
        """Make the next step call `wait(name)` before it first reads each tensor. None cancels this.

        A training that cannot detect when a tensor is read calls `wait` for all tensors at the beginning of the step.
        """
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


Build = Callable[[RankContext], Training]
"""A function that builds the training of a rank. The engine sends it to the rank's actor."""
