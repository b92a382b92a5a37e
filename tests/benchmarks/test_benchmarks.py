"""The benchmarks' own parts: generators, file peers, Redis-Queries, timing and rows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorvine.store.graphs.graph import Layer, ModelGraph
from typer.testing import CliRunner

from benchmarks import __main__ as command_line
from benchmarks.architectures import (
    ATTN_FEATURES,
    Architecture,
    attn_graph,
    bert_large,
    nas_graphs,
    small_tensors,
    synthetic,
    vgg19,
)
from benchmarks.measure import (
    MIB,
    Action,
    Effort,
    Goal,
    Report,
    Row,
    Sample,
    alternate,
    buffers_like,
    copy_action,
    memory_growth,
)
from benchmarks.peers import Peer, file_peers
from benchmarks.redis_queries import PrefixWalk, RedisQueries, RedisServer, compact, concurrent_queries
from examples.nas.models import AttnModel
from examples.nas.space import UNITS, AttnSpace, draw

# ---- architectures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 10, 99, 1000])
@pytest.mark.parametrize("deviation", [0.0, 0.3])
def test_synthetic_models_have_the_bytes_and_layers_asked_for(layers: int, deviation: float) -> None:
    model = synthetic(4 * MIB, layers, deviation=deviation)
    tensors = model.tensors()
    assert sum(tensor.nbytes for tensor in tensors.values()) == model.nbytes == 4 * MIB
    assert sum(bool(layer.tensors) for layer in model.graph.layers) == layers
    assert set(model.graph.tensors) == set(tensors)


def test_layer_sizes_spread_up_to_the_deviation_and_no_further() -> None:
    sizes = np.array([shape[0] for shape in synthetic(4 * MIB, 100, deviation=0.3).shapes.values()])
    spread = np.abs(sizes / (MIB / 100) - 1)
    assert 0.2 < spread.max() < 0.3 + 1e-3
    even = {shape[0] for shape in synthetic(4 * MIB, 100).shapes.values()}
    assert max(even) - min(even) <= 1


@pytest.mark.parametrize("depth", [0, 4, 10])
def test_synthetic_models_share_a_prefix_of_the_depth_asked_for(depth: int) -> None:
    base = synthetic(MIB, 10, deviation=0.2)
    child = synthetic(MIB, 10, deviation=0.2, shared_prefix=depth)
    known = set(base.graph.fingerprints.values())
    shared = [v for v in child.graph.layers if child.graph.fingerprints[v.name] in known]
    assert len(shared) == depth + 1, "the input and as many layers as asked for"


@pytest.mark.parametrize(("size", "layers", "deviation"), [(0, 1, 0.0), (12, 4, 0.0), (MIB, 0, 0.0), (MIB, 4, 1.0)])
def test_impossible_synthetic_models_are_refused(size: int, layers: int, deviation: float) -> None:
    with pytest.raises(ValueError, match="at least one float32 value per layer"):
        synthetic(size, layers, deviation=deviation)


def test_leading_layers_come_as_close_to_the_share_as_whole_layers_can() -> None:
    model = synthetic(MIB, 10)
    assert len(model.leading_layers(0.5)) == 5
    assert len(model.leading_layers(0.74)) == 7
    assert model.tensors_of(model.leading_layers(0.2)) == ["layer_0000/kernel", "layer_0001/kernel"]


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        (vgg19(), 38, 143_667_240),
        (bert_large(), 391, 335_141_888),
        (bert_large(head=True), 397, 750_262_855),
    ],
    ids=["VGG19", "BERT-large", "BERT-large and head"],
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


# ---- file peers -----------------------------------------------------------------------------------------


@pytest.fixture(params=file_peers(), ids=lambda peer: peer.name)
def peer(request: pytest.FixtureRequest) -> Peer:
    return request.param


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras' HDF5 reader
def test_a_peer_gives_back_what_it_saved(peer: Peer, tmp_path: Path) -> None:
    tensors = synthetic(MIB, 7, deviation=0.3).tensors(seed=5)
    tensors["square/kernel"] = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = tmp_path / "model"
    peer.hold(tensors)
    peer.save(path)
    peer.save(tmp_path / "second")
    peer.hold({name: np.zeros_like(tensor) for name, tensor in tensors.items()})
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


def test_peers_for_large_models_leave_out_those_that_hold_a_copy() -> None:
    assert [peer.name for peer in file_peers(large=True)] == ["h5py", "safetensors", "torch.save"]


# ---- Redis-Queries --------------------------------------------------------------------------------------


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


def shared_layers(graph: ModelGraph, other: ModelGraph) -> int:
    known = set(other.fingerprints.values())
    return sum(value in known for value in graph.fingerprints.values())


def test_redis_queries_find_the_longest_common_prefix_of_200_graphs(redis: RedisQueries) -> None:
    stored = list(nas_graphs(200, seed=0))
    keys = {redis.add(graph, place / 200): graph for place, graph in enumerate(stored)}
    for query in nas_graphs(40, seed=1):
        match = redis.query(query)
        assert match is not None
        assert match.layers == max(shared_layers(query, graph) for graph in stored)
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


def test_redis_queries_break_ties_by_quality(redis: RedisQueries) -> None:
    base = synthetic(MIB, 5)
    graphs = [synthetic(MIB, 5, shared_prefix=3), synthetic(MIB, 5, shared_prefix=4)]
    extended = [
        ModelGraph([*base.graph.layers, Layer("extra", {"class": "Dense", "units": units}, ("layer_0004",))])
        for units in (1, 2)
    ]
    best = redis.add(extended[0], 0.9)
    for graph in (extended[1], *(model.graph for model in graphs)):
        redis.add(graph, 0.1)
    match = redis.query(base.graph)
    assert match is not None
    assert (match.architecture, match.quality) == (best, 0.9)


def test_an_architecture_goes_from_redis_with_its_last_reference(redis: RedisQueries) -> None:
    graph = next(nas_graphs(1, seed=7))
    assert redis.query(graph) is None
    key = redis.add(graph, 0.5)
    assert redis.add(graph, 0.5) == key
    assert redis.query(graph) is not None
    for _ in range(2):
        redis.release(key)
        assert redis.query(graph) is not None
        redis.release(key)
    redis.release(key)
    assert redis.query(graph) is None
    assert sorted(redis._redis.keys("graph:*") + redis._redis.keys("lock:*")) == [b"lock:metadata:readers"]


def test_concurrent_callers_of_redis_all_get_answers(server: RedisServer, redis: RedisQueries) -> None:
    graphs = list(nas_graphs(20, seed=0))
    for graph in graphs:
        redis.add(graph)
    assert concurrent_queries(server.socket, graphs[:4], callers=2) > 0
    references = redis._redis.hgetall("references")
    assert sum(map(int, references.values())) == 20 + 4


# ---- timing and rows ------------------------------------------------------------------------------------


def test_actions_run_in_turn_and_the_warm_up_does_not_count() -> None:
    ran: list[str] = []
    actions = {
        name: Action(lambda name=name: ran.append(name) or name, lambda result: ran.append(f"after {result}"))
        for name in ("a", "b")
    }
    samples = alternate(actions, rounds=2, warmup=1)
    assert [name for name in ran if "after" not in name] == ["a", "b", "b", "a", "a", "b"]
    assert ran[:2] == ["a", "after a"]
    assert {len(sample.times) for sample in samples.values()} == {2}


def test_the_copy_floor_copies_every_tensor() -> None:
    tensors = synthetic(MIB, 3).tensors()
    buffers = buffers_like(tensors)
    copy_action(tensors, buffers).run()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(buffers[name], tensor)


def test_memory_growth_sees_memory_that_is_gone_afterwards() -> None:
    def hold() -> int:
        block = np.ones(256 * MIB, dtype=np.uint8)
        return sum(int(block.sum()) for _ in range(5))

    growth = memory_growth(Action(hold))  # other threads of this process free memory meanwhile
    assert 200 * MIB < growth.rss_bytes < 384 * MIB
    assert 200 * MIB < growth.uss_bytes < 384 * MIB


def example_row() -> Row:
    goals = (Goal("times faster", 4.0, at_least=3), Goal("memory copies", 2.0, at_most=1.5))
    return Row("save", Sample((0.1, 0.2, 0.3)), 1000, "h5py", Sample((0.8,)), "one copy", 0.1, goals, {"rss": 5})


def test_a_report_has_the_fields_that_the_command_promises() -> None:
    report = Report("save_load")
    report.add(Row("first", Sample((1.0,)), 10))
    report.add(example_row(), headline=True)
    found = json.loads(json.dumps(report.as_dict()))
    promised = {"benchmark", "ours_s", "peer", "peer_s", "ratio", "limit", "limit_ratio", "size_bytes"}
    assert promised <= set(found)
    assert {key: found[key] for key in promised} == {
        "benchmark": "save_load",
        "ours_s": 0.2,
        "peer": "h5py",
        "peer_s": 0.8,
        "ratio": 4.0,
        "limit": "one copy",
        "limit_ratio": 2.0,
        "size_bytes": 1000,
    }
    assert [row["case"] for row in found["rows"]] == ["first", "save"]
    assert found["rows"][0]["ratio"] is None
    assert [goal["reached"] for goal in found["rows"][1]["goals"]] == [True, False]
    assert {"cpu", "cores", "memory_gib", "date", "numpy", "ray"} <= set(found["machine"])


def test_the_command_ends_with_one_line_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    efforts: list[Effort] = []

    def run(name: str, effort: Effort) -> Report:
        efforts.append(effort)
        return Report(name, [example_row()])

    monkeypatch.setattr(command_line, "run", run)
    app = command_line.application()
    result = CliRunner().invoke(app, ["growth", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["benchmark"], last["ratio"]) == ("growth", 4.0)
    assert efforts == [Effort.QUICK]
    assert "MISSED: memory copies: 2 (<= 1.5)" in result.stdout


def test_the_command_lists_benchmarks_that_exist() -> None:
    result = CliRunner().invoke(command_line.application(), ["list"])
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == [
        "save_load",
        "incremental",
        "prefix_query",
        "staging",
        "pages",
        "checkpoint",
        "codec",
        "persist",
        "start",
        "update_latency",
        "notify",
        "consumers",
        "schedule",
        "collective",
        "fork",
        "elastic",
        "query_scaling",
        "nas",
        "calls",
        "engines",
        "weak_scaling",
        "links",
        "growth",
    ]
    folder = Path(command_line.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in names)


@pytest.mark.parametrize("arguments", [["unknown"], ["growth", "--quick", "--full"]])
def test_the_command_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    result = CliRunner().invoke(command_line.application(), arguments)
    assert result.exit_code == 2
    assert "expected" in result.output
