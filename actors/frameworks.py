"""Which framework a model belongs to, and its adapter; a framework is imported only when one of its models comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..store.errors import GraphError
from ..store.graph import ModelGraph

_OPTIMIZER = "optimizer/"


def adapter_of(model: Any) -> Any:
    """Give `store.keras` or `store.torch`, whichever `model` belongs to.

    Raises:
        GraphError: it is a model of neither.
    """
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and isinstance(model, keras.Model):
        from ..store import keras as keras_adapter

        return keras_adapter
    if torch is not None and isinstance(model, torch.nn.Module):
        from ..store import torch as torch_adapter

        return torch_adapter
    raise GraphError(f"expected a Keras model or a torch module; found {type(model).__name__}")


def recipe_of(model: Any) -> str | None:
    """Give what rebuilds a Keras model; None for a torch module, which only its code can rebuild."""
    recipe = getattr(adapter_of(model), "recipe_of", None)
    return recipe(model) if recipe is not None else None


def optimizer_tensors_of(model: Any) -> dict[str, np.ndarray]:
    """Give the state of a Keras model's optimizer.

    Raises:
        GraphError: a torch module does not know its optimizer.
    """
    of = getattr(adapter_of(model), "optimizer_tensors_of", None)
    if of is None:
        raise GraphError(
            f"optimizer=True: expected a Keras model; found {type(model).__name__}, save its optimizer's state_dict"
        )
    return of(model)


def rebuild(recipe: str, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> Any:
    """Build a Keras model from what `save_model` stored, and give it its tensors."""
    from ..store import keras as keras_adapter

    model = keras_adapter.build(recipe)
    fill(model, tensors, graph)
    return model


def fill(model: Any, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> None:
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
    """Give the tensors under the names that `target` has for them; None unless the architectures are equal."""
    if graph.fingerprint != target.fingerprint:
        return None
    return {
        mine: tensors[theirs]
        for layer, source in target.common_prefix(graph).items()
        for mine, theirs in zip(target.by_name[layer].tensors, graph.by_name[source].tensors, strict=True)
    }
