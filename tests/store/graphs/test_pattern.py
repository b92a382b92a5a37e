"""Finding graphs by pattern: the plain form by cases, the index held to the plain form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.errors import GraphError, ModelNotFoundError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.graphs.pattern import PatternIndex, check_pattern, matches

from tests.support.strategies import CONFIGS, build, plan_families

CNN = ModelGraph(
    [
        Layer("in", {"class": "Input", "shape": [32, 32, 3]}),
        Layer("c1", {"class": "Conv2D", "filters": 32, "kernel_size": (3, 3), "use_bias": True}, ["in"]),
        Layer("bn", {"class": "BatchNormalization"}, ["c1"]),
        Layer("c2", {"class": "Conv2D", "filters": 64, "kernel_size": [5, 5], "use_bias": False}, ["bn"]),
        Layer("add", {"class": "Add"}, ["c1", "c2"]),
        Layer("out", {"class": "Dense", "units": 10, "activation": None}, ["add"]),
    ]
)

predicates = st.one_of(
    st.just({}),
    st.sampled_from(CONFIGS),
    st.sampled_from([{"class": ["Input", "Dense"]}, {"units": [1, 2]}, {"units": 2}, {"shape": [1, 1]}, {"no": 1}]),
)
patterns = st.lists(predicates, min_size=1, max_size=4)


@pytest.mark.parametrize(
    "pattern",
    [
        [{"class": "Conv2D", "filters": [32, 64]}, {"class": "BatchNormalization"}],
        [{"class": "Conv2D"}, {"class": "Add"}, {"class": "Dense"}],
        [{}, {}, {}, {}, {}, {}],
        [{"kernel_size": [3, 3]}],
        [{"kernel_size": (3, 3)}],
        [{"kernel_size": [[3, 3], [7, 7]]}],
        [{"filters": 32.0}],
        [{"activation": None}],
        [{"use_bias": True}],
    ],
)
def test_pattern_matches(pattern):
    assert matches(CNN, pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        [{"class": "BatchNormalization"}, {"class": "Add"}],  # not consecutive
        [{"class": "BatchNormalization"}, {"class": "Conv2D", "filters": 32}],  # against the edge
        [{}] * 7,  # longer than the longest path
        [{"kernel_size": 3}],
        [{"kernel_size": [5, 3]}],
        [{"use_bias": 1}],
        [{"use_bias": None}],
        [{"filters": [16, 128]}],
        [{"filters": []}],
        [{"rate": None}],
    ],
)
def test_pattern_does_not_match(pattern):
    assert not matches(CNN, pattern)


def test_exact_pattern_covers_a_whole_path():
    assert matches(CNN, [{"class": "Input"}, {"class": "Conv2D"}, {"class": "Add"}, {"class": "Dense"}], exact=True)
    assert matches(CNN, [{}] * 4, exact=True)
    assert matches(CNN, [{}] * 6, exact=True)
    assert not matches(CNN, [{}] * 5, exact=True)
    assert not matches(CNN, [{"class": "Conv2D"}, {"class": "Add"}, {"class": "Dense"}], exact=True)
    assert not matches(CNN, [{"class": "Input"}, {"class": "Conv2D"}, {"class": "Add"}], exact=True)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ([], "at least one layer predicate"),
        ("Conv2D", "expected a list of layer predicates; found str"),
        ({"class": "Conv2D"}, "expected a list of layer predicates; found dict"),
        ([{}, "Conv2D"], "predicate 2 .* found str"),
        ([{1: 2}], "predicate 1 .* found 1"),
        ([{}, {"x": object()}], "predicate 2 .* found object"),
    ],
)
def test_malformed_pattern_is_named(pattern, message):
    with pytest.raises(GraphError, match=message):
        check_pattern(pattern)
    with pytest.raises(GraphError, match=message):
        matches(CNN, pattern)
    with pytest.raises(GraphError, match=message):
        PatternIndex().find(pattern)


@given(plan_families(), st.data())
def test_index_finds_what_the_plain_form_matches(family, data):
    index = PatternIndex[int]()
    graphs = {}
    for key, plan in enumerate(family):
        graphs[key] = build(plan, f"name{key}-")
        index.add(key, graphs[key])
    for key in data.draw(st.sets(st.sampled_from(range(len(family))))):
        index.remove(key)
        del graphs[key]
    for pattern in data.draw(st.lists(patterns, max_size=4)):
        for exact in (False, True):
            assert index.find(pattern, exact) == [k for k, g in graphs.items() if matches(g, pattern, exact)]


@given(patterns, st.booleans())
def test_pattern_matches_when_some_path_does(pattern, exact):
    """The dynamic program against an enumeration of paths, on one graph with forks and joins."""
    graph = build(((0, ()), (1, (0,)), (2, (0,)), (3, (1, 2)), (1, (3,)), (0, ()), (3, (5, 4)), (2, (1,))))
    feeds = [(name, layer.name) for layer in graph.layers for name in layer.inputs]
    paths = [[layer.name] for layer in graph.layers]
    for _ in pattern[1:]:
        paths = [[*path, after] for path in paths for before, after in feeds if before == path[-1]]
    if exact:
        consumed = {before for before, _ in feeds}
        paths = [p for p in paths if not graph.by_name[p[0]].inputs and p[-1] not in consumed]

    def accepts(predicate, config):
        return all(
            key in config and (config[key] == want or (isinstance(want, list) and config[key] in want))
            for key, want in predicate.items()
        )

    expected = any(
        all(accepts(p, graph.by_name[n].config) for p, n in zip(pattern, path, strict=True)) for path in paths
    )
    assert matches(graph, pattern, exact) == expected


def test_key_added_again_is_replaced_and_removed_key_is_gone():
    index = PatternIndex[str]()
    index.add("a", CNN)
    index.add("b", CNN)
    index.add("a", build(((0, ()),)))
    assert index.find([{"class": "Conv2D"}]) == ["b"]
    assert index.find([{}]) == ["b", "a"]
    index.remove("b")
    assert (len(index), "b" in index, index.find([{"class": "Conv2D"}])) == (1, False, [])
    with pytest.raises(ModelNotFoundError, match="'b'"):
        index.remove("b")


def test_emptied_index_keeps_no_config():
    index = PatternIndex[int]()
    for key in range(3):
        index.add(key, CNN)
    for key in range(3):
        index.remove(key)
    assert not index._configs
    assert not index._texts
    assert not index._shapes
