"""The inverted index answers exactly what a scan of all models would."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store.errors import ModelNotFoundError
from tensorvine.store.graphs import search as search_module
from tensorvine.store.graphs.graph import Layer, ModelGraph, common_prefix
from tensorvine.store.graphs.index import IndexMatch, PrefixIndex, PrefixQuery, rank_of
from tensorvine.store.refs import ModelRef

from tests.support.strategies import build, grown, plan_families, plans

qualities = st.sampled_from([None, math.nan, -1.0, 0.0, 0.5])
refs = st.builds(ModelRef, st.sampled_from("abc"), st.integers(1, 4))


class Scan:
    """The same by brute force."""

    def __init__(self):
        self.models = {}

    def match(self, graph):
        found = []
        for ref, (model, quality, created_ns) in self.models.items():
            size = len(common_prefix(graph, model))
            if size:
                found.append((size, rank_of(quality, created_ns, ref)))
        if not found:
            return None
        size, (quality, created_ns, ref) = max(found)
        return IndexMatch(ref, size, None if quality == -math.inf else quality, created_ns)


def check_interleaved(data, family):
    index, scan = PrefixIndex(), Scan()
    graphs = [build(plan) for plan in family]
    for _ in range(data.draw(st.integers(1, 20))):
        ref = data.draw(refs)
        if ref in scan.models and data.draw(st.booleans()):
            index.remove(ref)
            del scan.models[ref]
        else:
            graph = data.draw(st.sampled_from(graphs))
            quality, created_ns = data.draw(qualities), data.draw(st.integers(0, 2))
            index.add(ref, PrefixQuery.of(graph), quality, created_ns)
            scan.models[ref] = (graph, quality, created_ns)
        plan = data.draw(st.one_of(st.sampled_from(family), st.sampled_from(family).flatmap(grown), plans()))
        graph = build(plan, "query")
        assert index.match(PrefixQuery.of(graph)) == scan.match(graph)
        assert len(index) == len(scan.models)


@given(st.data(), plan_families())
@settings(max_examples=100, deadline=None)
def test_match_is_that_of_a_scan(data, family):
    check_interleaved(data, family)


@pytest.mark.parametrize(("few", "steps"), [(0, 64), (0, 2), (0, 0), (1, 1)])
@given(data=st.data(), family=plan_families())
@settings(max_examples=50, deadline=None)
def test_match_is_that_of_a_scan_by_way_of_sets_and_by_way_of_counting(few, steps, data, family):
    """Small indexes take the ways of large ones when the limits between the ways are lowered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "_FEW", few)
        patch.setattr(search_module, "_STEPS", steps)
        check_interleaved(data, family)


def wide(*heads):
    """One input and one head per number; no head feeds another, so any set of heads is a prefix."""
    return ModelGraph([Layer("in", {"class": "Input"})] + [Layer(f"h{u}", {"units": u}, ["in"]) for u in heads])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_match_is_that_of_a_scan_over_wide_models(data):
    index, scan = PrefixIndex(), Scan()
    head_sets = st.sets(st.integers(0, 11))
    for version, heads in enumerate(data.draw(st.lists(head_sets, min_size=40, max_size=120)), 1):
        ref, graph, quality = ModelRef("m", version), wide(*heads), data.draw(qualities)
        index.add(ref, PrefixQuery.of(graph), quality, 0)
        scan.models[ref] = (graph, quality, 0)
    for heads in data.draw(st.lists(head_sets, min_size=3, max_size=6)):
        graph = wide(*heads)
        assert index.match(PrefixQuery.of(graph)) == scan.match(graph)


def test_empty_index_and_foreign_query_have_no_match():
    index = PrefixIndex()
    assert index.match(PrefixQuery.of(wide(1))) is None
    index.add(ModelRef("m", 1), PrefixQuery.of(wide(1)), None, 0)
    assert index.match(PrefixQuery.of(ModelGraph([Layer("x", {"class": "Other"})]))) is None
    assert index.match(PrefixQuery.of(ModelGraph())) is None


def test_ties_go_to_quality_then_to_the_newer_then_to_the_greater_reference():
    index = PrefixIndex()
    query = PrefixQuery.of(wide(1))

    def add(name, version, quality, created_ns):
        index.add(ModelRef(name, version), query, quality, created_ns)
        return str(index.match(query).ref)

    assert add("m", 1, None, 5) == "m@1"
    assert add("m", 2, math.nan, 4) == "m@1"
    assert add("m", 3, -2.0, 1) == "m@3"
    assert add("m", 4, 0.0, 1) == "m@4"
    assert add("m", 5, 0.0, 2) == "m@5"
    assert add("n", 1, 0.0, 2) == "n@1"
    assert add("a", 9, 0.0, 2) == "n@1"


def test_longer_prefix_beats_quality():
    index = PrefixIndex()
    index.add(ModelRef("short", 1), PrefixQuery.of(wide(1)), 0.9, 1)
    index.add(ModelRef("long", 1), PrefixQuery.of(wide(1, 2)), 0.1, 1)
    assert index.match(PrefixQuery.of(wide(1, 2, 3))) == IndexMatch(ModelRef("long", 1), 3, 0.1, 1)


def test_removing_the_best_brings_back_the_second():
    index, query = PrefixIndex(), PrefixQuery.of(wide(1))
    for version in range(1, 60):
        index.add(ModelRef("m", version), query, version % 7, version)
        index.add(ModelRef("n", version), PrefixQuery.of(wide(1, version + 1)), -1.0, version)
    live = {ModelRef("m", v): (v % 7, v) for v in range(1, 60)}
    while live:
        best = max(live, key=live.__getitem__)
        assert index.match(query).ref == best
        index.remove(best)
        del live[best]
    assert index.match(query).ref == ModelRef("n", 59)


def test_removing_what_is_not_there_is_an_error():
    index = PrefixIndex()
    with pytest.raises(ModelNotFoundError, match="m@1"):
        index.remove(ModelRef("m", 1))


def test_emptied_index_keeps_nothing():
    index = PrefixIndex()
    for version in range(1, 30):
        index.add(ModelRef("m", version), PrefixQuery.of(wide(*range(version % 5))), None, version)
    for version in range(1, 30):
        index.remove(ModelRef("m", version))
    assert len(index) == 0
    assert not index._postings
    assert not index._architectures
    assert not index._numbers


def test_a_stream_of_checkpoints_does_not_pile_up():
    """Every version is the best when added and goes when it is five versions old."""
    index = PrefixIndex()
    other = PrefixQuery.of(wide(1, 2, 3))
    index.add(ModelRef("other", 1), other, None, 0)
    stream = PrefixQuery.of(wide(1, 2))
    for version in range(1, 1000):
        index.add(ModelRef("m", version), stream, None, version)
        if version > 5:
            index.remove(ModelRef("m", version - 5))
    assert sum(len(p.heap) for p in index._postings.values() if not isinstance(p, int)) < 100
    assert sum(len(a.heap) for a in index._architectures.values()) < 100
    assert index.match(stream).ref == ModelRef("m", 999)
