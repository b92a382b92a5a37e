"""What a consumer's model is filled by: each version's bytes are copied once, to where the model has them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.arrays import as_numpy, checked
from ...store.errors import GraphError, TensorNotFoundError
from ...store.graphs.graph import ModelGraph
from ..client.frameworks import adapter_of, bases, is_keras, parted, renamed
from ..memory.copying import Pair, copy_all

if TYPE_CHECKING:
    import keras
    from torch import nn

    from ...store.keras import ModelState
    from ...store.keras_memory import WeightMemory


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
        self._state: ModelState | None = None
        if is_keras(self._adapter):
            self._state = self._adapter.ModelState(model)
        self._graph: ModelGraph = self._state.architecture if self._state else self._adapter.graph_of(model)
        self._memory: Any = _keras_memory(model) if self._state else _TorchMemory(model)
        self._names = bases(self._graph.tensors)
        self._expected = {
            name: (str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
            for name, weight in self._memory.weights.items()
        }
        self._helper = helper
        self._kept = b""
        """Digest of what layers keep, and of the weights that they derive something from."""

    def fill(self, tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> bool:
        """Write a version's tensors; those of its optimizer are left out.

        Returns:
            Whether what was compiled of the model is void: its layers were given state other than weights.

        Raises:
            GraphError: another architecture than the model's, or a layer refused its state.
            TensorNotFoundError: the model has no such tensor, or one that it has is missing.
            TensorMismatchError: a tensor has another shape or dtype. None was written.
        """
        own, _ = parted(tensors, graph)
        if len(graph.layers):
            own = self._named(own, graph)
        weights, kept = self._state.checked(own) if self._state else self._checked(own)
        missing = sorted((self._expected.keys() if self._state else self._names) - bases({**weights, **kept}))
        if missing and self._state is None:  # a tied tensor has several names
            missing = self._adapter.lacking(self._model, {**weights, **kept})
        if missing:
            raise TensorNotFoundError(f"expected all {len(self._names)} tensors of the model; {missing} are missing")
        pairs: list[Pair] = []
        for name, array in weights.items():
            target = self._memory.in_place(name)
            if target is not None:
                pairs.append((target, array))
            elif self._state is not None:
                self._state.weights[name].assign(array)
            else:
                kept[name] = array
        if self._state is None and kept:  # with the weights: hooks may derive something from both
            self._adapter.assign(self._model, {**weights, **kept})
        else:
            copy_all(pairs, self._helper)
            if self._state is None:
                self._memory.count_writes()
        return self._state is not None and self._restore(self._state, weights, kept)

    def _checked(self, own: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Tell a torch module's own tensors, which were checked, from what goes through `load_state_dict`."""
        weights = checked({name: array for name, array in own.items() if name in self._expected}, self._expected)
        self._adapter.check_tied(self._memory.tied, weights)
        return weights, {name: a for name, a in own.items() if name not in weights}

    def _named(self, own: dict[str, np.ndarray], graph: ModelGraph) -> dict[str, np.ndarray]:
        """Return a version's tensors under the model's names."""
        if graph.fingerprint != self._graph.fingerprint:
            raise GraphError(
                f"expected the architecture of the model that answers; found {_unlike(graph, self._graph)}"
            )
        if self._state is None:
            return own if bases(own) == self._names else renamed(own, graph, self._graph) or own
        return dict(self._state.all_of(own, graph))

    def _restore(self, state: ModelState, weights: Mapping[str, np.ndarray], kept: Mapping[str, np.ndarray]) -> bool:
        """Give layers what they keep, if it is not what they have: what is compiled need not be compiled again then."""
        digest = state.digest(weights, kept)
        if digest == self._kept:
            return False
        self._kept = b""
        given = state.restore(kept, weights.keys(), lambda: None)  # it does not answer, and is filled anew
        self._kept = digest
        return given


def _keras_memory(model: keras.Model) -> WeightMemory:
    from ...store.keras_memory import WeightMemory

    return WeightMemory(model)


class _TorchMemory:
    """The memory of a torch module's own tensors; those on a GPU have none that NumPy could write to.

    A module that runs code of its own when it is loaded has no `weights` here: its `load_state_dict` sets them.
    """

    def __init__(self, module: nn.Module) -> None:
        from ...store.torch import State, loads_itself, tied

        state = State(module)
        own = {} if loads_itself(module) else state.tensors
        self.weights = {name: tensor for name, tensor in own.items() if state.is_own(name)}
        self.tied = tied(self.weights)
        """Names of tensors that are the same memory."""

    def count_writes(self) -> None:
        """Update the tensors' version counters, by which a module may know that a cached value is stale."""
        from torch.autograd.graph import increment_version

        for tensor in self.weights.values():
            increment_version(tensor)

    def in_place(self, name: str) -> np.ndarray | None:
        tensor = self.weights[name]
        return as_numpy(tensor, f"tensor {name!r}") if tensor.device.type == "cpu" else None


def _unlike(graph: ModelGraph, mine: ModelGraph) -> str:
    """Say where an architecture differs from the model's."""
    same = mine.common_prefix(graph).values()
    others = [layer for layer in graph.layers if layer.name not in same]
    constants = [layer.config.get("value") for layer in others if layer.config.get("class") == "constant"]
    if any(isinstance(value, Mapping) and "content" in value for value in constants):
        return (
            "a graph stored by an earlier version of TensorVine, which contains the values of tensors that are not "
            "stored: save the model again"
        )
    if not others:
        return f"an architecture of {len(graph.layers)} layers; the model has {len(mine.layers)}"
    return f"layer {others[0].name!r} {dict(others[0].config)}, which the model does not have"
