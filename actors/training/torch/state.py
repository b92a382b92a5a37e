"""The whole state of a PyTorch training: model, optimizer, schedule and random generators, as tensors and facts.

Rules
- Names: "model/<parameter or buffer>", "optimizer/<parameter>/<key>", "random/<generator>". They do not change, nor
  does their order: ranks that fork must agree on it at any time, so it is that of registration, reversed, which is
  near enough to that of the backward pass, and not one that a step found out.
- Tensors that a forward pass writes to, buffers and random state, are handed out as copies; they are small. The others
  are handed out as they lie in memory, if that is contiguous and the host's: of a GPU's tensors, copies travel.
- Optimizer state that is not there yet, before the first step or for a parameter that never had a gradient, is sent as
  zeros and named in the facts, so that it is not there in a clone either.
- Ranks may differ in buffers (statistics of their batches) and in random state.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ....store.arrays import Array, as_numpy, dtype_of
from ....store.errors import TensorNotFoundError
from ....store.facts import Json
from ....store.values import decode, encode
from ..training import Facts, TensorSpec
from .optimizer import Slot, state_slots
from .random_state import random_facts, set_random

OPTIONS = ("learning_rate", "momentum", "weight_decay", "seed")
"""What `configure` takes."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Learning rates of a parameter group; all but the first belong to a schedule."""

Scheduler = torch.optim.lr_scheduler.LRScheduler
_Generator = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]
"""How the state of a random generator is read, and set."""


