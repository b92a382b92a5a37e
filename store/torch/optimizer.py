"""The state of a PyTorch optimizer and of its learning-rate schedule, as tensors named by the model's parameters.

Rules
- Names: "optimizer/PARAMETER/KEY" for the state of a parameter, "optimizer/groups" for the parameter groups,
  "scheduler" for the schedule. What is no tensor is written as `values` do.
- State is found by the names of parameters, so an optimizer that was given them in another order takes it, too.
- It comes back in every bit, and on the device of its parameter, where PyTorch would have it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (torch's types are partial)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ..arrays import Array, as_numpy
from ..errors import CorruptDataError, TensorMismatchError, TensorNotFoundError
from ..values import base_of
from .state import array_of, bare, plain_name
from .values import as_tensor, packed, unpacked

_GROUPS = "optimizer/groups"
_SCHEDULER = "scheduler"
Scheduler = torch.optim.lr_scheduler.LRScheduler


def optimizer_tensors_of(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Scheduler | None = None
) -> dict[str, Array]:
    """Return the state of an optimizer and of a schedule.

    Args:
        module: has the parameters, wrapped or not.
        optimizer: over parameters of the module; None: none.
        scheduler: its schedule; None: none.

    Raises:
        TensorMismatchError: a parameter is not the module's, or part of the state cannot be stored.

    >>> net = nn.Linear(2, 1)
    >>> sorted(optimizer_tensors_of(net, torch.optim.SGD(net.parameters(), momentum=0.9)))
    ['optimizer/groups:json']
    """
    found: dict[str, Array] = {}
    if optimizer is not None:
        names = {id(item): name for name, item in reversed(_parameters(module).items())}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                name = f"optimizer/{_name_of(parameter, names)}/{key}"
                plain = isinstance(value, torch.Tensor) and not value.is_quantized
                found.update({name: array_of(name, value)} if plain else packed(name, value))
        groups = [
            {**group, "params": [_name_of(parameter, names) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        found.update(packed(_GROUPS, {"class": type(optimizer).__qualname__, "groups": groups}))
    if scheduler is not None:
        facts = {"class": type(scheduler).__qualname__, "state": scheduler.state_dict()}
        found.update(packed(_SCHEDULER, facts))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Restoring:
    """The state of an optimizer and a schedule, found to fit them, which `apply` sets."""

    optimizer: torch.optim.Optimizer | None
    scheduler: Scheduler | None
    _state: dict[torch.Tensor, dict[str, Any]]
    _groups: Sequence[Mapping[str, Any]]
    """Options of each of the optimizer's groups."""
    _schedule: Any

    def apply(self) -> None:
        """Set it."""
        if self.optimizer is not None:
            self._set(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self._schedule)

    def _set(self, optimizer: torch.optim.Optimizer) -> None:
        places: dict[torch.Tensor, int] = {}
        groups: list[dict[str, Any]] = []
        for mine, options in zip(optimizer.param_groups, self._groups, strict=True):
            for parameter in mine["params"]:
                places[parameter] = len(places)
            groups.append({**options, "params": [places[parameter] for parameter in mine["params"]]})
        state = {places[parameter]: values for parameter, values in self._state.items()}
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, values in self._state.items():  # which has made floats those of the parameter's dtype
            for key, value in values.items():
                held = optimizer.state[parameter][key]
                if isinstance(value, torch.Tensor) and held.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(held.device)


def restoring(
    module: nn.Module,
    tensors: Mapping[str, Array],
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Restoring:
    """Find out how the state of an optimizer and a schedule is to be set; nothing is changed yet.

    Args:
        module: has the parameters.
        tensors: what `optimizer_tensors_of` gave; others are not looked at.
        optimizer: gets the state; None: none does.
        scheduler: likewise.
        renamed: stored name of a parameter -> its name in the module, where these differ.

    Raises:
        TensorNotFoundError: the state was not stored.
        TensorMismatchError: it is that of another kind, or of other parameter groups.
    """
    state: dict[torch.Tensor, dict[str, Any]] = {}
    groups: list[Mapping[str, Any]] = []
    schedule: Any = None
    if optimizer is not None:
        facts = _facts(_GROUPS, tensors, optimizer)
        known = _parameters(module)
        groups = _matched(optimizer, facts["groups"], known, renamed or {})
        for name in dict.fromkeys(base_of(name) or name for name in tensors if name.startswith("optimizer/")):
            if name == _GROUPS:
                continue
            stored, _, key = name.removeprefix("optimizer/").rpartition("/")
            parameter = _parameter(stored, known, renamed or {})
            value = as_tensor(as_numpy(tensors[name], name)) if name in tensors else unpacked(name, tensors)
            state.setdefault(parameter, {})[key] = value
    if scheduler is not None:
        schedule = _facts(_SCHEDULER, tensors, scheduler)["state"]
    return Restoring(optimizer, scheduler, state, groups, schedule)


def _facts(name: str, tensors: Mapping[str, Array], target: object) -> dict[str, Any]:
    if f"{name}:json" not in tensors:
        raise TensorNotFoundError(f"{name.partition('/')[0]}: expected its state among what is stored; found none")
    found = unpacked(name, tensors)
    if not isinstance(found, dict) or not found.keys() >= {"class"}:
        raise CorruptDataError(f"value {name!r}: expected a class and a state; found {found!r:.80}")
    if found["class"] != type(target).__qualname__:
        what, kind = name.partition("/")[0], type(target).__qualname__
        raise TensorMismatchError(f"{what}: expected the state of a {kind}; found that of a {found['class']}")
    return cast("dict[str, Any]", found)


def _matched(
    optimizer: torch.optim.Optimizer,
    stored: Sequence[Mapping[str, Any]],
    known: Mapping[str, torch.Tensor],
    renamed: Mapping[str, str],
) -> list[Mapping[str, Any]]:
    """Find, for each of the optimizer's groups, the stored one of the same parameters."""
    by_members = {frozenset(id(_parameter(n, known, renamed)) for n in group["params"]): group for group in stored}
    found = [by_members.get(frozenset(id(item) for item in group["params"])) for group in optimizer.param_groups]
    if len(stored) != len(found) or None in found:
        mine = [len(group["params"]) for group in optimizer.param_groups]
        theirs = [len(group["params"]) for group in stored]
        raise TensorMismatchError(
            f"optimizer: expected groups of the same parameters; it has groups of {mine}, what is stored of {theirs}"
        )
    return cast("list[Mapping[str, Any]]", found)


def _parameter(stored: str, known: Mapping[str, torch.Tensor], renamed: Mapping[str, str]) -> torch.Tensor:
    name = renamed.get(stored, stored)
    if name not in known:
        raise TensorNotFoundError(f"optimizer: expected a parameter {name!r} in the model; found no such")
    return known[name]


def _parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters under all of their names."""
    return {plain_name(name): item for name, item in bare(module).named_parameters(remove_duplicate=False)}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        shape = tuple(parameter.shape)
        raise TensorMismatchError(f"optimizer: expected parameters of the model; found another one of shape {shape}")
    return names[id(parameter)]
