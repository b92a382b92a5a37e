"""All that is stored of one model: its weights by name, and what its layers keep beside them.

Rules
- What can be known once is found out once. Weights are the model's own variables, and are as they are when asked.
- Everything is checked before anything is written. Where a layer's own hook fails all the same, what was written is
  taken back: weights bit for bit, and what layers keep as far as their hooks take it.
- A layer is given its state when what it keeps is among the tensors, or one of its weights is: it may derive something
  from them. What Keras compiled of the model before that is forgotten, for it holds the state from then.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's types are partial)

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from hashlib import blake2b

import keras

from ..arrays import Array, as_bytes, as_numpy, checked, dtype_name, read_only
from ..errors import TensorNotFoundError, TensorVineError
from ..graphs.graph import ModelGraph
from ..graphs.renaming import by_own_names
from .kept import Keeper
from .vertices import Flattened

_log = logging.getLogger(__name__)


class ModelState:
    """The weights and the layer state of a Keras model.

    Layer state is data that a layer keeps outside its weights, such as a vocabulary.

    Args:
        model: A built Keras model.

    Raises:
        GraphError: if the model is not built.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._flat = Flattened(model, configs=False)
        self._ids = self._flat.names.keys()
        names = self._flat.names
        self.weights: dict[str, keras.Variable] = {names[id(weight)]: weight for weight in model.weights}
        """The variables, by name."""
        self.expected = _expected(self.weights)
        """Dtype name and shape of each weight, by name."""

    # ---- what it is -------------------------------------------------------------------------------------

    def graph(self, kept: Iterable[str] | None = None) -> ModelGraph:
        """Return the graph of the model, including the tensors of the layer state.

        Args:
            kept: Names of the layer-state tensors. Names of weights are ignored. If None, the current layer state of
                the model determines the names.
        """
        return self._told.graph(kept)

    @cached_property
    def architecture(self) -> ModelGraph:
        """The graph of the model without layer state."""
        return ModelGraph(self._told.vertices)

    @cached_property
    def _told(self) -> Flattened:
        return Flattened(self._model)

    def tensors(self) -> dict[str, Array]:
        """Return the weights and the layer state of the model as read-only arrays, by name (see `tensors_of`)."""
        return snapshot(self.weights) | self.kept()

    def kept(self) -> dict[str, Array]:
        """Return the layer state of the model as read-only arrays, by name.

        Raises:
            GraphError: if the state of a layer cannot be read.
        """
        return {name: a for keeper in self._keepers for name, a in keeper.tensors(self._ids).items()}

    def is_kept(self, name: str) -> bool:
        """Return whether `name` is the name of a layer-state tensor."""
        return name not in self.weights and any(keeper.part_of(name) for keeper in self._keepers)

    def renamed(self, tensors: Mapping[str, Array], graph: ModelGraph) -> dict[str, Array] | None:
        """Return a mapping of this model's tensor names to a version's tensors, or None if the architectures differ.

        Args:
            tensors: Tensors of the version, without the optimizer state.
            graph: Graph of the version.

        Raises:
            TensorMismatchError: if one tensor of the model corresponds to several stored tensors whose values differ.
        """
        mine = self.architecture
        if graph.fingerprint != mine.fingerprint:
            return None
        found: list[tuple[str, str, Array]] = []
        for layer, source in mine.common_prefix(graph).items():
            own, stored = mine.by_name[layer].tensors, graph.by_name[source].tensors
            if len(own) > len(stored):
                return None
            names = [*zip(own, stored, strict=False), *self._rehomed(layer, source, stored[len(own) :])]
            found += [(name, theirs, tensors[theirs]) for name, theirs in names if theirs in tensors]
        return by_own_names(found)

    def _rehomed(self, layer: str, source: str, names: Iterable[str]) -> list[tuple[str, str]]:
        """Return names of what a version's layer keeps: those that it has here, and the stored ones."""
        homes = {keeper.vertex for keeper in self._flat.keepers_of.get(layer, ())}
        found: list[tuple[str, str]] = []
        for name in names:
            for home in (source, re.sub(r"#\d+$", "", source)):  # a later use of a layer has the names of the first
                if name.startswith(home + "/") and homes:
                    place = layer if layer in homes else next(iter(homes))
                    found.append((place + name[len(home) :], name))
                    break
        return found

    # ---- to give it tensors -----------------------------------------------------------------------------

    def all_of(self, tensors: Mapping[str, Array], graph: ModelGraph, *, strict: bool = True) -> Mapping[str, Array]:
        """Return a mapping of this model's tensor names to the tensors of a version.

        Tensors are matched by name, or by architecture if the names differ. If neither matches, `tensors` is returned
        unchanged, and may contain names that the model does not have. Pass the result to `checked`, which raises an
        error for such names.

        Args:
            tensors: Tensors of the version, without the optimizer state.
            graph: Graph of the version.
            strict: Whether to raise an error if a weight of the model is missing from `tensors`.

        Raises:
            TensorNotFoundError: if `strict` is true, the model has all names in the result, and a weight of the model
                is missing from the result.
            TensorMismatchError: if one tensor of the model corresponds to several stored tensors whose values differ.
        """
        if not self._are_all(tensors):
            tensors = self.renamed(tensors, graph) or tensors
        missing = sorted(self.weights.keys() - tensors.keys())
        unknown = [name for name in tensors if name not in self.weights and not self.is_kept(name)]
        if strict and missing and not unknown:
            raise TensorNotFoundError(
                f"expected all {len(self.weights)} weights of model {self._model.name!r}, or strict=False; "
                f"{missing[:8]} are missing"
            )
        for keeper in self._keepers:
            if keeper.writes and not any(map(keeper.part_of, tensors)) and self._now(keeper):
                _say_lacking(type(keeper.layer).__qualname__)
        return tensors

    def _are_all(self, tensors: Mapping[str, Array]) -> bool:
        known = all(name in self.weights or self.is_kept(name) for name in tensors)
        return known and self.weights.keys() <= tensors.keys()

    def checked(self, tensors: Mapping[str, object]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Check that all tensors fit the model, and return the weights and the layer state as two mappings.

        Layer state can include files (Keras assets). Each file is a tensor whose name contains the path of the file.

        Raises:
            TensorNotFoundError: if `tensors` contains a name that no tensor of the model has.
            TensorMismatchError: if a tensor differs in shape or dtype from the weight of the same name, or if the
                content of a file is not a 1-D uint8 array.
            CorruptDataError: if the path of a file leads out of the layer's folder.
        """
        kept = {name: array for keeper in self._keepers for name, array in keeper.checked(tensors).items()}
        return checked({name: a for name, a in tensors.items() if name not in kept}, self.expected), kept

    def assign(self, tensors: Mapping[str, object], more: Sequence[tuple[keras.Variable, Array]] = ()) -> None:
        """Set weights and layer state of the model. Tensors of the model that are not in `tensors` do not change.

        `tensors` is checked before anything is changed. If a layer then rejects its state, all changes are undone.

        Args:
            tensors: Weights and layer state, by name.
            more: Pairs of a variable and its new value, for variables that are not weights of the model, such as
                optimizer variables. The new values are not checked.

        Raises:
            TensorNotFoundError, TensorMismatchError, CorruptDataError: As in `checked`.
            GraphError: if a layer rejects its state.
        """
        arrays, kept = self.checked(tensors)
        values = [*((self.weights[name], array) for name, array in arrays.items()), *more]
        written = [*self.weights.values()] if self._flat.keepers else [variable for variable, _ in values]
        before = [(each, as_numpy(each, each.path)) for each in [*written, *(variable for variable, _ in more)]]

        def undo() -> None:
            for variable, array in before:
                variable.assign(array)

        try:
            for variable, array in values:
                variable.assign(array)
        except BaseException:
            undo()
            raise
        self.restore(kept, arrays.keys(), undo)

    def digest(self, weights: Mapping[str, Array], kept: Mapping[str, Array]) -> bytes:
        """Return a 64-byte BLAKE2b hash of the data from which `restore` restores layers.

        This data is the layer state in `kept`, and the weights of layers that can compute other values from their
        weights. For example, `keras.layers.Normalization` computes its mean and variance from its weights. If there is
        no such data, the result is empty.

        Args:
            weights: Weights by name. Weights of layers that compute no other values are ignored.
            kept: Layer state by name.
        """
        sources = {id(weight) for keeper in self._keepers for weight in keeper.sources}
        used = {name: array for name, array in weights.items() if id(self.weights[name]) in sources} | dict(kept)
        found = blake2b()
        for name, array in used.items():
            found.update(f"{name}\0{array.nbytes}\0".encode())
            found.update(as_bytes(array).data)
        return found.digest() if used else b""

    def restore(self, kept: Mapping[str, Array], assigned: Iterable[str], undo: Callable[[], None]) -> bool:
        """Restore layer state after weights were assigned, and return whether any layer was restored.

        Each layer with state in `kept` is restored. Some layers, such as `keras.layers.Normalization`, derive values
        from their weights when they are restored. If a weight of such a layer was assigned, and `kept` has no state for
        the layer, the layer's current state is loaded again, so that it derives the values from the new weights.

        Args:
            kept: Layer state from `checked`.
            assigned: Names of the weights that were assigned.
            undo: Function that restores the previous weights. If a layer rejects its state, this function is called
                first, and then the previous layer state is restored.

        Raises:
            GraphError: if a layer rejects its state.
        """
        new = {id(self.weights[name]) for name in assigned}
        before: list[tuple[Keeper, dict[str, Array]]] = []
        try:
            for keeper in self._keepers:
                own = keeper.checked(kept)
                if own or not new.isdisjoint(map(id, keeper.sources)):
                    now = self._now(keeper)
                    before.append((keeper, now))
                    keeper.restore(own or now, self._ids)
        except BaseException:
            undo()
            for keeper, state in reversed(before):
                if state or not keeper.writes:
                    self._take_back(keeper, state)
            raise
        if before:
            self._model.train_function = self._model.test_function = self._model.predict_function = None
        return bool(before)

    @property
    def _keepers(self) -> Iterable[Keeper]:
        return self._flat.keepers.values()

    def _now(self, keeper: Keeper) -> dict[str, Array]:
        try:
            return keeper.tensors(self._ids)
        except TensorVineError as exc:  # before its first state, it may have none to give
            _log.info("layer %r: cannot read its state: %s", keeper.layer.name, exc)
            return {}

    def _take_back(self, keeper: Keeper, state: Mapping[str, Array]) -> None:
        try:
            keeper.restore(state, self._ids)
        except TensorVineError as exc:
            _log.warning("layer %r: cannot restore its previous state: %s", keeper.layer.name, exc)


@cache
def _say_lacking(kind: str) -> None:
    _log.warning(
        "%s has state outside its weights, but the version contains none: the layer was not adapted when it was saved, "
        "or an older TensorVine saved it",
        kind,
    )


def _expected(variables: Mapping[str, keras.Variable]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype_name(variable.dtype), tuple(variable.shape)) for name, variable in variables.items()}


def snapshot(variables: Mapping[str, object]) -> dict[str, Array]:
    """Return the values of variables as read-only arrays, by name."""
    return {name: read_only(as_numpy(variable, f"tensor {name!r}")) for name, variable in variables.items()}
