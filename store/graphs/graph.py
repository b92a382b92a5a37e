"""Model graphs: leaf layers, their ordered inputs, and fingerprints that do not depend on names.

Rules
- A graph holds leaf layers only; nested models are flattened, a shared layer is one vertex per use.
- The order of a layer's inputs matters; the order in which layers are given does not.
- A fingerprint is a Merkle hash (DStore, Algorithm 1): BLAKE2b-128 over the canonical config and the
  fingerprints of the inputs, in order. Names, tensors' names and trainable flags never enter it. The paper's
  line 6 stands inside the `if`, so that an input met before would not be hashed in; here every input is.
- Configs are compared as JSON values: a tuple equals a list, 1 equals 1.0, true does not equal 1.
- A vertex of one graph matches a vertex of another when their configs are equal and their inputs match, in order. That
  is when their fingerprints are equal, so `common_prefix` compares fingerprints only. The prefix is the set of vertices
  that have a match (EvoStore, section 4.2); with a vertex, all its ancestors are in it.
- Twins are vertices of one graph with equal fingerprints. Each twin of the first graph is in the prefix if the second
  has at least one; they share a match where the second has fewer. Which twin is matched with which follows the edges:
  what feeds a matched vertex is matched with what feeds its match, so that a branch's weights come from one branch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, cast

from .. import html
from ..bounds import jsontext
from ..bounds.allowance import allowed
from ..errors import CorruptDataError, GraphError
from ..facts import Json

FINGERPRINT_BYTES = 16
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
MOST_NESTED = 100
"""Lists and mappings in one another in a config: what reads it goes down by calls."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A leaf layer: one vertex of a model graph.

    >>> Layer("dense", {"class": "Dense", "units": 8}, inputs=["in"], tensors=["dense/kernel", "dense/bias"])
    Layer(name='dense', config={'class': 'Dense', 'units': 8}, inputs=('in',), tensors=('dense/kernel', 'dense/bias'))
    """

    name: str
    """Name of the layer, unique within its graph. The layer's fingerprint does not depend on the name."""
    config: Mapping[str, Any]
    """Mapping of keys to JSON values: the layer's operation and settings, without its name and trainable flag."""
    inputs: tuple[str, ...] = ()
    """Names of the layers that provide the inputs of this layer, in order. Empty if the layer is an input layer."""
    tensors: tuple[str, ...] = ()
    """Names of the layer's tensors, in the order in which the framework (Keras or PyTorch) lists them."""

    def __init__(
        self, name: str, config: Mapping[str, object], inputs: Iterable[str] = (), tensors: Iterable[str] = ()
    ) -> None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"layer name: expected a non-empty string; found {name!r}")
        if not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = type(cast(object, config)).__name__
            raise GraphError(f"config of layer {name!r}: expected a mapping; found {found}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "config", _json_value(config, f"config of layer {name!r}"))
        object.__setattr__(self, "inputs", _names(inputs, f"inputs of layer {name!r}"))
        object.__setattr__(self, "tensors", _names(tensors, f"tensors of layer {name!r}"))

    def __hash__(self) -> int:
        return hash((self.name, self.inputs, self.tensors))


@dataclass(frozen=True, eq=False)
class ModelGraph:
    """The architecture of a model: an immutable, directed acyclic graph of leaf layers.

    Args:
        layers: The layers, in any order.

    Raises:
        GraphError: if two layers have the same name, an input of a layer is not in the graph, or there is a cycle. The
            message names the layers.

    >>> graph = ModelGraph([
    ...     Layer("out", {"class": "Dense", "units": 2}, inputs=["in"]),
    ...     Layer("in", {"class": "Input", "shape": [4]}),
    ... ])
    >>> [layer.name for layer in graph.layers]
    ['in', 'out']
    >>> graph == ModelGraph.from_json(graph.to_json())
    True
    """

    layers: tuple[Layer, ...] = field(default=())
    """The layers in topological order: the inputs of each layer precede the layer."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        object.__setattr__(self, "layers", _topological(tuple(layers)))

    def __eq__(self, other: object) -> bool:
        """Return whether both graphs have the same layers: equal names, configs, inputs and tensor names.

        The order in which the layers were given does not matter.
        """
        if not isinstance(other, ModelGraph):
            return NotImplemented
        return self.by_name == other.by_name

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"ModelGraph({len(self.layers)} layers, {self.fingerprint.hex()[:12]})"

    def _repr_html_(self) -> str:
        rows = (
            (one.name, one.config.get("class"), ", ".join(one.inputs), ", ".join(one.tensors)) for one in self.layers
        )
        return html.table(repr(self), ("layer", "class", "inputs", "tensors"), rows, len(self.layers))

    @cached_property
    def by_name(self) -> Mapping[str, Layer]:
        """The layers of the graph, by name."""
        return MappingProxyType({layer.name: layer for layer in self.layers})

    @cached_property
    def fingerprints(self) -> Mapping[str, bytes]:
        """The 16-byte fingerprint of each layer, by name (DStore, Algorithm 1).

        The fingerprint is a hash of the layer's config and of the fingerprints of its inputs, in order.
        """
        prints: dict[str, bytes] = {}
        for layer in self.layers:
            prints[layer.name] = _fingerprint(layer, self.canonical_configs[layer.name], prints)
        return MappingProxyType(prints)

    @cached_property
    def canonical_configs(self) -> Mapping[str, str]:
        """The config of each layer as canonical JSON text, by name. Equal configs have equal texts."""
        return MappingProxyType({layer.name: canonical_config(layer.config) for layer in self.layers})

    @cached_property
    def fingerprint(self) -> bytes:
        """The 16-byte fingerprint of the graph. Names and the order of the layers do not change the fingerprint."""
        return blake2b(b"".join(sorted(self.fingerprints.values())), digest_size=FINGERPRINT_BYTES).digest()

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors, without duplicates, in topological order of the layers."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.tensors))

    def common_prefix(self, other: ModelGraph) -> dict[str, str]:
        """Return the longest common prefix of this graph and another graph (EvoStore, Algorithm 1).

        The prefix contains each layer of this graph that matches a layer of `other`. Two layers match if their configs
        are equal and their inputs match, in order.

        Args:
            other: The other graph.

        Returns:
            A mapping from the name of each layer in the prefix to the name of the matching layer of `other`.
        """
        return common_prefix(self, other)

    def to_json(self) -> str:
        """Return the graph as JSON text. `from_json` creates an equal graph from the text."""
        return self._json

    @cached_property
    def _json(self) -> str:
        rows = [[v.name, v.config, list(v.inputs), list(v.tensors)] for v in self.layers]
        return json.dumps({"layers": rows}, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelGraph:
        """Create a graph from the output of `to_json`.

        Raises:
            GraphError: if `text` is not the output of `to_json`, or the graph is invalid or would need too much memory.
        """
        try:
            found = jsontext.mapping(text, "graph as JSON", believed(len(text)))
            rows = cast("list[tuple[str, Mapping[str, Any], list[str], list[str]]]", found["layers"])
            layers = [Layer(name, config, tuple(i), tuple(t)) for name, config, i, t in rows]
        except (CorruptDataError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
            if isinstance(exc, GraphError):
                raise
            raise GraphError(f"graph as JSON: expected a text from ModelGraph.to_json; found {exc}") from exc
        return cls(layers)


def believed(nbytes: int) -> int:
    """Return how many bytes a graph's text may take as JSON when so many are read: layers have copies of most of it."""
    return allowed(nbytes) * 4 // 7


def common_prefix(graph: ModelGraph, other: ModelGraph) -> dict[str, str]:
    """Map each layer of the longest common prefix to its match (EvoStore, section 4.2).

    Args:
        graph: the graph whose layers are looked up, such as a new candidate.
        other: the graph to find them in, such as an ancestor.

    Returns:
        Layer of `graph` -> matching layer of `other`, in the topological order of `graph`.

    >>> from tensorvine.store import Layer, ModelGraph
    >>> stem = [Layer("in", {"class": "Input"}), Layer("a", {"class": "Dense", "units": 8}, ["in"])]
    >>> parent = ModelGraph([*stem, Layer("out", {"class": "Dense", "units": 2}, ["a"])])
    >>> child = ModelGraph([*stem, Layer("out", {"class": "Dense", "units": 3}, ["a"])])
    >>> common_prefix(child, parent)
    {'in': 'in', 'a': 'a'}
    """
    candidates: dict[bytes, list[str]] = {}
    for name, fingerprint in other.fingerprints.items():
        candidates.setdefault(fingerprint, []).append(name)
    matched = [layer for layer in graph.layers if graph.fingerprints[layer.name] in candidates]
    heights = _heights(graph)
    # The highest first, among equals the order of the graph: consumers before what feeds them. Twins are
    # equally high, so when one of them picks freely, all those that a consumer's match decides are decided.
    matched.sort(key=lambda layer: -heights[layer.name])
    assigned: dict[str, str] = {}
    used: set[str] = set()
    for layer in matched:
        if layer.name not in assigned:
            choice = candidates[graph.fingerprints[layer.name]]
            match = _pick(layer.inputs, choice, other, assigned, used) if len(choice) > 1 else choice[0]
            assigned[layer.name] = match
            used.add(match)
        for mine, theirs in zip(layer.inputs, other.by_name[assigned[layer.name]].inputs, strict=True):
            if mine not in assigned:
                assigned[mine] = theirs
                used.add(theirs)
    return {layer.name: assigned[layer.name] for layer in graph.layers if layer.name in assigned}


def canonical_config(config: Mapping[str, object]) -> str:
    """Write a config as the one JSON text that stands for all configs equal to it.

    >>> canonical_config({"units": 8.0, "class": "Dense"})
    '{"class":"Dense","units":8}'
    """
    return _CANONICAL.encode(_integral(config))


def _fingerprint(layer: Layer, config: str, known: Mapping[str, bytes]) -> bytes:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    digest.update(config.encode("utf-8", "surrogatepass"))
    digest.update(b"\0%d\0" % len(layer.inputs))
    for name in layer.inputs:
        digest.update(known[name])
    return digest.digest()


def _pick(
    inputs: tuple[str, ...], choice: list[str], other: ModelGraph, assigned: Mapping[str, str], used: set[str]
) -> str:
    """Choose among equal layers of `other`: an unused one first, then the one whose inputs disagree least."""

    def cost(name: str) -> tuple[bool, int]:
        feeds = zip(inputs, other.by_name[name].inputs, strict=True)
        return name in used, sum(assigned.get(mine, theirs) != theirs for mine, theirs in feeds)

    return min(choice, key=cost)


def _heights(graph: ModelGraph) -> dict[str, int]:
    """Layer -> edges on the longest path that leads to it."""
    heights: dict[str, int] = {}
    for layer in graph.layers:
        heights[layer.name] = max((heights[name] + 1 for name in layer.inputs), default=0)
    return heights


def _topological(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Sort so that inputs come first; among the ready, the order given is kept."""
    by_name: dict[str, Layer] = {}
    for layer in layers:
        if not isinstance(layer, Layer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"graph: expected Layer objects; found {type(cast(object, layer)).__name__}")
        if layer.name in by_name:
            raise GraphError(f"graph: expected unique layer names; found {layer.name!r} twice")
        by_name[layer.name] = layer
    for layer in layers:
        for name in layer.inputs:
            if name not in by_name:
                raise GraphError(f"layer {layer.name!r}: expected inputs among the graph's layers; found {name!r}")
    ordered: dict[str, Layer] = {}
    for layer in layers:
        _place(layer, by_name, ordered)
    return tuple(ordered.values())


def _place(last: Layer, by_name: Mapping[str, Layer], ordered: dict[str, Layer]) -> None:
    """Append `last` after all that it needs. Depth first without recursion: graphs may be 1000s deep."""
    path: dict[str, None] = {}
    stack: list[tuple[Layer, int]] = [(last, 0)]
    while stack:
        layer, position = stack.pop()
        if layer.name in ordered:
            continue
        path[layer.name] = None
        if position < len(layer.inputs):
            stack.append((layer, position + 1))
            name = layer.inputs[position]
            if name in path:
                start = list(path).index(name)
                raise GraphError(f"graph: expected no cycle; found {' <- '.join([*list(path)[start:], name])}")
            if name not in ordered:
                stack.append((by_name[name], 0))
        else:
            ordered[layer.name] = layer
            del path[layer.name]


def _names(names: object, where: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise GraphError(f"{where}: expected a sequence of names; found {names!r}")
    result = tuple(cast("Iterable[object]", names))
    for name in result:
        if not isinstance(name, str):
            raise GraphError(f"{where}: expected names; found {name!r}")
    return cast("tuple[str, ...]", result)


def _json_value(value: object, where: str, depth: int = 0) -> Json:
    """Copy `value` into plain JSON types: tuples become lists, NumPy scalars become Python's."""
    if depth > MOST_NESTED:
        raise GraphError(f"{where}: expected at most {MOST_NESTED} levels of nested lists and mappings; found more")
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            raise GraphError(f"{where}: expected JSON values; found NaN, which is not equal to itself")
        return value
    if type(value) is list or type(value) is tuple:
        return [_json_value(item, where, depth + 1) for item in cast("list[object]", value)]
    if isinstance(value, Mapping):
        result: dict[str, Json] = {}
        for key, item in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                raise GraphError(f"{where}: expected string keys; found {key!r}")
            result[key] = _json_value(item, where, depth + 1)
        return result
    if isinstance(value, (list, tuple)):
        return [_json_value(item, where, depth + 1) for item in cast("list[object]", value)]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return _json_value(item(), where, depth + 1)
    raise GraphError(f"{where}: expected JSON values; found {type(value).__name__}")


def _integral(value: object) -> object:
    """Write every float that is an integer as that integer, so that 1.0 and 1 get one text."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _integral(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_integral(item) for item in cast("list[object]", value)]
    return value
