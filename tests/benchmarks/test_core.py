"""The benchmarks' shared parts: models, file peers, Redis-Queries, timing, reports, the command line.

`test_smoke.py` runs each benchmark.
"""

from __future__ import annotations

import doctest
import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.graphs.graph import Layer, ModelGraph
from typer.testing import CliRunner

from benchmarks import __main__ as command_line
from benchmarks import nas
from benchmarks.core.comparing import Verdict, change, changes
from benchmarks.core.fleet import Fleet, seconds_of
from benchmarks.core.measure import MIB, Sample, alternate, buffers_like, copying, memory_growth, sample
from benchmarks.core.models import (
    ATTN_FEATURES,
    Architecture,
    attn_graph,
    bert_large,
    draw,
    mutate,
    nas_graphs,
    small_tensors,
    synthetic,
    vgg19,
)
from benchmarks.core.peers import Peer, Plain, file_peers
from benchmarks.core.redis import PrefixWalk, RedisQueries, RedisServer, compact, concurrent_queries
from benchmarks.core.report import Effort, Goal, Report
from examples.nas.space import UNITS, AttnModel, AttnSpace

CORE = ("comparing", "measure", "report", "fleet", "models", "trainings")
EXAMPLES = [*(f"core.{name}" for name in CORE), "checkpoint", "consumers", "elastic", "schedule"]
"""Modules whose docstrings have examples."""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("module", EXAMPLES)
def test_the_examples_of_docstrings_hold(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"benchmarks.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


# ---- models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 10, 99, 1000])
def test_synthetic_models_have_the_bytes_and_layers_asked_for(layers: int) -> None:
    model = synthetic(4 * MIB, layers)
    tensors = model.tensors()
    assert sum(tensor.nbytes for tensor in tensors.values()) == model.nbytes == 4 * MIB
    assert sum(bool(layer.tensors) for layer in model.graph.layers) == layers
    assert set(model.graph.tensors) == set(tensors)
    sizes = {shape[0] for shape in model.shapes.values()}
    assert max(sizes) - min(sizes) <= 1


def test_leading_layers_come_as_close_to_the_share_as_whole_layers_can() -> None:
    model = synthetic(MIB, 10)
    assert len(model.leading_layers(0.5)) == 5
    assert len(model.leading_layers(0.74)) == 7
    assert model.tensors_of(model.leading_layers(0.2)) == ["layer_0000/kernel", "layer_0001/kernel"]


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [(vgg19(), 38, 143_667_240), (bert_large(), 391, 335_141_888)],
    ids=["VGG19", "BERT-large"],
)
def test_real_models_have_the_published_tensors(model: Architecture, tensors: int, parameters: int) -> None:
    assert len(model.shapes) == tensors
    assert model.nbytes == 4 * parameters
    assert model.graph.tensors == tuple(model.shapes)


