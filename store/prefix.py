"""The longest common prefix of two graphs (EvoStore, section 4.2).

Rules
- A vertex of one graph matches a vertex of the other when their configs are equal and their inputs match, in
  order. That is when their fingerprints are equal, so `common_prefix` compares fingerprints only.
- The prefix is the set of vertices that have a match. With a vertex, all its ancestors are in it.
- Twins are vertices of one graph with equal fingerprints. Each twin of the first graph is in the prefix if
  the second has at least one; they share a match where the second has fewer.
- Which twin is matched with which follows the edges: what feeds a matched vertex is matched with what feeds
  its match, so that the weights of a branch come from one branch.
- `reference_prefix` is the paper's algorithm. It shares no code with `common_prefix`, which tests hold to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .graph import canonical_config

if TYPE_CHECKING:
    from .graph import ModelGraph


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


def reference_prefix(graph: ModelGraph, other: ModelGraph) -> set[str]:
    """Find the layers of the longest common prefix by EvoStore's Algorithm 1, without fingerprints.

    The paper's pseudo code names a vertex by one ID in both graphs, starts at the one root, and counts edges.
    It is mended here where that is not enough:

    - `A[v]` takes for granted that v is known to be the same vertex in both graphs. Configs may repeat within
      a graph, so the frontier holds pairs (vertex of `graph`, vertex of `other`), each with its own counter.
    - A model may have several inputs: the frontier starts with all pairs of equal vertices without inputs.
    - The order of inputs matters, and one edge may occur twice, as in `Add(x, x)`: an edge is known by the
      position at which it enters, and a pair is visited only by edges that enter at the same position.
    - The paper's `exists v in A[u].out_edges` compares layers; here it is the equality of canonical configs.

    Args:
        graph: the graph whose layers are looked up.
        other: the graph to find them in.

    Returns:
        Names of the layers of `graph` in the prefix. The time is quadratic in the number of equal layers:
        this is the reference for `common_prefix`, not a replacement.

    >>> from tensorvine.store import Layer, ModelGraph
    >>> chain = ModelGraph([Layer("in", {"class": "Input"}), Layer("a", {"class": "ReLU"}, ["in"])])
    >>> sorted(reference_prefix(chain, ModelGraph([Layer("x", {"class": "Input"})])))
    ['in']
    """
    texts = {layer.name: canonical_config(layer.config) for layer in graph.layers}
    other_texts = {layer.name: canonical_config(layer.config) for layer in other.layers}
    edges, other_edges = _out_edges(graph), _out_edges(other)
    frontier = deque(
        (v.name, w.name)
        for v in graph.layers
        for w in other.layers
        if not v.inputs and not w.inputs and texts[v.name] == other_texts[w.name]
    )
    visits: dict[tuple[str, str], int] = {}
    prefix: set[str] = set()
    while frontier:
        u, x = frontier.popleft()
        prefix.add(u)
        for v, position in edges[u]:
            for w, other_position in other_edges[x]:
                if position != other_position or texts[v] != other_texts[w]:
                    continue
                visits[v, w] = visits.get((v, w), 0) + 1
                if visits[v, w] == max(len(graph.by_name[v].inputs), len(other.by_name[w].inputs)):
                    frontier.append((v, w))
    return prefix


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


def _out_edges(graph: ModelGraph) -> dict[str, list[tuple[str, int]]]:
    """Layer -> its consumers, each with the position at which the layer enters it."""
    edges: dict[str, list[tuple[str, int]]] = {layer.name: [] for layer in graph.layers}
    for layer in graph.layers:
        for position, name in enumerate(layer.inputs):
            edges[name].append((layer.name, position))
    return edges
