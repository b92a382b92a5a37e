"""Hypothesis strategies for small random graphs, in which equal layers, twins and shared prefixes are common.

Rules
- A plan is a list of (config number, input positions); layer i may only take inputs from layers before it.
- `CONFIGS` is small on purpose: most pairs of graphs share something, and most graphs hold a layer twice.
"""

from hypothesis import strategies as st
from tensorvine.store.graphs.graph import Layer, ModelGraph

CONFIGS = (
    {"class": "Input"},
    {"class": "Dense", "units": 1},
    {"class": "Dense", "units": 2},
    {"class": "Add", "shape": [1, 1]},
)

Plan = tuple[tuple[int, tuple[int, ...]], ...]


def build(plan: Plan, name: str = "v") -> ModelGraph:
    """Build the graph of a plan; layer i is called `name` followed by i."""
    return ModelGraph(
        Layer(f"{name}{i}", CONFIGS[config], [f"{name}{j}" for j in inputs]) for i, (config, inputs) in enumerate(plan)
    )


@st.composite
def plans(draw: st.DrawFn, max_layers: int = 8) -> Plan:
    """Draw a plan of up to `max_layers` layers with forks, joins, repeated edges and several inputs."""
    plan: list[tuple[int, tuple[int, ...]]] = []
    for i in range(draw(st.integers(0, max_layers))):
        inputs = draw(st.lists(st.integers(0, i - 1), max_size=2)) if i else []
        # Mostly one root config and one config per arity, so that deep vertices coincide too.
        config = draw(st.integers(0, len(CONFIGS) - 1)) if draw(st.booleans()) else len(inputs)
        plan.append((config, tuple(inputs)))
    return tuple(plan)


@st.composite
def grown(draw: st.DrawFn, plan: Plan, max_layers: int = 4) -> Plan:
    """Draw a plan that keeps the first layers of `plan` and goes on in its own way."""
    kept = plan[: draw(st.integers(0, len(plan)))]
    rows = list(kept)
    for _ in range(draw(st.integers(0, max_layers))):
        inputs = draw(st.lists(st.integers(0, len(rows) - 1), max_size=2)) if rows else []
        rows.append((draw(st.integers(0, len(CONFIGS) - 1)), tuple(inputs)))
    return tuple(rows)


@st.composite
def plan_families(draw: st.DrawFn, max_size: int = 8) -> list[Plan]:
    """Draw several plans, each new or grown from an earlier one."""
    family = [draw(plans())]
    for _ in range(draw(st.integers(0, max_size - 1))):
        family.append(draw(st.one_of(plans(), st.sampled_from(tuple(family)).flatmap(grown))))
    return family


@st.composite
def shuffled(draw: st.DrawFn, graph: ModelGraph, prefix: str = "other-") -> ModelGraph:
    """Draw the same graph with its layers renamed and given in another order."""
    layers = draw(st.permutations(graph.layers))
    return ModelGraph(Layer(prefix + v.name, v.config, [prefix + name for name in v.inputs], v.tensors) for v in layers)