def test_searched_graphs_are_the_same_for_the_same_seed() -> None:
    first, again, other = (list(nas_graphs(30, seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_searched_graphs_skip_and_join() -> None:
    graphs = list(nas_graphs(300, seed=0))
    kinds = {layer.config["class"] for graph in graphs for layer in graph.layers}
    assert kinds == {"InputLayer", "Dense", "Activation", "Add"}
    assert all(len(graph.layers[0].inputs) == 0 for graph in graphs)
    assert max(len(layer.inputs) for graph in graphs for layer in graph.layers) == 4, "output and three anchors"


def test_searched_graphs_are_what_the_example_builds_of_the_same_candidates() -> None:
    space, rng = AttnSpace(2, UNITS), random.Random(4)  # noqa: S311  for candidates
    for _ in range(20):
        candidate = draw(space, rng)
        layers = [layer for layer in attn_graph(space, candidate).layers if layer.config["class"] == "Dense"]
        with torch.device("meta"):
            model = AttnModel(space, candidate, ATTN_FEATURES, 2)
        widths = [part.out_features for part in model.modules() if isinstance(part, torch.nn.Linear)]
        assert [layer.config["units"] for layer in layers] == widths


def test_searched_graphs_share_prefixes_of_many_depths() -> None:
    graphs = list(nas_graphs(200, seed=0))
    depths = set()
    for place in range(1, 200):
        mine = set(graphs[place].fingerprints.values())
        depths.add(max(len(mine & set(other.fingerprints.values())) for other in graphs[:place]))
    assert len(depths) > 10


def test_small_tensors_cover_what_a_searched_graph_names() -> None:
    for graph in nas_graphs(5, seed=0, tensors=True):
        tensors = small_tensors(graph)
        assert set(tensors) == set(graph.tensors)
        assert 256 <= sum(tensor.nbytes for tensor in tensors.values()) < 16 * 1024


# ---- file peers -------------------------------------------------------------------------------------------


@pytest.fixture(params=[*file_peers(), Plain()], ids=lambda peer: peer.name)
def peer(request: pytest.FixtureRequest) -> Peer:
    return request.param


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras' HDF5 reader
def test_a_peer_gives_back_what_it_saved(peer: Peer, tmp_path: Path) -> None:
    tensors = synthetic(MIB, 7).tensors(seed=5)
    tensors["square/kernel"] = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = tmp_path / "model"
    peer.hold(tensors)
    peer.save(path)
    peer.save(tmp_path / "second")
    peer.hold({name: np.zeros_like(tensor) for name, tensor in tensors.items()})  # a load returns the file's content
    loaded = peer.load(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor, err_msg=name)
        assert loaded[name].dtype == tensor.dtype
    peer.remove(path)
    assert not path.exists()
    assert [left.name for left in tmp_path.iterdir()] == ["second"]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras' HDF5 reader
def test_a_peer_gives_the_tensors_named_and_no_others(peer: Peer, tmp_path: Path) -> None:
    tensors = synthetic(MIB, 7).tensors(seed=6)
    names = ["layer_0005/kernel", "layer_0001/kernel"]
    peer.hold(tensors)
    peer.save(tmp_path / "model")
    loaded = peer.load(tmp_path / "model", names)
    assert set(loaded) == set(names)
    for name in names:
        np.testing.assert_array_equal(loaded[name], tensors[name])


# ---- Redis-Queries ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def redis(server: RedisServer) -> Iterator[RedisQueries]:
    client = RedisQueries(server.socket)
    client._redis.flushall()
    yield client
    client.close()


def test_redis_queries_find_the_longest_common_prefix_of_200_graphs(redis: RedisQueries) -> None:
    stored = list(nas_graphs(200, seed=0))
    keys = dict(zip(redis.add_all([(graph, place / 200) for place, graph in enumerate(stored)]), stored, strict=True))
    for query in nas_graphs(40, seed=1):
        match = redis.query(query)
        assert match is not None
        assert match.layers == max(len(query.common_prefix(graph)) for graph in stored)
        assert match.layers == len(query.common_prefix(keys[match.architecture]))


def test_redis_queries_count_repeated_layers_as_the_store_does() -> None:
    def graph(repeats: int) -> ModelGraph:
        layers = [Layer("in", {"class": "Input"})]
        layers += [Layer(f"same_{i}", {"class": "Dense"}, ("in",)) for i in range(repeats)]
        layers.append(Layer("sum", {"class": "Add"}, tuple(f"same_{i}" for i in range(repeats))))
        return ModelGraph(layers)

    for mine in range(1, 4):
        for other in range(1, 4):
            length = PrefixWalk(graph(mine)).length(compact(graph(other)))
            assert length == len(graph(mine).common_prefix(graph(other))), (mine, other)


def test_redis_queries_tell_apart_the_order_of_inputs() -> None:
    a, b = Layer("a", {"class": "Input", "shape": [1]}), Layer("b", {"class": "Input", "shape": [2]})
    forward = ModelGraph([a, b, Layer("join", {"class": "Subtract"}, ("a", "b"))])
    backward = ModelGraph([a, b, Layer("join", {"class": "Subtract"}, ("b", "a"))])
    assert PrefixWalk(forward).length(compact(backward)) == 2
    assert PrefixWalk(forward).length(compact(forward)) == 3


def test_concurrent_callers_of_redis_all_get_answers(server: RedisServer, redis: RedisQueries) -> None:
    graphs = list(nas_graphs(20, seed=0))
    redis.add_all([(graph, 0.0) for graph in graphs])
    assert concurrent_queries(server.socket, graphs[:4], callers=2) > 0
    references = redis._redis.hgetall("references")
    assert sum(map(int, references.values())) == 20 + 4


def test_redis_queries_break_ties_by_quality(redis: RedisQueries) -> None:
    base = synthetic(MIB, 5).graph
    extended = [
        ModelGraph([*base.layers, Layer("extra", {"class": "Dense", "units": units}, ("layer_0004",))])
        for units in (1, 2)
    ]
    best, _ = redis.add_all([(extended[0], 0.9), (extended[1], 0.1)])
    match = redis.query(base)
    assert match is not None
    assert (match.architecture, match.quality) == (best, 0.9)


# ---- timing, helper processes and reports -----------------------------------------------------------------


def test_actions_run_in_turn_and_the_warm_up_does_not_count() -> None:
    ran: list[str] = []
    actions = {
        name: (lambda name=name: ran.append(name) or name, lambda result: ran.append(f"after {result}"))
        for name in ("a", "b")
    }
    samples = alternate(actions, rounds=2, warmup=1)
    assert [name for name in ran if "after" not in name] == ["a", "b", "b", "a", "a", "b"]
    assert ran[:2] == ["a", "after a"]
    assert {len(each.times) for each in samples.values()} == {2}


def test_the_copy_floor_copies_every_tensor() -> None:
    tensors = synthetic(MIB, 3).tensors()
    buffers = buffers_like(tensors)
    copying(tensors, buffers)()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(buffers[name], tensor)


def test_memory_growth_sees_memory_that_is_freed_afterwards() -> None:
    def hold() -> int:
        block = np.ones(256 * MIB, dtype=np.uint8)
        return sum(int(block.sum()) for _ in range(5))

    rss, uss, _ = memory_growth(hold)  # other threads of this process free memory meanwhile
    assert 200 * MIB < rss < 384 * MIB
    assert 200 * MIB < uss < 384 * MIB


class Worker:
    """Of the fleet below."""

    def __init__(self, number: int) -> None:
        self._done = [number]

    def work(self, added: int) -> None:
        self._done.append(added)

    def done(self) -> list[int]:
        return self._done


def test_a_fleet_calls_all_workers_at_the_same_moment(cluster: object) -> None:
    with Fleet(Worker, [(1,), (2,)]) as fleet:
        spans = fleet.spans("work", 7)
        assert fleet.all("done") == [[1, 7], [2, 7]]
        assert fleet.each("done", [()]) == [[1, 7]]
    assert len(spans) == 2
    assert seconds_of(spans) >= max(end - start for start, end in spans)


def report() -> Report:
    """Return a report whose headline is its second row."""
    made = Report("save_load", Effort.QUICK)
    made.add("first", sample(1.0), 10)
    goals = [Goal("times faster", 4.0, at_least=3), Goal("memory copies", 2.0, at_most=1.5)]
    ours, theirs = sample([0.1, 0.2, 0.3]), sample(0.8)
    made.add("save", ours, 1000, peer=("h5py", theirs), floor=("one copy", 0.1), goals=goals, headline=True, rss=5)
    made.tables["parts"] = [{"party": "h5py", "write_s": 0.5, "MiB": 3.0}]
    return made


def test_a_result_file_has_the_promised_fields_and_all_samples(tmp_path: Path) -> None:
    found = json.loads(report().write(tmp_path / "new").read_text())
    promised = {
        "benchmark": "save_load",
        "ours_s": 0.2,
        "peer": "h5py",
        "peer_s": 0.8,
        "ratio": 4.0,
        "limit": "one copy",
        "limit_ratio": 2.0,
        "size_bytes": 1000,
        "rss": 5,
        "effort": "quick",
    }
    assert {key: found[key] for key in promised} == promised
    assert [row["case"] for row in found["rows"]] == ["first", "save"]
    assert found["rows"][1]["ours_times_s"] == [0.1, 0.2, 0.3]
    assert found["rows"][0]["ratio"] is None
    assert [goal["reached"] for goal in found["rows"][1]["goals"]] == [True, False]
    assert {"cpu", "cores", "memory_gib", "load", "date"} <= found["machine"].keys()
    assert {"python", "tensorvine", "numpy", "ray"} <= found["versions"].keys()
    assert found["commit"]


def test_the_command_prints_everything_and_ends_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command_line, "run", lambda name, effort: report())
    words = ["save_load", "--quick", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(command_line.application(), words)
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["benchmark"], last["ratio"], "ours_times_s" in last["rows"][1]) == ("save_load", 4.0, False)
    assert "MISSED: memory copies: 2 (<= 1.5)" in result.stdout
    assert "500 ms" in result.stdout
    assert (tmp_path / "save_load.json").exists()


def test_the_command_lists_the_benchmarks_with_what_they_measure() -> None:
    lines = CliRunner().invoke(command_line.application(), ["list"]).stdout.splitlines()
    assert len(lines) == 25
    assert "save_load       Saves and loads of whole models and of a quarter" in "\n".join(lines)
    assert all(line[16:].strip() for line in lines)


def result_of(commit: str, folder: Path, times: dict[str, Sample]) -> Path:
    """Write the result file of a run."""
    report = Report("calls")
    for case, sampled in times.items():
        report.add(case, sampled)
    path = report.write(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": commit}))
    return path


def test_two_runs_are_compared_case_by_case(tmp_path: Path) -> None:
    base = np.linspace(0.9, 1.1, 21)
    cases = {"noise": 1.03, "slower": 1.2, "faster": 0.5}
    before = result_of("1234567", tmp_path / "a", {case: sample(list(base)) for case in (*cases, "gone", "few")})
    after = {case: sample(list(base * factor)) for case, factor in cases.items()} | {"few": sample([9.0, 9.1])}
    result_of("89abcde", tmp_path / "b", after)
    found = changes(before, tmp_path / "b")
    assert {one.case: one.verdict.value for one in found} == {
        **{case: case for case in cases},
        "few": "too few samples",
    }
    slower = next(one for one in found if one.case == "slower")
    assert slower.ratio == pytest.approx(1.2)
    assert slower.low < slower.ratio < slower.high
    shown = CliRunner().invoke(command_line.application(), ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 0, shown.output
    assert "before: commit 1234567" in shown.stdout
    assert "1.20 [1." in shown.stdout


@given(times=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), factor=st.floats(0.3, 3))
def test_a_case_that_takes_longer_is_slower_in_one_direction_only(times: list[float], factor: float) -> None:
    found = change("calls", "a", times, [factor * time for time in times])
    back = change("calls", "a", [factor * time for time in times], times)
    assert found.ratio == pytest.approx(factor)
    assert found.low <= found.high
    assert {found.verdict, back.verdict} != {Verdict.SLOWER}
    if found.verdict is Verdict.SLOWER:
        assert len(times) >= 5
        assert factor > 1


WITHOUT_SAMPLES = '{"benchmark": "calls", "rows": [{"case": "a", "ours_s": 1}], "machine": {}, "commit": ""}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"benchmark": "calls"}', WITHOUT_SAMPLES, None])
def test_what_is_no_result_cannot_be_compared(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    before = result_of("1234567", tmp_path / "a", {"a": sample([1.0])})
    if content is not None:
        (tmp_path / "b/calls.json").write_text(content)
    arguments = ["compare", str(before), str(tmp_path / "b")]
    assert CliRunner().invoke(command_line.application(), arguments).exit_code == 2


@pytest.mark.parametrize("arguments", [["unknown"], ["growth", "--slow"], ["compare"], ["growth", "README.md"]])
def test_the_command_refuses_unknown_words(arguments: list[str]) -> None:
    assert CliRunner().invoke(command_line.application(), arguments).exit_code == 2


# ---- searches ---------------------------------------------------------------------------------------------


def search(seconds: float, best: float, stored_s: float, space: int, written: int) -> nas.Search:
    """Return a search of four candidates, the third of which is the best."""
    facts = {"repository_s": stored_s, "space_bytes": space, "bytes_written": written // 4}
    qualities = (0.5, None, best, 0.6)
    return [{**facts, "at": seconds * (n + 1) / 4, "quality": quality} for n, quality in enumerate(qualities)]


def test_rows_of_searches_say_how_much_sooner_and_smaller() -> None:
    made = Report("nas")
    nas.add(
        made,
        {
            nas.NONE: search(400, 0.975, 0.0, 0, 0),
            nas.HDF5: search(360, 0.985, 0.1, 4000, 8000),
            nas.REPOSITORY: search(280, 0.985, 0.01, 1000, 2400),
        },
    )
    rows = {row.case: row for row in made.rows}
    assert made.headline is rows[f"end to end, beside {nas.NONE}"]
    assert [goal.value for goal in made.headline.goals] == [pytest.approx(0.04 / 560), pytest.approx(0.7)]
    assert rows["time to 97.0%"].ratio == pytest.approx(300 / 210)
    assert "at least" in rows["time to 98.0%"].goals[0].what
    assert rows["time to 98.0%"].facts["hdf5_s"] == 270
    assert "time to 99.0%" not in rows  # the repository's search does not reach it
    assert [goal.value for goal in rows["space"].goals] == [8, pytest.approx(10 / 3), 1]
    json.dumps(made.as_dict())


def test_files_of_searched_architectures_are_shared_and_go_with_the_last_reference(tmp_path: Path) -> None:
    space, rng = AttnSpace(), random.Random(5)  # noqa: S311  for candidates
    chosen = draw(space, rng)

    def candidate(store: nas.FileStore, decisions: tuple[int, ...]) -> nas.FileCandidate:
        return nas.FileCandidate(store, "nas", AttnModel(space, decisions, 8, 2))

    with RedisServer() as server:
        store = nas.FileStore(server.socket, tmp_path)
        first = candidate(store, chosen)
        assert first.layers == {}
        saved = first.save(0.5)
        assert saved is not None
        with candidate(store, chosen) as same, candidate(store, mutate(space, chosen, rng)) as child:
            assert same.ancestor == child.ancestor == saved.ref
            assert 0 < len(child.layers) < len(same.layers)
            again, other = same.save(0.6), child.save(0.7)
        assert again is not None
        assert (again.ref, again.bytes_written) == (saved.ref, 0)
        assert other is not None
        assert len(list(tmp_path.glob("*.h5"))) == 2
        store.release(saved.ref.name)
        assert store.path(saved.ref.name).exists()  # the second candidate refers to it
        store.release(saved.ref.name)
        assert not store.path(saved.ref.name).exists()
        assert store.stats().bytes_memory == other.bytes_written
        store.close()
