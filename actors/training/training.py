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
"""What is no tensor: JSON-like."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a training's state."""

    name: str
    dtype: str
    """By name, as `store.arrays.dtype_name` gives it."""
    shape: tuple[int, ...]
    nbytes: int
    local: bool = False
    """Ranks may differ in it (statistics of a batch, random state): it goes whole, from one rank to its clone."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank's training is built from."""

    run: str
    """The run's name."""
    rank: int
    size: int
    """Ranks of the run."""
    group: Group | None
    """The ranks' group; None for a single rank."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the user said: learning rate, seed, which data. A fork may say other ones for its clones."""


class Hooks(Protocol):
    """What a training calls in each step; `fork.fork_hooks.ForkHooks` is one. All are cheap while nothing is forked."""

    def step_begins(self, step: int) -> bool:
        """Tell that step `step` is about to begin; gives whether `updated` wants to be called in it."""
        ...

    def before_update(self) -> None:
        """Tell that tensors are about to be written to in place: what still travels is set aside first.

        Called before a step's first update; not needed where an array given to `updated` never changes (`stable`).
        """
        ...

    def updated(self, name: str, array: object, stable: bool = False) -> None:
        """Tell that a tensor has the value that the step ends with. Any thread, any order, once a tensor and step.

        Args:
            name: the tensor's, as in `specs`.
            array: NumPy, or what DLPack or a buffer gives without a copy.
            stable: the array's memory is never written to, as long as somebody holds it.
        """
        ...

    def step_ended(self, step: int) -> None:
        """Tell that the step has ended; tensors that `updated` did not tell are read by `Training.tensor`."""
        ...


class Training(Protocol):
    """One rank of a training that can be forked."""

    def step(self) -> float:
        """Train one step, calling the hooks; gives the loss (of this rank's batch)."""
        ...

    @property
    def steps_done(self) -> int:
        """Steps since the training's beginning, those before a fork included."""
        ...

    def hook(self, hooks: Hooks | None) -> None:
        """Attach what is called in each step; None: nothing."""
        ...

    def configure(self, options: Mapping[str, object]) -> None:
        """Go on with other options: those named are changed, the others stay.

        Raises:
            ValueError: an option that it does not have, or a wrong value.
        """
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the state, in the order in which a step updates them (that of the backward pass).

        Those of which `Hooks.updated` is not told come last, such as counters, statistics and random state.
        """
        ...

    def forward_order(self) -> Sequence[str]:
        """Name the tensors in the order in which the next forward pass needs them; the others follow."""
        ...

    def tensor(self, name: str) -> object:
        """Return a tensor's present value, without a copy where that is possible."""
        ...

    def facts(self) -> Facts:
        """Return what is no tensor: steps done, schedule, random state."""
        ...

    def memory(self, name: str) -> object:
        """Return the contiguous memory that a clone's tensor is received into, all of which will be written.

        It is the tensor's own where that is possible, otherwise scratch that `filled` assigns from.
        """
        ...

    def filled(self, name: str) -> None:
        """Tell that all of a tensor's `memory` has been written."""
        ...

    def restore(self, facts: Facts) -> None:
        """Take over another rank's facts. The tensors may still be on their way."""
        ...

    def gate(self, wait: Callable[[str], None] | None) -> None:
        """Have the next step call `wait(name)` before it first reads a tensor; None: no more.

        A training that cannot tell when it reads calls it for all its tensors at the beginning of the step.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


Build = Callable[[RankContext], Training]
"""Makes a rank's training. It is sent to the rank's actor by the engine."""
