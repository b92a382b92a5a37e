"""The parts of a model that is a candidate: its graph and its tensors, which can be filled and frozen.

Rules
- What can be known once is found out once: taking a Keras model apart costs more than all else that is done here.
- What is frozen is told by tensors: a Keras layer is frozen when all of its weights are to be, a parameter of a torch
  module when it is. So layers inside layers, and layers that are used twice, need no rule of their own.
- A frozen Keras layer runs as in inference: BatchNormalization does not move its statistics. In PyTorch that is the
  training flag, which `module.train()` sets again at every epoch: a module whose buffers are frozen is put back
  before each of its calls, until it thaws.
- Frozen is no promise: some layers write to their weights all the same. Who saves compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...store.graphs.graph import ModelGraph
from ..client.frameworks import adapter_of, is_keras

if TYPE_CHECKING:
    from keras import Layer

    from ...store.keras import ModelState
    from ...store.torch import State


class ModelParts:
    """A model taken apart once.

    Args:
        model: a built Keras model or a torch module.

    Raises:
        GraphError: it is neither.
    """

    def __init__(self, model: object) -> None:
        self._model: Any = model
        self._adapter = adapter_of(model)
        of_keras = is_keras(self._adapter)
        self._state: ModelState | None = self._adapter.ModelState(model) if of_keras else None
        self._read: State | None = None if of_keras else self._adapter.State(model)
        """Of a torch module, as it was taken apart."""
        self.graph: ModelGraph = self._state.graph() if self._state else self._adapter.graph_of(model, self._read)

    @cached_property
    def first(self) -> dict[str, np.ndarray]:
        """The tensors that it was taken apart with; those of a torch module show later changes."""
        return self._state.tensors() if self._state else self._adapter.tensors_of(self._model, self._read)

    def prepare(self) -> None:
        """Find out now what will be asked for."""
        _ = self.first, self.graph.to_json()

    def forget(self) -> None:
        """Let the tensors go that it was taken apart with: some may be copies, which a training has no use for."""
        self.__dict__.pop("first", None)
        self._read = None

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the tensors as they are now, without a copy where the framework allows it."""
        return self._state.tensors() if self._state else self._adapter.tensors_of(self._model)

    def graph_with(self, tensors: Mapping[str, np.ndarray]) -> ModelGraph:
        """Return the graph that names just these tensors: what the model keeps beside weights may have changed."""
        if set(self.graph.tensors) != set(tensors):
            self.graph = self._state.graph(tensors) if self._state else self._adapter.graph_of(self._model)
        return self.graph

    def assign(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Set the tensors that are named, in what it was taken apart with."""
        if self._state is not None:
            self._state.assign(tensors)
        else:
            self._adapter.assign(self._model, tensors, self._read)

    def freeze(self, names: Set[str]) -> Callable[[], None]:
        """Keep tensors as they are while the model is trained.

        Args:
            names: of the tensors; what layers keep beside their weights is not trained anyway. A Keras model is to be
                compiled after this.

        Returns:
            Call it when the model is not trained any more: takes off what was attached to it; flags stay.
        """
        if self._state is not None:
            weights = self._state.weights
            frozen = {id(weights[name]) for name in names & weights.keys()}
            _freeze_layers(self._adapter.all_layers(self._model), frozen)
            return _nothing
        tensors: Mapping[str, Any] = (self._read or self._adapter.State(self._model)).tensors
        kept = [tensors[name] for name in names & tensors.keys()]
        for tensor in kept:
            if tensor.requires_grad:
                tensor.requires_grad_(False)
        return self._adapter.keep_in_inference(self._model, {id(tensor) for tensor in kept})


def _freeze_layers(layers: Sequence[Layer], frozen: Set[int]) -> None:
    for layer in layers:
        weights = {id(weight) for weight in cast("list[object]", layer.weights)}
        if weights and weights <= frozen:
            layer.trainable = False


def _nothing() -> None:
    pass
