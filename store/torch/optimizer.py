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

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ..arrays import Array, as_numpy
from ..errors import CorruptDataError, TensorMismatchError, TensorNotFoundError
from ..values import base_of
from .state import array_of, bare, plain_name
from .values import as_tensor, packed, unpacked

_log = logging.getLogger(__name__)

_GROUPS = "optimizer/groups"
_SCHEDULER = "scheduler"
Scheduler = torch.optim.lr_scheduler.LRScheduler


def optimizer_tensors_of(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Scheduler | None = None
) -> dict[str, Array]:
    """Return the state of an optimizer and of its learning-rate scheduler as a mapping of names to arrays.

    Args:
        module: The module with the parameters, or a wrapper such as `DistributedDataParallel`.
        optimizer: The optimizer of the module's parameters, or None.
        scheduler: The learning-rate scheduler of the optimizer, or None.

    Raises:
        TensorMismatchError: if the optimizer has a parameter that is not in the module, or a value of the state cannot
            be stored.

    >>> net = nn.Linear(2, 1)
    >>> sorted(optimizer_tensors_of(net, torch.optim.SGD(net.parameters(), momentum=0.9)))
    ['optimizer/groups:json']
    """
    found: dict[str, Array] = {}
    if optimizer is not None:
        names = {id(item): name for name, item in reversed(_parameters(module).items())}
        for parameter, state in optimizer.state.items():
            owner = _name_of(parameter, names)
            for key, value in state.items():
                _check_key(owner, key)
                name = f"optimizer/{owner}/{key}"
                plain = isinstance(value, torch.Tensor) and not value.is_quantized
                found.update({name: array_of(name, value)} if plain else packed(name, value))
        groups = [
            {**_options_of(group), "params": [_name_of(parameter, names) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        found.update(packed(_GROUPS, {"class": type(optimizer).__qualname__, "groups": groups}))
    if scheduler is not None:
        facts = {"class": type(scheduler).__qualname__, "state": scheduler.state_dict()}
        found.update(packed(_SCHEDULER, facts))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Restoring:
    """Stored state that was checked by `restoring` and fits an optimizer and its learning-rate scheduler.

    Call `apply` to set the state.
    """

    optimizer: torch.optim.Optimizer | None
    scheduler: Scheduler | None
    _state: dict[torch.Tensor, dict[str, object]]
    _groups: Sequence[Mapping[str, object]]
    """Stored options of each parameter group."""
    _schedule: dict[str, object]
    """Stored state of the learning-rate scheduler. Empty if there is no scheduler."""

    def apply(self) -> Callable[[], None]:
        """Set the optimizer and the learning-rate scheduler to the checked state.

        Returns:
            A function that restores the previous state.

        Raises:
            TensorMismatchError: if the optimizer or the scheduler rejects the state. Both keep the previous state.
        """
        undo: list[Callable[[], None]] = []
        try:
            if self.optimizer is not None:
                undo.append(_kept(self.optimizer))
                self._set(self.optimizer)
            if self.scheduler is not None:
                before = copy.deepcopy(self.scheduler.state_dict())
                undo.append(lambda: self.scheduler and self.scheduler.load_state_dict(before))
                self.scheduler.load_state_dict(self._schedule)
        except Exception as exc:  # whatever a hook raises
            _undo(undo)
            kinds = [type(item).__qualname__ for item in (self.optimizer, self.scheduler) if item is not None]
            raise TensorMismatchError(
                f"load_state_dict of {' and '.join(kinds)}: expected it to accept the stored state; found {exc!r}"
            ) from exc
        return lambda: _undo(undo)

    def _set(self, optimizer: torch.optim.Optimizer) -> None:
        places: dict[torch.Tensor, int] = {}
        groups: list[dict[str, object]] = []
        for mine, options in zip(optimizer.param_groups, self._groups, strict=True):
            for parameter in mine["params"]:
                places[parameter] = len(places)
            names = {"param_names": mine["param_names"]} if "param_names" in mine else {}
            options = {**_options_of(options), **names}
            groups.append({**options, "params": [places[parameter] for parameter in mine["params"]]})
        state = {places[parameter]: values for parameter, values in self._state.items()}
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, values in self._state.items():  # which has made floats those of the parameter's dtype
            state_of = optimizer.state[parameter]
            for key, value in values.items():
                held = state_of.get(key)
                if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
                    if held.dtype != value.dtype:
                        state_of[key] = value.to(held.device)
                elif key in state_of:
                    state_of[key] = _moved(value, parameter.device)


def _kept(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what gives an optimizer its present state again; loading another one makes new mappings."""
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    return lambda: optimizer.__setstate__(before)


def _undo(steps: list[Callable[[], None]]) -> None:
    for step in reversed(steps):
        try:
            step()
        except Exception as exc:  # noqa: BLE001  of the user's schedule; the error that led here is raised
            _log.warning("cannot restore the previous state of an optimizer or its schedule: %r", exc)


def _moved(value: object, device: torch.device) -> object:
    """Return a value with the tensors in it on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is list or type(value) is tuple:
        items = [_moved(item, device) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: _moved(item, device) for key, item in value.items()} if type(value) is dict else value


def restoring(
    module: nn.Module,
    tensors: Mapping[str, Array],
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Restoring:
    """Check that stored state fits an optimizer and its learning-rate scheduler, without changing them.

    Call `apply` on the result to set the state.

    Args:
        module: The module with the parameters.
        tensors: The result of `optimizer_tensors_of`. It can also contain tensors of the module, which are ignored.
        optimizer: The optimizer to restore, or None.
        scheduler: The learning-rate scheduler to restore, or None.
        renamed: Mapping of stored parameter names to parameter names in the module. Parameters whose name has not
            changed can be omitted.

    Raises:
        TensorNotFoundError: if `tensors` lacks the state of the optimizer or scheduler, or if the stored state contains
            a parameter that the module lacks.
        TensorMismatchError: if the state belongs to a different class of optimizer or scheduler, or to different
            parameter groups, or if a parameter of the optimizer is on the device "meta".
        CorruptDataError: if the stored state is damaged.
    """
    state: dict[torch.Tensor, dict[str, object]] = {}
    groups: list[Mapping[str, object]] = []
    schedule: dict[str, object] = {}
    if optimizer is not None:
        if any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"]):
            raise TensorMismatchError(
                'optimizer: expected parameters with memory; found parameters on the device "meta": fill the module '
                "first, and create the optimizer afterwards"
            )
        facts = _facts(_GROUPS, tensors, optimizer)
        known = _parameters(module)
        groups = _matched(optimizer, cast("Sequence[Mapping[str, object]]", facts["groups"]), known, renamed or {})
        for name in dict.fromkeys(base_of(name) or name for name in tensors if name.startswith("optimizer/")):
            if name == _GROUPS:
                continue
            stored, _, key = name.removeprefix("optimizer/").rpartition("/")
            parameter = _parameter(stored, known, renamed or {})
            value = as_tensor(as_numpy(tensors[name], name)) if name in tensors else unpacked(name, tensors)
            state.setdefault(parameter, {})[key] = value
    if scheduler is not None:
        schedule = cast("dict[str, object]", _facts(_SCHEDULER, tensors, scheduler)["state"])
    return Restoring(optimizer, scheduler, state, groups, schedule)


def _facts(name: str, tensors: Mapping[str, Array], target: object) -> dict[str, object]:
    if f"{name}:json" not in tensors:
        raise TensorNotFoundError(f"{name.partition('/')[0]}: expected its state among the stored tensors; found none")
    found = unpacked(name, tensors)
    if not isinstance(found, dict) or not found.keys() >= {"class"}:
        raise CorruptDataError(f"value {name!r}: expected a class and a state; found {found!r:.80}")
    if found["class"] != type(target).__qualname__:
        what, kind = name.partition("/")[0], type(target).__qualname__
        raise TensorMismatchError(f"{what}: expected the state of a {kind}; found that of a {found['class']}")
    return cast("dict[str, object]", found)


def _matched(
    optimizer: torch.optim.Optimizer,
    stored: Sequence[Mapping[str, object]],
    known: Mapping[str, torch.Tensor],
    renamed: Mapping[str, str],
) -> list[Mapping[str, object]]:
    """Find, for each of the optimizer's groups, the stored one of the same parameters."""
    by_members: dict[frozenset[int], list[Mapping[str, object]]] = {}
    for group in stored:
        members = frozenset(id(_parameter(name, known, renamed)) for name in cast("Sequence[str]", group["params"]))
        by_members.setdefault(members, []).append(group)
    found: list[Mapping[str, object] | None] = []
    for group in optimizer.param_groups:
        alike = by_members.get(frozenset(id(item) for item in group["params"]), [])
        found.append(alike.pop(0) if alike else None)
    if len(stored) != len(found) or None in found:
        mine = [len(group["params"]) for group in optimizer.param_groups]
        theirs = [len(cast("Sequence[str]", group["params"])) for group in stored]
        raise TensorMismatchError(
            f"optimizer: expected the parameter groups that were stored, with {theirs} parameters; found groups with "
            f"{mine}"
        )
    return cast("list[Mapping[str, object]]", found)


def _parameter(stored: str, known: Mapping[str, torch.Tensor], renamed: Mapping[str, str]) -> torch.Tensor:
    name = renamed.get(stored, stored)
    if name not in known:
        raise TensorNotFoundError(f"optimizer: expected a parameter {name!r} in the model; found no such parameter")
    return known[name]


def _parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters under all of their names."""
    return {plain_name(name): item for name, item in bare(module).named_parameters(remove_duplicate=False)}


def _options_of(group: Mapping[str, object]) -> dict[str, object]:
    """Return a group without its parameters, and without the names that `named_parameters` gave them."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _check_key(owner: str, key: object) -> None:
    if not isinstance(key, str) or not key or "/" in key or base_of(key) is not None:
        raise TensorMismatchError(
            f"optimizer state of {owner!r}: expected keys without '/' that do not end in ':json' or ':NUMBER'; "
            f"found {key!r}"
        )


def _name_of(parameter: object, names: Mapping[int, str]) -> str:
    if not isinstance(parameter, torch.Tensor):
        raise TensorMismatchError(f"optimizer: expected state of parameters; found state of {parameter!r:.80}")
    if id(parameter) not in names:
        shape = tuple(parameter.shape)
        raise TensorMismatchError(f"optimizer: expected parameters of the model; found another tensor of shape {shape}")
    return names[id(parameter)]
