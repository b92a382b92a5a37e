"""What a training publishes from: a model whose tensors are read again and again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from ...store.graphs.graph import ModelGraph
from ...store.recipes import is_note
from ..client.frameworks import adapter_of, is_keras, recipe_of

if TYPE_CHECKING:
    from ...store.keras import ModelState


class Source:
    """Gives the tensors of one model, which is trained, again and again.

    What can be known once is found out once: the architecture, what rebuilds a Keras model, the names of its weights.
    What builds a torch module again has its attributes and flags, which a training may change: it is written each time.

    Args:
        model: a Keras model, a torch module, a mapping of names to arrays, or a callable that gives one of these.
    """

    def __init__(self, model: object) -> None:
        self._model = model
        self.graph: ModelGraph | None = None
        """None for a mapping."""
        self.recipe: str | None = None
        held = self._held(model)
        self._state: ModelState | None = None
        self._adapter: Any = None
        if not isinstance(held, Mapping):
            self._adapter = adapter_of(held)
            if is_keras(self._adapter):
                self._state = self._adapter.ModelState(held)
            self.graph = graph = self._state.graph() if self._state else self._adapter.graph_of(held)
            weights: Collection[str] = self._state.weights.keys() if self._state else ()
            self._kept = frozenset(graph.tensors).difference(weights)
            """Names of the layers' other state, as in the graph. Of a torch module, all names."""
            self.recipe = recipe_of(held)

    def is_of(self, model: object) -> bool:
        """Tell whether this is the source of just that object."""
        return self._model is model

    def tensors(self, model: object) -> Mapping[str, object]:
        """Return the tensors as they are now, without a copy where the framework allows it."""
        if self._state is not None:
            kept = self._state.kept()
            if kept.keys() != self._kept:
                self.graph, self._kept = self._state.graph(kept), frozenset(kept)
            return self._adapter.snapshot(self._state.weights) | kept
        held = self._held(model)
        if isinstance(held, Mapping):
            return cast("Mapping[str, object]", held)
        if self.recipe is not None and not is_note(self.recipe):
            self.recipe = recipe_of(held)
        found: dict[str, object] = self._adapter.tensors_of(held)
        if found.keys() != self._kept:  # a value of its state takes more arrays, or fewer
            self.graph, self._kept = self._adapter.graph_of(held), frozenset(found)
        return found

    @staticmethod
    def _held(model: object) -> object:
        if isinstance(model, Mapping):
            return cast("Mapping[str, object]", model)
        return model() if callable(model) and not _is_model(model) else model


def _is_model(value: object) -> bool:
    roots = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return bool(roots & {"keras", "torch"})