class TorchState:
    """Model, optimizer and schedule, seen as tensors and facts.

    Args:
        model: its parameters and buffers are the state; what they are called is `named_parameters`' matter.
        optimizer: over parameters of the model.
        scheduler: its learning-rate schedule; None: none.
        rank: makes random generators differ between ranks that have one seed.
        where: whose state it is, for errors.

    Raises:
        ValueError: the optimizer has a parameter that the model does not have, or cannot step by itself (LBFGS), or the
            schedule needs a metric, or the optimizer's state is not made of tensors, numbers and strings.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, rank: int, where: str
    ) -> None:
        self.where = where
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self._model, self._optimizer, self._scheduler, self._rank = model, optimizer, scheduler, rank
        _check_kind(optimizer, scheduler, where)
        known = {id(parameter): name for name, parameter in self.parameters.items()}
        mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in known for parameter in mine):
            raise ValueError(f"{where}: optimizer: expected only parameters of the model; found others")
        order = {name: place for place, name in enumerate(self.parameters)}
        names = sorted((known[id(parameter)] for parameter in mine), key=lambda name: -order[name])
        self.trained = {name: self.parameters[name] for name in names}
        """The optimizer's parameters, in the order of the backward pass as far as that of registration tells."""
        self._generators = _generators(self.parameters.values())
        self._slots: dict[str, dict[str, Slot]] = {}
        self._fresh: dict[tuple[str, str], torch.Tensor] = {}
        """Optimizer state that is received."""
        self._scratch: dict[str, np.ndarray] = {}
        self._seeded = False
        """A seed was given after the state: random state that is still on its way does not count."""
        self._specs: list[TensorSpec] = []
        self._look_ahead()
        self._groups_facts()
        self._state_facts()

    def specs(self) -> Sequence[TensorSpec]:
        """List all tensors (`training.Training`)."""
        return self._specs

    def parts(self, parameter: str) -> list[str]:
        """Name the tensors that change when a parameter is updated: its own, and those of its optimizer state."""
        return [f"model/{parameter}", *(f"optimizer/{parameter}/{key}" for key in self._slots.get(parameter, ()))]

    def read_order(self) -> list[str]:
        """Name the tensors that a forward pass reads, in the order of registration; generators come first."""
        return [
            *(f"random/{name}" for name in self._generators),
            *(f"model/{name}" for name in (*self.parameters, *self.buffers)),
        ]

    def view(self, name: str) -> tuple[Array, bool]:
        """Return a tensor's present value, and whether that is a copy.

        Raises:
            TensorNotFoundError: there is no such tensor.
        """
        tensor, copied = self._find(name), False
        if tensor is None:
            slot = self._slot(name)
            tensor, copied = torch.zeros(slot.shape, dtype=slot.dtype), True
        elif name.startswith("model/") and name[6:] in self.buffers:
            tensor, copied = tensor.detach().clone(memory_format=torch.contiguous_format), True
        elif name.startswith("random/"):
            copied = True
        elif not tensor.is_contiguous():
            tensor, copied = tensor.detach().contiguous(), True
        return as_numpy(tensor, f"{self.where}: tensor {name!r}"), copied or tensor.is_cuda

    def memory(self, name: str) -> Array:
        """Return memory to receive a tensor into (`training.Training`)."""
        tensor = self._target(name)
        if tensor is not None and tensor.is_contiguous() and not tensor.is_cuda:
            return as_numpy(tensor, f"{self.where}: tensor {name!r}")
        spec = next(spec for spec in self._specs if spec.name == name)
        return self._scratch.setdefault(name, np.zeros(spec.shape, dtype_of(spec.dtype)))

    def filled(self, name: str) -> None:
        """Assign a tensor from its scratch, if it has one (`training.Training`)."""
        array = self._scratch.pop(name, None)
        if array is None:
            return
        if name.startswith("random/"):
            if not self._seeded:
                self._generators[name.removeprefix("random/")][1](torch.from_numpy(array))
            return
        target = self._target(name)
        if target is not None:
            raw = torch.from_numpy(array.reshape(-1).view(np.uint8))
            target.detach().copy_(raw.view(target.dtype).reshape(target.shape))

    def facts(self) -> dict[str, object]:
        """Return what is no tensor: parameter groups, schedule, random state of Python and NumPy, modules' extra state.

        Raises:
            ValueError: something that is not JSON-like; names it.
        """
        scheduler = self._scheduler
        return {
            "groups": self._groups_facts(),
            "state": self._state_facts(),
            "absent": [spec.name for spec in self._specs if self._find(spec.name) is None],
            "scheduler": None if scheduler is None else encode(scheduler.state_dict(), f"{self.where}: scheduler"),
            "random": random_facts(),
            "extra": {
                name: encode(module.get_extra_state(), f"{self.where}: extra state of module {name!r}")
                for name, module in cast("Iterable[tuple[str, nn.Module]]", self._model.named_modules())
                if type(module).get_extra_state is not nn.Module.get_extra_state
            },
        }

    def restore(self, facts: Facts) -> None:
        """Take over another rank's facts; optimizer state that is received counts from now on.

        Raises:
            ValueError: they are of another optimizer or schedule.
        """
        groups, scheduler = decode(facts["groups"]), self._scheduler
        if len(groups) != len(self._optimizer.param_groups) or (facts["scheduler"] is None) != (scheduler is None):
            raise ValueError(
                f"{self.where}: facts: expected {len(self._optimizer.param_groups)} parameter groups and "
                f"{'no' if scheduler is None else 'a'} schedule; found {len(groups)} groups and "
                f"{'no' if facts['scheduler'] is None else 'a'} schedule"
            )
        for group, found in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(found)
        if scheduler is not None:
            scheduler.load_state_dict(decode(facts["scheduler"]))
        absent, others = set(facts["absent"]), decode(facts["state"])
        for name, parameter in self.trained.items():
            state: dict[str, Any] = dict(others.get(name, {}))
            for key in self._slots[name]:
                if f"optimizer/{name}/{key}" not in absent:
                    state[key] = self._target(f"optimizer/{name}/{key}")
            if state:
                self._optimizer.state[parameter] = state
            else:
                self._optimizer.state.pop(parameter, None)
        for name, extra in facts["extra"].items():
            self._model.get_submodule(name).set_extra_state(decode(extra))
        if not self._seeded:
            set_random(facts["random"])
        self._fresh.clear()
        self._look_ahead()

    def known_options(self) -> list[str]:
        """Name the options that `configure` takes."""
        entries = {key for group in self._optimizer.param_groups for key in group}
        return [name for name in OPTIONS if name in ("learning_rate", "seed") or name in entries]

    def configure(self, options: Mapping[str, object]) -> None:
        """Set options of the optimizer and seed the random generators.

        Args:
            options: some of `known_options`. "learning_rate" is that of all parameter groups; with a schedule it is the
                one that it began with, or its peak (OneCycleLR), and where the schedule stands remains.

        Raises:
            ValueError: another option, or no finite number from 0 (an integer for the seed); nothing is changed.
        """
        for name, value in options.items():
            kinds = (int, np.integer) if name == "seed" else (int, float, np.integer, np.floating)
            if name not in self.known_options():
                raise ValueError(f"{self.where}: options: expected some of {self.known_options()}; found {name!r}")
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
                kind = "an integer" if name == "seed" else "a number"
                raise ValueError(f"{self.where}: option {name!r}: expected {kind} from 0; found {value!r}")
        for name, value in options.items():
            if name == "learning_rate":
                self._set_rate(float(cast(float, value)))
            elif name == "seed":
                self._seed(int(cast(int, value)))
            else:
                for group in self._optimizer.param_groups:
                    group.update({name: float(cast(float, value))} if name in group else {})
        self._look_ahead()

    def settled(self) -> None:
        """Tell that no random state is on its way any more."""
        self._seeded = False

    def _set_rate(self, rate: float) -> None:
        for place, group in enumerate(self._optimizer.param_groups):
            base = group.get("max_lr", group.get("initial_lr"))
            if not base:
                group.update(dict.fromkeys((key for key in _RATES if key in group), rate))
                continue
            for key in _RATES:
                if key in group:
                    group[key] *= rate / base
            if self._scheduler is not None:
                _scale(self._scheduler, place, rate / base)

    def _seed(self, seed: int) -> None:
        words = np.random.SeedSequence([seed, self._rank]).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(words[1])
        torch.manual_seed(int(words[2]))
        self._seeded = True

    def _look_ahead(self) -> None:
        """Find out of which tensors the state is."""
        slots = state_slots(self._optimizer)
        self._slots = {name: slots[parameter] for name, parameter in self.trained.items()}
        found: list[tuple[str, torch.dtype, tuple[int, ...], bool]] = []
        for name, parameter in self.trained.items():
            found.append((f"model/{name}", parameter.dtype, tuple(parameter.shape), False))
            found += [(f"optimizer/{name}/{key}", s.dtype, s.shape, False) for key, s in self._slots[name].items()]
        rest = [name for name in self.parameters if name not in self.trained]
        found += [(f"model/{n}", self.parameters[n].dtype, tuple(self.parameters[n].shape), False) for n in rest]
        found += [(f"model/{name}", item.dtype, tuple(item.shape), True) for name, item in self.buffers.items()]
        for name, (get, _) in self._generators.items():
            found.append((f"random/{name}", torch.uint8, tuple(get().shape), True))
        self._specs = [
            TensorSpec(name, str(dtype).removeprefix("torch."), shape, math.prod(shape) * dtype.itemsize, local)
            for name, dtype, shape, local in found
        ]

    def _find(self, name: str) -> torch.Tensor | None:
        """Find a tensor; None: optimizer state that is not there yet."""
        kind, _, rest = name.partition("/")
        if kind == "model" and rest in self.parameters:
            return self.parameters[rest]
        if kind == "model" and rest in self.buffers:
            return self._model.get_buffer(rest)
        if kind == "random" and rest in self._generators:
            return self._generators[rest][0]()
        self._slot(name)
        parameter, _, key = rest.rpartition("/")
        return self._optimizer.state.get(self.trained[parameter], {}).get(key)

    def _slot(self, name: str) -> Slot:
        kind, _, rest = name.partition("/")
        parameter, _, key = rest.rpartition("/")
        slot = self._slots.get(parameter, {}).get(key) if kind == "optimizer" else None
        if slot is None:
            raise TensorNotFoundError(f"{self.where}: expected a tensor of the training's state; found {name!r}")
        return slot

    def _target(self, name: str) -> torch.Tensor | None:
        """Find the tensor that is received into; None: a random generator."""
        if name.startswith("random/"):
            return None
        tensor = self._find(name)
        if tensor is None:
            parameter, _, key = name.partition("/")[2].rpartition("/")
            if (parameter, key) not in self._fresh:
                self._fresh[parameter, key] = self._slot(name).make()
            return self._fresh[parameter, key]
        return tensor

    def _groups_facts(self) -> list[Json]:
        return [
            encode({key: value for key, value in group.items() if key != "params"}, f"{self.where}: parameter group")
            for group in self._optimizer.param_groups
        ]

    def _state_facts(self) -> Json:
        """Return optimizer state that is no tensor.

        Raises:
            ValueError: some is neither JSON-like nor a tensor that was expected; names it.
        """
        found: dict[str, dict[str, object]] = {}
        for name, parameter in self.trained.items():
            state = self._optimizer.state.get(parameter, {})
            others = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            unknown = state.keys() - others.keys() - self._slots[name].keys()
            if unknown:
                raise ValueError(
                    f"{self.where}: optimizer state of {name!r}: expected no further tensors; found {sorted(unknown)}"
                )
            if others:
                found[name] = others
        return encode(found, f"{self.where}: optimizer state")


def _check_kind(optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, where: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{where}: optimizer: expected an optimizer whose step needs no closure; found LBFGS")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(f"{where}: scheduler: expected a schedule that needs no metric; found ReduceLROnPlateau")


def _generators(parameters: Iterable[torch.Tensor]) -> dict[str, _Generator]:
    """Find PyTorch's generators that the model draws from: name -> how to read and to set its state."""
    found: dict[str, _Generator] = {"torch": (torch.get_rng_state, torch.set_rng_state)}
    device = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
    if device is not None:
        found["cuda"] = (
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
        )
    return found


def _scale(scheduler: Scheduler, group: int, factor: float) -> None:
    """Scale the rates that a schedule keeps for a parameter group, and those of schedules within it."""
    for name in ("base_lrs", "max_lrs"):
        rates = getattr(scheduler, name, None)
        if rates is not None:
            rates[group] *= factor
    scheduler._last_lr = [item["lr"] for item in scheduler.optimizer.param_groups]
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale(inner, group, factor)
