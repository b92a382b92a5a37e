"""A PyTorch optimizer, asked for a part of its step, and for the state that it will have.

Rules
- The optimizers of `APART` treat each parameter by itself: a step for some parameters and then for the others gives
  the same bits as one step for all. All others, and those with step hooks of a user's (such as clipping by the norm of
  all gradients), take their whole step at once.
- The user's optimizer is not touched for it: a twin that shares its state and the options of its groups steps.
- State comes to be in the first step. Of which tensors it will be, a step of the twin on parameters without memory
  tells, on the device "meta"; where an optimizer cannot do that, a step on zeros, one parameter after the other.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.optim.optimizer as base

APART = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of torch.optim that treat each parameter by itself."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the state that an optimizer keeps for a parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def make(self) -> torch.Tensor:
        """Make such a tensor, of zeros in memory that has been touched."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).zero_()


def steps_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the optimizer may be asked for a part of its step, as it is now."""
    kind = type(optimizer)
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        base._global_optimizer_pre_hooks,
        base._global_optimizer_post_hooks,
    )
    return kind in (getattr(torch.optim, name, None) for name in APART) and not any(hooks)


def step_for(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Take the optimizer's step for some of its parameters alone; see `steps_apart`."""
    twin = _twin(optimizer)
    chosen = {id(parameter) for parameter in parameters}
    twin.state = optimizer.state
    twin.param_groups = [
        {**group, "params": found}
        for group in optimizer.param_groups
        if (found := [parameter for parameter in group["params"] if id(parameter) in chosen])
    ]
    type(optimizer).step(twin)
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # schedulers look whether it stepped


def state_slots(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, dict[str, Slot]]:
    """Tell of which tensors the state of each parameter is, or will be, by their keys in alphabetical order.

    >>> model = torch.nn.Linear(2, 3, bias=False)
    >>> slots = state_slots(torch.optim.Adam(model.parameters()))
    >>> {key: slot.shape for key, slot in slots[model.weight].items()}
    {'exp_avg': (3, 2), 'exp_avg_sq': (3, 2), 'step': ()}
    """
    found: dict[torch.nn.Parameter, dict[str, Slot]] = {}
    for group in optimizer.param_groups:
        fresh = [item for item in group["params"] if not optimizer.state.get(item) and item.requires_grad]
        expected = _expected(optimizer, group, fresh)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) or expected.get(parameter, {})
            found[parameter] = {
                key: Slot(item.dtype, tuple(item.shape), parameter.device if item.is_meta else item.device)
                for key, item in sorted(state.items())
                if isinstance(item, torch.Tensor)
            }
    return found


def _expected(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], parameters: Sequence[torch.nn.Parameter]
) -> dict[torch.nn.Parameter, dict[str, object]]:
    if not parameters:
        return {}
    try:
        return _dry_run(optimizer, group, parameters, "meta")
    except (NotImplementedError, RuntimeError, TypeError):  # what kernels and `.item()` say of tensors without memory
        found: dict[torch.nn.Parameter, dict[str, object]] = {}
        for parameter in parameters:
            state = _dry_run(optimizer, group, [parameter], parameter.device)
            shapes = {
                key: item.to("meta") if isinstance(item, torch.Tensor) and item.device == parameter.device else item
                for key, item in state[parameter].items()
            }
            found[parameter] = shapes
        return found


def _dry_run(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, object],
    parameters: Iterable[torch.nn.Parameter],
    device: torch.device | str,
) -> dict[torch.nn.Parameter, dict[str, object]]:
    """Step on stand-ins of parameters, with gradients of zeros, and give the state that came to be."""
    twin = _twin(optimizer)
    twin.state = defaultdict(dict)
    standing_in: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in parameters:
        other = torch.zeros_like(parameter, device=device).requires_grad_()
        other.grad = torch.zeros_like(other)
        standing_in[parameter] = other
    twin.param_groups = [{**group, "params": list(standing_in.values())}]
    type(optimizer).step(twin)
    return {parameter: twin.state.get(other, {}) for parameter, other in standing_in.items()}


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make another optimizer with the same attributes, without hooks and without what a scheduler wraps its step in."""
    twin = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    hooks: dict[str, OrderedDict[int, Any]] = {
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    vars(twin).update(attributes | hooks)
    return twin
