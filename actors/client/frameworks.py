"""Which framework a model belongs to, and its adapter; a framework is imported only when one of its models comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...store.arrays import as_numpy, checked
from ...store.errors import GraphError, TensorNotFoundError
from ...store.graphs.graph import ModelGraph
from ...store.values import base_of
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
    adapter = adapter_of(model)
    return adapter.recipe_of(model) if _is_keras(adapter) else None


def training_tensors_of(model: object, optimizer: object, scheduler: object) -> dict[str, np.ndarray]:
    """Return the state of a model's optimizer, and of its learning-rate schedule.

    Args:
        model: whose parameters they are over.
        optimizer: True for that which a Keras model was compiled with, an optimizer of `torch.optim` for a torch
            module; False: none.
        scheduler: of `torch.optim.lr_scheduler`; None: none.

    Raises:
        GraphError: a torch module does not know its optimizer, and Keras' optimizers know their schedule.
    """
    adapter, kind = adapter_of(model), type(model).__name__
    if _is_keras(adapter):
        if not isinstance(optimizer, bool) or scheduler is not None:
            raise GraphError(
                f"optimizer of a Keras model ({kind}): expected True or False, and no scheduler; "
                f"found {type(optimizer).__name__} and {type(scheduler).__name__}"
            )
        return adapter.optimizer_tensors_of(model) if optimizer else {}
    return adapter.optimizer_tensors_of(model, _of_torch(optimizer, kind), scheduler)


def _of_torch(optimizer: object, kind: str) -> Any:
    """Return an optimizer of torch, or None for False.

    Raises:
        GraphError: it is something else.
    """
    if optimizer is False:
        return None
    if not isinstance(optimizer, sys.modules["torch"].optim.Optimizer):
        raise GraphError(
            f"optimizer of a torch module ({kind}): expected the optimizer itself, of torch.optim; "
            f"found {optimizer!r:.80}"
        )
    return optimizer


def rebuild(recipe: str, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> keras.Model:
    """Build a Keras model from what `save_model` stored, and give it its tensors."""
    from ...store import keras as keras_adapter

    model = keras_adapter.build(recipe)
    fill(model, tensors, graph)
    return model


def fill(
    model: object,
    tensors: Mapping[str, np.ndarray],
    graph: ModelGraph,
    *,
    optimizer: object = True,
    scheduler: object = None,
    strict: bool = True,
) -> None:
    """Assign tensors to a model, those of its optimizer too where they were saved.

    They are matched by name; where the names differ, as those do that Keras numbers, by architecture: `graph` is
    that of the stored model.

    Args:
        model: is filled.
        tensors: what was stored.
        graph: that of the stored model.
        optimizer: of a torch module, gets its state; of a Keras model, True: that which it has does.
        scheduler: of a torch module's optimizer, gets its state.
        strict: the model may have no tensor that was not stored.

    Raises:
        TensorNotFoundError: the model has no such tensor, and another architecture, or one that was not stored.
        TensorMismatchError: a tensor has another shape or dtype; none was assigned.
    """
    adapter = adapter_of(model)
    own = {name: array for name, array in tensors.items() if not _is_of_training(name)}
    target: ModelGraph = adapter.graph_of(model)
    if not _bases(own) <= _bases(target.tensors):
        own = _unwrapped(own, target) or _renamed(own, graph, target) or own
    missing = _lacking(adapter, model, own, target) if strict else []
    if missing:
        raise TensorNotFoundError(
            f"expected values for all tensors of the model, or strict=False; {missing[:8]} of it are not stored"
        )
    if _is_keras(adapter):
        adapter.assign(model, own)
        if any(name.startswith(_OPTIMIZER) for name in tensors):
            adapter.assign_optimizer(model, {k: v for k, v in tensors.items() if k.startswith(_OPTIMIZER)})
        return
    given = None if optimizer is True else _of_torch(optimizer, type(model).__name__)
    training = adapter.restoring(model, tensors, given, scheduler, _names_of(tensors, own))
    adapter.assign(model, own)
    training.apply()


def _is_keras(adapter: ModuleType) -> bool:
    return hasattr(adapter, "recipe_of")


def _is_of_training(name: str) -> bool:
    return name.startswith(_OPTIMIZER) or base_of(name) == "scheduler"


def _bases(names: Iterable[str]) -> set[str]:
    """Return the names of tensors and of values: how many arrays a value takes may change."""
    return {base_of(name) or name for name in names}


def _lacking(adapter: ModuleType, model: object, own: Mapping[str, np.ndarray], target: ModelGraph) -> list[str]:
    if _is_keras(adapter):
        return sorted(set(target.tensors) - own.keys())
    return adapter.lacking(model, own.keys())


def _names_of(tensors: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return what stored tensors are called in the model."""
    names = {id(array): name for name, array in own.items()}
    return {name: names[id(array)] for name, array in tensors.items() if id(array) in names}


def _unwrapped(tensors: Mapping[str, np.ndarray], target: ModelGraph) -> dict[str, np.ndarray] | None:
    """Return the tensors of a module that was saved in what wrapped it, under the module's own names."""
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in tensors):
            found = {name.removeprefix(prefix): array for name, array in tensors.items()}
            return found if _bases(found) <= _bases(target.tensors) else None
    return None


def _renamed(tensors: Mapping[str, np.ndarray], graph: ModelGraph, target: ModelGraph) -> dict[str, np.ndarray] | None:
    """Return the tensors under the names that `target` has for them; None unless the architectures are equal."""
    if graph.fingerprint != target.fingerprint:
        return None
    pairs = [(target.by_name[mine], graph.by_name[theirs]) for mine, theirs in target.common_prefix(graph).items()]
    if any(len(layer.tensors) != len(source.tensors) for layer, source in pairs):  # values that take more arrays
        return None
    return {m: tensors[t] for layer, source in pairs for m, t in zip(layer.tensors, source.tensors, strict=True)}


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
        self._memory: Any = _keras_memory(model) if _is_keras(self._adapter) else _TorchMemory(model)
        self._names = _bases(self._graph.tensors)
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
        own = {name: array for name, array in tensors.items() if not _is_of_training(name)}
        if len(graph.layers):
            renamed = own if _bases(own) == self._names else _renamed(own, graph, self._graph)
            if renamed is None or graph.fingerprint != self._graph.fingerprint:
                raise GraphError(
                    f"expected the architecture of the model that answers; found {_unlike(graph, self._graph)}"
                )
            own = renamed
        missing = sorted(self._names - _bases(own))
        if missing:
            raise TensorNotFoundError(f"expected all {len(self._names)} tensors of the model; {missing} are missing")
        kept = {name: array for name, array in own.items() if name not in self._expected}
        arrays = checked({name: array for name, array in own.items() if name in self._expected}, self._expected)
        pairs: list[Pair] = []
        for name, array in arrays.items():
            target = self._memory.in_place(name)
            if target is not None:
                pairs.append((target, array))
            else:
                kept[name] = array
        if kept:
            self._adapter.assign(self._model, kept)
        copy_all(pairs, self._helper)


def _keras_memory(model: keras.Model) -> WeightMemory:
    from ...store.keras_memory import WeightMemory

    return WeightMemory(model)


class _TorchMemory:
    """The memory of a torch module's own tensors; those on a GPU have none that NumPy could write to."""

    def __init__(self, module: nn.Module) -> None:
        from ...store.torch import State

        state = State(module)
        self.weights = {name: tensor for name, tensor in state.tensors.items() if state.is_own(name)}

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
