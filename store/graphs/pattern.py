"""Find graphs by a pattern of layers along a path.

Rules
- A pattern is a list of predicates for consecutive vertices: each feeds the next, at whatever position.
- A predicate maps config keys to a value or to a list of allowed values. `{}` matches any layer; a key that a
  config lacks matches nothing. A list also matches a config value that is this whole list.
- Values are compared as canonical JSON: a tuple equals a list, 1 equals 1.0, true does not equal 1.
- An exact pattern covers a whole path, from a vertex without inputs to a vertex that feeds no other.
- `matches` is the plain form and shares no code with `PatternIndex` but the reading of predicates.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

from ..errors import GraphError, ModelNotFoundError
from ..facts import Json
from .graph import (
    _json_value,  # pyright: ignore[reportPrivateUsage] - configs and predicates are read alike
    canonical_config,
)

if TYPE_CHECKING:
    from .graph import ModelGraph

Pattern: TypeAlias = Sequence[Mapping[str, object]]
KeyT = TypeVar("KeyT", bound=Hashable)

_Shape: TypeAlias = "tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]"
"""(number of the config, positions of the inputs) of each layer, in topological order."""


def check_pattern(pattern: object) -> tuple[Mapping[str, Json], ...]:
    """Return the pattern as plain JSON values.

    Raises:
        GraphError: it is no pattern, or empty; the message names the predicate, counted from 1.

    >>> check_pattern([{"class": "Conv2D", "kernel_size": (3, 3)}, {}])
    ({'class': 'Conv2D', 'kernel_size': [3, 3]}, {})
    """
    if isinstance(pattern, (str, bytes)) or not isinstance(pattern, Sequence):
        raise GraphError(f"pattern: expected a list of layer predicates; found {type(pattern).__name__}")
    if not pattern:
        raise GraphError("pattern: expected at least one layer predicate; found none")
    predicates: list[Mapping[str, Json]] = []
    for number, predicate in enumerate(cast("Sequence[object]", pattern), 1):
        where = f"predicate {number} of the pattern"
        if not isinstance(predicate, Mapping):
            raise GraphError(f"{where}: expected a mapping of config keys; found {type(predicate).__name__}")
        predicates.append(cast("Mapping[str, Json]", _json_value(cast(object, predicate), where)))
    return tuple(predicates)


def matches(graph: ModelGraph, pattern: Pattern, exact: bool = False) -> bool:
    """Say whether a path of `graph` matches `pattern`.

    Args:
        graph: the graph to look at.
        pattern: predicates for consecutive vertices.
        exact: the path must lead from a vertex without inputs to one that feeds no other.

    Raises:
        GraphError: the pattern is malformed.

    >>> from tensorvine.store import Layer, ModelGraph
    >>> graph = ModelGraph([
    ...     Layer("in", {"class": "Input"}),
    ...     Layer("c", {"class": "Conv2D", "filters": 32}, ["in"]),
    ...     Layer("out", {"class": "Flatten"}, ["c"]),
    ... ])
    >>> matches(graph, [{"class": "Conv2D", "filters": [32, 64]}, {}])
    True
    >>> matches(graph, [{"class": "Conv2D"}, {}], exact=True)
    False
    """
    predicates = [_allowed(predicate) for predicate in check_pattern(pattern)]
    consumed = {name for layer in graph.layers for name in layer.inputs}
    done: dict[str, set[int]] = {}  # layer -> how many predicates the paths that end there may have matched
    for layer in graph.layers:
        counts = {0} if not exact or not layer.inputs else set[int]()
        counts.update(count for name in layer.inputs for count in done[name] if count < len(predicates))
        facts = _facts(layer.config)
        done[layer.name] = {count + 1 for count in counts if _accepts(predicates[count], facts)}
    ends = (counts for name, counts in done.items() if not exact or name not in consumed)
    return any(len(predicates) in counts for counts in ends)


class PatternIndex(Generic[KeyT]):
    """Many graphs by any key, to be found by pattern.

    Configs are few and graphs many: each distinct config is kept once and judged once per query, and graphs
    that differ in names only are kept once.

    >>> from tensorvine.store import Layer, ModelGraph
    >>> index = PatternIndex[str]()
    >>> index.add("a", ModelGraph([Layer("in", {"class": "Input"}), Layer("r", {"class": "ReLU"}, ["in"])]))
    >>> index.find([{"class": "ReLU"}]), index.find([{"class": "ReLU"}], exact=True)
    (['a'], [])
    """

    def __init__(self) -> None:
        self._keys: dict[KeyT, tuple[int, int]] = {}
        """Key -> (number of its shape, number that grows with every key added)."""
        self._numbers: dict[_Shape, int] = {}
        self._shapes: dict[int, tuple[_Shape, set[KeyT]]] = {}
        """Number of a shape -> the shape and its keys."""
        self._texts: dict[str, int] = {}
        """Canonical config -> its number."""
        self._configs: dict[int, _Config] = {}
        self._inputs: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Each distinct tuple of positions once; there are few, and shapes would be mostly made of them."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: KeyT, graph: ModelGraph) -> None:
        """Add a graph. One of the same key is replaced."""
        if key in self._keys:
            self.remove(key)
        shape = self._shape_of(graph)
        number = self._numbers.get(shape)
        if number is None:
            number = self._numbers[shape] = self._number()
            self._shapes[number] = (shape, set())
            for config in set(shape[0]):
                self._configs[config].shapes.add(number)
        self._shapes[number][1].add(key)
        self._keys[key] = (number, self._number())

    def remove(self, key: KeyT) -> None:
        """Remove a graph.

        Raises:
            ModelNotFoundError: there is none of this key; nothing is changed.
        """
        if key not in self._keys:
            raise ModelNotFoundError(f"pattern index: expected a key in the index; found {key!r}")
        number, _ = self._keys.pop(key)
        shape, keys = self._shapes[number]
        keys.discard(key)
        if keys:
            return
        del self._shapes[number], self._numbers[shape]
        for config in set(shape[0]):
            self._configs[config].shapes.discard(number)
            if not self._configs[config].shapes:
                del self._texts[self._configs.pop(config).text]

    def find(self, pattern: Pattern, exact: bool = False) -> list[KeyT]:
        """Find the graphs that match, as `matches` says, in the order in which they were added.

        Raises:
            GraphError: the pattern is malformed.
        """
        accepting: list[list[_Config]] = []
        masks: dict[int, int] = {}  # number of a config -> bits of the predicates that accept it
        for position, predicate in enumerate(map(_allowed, check_pattern(pattern))):
            accepting.append([])
            for number, config in self._configs.items():
                if _accepts(predicate, config.facts):
                    accepting[-1].append(config)
                    masks[number] = masks.get(number, 0) | 1 << position
        rarest = min(accepting, key=lambda configs: sum(len(config.shapes) for config in configs))
        candidates = set[int]().union(*(config.shapes for config in rarest))
        found = [
            key
            for number in candidates
            if _has_path(self._shapes[number][0], masks, len(accepting), exact)
            for key in self._shapes[number][1]
        ]
        return sorted(found, key=lambda key: self._keys[key][1])

    def _shape_of(self, graph: ModelGraph) -> _Shape:
        position = {layer.name: i for i, layer in enumerate(graph.layers)}
        inputs = (tuple(position[name] for name in layer.inputs) for layer in graph.layers)
        return (
            tuple(self._config(graph.canonical_configs[layer.name], layer.config) for layer in graph.layers),
            tuple(self._inputs.setdefault(positions, positions) for positions in inputs),
        )

    def _config(self, text: str, config: Mapping[str, object]) -> int:
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = self._number()
            self._configs[number] = _Config(text, _facts(config), set())
        return number

    def _number(self) -> int:
        self._next += 1
        return self._next


@dataclass(slots=True)
class _Config:
    text: str
    facts: frozenset[str]
    shapes: set[int]
    """Numbers of the shapes that hold it."""


def _has_path(shape: _Shape, masks: Mapping[int, int], length: int, exact: bool) -> bool:
    """Say whether a path of `shape` takes predicates 0 to `length` - 1 in turn."""
    last = 1 << (length - 1)
    ends: list[int] = []
    states: list[int] = []  # per layer, bit j: some path that ends here takes predicates 0 to j
    for position, (config, inputs) in enumerate(zip(*shape, strict=True)):
        state = masks.get(config, 0)
        if state:
            before = 0
            for i in inputs:
                before |= states[i]
            state &= before << 1 | (not exact or not inputs)
            if state & last:
                if not exact:
                    return True
                ends.append(position)
        states.append(state)
    return bool(ends) and not {i for inputs in shape[1] for i in inputs}.issuperset(ends)


def _allowed(predicate: Mapping[str, object]) -> list[frozenset[str]]:
    """Per key of a predicate, the facts of which a config must have one."""
    allowed: list[frozenset[str]] = []
    for key, value in predicate.items():
        options: list[object] = [value]
        if isinstance(value, list):
            options += cast("list[object]", value)
        allowed.append(frozenset(canonical_config({key: option}) for option in options))
    return allowed


def _facts(config: Mapping[str, object]) -> frozenset[str]:
    """Each item of a config as canonical text."""
    return frozenset(canonical_config({key: value}) for key, value in config.items())


def _accepts(allowed: list[frozenset[str]], facts: frozenset[str]) -> bool:
    return not any(facts.isdisjoint(options) for options in allowed)
