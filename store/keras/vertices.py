"""The graph of a Keras model: leaf layers, their names and those of their weights.

Rules
- Vertices are leaf layers. A nested model is replaced by its layers; a layer that wraps others
  (Bidirectional, TimeDistributed, MultiHeadAttention) is one vertex that holds all their weights; a layer
  used twice is two vertices ("dense", "dense#2") with the same tensors; an operation such as `x + y` is a
  vertex without tensors.
- What a call adds to its layer (constants, keyword arguments, an output other than the first) stands in the
  config under "call".
- A model whose graph Keras does not know (a subclassed one) is taken for a chain of its layers in the order
  in which they were created. The shapes of the weights are then part of the configs, so that layers which
  match have tensors which match.
- Tensors are those of `model.weights`: moving statistics are among them, states of random seeds are not. What a
  layer keeps beside them (a vocabulary, see `kept`) follows the weights of its vertex.
  A tensor is named after its layer, its sublayers and itself, as in Keras's own paths, but without the
  parts that depend on what else the process has built. So a model built again has the same names.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (keras's types are partial, and a model's nodes are not public)

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import keras

from ..errors import GraphError
from ..facts import call_facts
from ..graphs.graph import Layer, ModelGraph
from .configs import config_of
from .kept import Keeper, holds_its_parts, keeps

if TYPE_CHECKING:
    from keras.src.ops.node import Node

_log = logging.getLogger(__name__)

_Output = tuple[str, int]
"""A vertex and which of its outputs."""


def graph_of(model: keras.Model) -> ModelGraph:
    """Return the graph of a model's leaf layers (DStore, section IV; EvoStore, section IV-A).

    A nested model is replaced by its layers.

    Raises:
        GraphError: if the model is not built, or the state of a layer cannot be read.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="out")])
    >>> graph_of(model).layers[-1].tensors
    ('out/kernel', 'out/bias')
    """
    return Flattened(model).graph()


class Flattened:
    """A model taken apart: its vertices, and its weights by name.

    Without `configs`, which take most of the time, the vertices are good for their names only.
    """

    def __init__(self, model: keras.Model, *, configs: bool = True, renamed: bool = False) -> None:
        self._configs = configs
        self.vertices: list[Layer] = []
        self.weights: dict[str, keras.Variable] = {}
        self.names: dict[int, str] = {}
        """id of a weight -> its name."""
        self.keepers: dict[int, Keeper] = {}
        """id of a layer that keeps something outside of its variables -> what tells it."""
        self.keepers_of: defaultdict[str, list[Keeper]] = defaultdict(list)
        """Vertex -> the keepers in it."""
        self._taken: set[str] = set()
        self._seen: set[int] = set()
        self._expand(model, "", None, renamed=renamed)
        self._name_folders()

    def graph(self, kept: Iterable[str] | None = None) -> ModelGraph:
        """Return the graph, with what layers keep beside their weights among its tensors.

        Args:
            kept: names of that, among others; None: layers are asked.
        """
        if not self.keepers:
            return ModelGraph(self.vertices)
        if kept is None:
            kept = [name for keeper in self.keepers.values() for name in keeper.tensors(self.names.keys())]
        others = [name for name in kept if name not in self.weights]
        layers: list[Layer] = []
        for vertex in self.vertices:
            keepers = self.keepers_of.get(vertex.name, ())
            more = [name for name in others if any(keeper.part_of(name) for keeper in keepers)]
            layers.append(Layer(vertex.name, vertex.config, vertex.inputs, (*vertex.tensors, *more)))
        return ModelGraph(layers)

    def _expand(self, model: object, path: str, feeds: list[_Output] | None, *, renamed: bool) -> list[_Output]:
        """Put a model's layers in its place; returns what its outputs are.

        `path` ends with a slash; `feeds` are its inputs, None for the outermost model. With `renamed`, layers
        are made by a class that is not Keras's, so that their automatic numbers differ from run to run.
        """
        self._seen.add(id(model))
        renamed = renamed or not type(model).__module__.startswith("keras.")
        function = model if isinstance(model, keras.Function) else getattr(model, "_functional", None)
        if function is not None:
            outputs = self._function(function, path, feeds, renamed)
        else:
            outputs = self._chain(cast("keras.Model", model), path, feeds or [], renamed)
        self._rest(model, path, renamed)
        return outputs

    def _function(
        self, function: keras.Function, path: str, feeds: list[_Output] | None, renamed: bool
    ) -> list[_Output]:
        produced: dict[int, _Output] = {}
        if feeds:
            produced = {id(tensor): feed for tensor, feed in zip(function.inputs, cycle(feeds), strict=False)}
        nodes: list[Node] = [
            node for depth in sorted(function._nodes_by_depth, reverse=True) for node in function._nodes_by_depth[depth]
        ]
        uses = _uses(nodes)
        for node in nodes:
            if all(id(tensor) in produced for tensor in node.outputs):
                self._seen.add(id(node.operation))
                continue
            name = path + _name(node.operation, renamed) + uses[id(node)]
            outputs = self._node(node, name, produced, renamed)
            produced.update({id(tensor): output for tensor, output in zip(node.outputs, outputs, strict=False)})
        return [produced[id(tensor)] for tensor in function.outputs]

    def _node(self, node: Node, name: str, produced: Mapping[int, _Output], renamed: bool) -> list[_Output]:
        operation = node.operation
        if isinstance(operation, (keras.Model, keras.Function)):
            feeds = [produced[id(tensor)] for tensor in _fed(node, operation)]
            outputs = self._expand(operation, self._unique(name) + "/", feeds, renamed=renamed)
            missing = range(len(outputs), len(node.outputs))  # a chain has one end, whatever its model returns
            return outputs + [(outputs[-1][0], index) for index in missing]
        arguments: Any = node.arguments  # its parts are there, which Keras's types do not say
        inputs, call = call_facts(
            operation.call,
            arguments.args,
            arguments.kwargs,
            lambda value: produced.get(id(value)) if isinstance(value, keras.KerasTensor) else None,
        )
        vertex = self._leaf(operation, name, inputs, {"call": call} if call else {})
        return [(vertex, index) for index in range(len(node.outputs))]

    def _chain(self, model: keras.Model, path: str, feeds: list[_Output], renamed: bool) -> list[_Output]:
        if not model.built:
            raise GraphError(
                f"model {model.name!r}: expected a built model; found one without weights: call it on data first"
            )
        _say_assumed(type(model).__qualname__)
        if not model.layers:
            return [(self._leaf(model, path or _name(model, renamed), _sources(feeds), _shapes(model)), 0)]
        outputs = feeds
        for layer in model.layers:
            name = path + _name(layer, renamed)
            if isinstance(layer, keras.Model):
                outputs = self._expand(layer, self._unique(name) + "/", outputs, renamed=renamed)
            else:
                outputs = [(self._leaf(layer, name, _sources(outputs), _shapes(layer)), 0)]
        return outputs

    def _rest(self, model: object, path: str, renamed: bool) -> None:
        """Weights that the model itself holds, and layers that are attached to it but in no call."""
        own = [(weight, _weight_name(weight)) for weight in _own_weights(model) if id(weight) not in self.names]
        keeper = isinstance(model, keras.Layer) and keeps(type(model)) and id(model) not in self.keepers
        if own or keeper:
            name = self._unique((path or "model/").removesuffix("/"))
            if keeper:
                self._keep(model, name, "")
            shapes = [list(weight.shape) for weight, _ in own]
            config = {"class": type(model).__name__, "weights": shapes}
            self.vertices.append(Layer(name, config, (), self._tensors(own, path)))
        for layer in getattr(model, "_layers", ()):
            if id(layer) in self._seen or isinstance(layer, keras.layers.InputLayer):
                continue
            name = path + _name(layer, renamed)
            if isinstance(layer, keras.Model):
                self._expand(layer, self._unique(name) + "/", [], renamed=renamed)
            else:
                self._leaf(layer, name, [], _shapes(layer))

    def _leaf(self, operation: keras.Operation, name: str, inputs: list[str], more: Mapping[str, object]) -> str:
        self._seen.add(id(operation))
        name = self._unique(name.removesuffix("/"))
        own = config_of(operation) if self._configs else {}
        config = {"class": type(operation).__name__, **own, **more}
        tensors = self._tensors(_inner_weights(operation), name + "/")
        if isinstance(operation, keras.Layer):
            for layer, inner in _keeping(operation, ""):
                self._keep(layer, name, inner)
        self.vertices.append(Layer(name, config, tuple(inputs), tensors))
        return name

    def _tensors(self, weights: list[tuple[keras.Variable, str]], prefix: str) -> tuple[str, ...]:
        result: list[str] = []
        for weight, name in weights:
            if id(weight) not in self.names:
                unique = first_free(prefix + name, self.weights)
                self.names[id(weight)] = unique
                self.weights[unique] = weight
            result.append(self.names[id(weight)])
        return tuple(result)

    def _keep(self, layer: keras.Layer, vertex: str, inner: str) -> None:
        keeper = self.keepers.setdefault(id(layer), Keeper(layer, vertex, inner))
        if keeper not in self.keepers_of[vertex]:
            self.keepers_of[vertex].append(keeper)

    def _name_folders(self) -> None:
        """Keep the folders of what layers keep apart from one another, and from those that weights are named by."""
        if not self.keepers:
            return
        names = [*self.weights, *(folder for keeper in self.keepers.values() for folder in keeper.folders.values())]
        taken = {name[:end] for name in names for end in range(len(name)) if name[end] == "/"}
        for keeper in self.keepers.values():
            for part, folder in keeper.folders.items():
                keeper.folders[part] = first_free(folder, taken)
                taken.add(keeper.folders[part])

    def _unique(self, name: str) -> str:
        unique = first_free(name, self._taken)
        self._taken.add(unique)
        return unique


@cache
def _say_assumed(model_type: str) -> None:
    _log.warning("%s has no functional graph: assuming a chain of its layers in their order of creation", model_type)


def _uses(nodes: list[Node]) -> dict[int, str]:
    """id of a node -> what its name gets: nothing for the first use of its operation, then "#2", "#3"."""
    by_operation: defaultdict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        by_operation[id(node.operation)].append(node)
    result: dict[int, str] = {}
    for uses in by_operation.values():
        position = {id(node): index for index, node in enumerate(uses[0].operation._inbound_nodes)}
        ordered = sorted(uses, key=lambda node: position[id(node)])
        result.update({id(node): f"#{rank + 1}" if rank else "" for rank, node in enumerate(ordered)})
    return result


def _fed(node: Node, model: keras.Model | keras.Function) -> list[keras.KerasTensor]:
    """Tensors that a call hands to a nested model, in the order of the model's inputs."""
    arguments: Any = node.arguments
    given = arguments.args[0] if arguments.args else next(iter(arguments.kwargs.values()))
    if isinstance(given, dict) and isinstance(getattr(model, "_inputs_struct", None), (list, tuple)):
        by_name = cast("dict[str, keras.KerasTensor]", given)
        return [by_name[tensor.name] for tensor in model.inputs]
    return [tensor for tensor in keras.tree.flatten(given) if isinstance(tensor, keras.KerasTensor)]


