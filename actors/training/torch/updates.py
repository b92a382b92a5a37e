"""The updates of one step of a PyTorch training: each parameter as soon as its gradient is final, or all at the end.

Rules
- Which parameters are updated together follows from the order in which their gradients become final, not from time.
- Hooks are told before the first parameter changes, and of each tensor right after it has.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn

from ..training import Hooks
from .optimizer import step_for

UPDATE_BYTES = 1 << 20
"""Parameters are updated together until they are so large: an optimizer's call costs as much as some KiB of work."""


class Parts(Protocol):
    """What updates need to know of the training."""

    def parts(self, parameter: nn.Parameter) -> list[str]:
        """Name the tensors that change when a parameter is updated."""
        ...

    def view(self, name: str) -> tuple[object, bool]:
        """Return a tensor's present value, and whether that is a copy."""
        ...

    def let_through(self, names: Iterable[str] | None = None) -> None:
        """Wait until tensors are there; None: all."""
        ...


class Updates:
    """The updates of one step.

    Args:
        training: whose.
        optimizer: the training's.
        hooks: what is told; None: nobody.
        telling: whether each tensor is told of.
        apart: parameters may be updated one by one; False: all at the end.
    """

    def __init__(
        self, training: Parts, optimizer: torch.optim.Optimizer, hooks: Hooks | None, telling: bool, apart: bool
    ) -> None:
        self.begun = False
        """Parameters have begun to change."""
        self._training, self._optimizer = training, optimizer
        self._hooks, self._telling, self._apart = hooks, telling, apart
        self._pending: list[nn.Parameter] = []
        self._nbytes = 0
        self._counted: set[int] = set()

    def counts(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter was counted."""
        return id(parameter) in self._counted

    def count(self, parameter: nn.Parameter, name: str) -> None:
        """Note that a parameter got its gradient.

        Raises:
            RuntimeError: it got it before: a backward pass within the backward pass.
        """
        if id(parameter) in self._counted:
            raise RuntimeError(
                f"gradient of {name!r}: expected one gradient per backward pass; found two, as with re-entrant "
                "checkpointing: use checkpoint(use_reentrant=False)"
            )
        self._counted.add(id(parameter))

    def final(self, parameter: nn.Parameter) -> None:
        """Update a parameter whose gradient is final, or note it for an update together with the next ones."""
        if not self._apart:
            return
        self._pending.append(parameter)
        self._nbytes += parameter.numel() * parameter.element_size()
        if self._nbytes >= UPDATE_BYTES:
            self._update()

    def finish(self) -> None:
        """Update what is left: all gradients are final."""
        if self._apart:
            self._update()
            return
        self._training.let_through()
        self._begin()
        self._optimizer.step()

    def _update(self) -> None:
        parameters, self._pending, self._nbytes = self._pending, [], 0
        if not parameters:
            return
        self._training.let_through(self._parts(parameters))
        self._begin()
        step_for(self._optimizer, parameters)
        if self._telling and self._hooks is not None:
            for name in self._parts(parameters):
                self._hooks.updated(name, *self._training.view(name))

    def _parts(self, parameters: Iterable[nn.Parameter]) -> Iterator[str]:
        return (name for parameter in parameters for name in self._training.parts(parameter))

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            if self._hooks is not None:
                self._hooks.before_update()


def overlapping(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether tensors lie in the same memory, so that the update of one changes another.

    >>> a = torch.zeros(4)
    >>> overlapping([a[:2], a[2:]]), overlapping([a[:3], a[2:]])
    (False, True)
    """
    spans: list[tuple[int, int]] = []
    for tensor in tensors:
        if tensor.numel():
            length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()))
    spans.sort()
    return any(after[0] < before[1] for before, after in pairwise(spans))
