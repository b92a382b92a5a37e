"""Which framework a model belongs to, and its adapter; a framework is imported only when one of its models comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import Executor
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...store.arrays import as_numpy, checked
from ...store.errors import GraphError, TensorNotFoundError
from ...store.graphs.graph import ModelGraph
from ..memory.copying import Pair, copy_all

if TYPE_CHECKING:
    import keras
    from torch import nn

    from ...store.keras_memory import WeightMemory

_OPTIMIZER = "optimizer/"


def adapter_of(model: object) -> ModuleType:
    """Return `store.keras` or `store.torch`, whichever `model` belongs to.

    Raises:
        GraphError: it is a model of neither.
    """
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and isinstance(model, keras.Model):
        from ...store import keras as keras_adapter

        return keras_adapter
    if torch is not None and isinstance(model, torch.nn.Module):
        from ...store import torch as torch_adapter

        return torch_adapter
    raise GraphError(f"expected a Keras model or a torch module; found {type(model).__name__}")


def recipe_of(model: object) -> str | None:
    """Return what rebuilds a Keras model; None for a torch module, which only its code can rebuild."""
    recipe = getattr(adapter_of(model), "recipe_of", None)
    return recipe(model) if recipe is not None else None


def optimizer_tensors_of(model: object) -> dict[str, np.ndarray]:
    """Return the state of a Keras model's optimizer.

    Raises:
        GraphError: a torch module does not know its optimizer.
    """
    of = getattr(adapter_of(model), "optimizer_tensors_of", None)
    if of is None:
        raise GraphError(
            f"optimizer=True: expected a Keras model; found {type(model).__name__}, save its optimizer's state_dict"
        )
    return of(model)


def rebuild(recipe: str, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> keras.Model:
    """Build a Keras model from what `save_model` stored, and give it its tensors."""
    from ...store import keras as keras_adapter

    model = keras_adapter.build(recipe)
    fill(model, tensors, graph)
    return model


def fill(model: object, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> None:
    """Assign tensors to a model, those of its optimizer too where they were saved.

    They are matched by name; where the names differ, as those do that Keras numbers, by architecture: `graph` is
    that of the stored model.

    Raises:
        TensorNotFoundError: the model has no such tensor, and another architecture.
        TensorMismatchError: a tensor has another shape or dtype; none was assigned.
    """
    adapter = adapter_of(model)
    own = {name: array for name, array in tensors.items() if not name.startswith(_OPTIMIZER)}
    target = adapter.graph_of(model)
    if not own.keys() <= set(target.tensors):
        own = _renamed(own, graph, target) or own
    adapter.assign(model, own)
    if len(tensors) > sum(not name.startswith(_OPTIMIZER) for name in tensors):
        adapter.assign_optimizer(model, {k: v for k, v in tensors.items() if k.startswith(_OPTIMIZER)})


def _renamed(tensors: Mapping[str, np.ndarray], graph: ModelGraph, target: ModelGraph) -> dict[str, np.ndarray] | None:
    """Return the tensors under the names that `target` has for them; None unless the architectures are equal."""
    if graph.fingerprint != target.fingerprint:
        return None
    return {
        mine: tensors[theirs]
        for layer, source in target.common_prefix(graph).items()
        for mine, theirs in zip(target.by_name[layer].tensors, graph.by_name[source].tensors, strict=True)
    }


class Source:
    """Gives the tensors of one model, which is trained, again and again.

    What can be known once is found out once: the architecture, what rebuilds the model, the names of its weights.

    Args:
        model: a Keras model, a torch module, a mapping of names to arrays, or a callable that gives one of these.
    """

    def __init__(self, model: object) -> None:
        self._model = model
        self.graph: ModelGraph | None = None
        """None for a mapping."""
        self.recipe: str | None = None
        held = self._held(model)
        self._weights: Any = None
        self._adapter: Any = None
        if not isinstance(held, Mapping):
            self._adapter = adapter_of(held)
            self.graph, self.recipe = self._adapter.graph_of(held), recipe_of(held)
            if hasattr(self._adapter, "weights_of"):
                self._weights = self._adapter.weights_of(held)

    def is_of(self, model: object) -> bool:
        """Tell whether this is the source of just that object."""
        return self._model is model

    def tensors(self, model: object) -> Mapping[str, object]:
        """Return the tensors as they are now, without a copy where the framework allows it."""
        if self._weights is not None:
            return self._adapter.snapshot(self._weights)
        held = self._held(model)
        return cast("Mapping[str, object]", held) if isinstance(held, Mapping) else self._adapter.tensors_of(held)

    @staticmethod
    def _held(model: object) -> object:
        if isinstance(model, Mapping):
            return cast("Mapping[str, object]", model)
        return model() if callable(model) and not _is_model(model) else model


def _is_model(value: object) -> bool:
    roots = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return bool(roots & {"keras", "torch"})


class Filler:
    """Fills one model, which only answers, with one version after the other: one copy of the bytes.

    What can be known once is found out once: the model's architecture, the names of its weights and their memory.

    Args:
        model: a Keras model or a torch module.
        helper: copies half of many bytes.
    """

    def __init__(self, model: Any, helper: Executor) -> None:
        self._model = model
        self._adapter = adapter_of(model)
        self._graph: ModelGraph = self._adapter.graph_of(model)
        self._memory: Any = _keras_memory(model) if hasattr(self._adapter, "recipe_of") else _TorchMemory(model)
        self._expected = {
            name: (str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
            for name, weight in self._memory.weights.items()
        }
        self._helper = helper

    def fill(self, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> None:
        """Write a version's tensors; those of its optimizer are left out.

        Raises:
            GraphError: another architecture than the model's.
            TensorNotFoundError: the model has no such tensor, or one that it has is missing.
            TensorMismatchError: a tensor has another shape or dtype. None was written.
        """
        own = {name: array for name, array in tensors.items() if not name.startswith(_OPTIMIZER)}
        if len(graph.layers):
            renamed = own if own.keys() == self._expected.keys() else _renamed(own, graph, self._graph)
            if renamed is None or graph.fingerprint != self._graph.fingerprint:
                raise GraphError(
                    f"expected the architecture of the model that answers; found {_unlike(graph, self._graph)}"
                )
            own = renamed
        arrays = checked(own, self._expected)
        missing = sorted(self._expected.keys() - arrays.keys())
        if missing:
            raise TensorNotFoundError(f"expected all {len(self._expected)} tensors of the model; {missing} are missing")
        pairs: list[Pair] = []
        for name, array in arrays.items():
            target = self._memory.in_place(name)
            if target is not None:
                pairs.append((target, array))
            else:
                self._adapter.assign(self._model, {name: array})
        copy_all(pairs, self._helper)


def _keras_memory(model: keras.Model) -> WeightMemory:
    from ...store.keras_memory import WeightMemory

    return WeightMemory(model)


class _TorchMemory:
    """The memory of a torch module's tensors; those on a GPU have none that NumPy could write to."""

    def __init__(self, module: nn.Module) -> None:
        from ...store.torch import _state

        self.weights = _state(module)

    def in_place(self, name: str) -> np.ndarray | None:
        tensor = self.weights[name]
        return as_numpy(tensor, f"tensor {name!r}") if tensor.device.type == "cpu" else None


def _unlike(graph: ModelGraph, mine: ModelGraph) -> str:
    """Say where an architecture leaves ours."""
    same = mine.common_prefix(graph)
    other = next((layer for layer in graph.layers if layer.name not in same.values()), None)
    if other is None:
        return f"one of {len(graph.layers)} layers, where the model has {len(mine.layers)}"
    return f"layer {other.name!r} {dict(other.config)}, which the model has not"