def _sources(outputs: list[_Output]) -> list[str]:
    return [name for name, _ in outputs]


def _shapes(layer: keras.Layer) -> dict[str, list[list[int]]]:
    return {"weights": [list(weight.shape) for weight in layer.weights]}


def first_free(name: str, taken: Mapping[str, object] | set[str]) -> str:
    """Return the name, numbered if it is taken."""
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}#{count}"
    return unique


def _name(operation: keras.Operation, renamed: bool) -> str:
    """Name of a layer; with `renamed`, an automatic one ("dense_7") loses its number."""
    if not renamed:
        return operation.name
    base = re.sub(r"_\d+$", "", operation.name)
    automatic = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", type(operation).__name__).lower()
    return base if base.replace("_", "") == automatic.replace("_", "") else operation.name


def _weight_name(weight: keras.Variable) -> str:
    return re.sub(r"^variable_\d+$", "variable", weight.name)


def _own_weights(layer: object) -> list[keras.Variable]:
    return [*getattr(layer, "_trainable_variables", ()), *getattr(layer, "_non_trainable_variables", ())]


def _inner_weights(operation: object) -> list[tuple[keras.Variable, str]]:
    """Weights of a layer and of the layers inside it, with names relative to it, in the layer's own order.

    `variable.path` will not do: Keras builds a wrapped layer of a restored model outside its wrapper.
    """
    if not isinstance(operation, keras.Layer):
        return []
    names: dict[int, str] = {}
    for weight, name in _walk(operation, ""):
        names.setdefault(id(weight), name)
    return [(weight, names.get(id(weight), _weight_name(weight))) for weight in operation.weights]


def _keeping(layer: keras.Layer, prefix: str) -> Iterator[tuple[keras.Layer, str]]:
    """A layer and those inside it that keep something outside of their variables, with their paths."""
    if keeps(type(layer)):
        yield layer, prefix
    if not holds_its_parts(layer):
        for inner in layer._layers:
            yield from _keeping(inner, f"{prefix}{_name(inner, renamed=True)}/")


def _walk(layer: keras.Layer, prefix: str) -> Iterator[tuple[keras.Variable, str]]:
    for weight in _own_weights(layer):
        yield weight, prefix + _weight_name(weight)
    for inner in layer._layers:
        yield from _walk(inner, f"{prefix}{_name(inner, renamed=True)}/")
