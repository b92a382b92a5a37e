"""Graphs: what makes one, what a fingerprint says, and that depth and order do no harm."""

import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.bounds.allowance import allowed
from tensorvine.store.errors import GraphError
from tensorvine.store.graphs.graph import FINGERPRINT_BYTES, Layer, ModelGraph, canonical_config

from tests.support.strategies import build, grown, plans, shuffled

INPUT = Layer("in", {"class": "Input", "shape": [4]})

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, -2.0, 1e300, math.inf]) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)
configs = st.dictionaries(st.text("abc", max_size=2), values, max_size=3)


def equal_json(a, b):
    """Equality of JSON values, in which true is not 1 and 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_json(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal_json, a, b))
    return a == b


def same_structure(graph, name, other, other_name):
    """Configs and, recursively, ordered inputs are equal."""
    v, w = graph.by_name[name], other.by_name[other_name]
    return (
        equal_json(v.config, w.config)
        and len(v.inputs) == len(w.inputs)
        and all(same_structure(graph, a, other, b) for a, b in zip(v.inputs, w.inputs, strict=True))
    )


def one(config):
    return ModelGraph([Layer("x", config)]).fingerprint


@given(st.data())
def test_fingerprints_are_equal_exactly_when_structures_are(data):
    plan = data.draw(plans(max_layers=6))
    graph, other = build(plan), build(data.draw(st.one_of(plans(max_layers=6), grown(plan))), "w")
    for mine, fingerprint in graph.fingerprints.items():
        for theirs, found in other.fingerprints.items():
            assert (fingerprint == found) == same_structure(graph, mine, other, theirs)


@given(configs, configs)
def test_fingerprints_are_equal_exactly_when_configs_are(a, b):
    assert (one(a) == one(b)) == equal_json(a, b)


@given(st.data())
def test_names_and_order_of_layers_do_not_enter_a_fingerprint(data):
    graph = build(data.draw(plans()))
    other = data.draw(shuffled(graph, "renamed-"))
    assert graph.fingerprint == other.fingerprint
    assert {"renamed-" + name: f for name, f in graph.fingerprints.items()} == other.fingerprints


def test_tensor_names_do_not_enter_a_fingerprint():
    plain, named = Layer("d", {"units": 1}), Layer("d", {"units": 1}, (), ["kernel", "bias"])
    assert ModelGraph([plain]).fingerprint == ModelGraph([named]).fingerprint
    assert ModelGraph([plain]) != ModelGraph([named])


def test_order_and_number_of_inputs_enter_a_fingerprint():
    sources = [INPUT, Layer("a", {"units": 1}, ["in"])]
    orders = [("in", "a"), ("a", "in"), ("a",), ("a", "a"), ("in", "in"), ("in",), ()]
    prints = [ModelGraph([*sources, Layer("j", {"class": "J"}, order)]).fingerprints["j"] for order in orders]
    assert len(set(prints)) == len(orders)
    assert {len(fingerprint) for fingerprint in prints} == {FINGERPRINT_BYTES}


def test_a_graph_fingerprint_counts_twins():
    twins = [INPUT, Layer("a", {"units": 1}, ["in"]), Layer("b", {"units": 1}, ["in"])]
    assert ModelGraph(twins).fingerprint != ModelGraph(twins[:2]).fingerprint


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"k": (3, 3)}, {"k": [3, 3]}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"n": 8}, {"n": 8.0}),
        ({"n": 8}, {"n": np.int64(8)}),
        ({"n": 0.5}, {"n": np.float32(0.5)}),
        ({"n": 0}, {"n": -0.0}),
        ({"o": {"x": [1.0]}}, {"o": {"x": (1,)}}),
    ],
)
def test_equal_configs_have_one_canonical_text(a, b):
    first, second = Layer("x", a).config, Layer("x", b).config
    assert canonical_config(first) == canonical_config(second)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"k": True}, {"k": 1}),
        ({"k": False}, {"k": 0}),
        ({"k": None}, {}),
        ({"k": "1"}, {"k": 1}),
        ({"k": [1, 2]}, {"k": [2, 1]}),
        ({"k": [[1], 2]}, {"k": [1, [2]]}),
        ({"k": 1}, {"k": 1.0000000001}),
        ({"k": 2**53}, {"k": 2**53 + 1}),
    ],
)
def test_different_configs_have_different_fingerprints(a, b):
    assert one(a) != one(b)


@given(st.data())
def test_layers_come_after_their_inputs_in_whatever_order_they_are_given(data):
    graph = data.draw(shuffled(build(data.draw(plans()))))
    seen = set()
    for layer in graph.layers:
        assert seen.issuperset(layer.inputs)
        seen.add(layer.name)
    assert ModelGraph(reversed(graph.layers)) == graph


def test_layers_given_in_order_stay_in_order():
    layers = [
        INPUT,
        Layer("b", {}, ["in"]),
        Layer("a", {}, ["in"]),
        Layer("z", {}),
        Layer("c", {}, ["z", "a"]),
    ]
    assert ModelGraph(layers).layers == tuple(layers)


def test_a_cycle_is_named():
    layers = [INPUT, Layer("a", {}, ["in", "c"]), Layer("b", {}, ["a"]), Layer("c", {}, ["b"])]
    with pytest.raises(GraphError, match="expected no cycle; found a <- c <- b <- a"):
        ModelGraph(layers)


def test_a_layer_that_feeds_itself_is_a_cycle():
    with pytest.raises(GraphError, match="found a <- a"):
        ModelGraph([Layer("a", {}, ["a"])])


def test_an_unknown_input_is_named_with_its_layer():
    with pytest.raises(GraphError, match=r"layer 'a'.*found 'gone'"):
        ModelGraph([INPUT, Layer("a", {}, ["in", "gone"])])


def test_a_name_that_occurs_twice_is_named():
    with pytest.raises(GraphError, match="unique layer names; found 'in' twice"):
        ModelGraph([INPUT, Layer("a", {}), INPUT])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", {}), "layer name"),
        ((3, {}), "layer name"),
        (("a", [1]), "config of layer 'a': expected a mapping; found list"),
        (("a", {"x": math.nan}), "config of layer 'a': .*NaN"),
        (("a", {"x": {1: 2}}), "config of layer 'a': expected string keys; found 1"),
        (("a", {"x": object()}), "config of layer 'a': expected JSON values; found object"),
        (("a", {"x": np.zeros(2)}), "config of layer 'a': expected JSON values; found ndarray"),
        (("a", {}, "in"), "inputs of layer 'a': expected a sequence of names; found 'in'"),
        (("a", {}, [1]), "inputs of layer 'a': expected names; found 1"),
        (("a", {}, (), "kernel"), "tensors of layer 'a'"),
    ],
)
def test_a_malformed_layer_is_an_error_that_says_where(arguments, message):
    with pytest.raises(GraphError, match=message):
        Layer(*arguments)


def test_what_is_no_layer_is_no_part_of_a_graph():
    with pytest.raises(GraphError, match="expected Layer objects; found str"):
        ModelGraph(["in"])


def test_a_layer_does_not_change_with_the_config_it_was_made_of():
    config = {"k": [1, 2]}
    layer = Layer("a", config)
    config["k"].append(3)
    assert layer.config == {"k": [1, 2]}


@pytest.mark.parametrize("backwards", [False, True])
def test_a_graph_5000_layers_deep_needs_no_recursion(backwards):
    layers = [Layer("0", {}), *(Layer(str(i), {"units": i % 7}, [str(i - 1)]) for i in range(1, 5000))]
    graph = ModelGraph(reversed(layers) if backwards else layers)
    assert graph.layers == tuple(layers)
    assert len(set(graph.fingerprints.values())) == 5000
    assert ModelGraph.from_json(graph.to_json()) == graph
    assert len(graph.common_prefix(ModelGraph(layers[:4000]))) == 4000


@given(st.data())
def test_json_brings_back_the_graph(data):
    plain = build(data.draw(plans()))
    graph = ModelGraph(
        Layer(v.name, data.draw(configs), v.inputs, data.draw(st.lists(st.text("kb/", max_size=2), max_size=2)))
        for v in plain.layers
    )
    again = ModelGraph.from_json(graph.to_json())
    assert again == graph
    assert again.fingerprints == graph.fingerprints
    assert [v.name for v in again.layers] == [v.name for v in graph.layers]


def test_json_keeps_text_that_is_no_valid_unicode():
    graph = ModelGraph([Layer("ä\ud800", {"k": "\ud800ß"})])
    assert ModelGraph.from_json(graph.to_json()).fingerprint == graph.fingerprint


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"layers": [1]}', '{"layers": [["a", {}, []]]}', b"\xff"])
def test_json_of_something_else_is_an_error(text):
    with pytest.raises(GraphError, match="graph as JSON"):
        ModelGraph.from_json(text)


def test_json_of_layers_that_are_no_graph_says_why():
    with pytest.raises(GraphError, match="found 'gone'"):
        ModelGraph.from_json(json.dumps({"layers": [["a", {}, ["gone"], []]]}))


def test_tensors_are_listed_once_in_the_order_of_layers():
    shared = ["w/kernel", "w/bias"]
    layers = [
        Layer("second", {}, ["first"], shared),
        Layer("first", {}, (), ["e"]),
        Layer("third", {}, (), shared),
    ]
    assert ModelGraph(layers).tensors == ("e", "w/kernel", "w/bias")


def test_equal_graphs_hash_equal_whatever_the_order():
    layers = [INPUT, Layer("a", {"k": 1}, ["in"]), Layer("b", {"k": 2}, ["in"])]
    graph, other = ModelGraph(layers), ModelGraph(layers[::-1])
    assert graph == other
    assert hash(graph) == hash(other)
    assert len({graph, other}) == 1
    assert graph != ModelGraph(layers[:2])
    assert graph != "graph"


class TestHostileText:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "3",
            b"\xff",
            "[" * 100_000,
            '{"layers": 3}',
            '{"layers": [["a", {}, []]]}',
            '{"layers": [["a", {"x": 1e999999}, [], 3]]}',
            '{"layers": [["a", {"x": ' + "9" * 5000 + "}, [], []]]}",
            '{"layers": [["a", {"x": ' + "[" * 200 + "]" * 200 + "}, [], []]]}",
            '{"layers": [["a", {"x": ' + '{"y":' * 900 + "1" + "}" * 900 + "}, [], []]]}",
        ],
        ids=lambda text: str(text)[:40],
    )
    def test_what_is_no_graph_is_a_graph_error(self, text: str | bytes) -> None:
        with pytest.raises(GraphError, match="expected"):
            ModelGraph.from_json(text)

    def test_what_takes_too_much_memory_is_not_parsed(self) -> None:
        for text in (
            '{"layers":[' + "{}," * 700_000 + "0]}",
            '{"layers":[' + ("[" * 40 + "]" * 40 + ",") * 20_000 + "0]}",
        ):
            tracemalloc.start()
            try:
                with pytest.raises(GraphError, match="expected JSON that takes at most"):
                    ModelGraph.from_json(text)
                assert tracemalloc.get_traced_memory()[1] <= allowed(len(text))
            finally:
                tracemalloc.stop()

    def test_a_config_as_deep_as_it_may_be_is_hashed_and_written(self) -> None:
        config: dict[str, object] = {}
        for _ in range(99):
            config = {"x": config}
        graph = ModelGraph([Layer("a", config)])
        assert ModelGraph.from_json(graph.to_json()).fingerprint == graph.fingerprint
        with pytest.raises(GraphError, match="expected at most 100 levels of nested lists and mappings"):
            Layer("a", {"x": {"x": config}})
