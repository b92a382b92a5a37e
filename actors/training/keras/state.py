"""The state of a Keras model in training on TensorFlow: its variables as named tensors, the rest as facts.

Rules
- Tensors are the model's weights and statistics, the states of random generators that its layers hold (Keras' own do),
  and the optimizer's variables. Names do not depend on what else the process has built.
- The learning rate is a fact, so that a clone may have another one; a schedule is code, and reads the counter of
  iterations, which is a tensor.
- Facts are that, the steps done, and the random states of Python and NumPy. No part of the state: metrics, TensorFlow's
  global seed, Keras' global generator. A layer that draws random numbers holds a `keras.random.SeedGenerator`. A step
  that writes to a variable which is no part of the state is warned of.
- An array that is given out is a snapshot without a copy: TensorFlow writes to new memory while somebody holds the old.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's and tensorflow's types are partial)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import keras
import numpy as np

from ....store.arrays import Array, as_numpy, dtype_name, dtype_of
from ....store.errors import TensorNotFoundError
from ....store.keras import optimizer_state_of, weights_in_call_order
from ....store.keras_memory import VariableMemory
from ..torch.random_state import random_facts, set_random
from ..training import Facts, TensorSpec


class KerasState:
    """A training's state: what `Training` has to tell of it.

    Args:
        model: built and compiled, with an optimizer.
        where: what it is, for errors.

    Raises:
        ValueError: it is not, or not on TensorFlow, or on several devices at once.
        GraphError: the model has no weights yet because its input shape is unknown.
    """

    def __init__(self, model: keras.Model, where: str) -> None:
        _check(model, where)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.model, self.where = model, where
        self.steps_done = 0
        weights = weights_in_call_order(model)
        slots = optimizer_state_of(model, numbered=False)
        rates = {id(getattr(optimizer, "_learning_rate", None)) for optimizer in _optimizers(model.optimizer)}
        self.rates = {name: variable for name, (variable, _) in slots.items() if id(variable) in rates}
        """Learning rates that are variables, by name."""
        seeds = _seeds(model, weights)
        self.variables: dict[str, keras.Variable] = {}
        """Name -> variable, in the order of `specs`."""
        trained = {id(weight) for weight in cast("list[keras.Variable]", model.trainable_variables)}
        for name, weight in reversed(weights.items()):
            if id(weight) in trained:
                own = {slot: variable for slot, (variable, owner) in slots.items() if owner == name}
                self.variables |= own | {name: weight}
        self.trained = [name for name in self.variables if name in weights]
        """Weights that are trained, in the order of the backward pass."""
        others = {name: variable for name, (variable, _) in slots.items() if name not in self.rates}
        self.variables |= {
            name: variable for name, variable in (others | weights | seeds).items() if name not in self.variables
        }
        local = {id(variable) for layer in _layers(model) for variable in layer._non_trainable_variables}
        self._specs = [
            _spec(name, variable, name in seeds or id(variable) in local) for name, variable in self.variables.items()
        ]
        counters = [name for name in others if slots[name][1] is None]
        self._forward = list(dict.fromkeys([*seeds, *weights, *counters, *self.variables]))
        self._memory = VariableMemory(self.variables)
        self._scratch: dict[str, Array] = {}
        self._receiving = False

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors in the order in which a step updates them: optimizer's slots, then the weight."""
        return self._specs

    def forward_order(self) -> Sequence[str]:
        """Name the tensors in the order in which the next step reads them."""
        return self._forward

    def tensor(self, name: str) -> Array:
        """Return a tensor's present value, which later steps do not change."""
        return as_numpy(self._variable(name), f"{self.where}: tensor {name!r}")

    def memory(self, name: str) -> Array:
        """Return the memory that a tensor is received into: the variable's own, or scratch where it has none."""
        variable = self._variable(name)
        self._receiving = True
        buffer = self._memory.in_place(name)
        if buffer is None:
            shape, dtype = tuple(variable.shape), dtype_of(dtype_name(variable.dtype))
            buffer = self._scratch.setdefault(name, np.zeros(shape, dtype))
        return buffer

    def filled(self, name: str) -> None:
        """Tell that all of a tensor's memory has been written; assigns it if that was scratch."""
        array = self._scratch.pop(name, None)
        if array is not None:
            self.variables[name].assign(array)

    def settle(self) -> None:
        """Tell that nothing is received any more: memory that variables have left is let go."""
        if self._receiving:
            self._memory, self._scratch, self._receiving = VariableMemory(self.variables), {}, False

    def facts(self) -> dict[str, object]:
        """Return steps done, learning rates, and the random states of Python and NumPy."""
        return {
            "steps_done": self.steps_done,
            "learning_rates": {name: float(rate.value) for name, rate in self.rates.items()},
            "random": random_facts(),
        }

    def restore(self, facts: Facts) -> None:
        """Take over what `facts` gave.

        Raises:
            ValueError: they are of another optimizer.
        """
        rates: Mapping[str, float] = facts["learning_rates"]
        if rates.keys() != self.rates.keys():
            raise ValueError(f"{self.where}: facts: expected learning rates {list(self.rates)}; found {list(rates)}")
        for name, rate in rates.items():
            self.rates[name].assign(rate)
        set_random(facts["random"])
        self.steps_done = int(facts["steps_done"])

    def grouped(self, names: Sequence[str], least: int, most: int) -> list[list[str]]:
        """Put tensors that follow one another into groups.

        Args:
            names: of tensors.
            least: bytes up to which a group grows.
            most: groups at most, but for tensors that are large; groups grow if they would be more.
        """
        sizes = {spec.name: spec.nbytes for spec in self._specs}
        limit = max(least, sum(sizes[name] for name in names) // most)
        groups: list[list[str]] = []
        filled = limit
        for name in names:
            if filled and filled + sizes[name] > limit:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += sizes[name]
        return groups

    def handles(self) -> set[int]:
        """Return the ids of the handles of TensorFlow's variables that are in the state, or need not be: metrics."""
        metrics = cast("list[keras.Variable]", self.model.metrics_variables)
        parts = [*self.variables.values(), *self.rates.values(), *metrics]
        return {id(part.value.handle) for part in parts}

    def _variable(self, name: str) -> keras.Variable:
        if name not in self.variables:
            raise TensorNotFoundError(f"{self.where}: expected a tensor of the training's state; found {name!r}")
        return self.variables[name]


def _check(model: keras.Model, where: str) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"{where}: expected Keras with the TensorFlow backend; found {keras.backend.backend()}")
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"{where}: expected a compiled model with an optimizer; found {model.name!r} without one")
    replicas = cast(int, model.distribute_strategy.num_replicas_in_sync)
    if replicas != 1:
        raise ValueError(f"{where}: expected a model on one device, one process per rank; found {replicas} replicas")


def _optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """List an optimizer and those within it."""
    inner = getattr(optimizer, "inner_optimizer", None)
    several = [inner] if inner is not None else list(getattr(optimizer, "optimizers", ()))
    return [optimizer, *(found for other in several for found in _optimizers(other))]


def _seeds(model: keras.Model, weights: Mapping[str, object]) -> dict[str, keras.Variable]:
    """Name what is neither a weight nor the optimizer's: states of random generators, in the layers' order."""
    known = {id(weight) for weight in weights.values()}
    states = [variable for variable in cast("list[keras.Variable]", model.variables) if id(variable) not in known]
    return {f"random/{place}": state for place, state in enumerate(states)}


def _layers(model: keras.Model) -> list[keras.Layer]:
    return list(model._flatten_layers())


def _spec(name: str, variable: keras.Variable, local: bool) -> TensorSpec:
    dtype, shape = dtype_name(variable.dtype), tuple(variable.shape)
    return TensorSpec(name, dtype, shape, math.prod(shape) * dtype_of(dtype).itemsize, local)
