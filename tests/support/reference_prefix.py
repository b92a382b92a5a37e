"""The longest common prefix as EvoStore's Algorithm 1 finds it: what tests hold `common_prefix` to.

It shares no code with that one, and knows no fingerprints.
"""

from __future__ import annotations

from collections import deque

from tensorvine.store.graphs.graph import ModelGraph, canonical_config


def reference_prefix(graph: ModelGraph, other: ModelGraph) -> set[str]:
    """Find the layers of the longest common prefix by EvoStore's Algorithm 1, without fingerprints.

    The paper's pseudo code names a vertex by one ID in both graphs, starts at the one root, and counts edges.
    It is corrected here where that is not enough:

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


def _out_edges(graph: ModelGraph) -> dict[str, list[tuple[str, int]]]:
    """Layer -> its consumers, each with the position at which the layer enters it."""
    edges: dict[str, list[tuple[str, int]]] = {layer.name: [] for layer in graph.layers}
    for layer in graph.layers:
        for position, name in enumerate(layer.inputs):
            edges[name].append((layer.name, position))
    return edges
