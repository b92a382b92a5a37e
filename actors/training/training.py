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
"""The non-tensor part of the training state, as JSON-like values."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the training state."""

    name: str
    dtype: str
    """Name of the dtype, such as "float32"."""
    shape: tuple[int, ...]
    nbytes: int
    local: bool = False
    """Whether ranks can have different values, as in batch statistics and random states. A fork sends the whole tensor
    from one rank to its clone."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """The argument of a `build` function, which builds the `Training` of one rank."""

    run: str
    """Name of the run."""
    rank: int
    """Number of this rank, from 0 to `size - 1`."""
    size: int
    """Number of ranks in the run."""
    group: Group | None
    """Group for collective communication between the ranks. None for a single rank."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options passed to `start_trainers`, such as learning rate and seed. A fork can change options for its clones."""


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
    """The interface of one rank of a training run that can be forked. Implement it for your own training code.

    Steps are numbered from 1. From the same state and the same data, two ranks must compute the same next state, bit
    for bit. If a batch depends on more than the step, the rank and the number of ranks, the result of `facts` must
    contain the position in the data set.
    """

    def step(self) -> float:
        """Train one step, call the hooks, and return the loss of this rank's batch."""
        ...

    @property
    def steps_done(self) -> int:
        """Number of steps trained so far. In a clone, this number includes the steps trained before the fork."""
        ...

    def hook(self, hooks: Hooks | None) -> None:
        """Set the hooks that each step calls. None removes the hooks."""
        ...

    def configure(self, options: Mapping[str, object]) -> None:
        """Change the values of the given options. All other options keep their values.

        Raises:
            ValueError: if an option is unknown, or a value is invalid.
        """
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the training state, in the order in which a step updates the tensors.

        The order usually follows the backward pass. Tensors that a step does not pass to `Hooks.updated`, such as
        counters, batch statistics and the states of random generators, come last.
        """
        ...

    def forward_order(self) -> Sequence[str]:
        """List the names of the tensors, in the order in which the next forward pass reads the tensors.

        Tensors that the forward pass does not read come last, or can be omitted.
        """
        ...

    def tensor(self, name: str) -> object:
        """Return the current value of a tensor, without a copy if possible."""
        ...

    def facts(self) -> Facts:
        """Return the non-tensor part of the training state, such as the step count.

        The result is a mapping of strings to JSON values. NaN and infinity are also allowed.
        """
        ...

    def memory(self, name: str) -> object:
        """Return a contiguous buffer for the new value of a tensor. The caller fills the buffer and calls `filled`.

        If possible, return the memory of the tensor itself. Otherwise, `filled` must copy the buffer to the tensor.
        """
        ...

    def filled(self, name: str) -> None:
        """Set a tensor to the value in the buffer that `memory` returned."""
        ...

    def restore(self, facts: Facts) -> None:
        """Restore the non-tensor part of the training state from the `facts` of another rank or of a saved version.

        `memory` and `filled` can be called before and after this call.
        """
        ...

    def gate(self, wait: Callable[[str], None] | None) -> None:
        """Set a function that the next step calls as `wait(name)` for each tensor, before it first reads the tensor.

        `wait` returns when the tensor has been received. None removes the function. An implementation that cannot
        detect reads must call `wait` for all tensors when the step begins.
        """
        ...

    def close(self) -> None:
        """Release all resources of this rank."""
        ...


Build = Callable[[RankContext], Training]
"""A function that builds the `Training` of a rank. The engine sends the function to the rank's actor."""
