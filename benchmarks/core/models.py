"""Models to measure with: synthetic chains, graphs as a search draws them, VGG19 and BERT-large.

Rules
- Everything follows from the seed; two runs see the same graphs and the same bytes.
- Each tensor is an allocation of its own, as in a framework, in float32.
- A synthetic model's bytes sum to what was asked, to the byte (rounded down to whole float32 values).
- The search space is the one that `examples/nas` searches; what its cells are is said there alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorvine.store import Layer, ModelGraph

from examples.nas.space import UNITS, AttnSpace, Candidate, Cell

from .measure import Tensors

ITEM_BYTES = 4
ATTN_FEATURES, ATTN_CLASSES = 6212, 2

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """A graph and the shapes of its tensors."""

    graph: ModelGraph
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor -> shape, in topological order; all are float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ITEM_BYTES * int(np.prod(shape)) for shape in self.shapes.values())

    def tensors(self, seed: int = 0) -> Tensors:
        """Draw all tensors at random."""
        rng = np.random.default_rng(seed)
        return {name: rng.random(shape, dtype=np.float32) for name, shape in self.shapes.items()}

    def leading_layers(self, fraction: float) -> list[str]:
        """Name the first layers that have tensors, until they hold `fraction` of the bytes.

        The last one is left out where the sum is closer to the fraction without it.
        """
        want = fraction * self.nbytes
        chosen: list[str] = []
        have = 0
        for layer in self.graph.layers:
            size = sum(ITEM_BYTES * int(np.prod(self.shapes[name])) for name in layer.tensors)
            if not size:
                continue
            if chosen and have + size - want >= want - have:
                break
            chosen.append(layer.name)
            have += size
        return chosen

    def tensors_of(self, layers: Sequence[str]) -> list[str]:
        """Name the tensors of some layers."""
        return [tensor for name in layers for tensor in self.graph.by_name[name].tensors]


def synthetic(size_bytes: int, layers: int) -> Architecture:
    """Make a chain of even, dense-like layers after an input (DStore, section 6.3; EvoStore, section 5.3).

    Args:
        size_bytes: Bytes of all tensors together.
        layers: Number of layers that have a tensor.

    >>> synthetic(1 << 20, 10).nbytes
    1048576
    """
    edges = np.rint(np.arange(1, layers + 1) * (size_bytes // ITEM_BYTES / layers)).astype(np.int64)
    counts = np.diff(edges, prepend=0).tolist()
    vertices = [Layer("input", {"class": "Input", "shape": [1]})]
    shapes: Shapes = {}
    for index, count in enumerate(counts):
        name = f"layer_{index:04d}"
        config = {"class": "Dense", "units": int(count), "position": index, "variant": 0}
        vertices.append(Layer(name, config, (vertices[-1].name,), (f"{name}/kernel",)))
        shapes[f"{name}/kernel"] = (int(count),)
    return Architecture(ModelGraph(vertices), shapes)


def nas_graphs(count: int, seed: int = 0, *, subgraphs: int = 2, tensors: bool = False) -> Iterator[ModelGraph]:
    """Draw architectures as an evolutionary search over the ATTN space would leave them behind.

    Half of the candidates are drawn afresh, half change one decision of an earlier candidate, so that prefixes of all
    depths are shared.

    Args:
        count: how many; they come one at a time, and only their decisions are kept.
        seed: of all decisions.
        subgraphs: of the space, one after the other; 2 make 18 decisions.
        tensors: whether layers with weights name a tensor.
    """
    space, rng = AttnSpace(subgraphs, UNITS), random.Random(seed)  # noqa: S311  for candidates
    seen: list[Candidate] = []
    for _ in range(count):
        again = seen and rng.random() < 0.5
        seen.append(mutate(space, rng.choice(seen), rng) if again else draw(space, rng))
        yield attn_graph(space, seen[-1], tensors=tensors)


def draw(space: AttnSpace, rng: random.Random) -> Candidate:
    """Draw a candidate."""
    return tuple(rng.randrange(len(options)) for options in space.decisions)


def mutate(space: AttnSpace, candidate: Candidate, rng: random.Random) -> Candidate:
    """Change exactly one decision to another option."""
    place = rng.randrange(len(candidate))
    other = rng.randrange(len(space.decisions[place]) - 1)
    return (*candidate[:place], other + (other >= candidate[place]), *candidate[place + 1 :])


def attn_graph(space: AttnSpace, candidate: Candidate, *, tensors: bool = False) -> ModelGraph:
    """Return a candidate of the ATTN space as Keras would describe it, for ATTN's features and classes.

    Args:
        space: that the candidate is of.
        candidate: what to describe.
        tensors: whether layers with weights name a tensor.
    """
    chain = _Chain(tensors)
    output = (chain.add({"class": "InputLayer", "shape": [ATTN_FEATURES]}), ATTN_FEATURES)
    for cells in space.chain(candidate):
        anchors = [output]
        for cell in cells:
            anchors.append(_cell(chain, cell, anchors))
        output = anchors[-1]
    chain.add({"class": "Dense", "units": ATTN_CLASSES, "activation": "softmax"}, output[0], weights=True)
    return ModelGraph(chain.layers)


class _Chain:
    """Layers in the order in which they were added, named by their position."""

    def __init__(self, tensors: bool) -> None:
        self.layers: list[Layer] = []
        self._tensors = tensors

    def add(self, config: dict[str, Any], *inputs: str, weights: bool = False) -> str:
        name = f"{config['class'].lower()}_{len(self.layers)}"
        tensors = (f"{name}/kernel",) if weights and self._tensors else ()
        self.layers.append(Layer(name, config, inputs, tensors))
        return name


def _cell(chain: _Chain, cell: Cell, anchors: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Add a cell after the last anchor; give its output and its width."""
    source, width = anchors[-1]
    if cell.dense is not None:
        width, activation = cell.dense
        source = _dense(chain, source, width, activation)
    addends = [source]
    for anchor, its in (anchors[number] for number in cell.skips):
        addends.append(anchor if its == width else _dense(chain, anchor, width, "none"))
    added = chain.add({"class": "Add"}, *addends) if len(addends) > 1 else source
    return chain.add({"class": "Activation", "activation": "relu"}, added), width


