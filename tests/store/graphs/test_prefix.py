"""The longest common prefix: held to EvoStore's Algorithm 1, and to the edges where twins leave a choice."""

from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.graphs.graph import Layer, ModelGraph, common_prefix

from tests.support.reference_prefix import reference_prefix
from tests.support.strategies import build, grown, plans, shuffled

INPUT = {"class": "Input"}


def dense(name: str, source: str, units: int = 1) -> Layer:
    return Layer(name, {"class": "Dense", "units": units}, [source])


def towers(*names: str, head: int = 9) -> ModelGraph:
    """One equal tower of two layers per name, each on its own input, joined by a head of its own config."""
    layers = [
        layer
        for n in names
        for layer in (Layer(f"in-{n}", INPUT), dense(f"d-{n}", f"in-{n}"), dense(f"e-{n}", f"d-{n}", 2))
    ]
    return ModelGraph([*layers, Layer("head", {"class": "Concat", "n": head}, [f"e-{n}" for n in names])])


@given(st.data())
def test_prefix_is_that_of_the_papers_algorithm(data: st.DataObject):
    plan = data.draw(plans())
    graph, other = build(plan), build(data.draw(st.one_of(plans(), grown(plan))), "w")
    assert set(common_prefix(graph, other)) == reference_prefix(graph, other)


@given(st.data())
def test_every_match_has_the_same_fingerprint_and_brings_its_ancestors(data: st.DataObject):
    plan = data.draw(plans())
    graph, other = build(plan), build(data.draw(st.one_of(plans(), grown(plan))), "w")
    prefix = common_prefix(graph, other)
    for mine, theirs in prefix.items():
        assert graph.fingerprints[mine] == other.fingerprints[theirs]
        assert set(graph.by_name[mine].inputs) <= set(prefix)
    assert list(prefix) == [layer.name for layer in graph.layers if layer.name in prefix]


@given(st.data())
def test_a_graph_of_trees_matches_its_shuffled_copy_edge_by_edge(data: st.DataObject):
    plan = data.draw(plans())
    graph = build(plan)
    consumers = [name for layer in graph.layers for name in layer.inputs]
    other = data.draw(shuffled(graph))
    prefix = common_prefix(graph, other)
    assert set(prefix) == set(graph.by_name)
    if len(consumers) == len(set(consumers)):  # each layer feeds one other at most: no two edges can disagree
        assert sorted(prefix.values()) == sorted(other.by_name)
        for mine, theirs in prefix.items():
            expected = [prefix[name] for name in graph.by_name[mine].inputs]
            assert list(other.by_name[theirs].inputs) == expected


def test_a_matching_layer_behind_a_different_one_is_not_in_the_prefix():
    parent = ModelGraph([Layer("in", INPUT), dense("a", "in", 1), dense("b", "a", 7)])
    child = ModelGraph([Layer("in", INPUT), dense("a", "in", 2), dense("b", "a", 7)])
    assert common_prefix(child, parent) == {"in": "in"}


def test_figure_2_child_keeps_all_but_what_depends_on_the_changed_layer():
    def model(six: int) -> ModelGraph:
        return ModelGraph(
            [
                Layer("1", INPUT),
                dense("2", "1", 2),
                dense("3", "2", 3),
                dense("4", "1", 4),
                dense("5", "4", 5),
                dense("6", "5", six),
                Layer("7", {"class": "Add"}, ["3", "6"]),
            ]
        )

    assert list(common_prefix(model(66), model(6))) == ["1", "2", "3", "4", "5"]


def test_inputs_in_another_order_do_not_match():
    def join(*order: str) -> ModelGraph:
        return ModelGraph([Layer("x", INPUT), dense("a", "x"), Layer("j", {"class": "Concat"}, order)])

    assert set(common_prefix(join("x", "a"), join("a", "x"))) == {"x", "a"}
    assert set(common_prefix(join("x", "x"), join("x"))) == {"x", "a"}
    assert reference_prefix(join("x", "x"), join("x")) == {"x", "a"}
    assert set(common_prefix(join("x", "x"), join("x", "x"))) == {"x", "a", "j"}


def test_twin_branches_come_each_from_one_branch():
    prefix = common_prefix(towers("a", "b"), towers("p", "q", head=8))
    assert set(prefix) == {"in-a", "in-b", "d-a", "d-b", "e-a", "e-b"}
    for tower in "ab":
        assert len({prefix[f"{part}-{tower}"][-1] for part in ("in", "d", "e")}) == 1
    assert len(set(prefix.values())) == 6


def test_twins_share_a_match_where_the_other_graph_has_fewer():
    prefix = common_prefix(towers("a", "b", "c"), towers("p"))
    assert {prefix[f"e-{tower}"] for tower in "abc"} == {"e-p"}
    assert common_prefix(towers("p"), towers("a", "b")).keys() == {"in-p", "d-p", "e-p"}


def test_a_free_twin_takes_what_the_edges_left_over():
    graph = ModelGraph([Layer("x", INPUT), dense("free", "x"), dense("used", "x"), dense("e", "used", 2)])
    other = ModelGraph([Layer("y", INPUT), dense("first", "y"), dense("second", "y"), dense("f", "first", 2)])
    assert common_prefix(graph, other) == {"x": "y", "free": "second", "used": "first", "e": "f"}


def test_two_ends_of_a_twin_branch_stay_on_it():
    def forked(*names: str) -> ModelGraph:
        layers = [Layer("x", INPUT)]
        for n in names:
            layers += [dense(f"d-{n}", "x"), dense(f"left-{n}", f"d-{n}", 2)]
        layers += [dense(f"right-{n}", f"d-{n}", 3) for n in reversed(names)]
        return ModelGraph(layers)

    prefix = common_prefix(forked("a", "b"), forked("p", "q"))
    for tower in "ab":
        assert len({prefix[f"{part}-{tower}"][-1] for part in ("d", "left", "right")}) == 1


def test_empty_graphs_have_an_empty_prefix():
    assert common_prefix(ModelGraph(), towers("a")) == common_prefix(towers("a"), ModelGraph()) == {}