def _dense(chain: _Chain, source: str, units: int, activation: str) -> str:
    config = {"class": "Dense", "units": units, "activation": "linear" if activation == "none" else activation}
    return chain.add(config, source, weights=True)


def small_tensors(graph: ModelGraph, *, items: int = 64, seed: int = 0) -> Tensors:
    """Return a few random float32 values for each tensor that the graph names."""
    rng = np.random.default_rng(seed)
    values = rng.random((len(graph.tensors), items), dtype=np.float32)
    return dict(zip(graph.tensors, values, strict=True))


class _Sequence:
    """A chain of weighted layers under construction."""

    def __init__(self, shape: list[int]) -> None:
        self.layers = [Layer("input", {"class": "InputLayer", "shape": shape})]
        self.shapes: Shapes = {}

    @property
    def last(self) -> str:
        return self.layers[-1].name

    def add(self, name: str, config: dict[str, Any], *inputs: str, **shapes: tuple[int, ...]) -> str:
        """Append a layer after `inputs`, or after the last one where none are named."""
        named = {f"{name}/{part}": shape for part, shape in shapes.items()}
        self.layers.append(Layer(name, config, inputs or (self.last,), tuple(named)))
        self.shapes.update(named)
        return name

    def dense(self, name: str, inputs: int, units: int, *sources: str, activation: str = "linear") -> str:
        config = {"class": "Dense", "units": units, "activation": activation}
        return self.add(name, config, *sources, kernel=(inputs, units), bias=(units,))

    def finish(self) -> Architecture:
        return Architecture(ModelGraph(self.layers), self.shapes)


def vgg19() -> Architecture:
    """VGG19: 38 tensors, 143,667,240 parameters."""
    net = _Sequence([224, 224, 3])
    channels = 3
    for block, (filters, repeats) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)), start=1):
        for repeat in range(1, repeats + 1):
            config = {"class": "Conv2D", "filters": filters, "kernel_size": [3, 3], "activation": "relu"}
            net.add(f"block{block}_conv{repeat}", config, kernel=(3, 3, channels, filters), bias=(filters,))
            channels = filters
        net.add(f"block{block}_pool", {"class": "MaxPooling2D", "pool_size": [2, 2]})
    net.add("flatten", {"class": "Flatten"})
    net.dense("fc1", 25088, 4096, activation="relu")
    net.dense("fc2", 4096, 4096, activation="relu")
    net.dense("predictions", 4096, 1000, activation="softmax")
    return net.finish()


def bert_large() -> Architecture:
    """BERT-large: 391 tensors, 335,141,888 parameters (1.34 GB)."""
    net = _Sequence([512])
    width, words, wide = 1024, 30522, 4096
    embedded = [
        net.add(f"embeddings/{kind}", {"class": "Embedding", "rows": rows, "kind": kind}, "input", table=(rows, width))
        for kind, rows in (("word", words), ("position", 512), ("segment", 2))
    ]
    net.add("embeddings/sum", {"class": "Add"}, *embedded)
    _normalise(net, "embeddings/norm", width)
    for index in range(24):
        _transformer_block(net, f"block_{index:02d}", width, wide)
    net.dense("pooler", width, width, activation="tanh")
    return net.finish()


def _transformer_block(net: _Sequence, name: str, width: int, wide: int) -> None:
    entry = net.last
    projected = [net.dense(f"{name}/{part}", width, width, entry) for part in ("query", "key", "value")]
    net.add(f"{name}/attention", {"class": "Attention", "heads": 16}, *projected)
    net.dense(f"{name}/output", width, width)
    net.add(f"{name}/add_1", {"class": "Add"}, net.last, entry)
    middle = _normalise(net, f"{name}/norm_1", width)
    net.dense(f"{name}/wide", width, wide, activation="gelu")
    net.dense(f"{name}/narrow", wide, width)
    net.add(f"{name}/add_2", {"class": "Add"}, net.last, middle)
    _normalise(net, f"{name}/norm_2", width)


def _normalise(net: _Sequence, name: str, width: int) -> str:
    return net.add(name, {"class": "LayerNormalization"}, gamma=(width,), beta=(width,))
