"""The repository end to end on a real Ray: what the contract promises, on one and on several shards."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import ml_dtypes
import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import (
    ClosedError,
    GraphError,
    InvalidNameError,
    ModelNotFoundError,
    OptionError,
    RepositoryNotFoundError,
    StorageError,
    StoreFullError,
    TensorMismatchError,
    TensorNotFoundError,
)

from tests.support.waiting import eventually

pytestmark = pytest.mark.both_engines

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128"]
DTYPES += ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture(scope="module", params=[1, 3], ids=["one-shard", "three-shards"])
def repo(request: pytest.FixtureRequest, cluster: object) -> Iterator[Repository]:
    with Repository.start(f"e2e-{uuid.uuid4().hex[:6]}", shards=request.param, preallocate_bytes=0) as repository:
        yield repository


@pytest.fixture
def name() -> str:
    return f"model-{uuid.uuid4().hex[:8]}"


def chain(depth: int, units: int = 4, last: str = "Dense") -> ModelGraph:
    layers = [Layer("in", {"class": "Input", "shape": [units]})]
    for i in range(depth):
        kind = last if i == depth - 1 else "Dense"
        inputs = [layers[-1].name]
        layers.append(Layer(f"d{i}", {"class": kind, "units": units, "i": i}, inputs, [f"d{i}/kernel", f"d{i}/bias"]))
    return ModelGraph(layers)


def weights(graph: ModelGraph, seed: int = 0, units: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (units, units), "bias": (units,)}
    return {t: rng.random(shapes[t.split("/")[1]], np.float32) for t in graph.tensors}


class TestSavingAndLoading:
    def test_what_was_saved_is_loaded_read_only(self, repo: Repository, name: str) -> None:
        tensors = weights(chain(3))
        saved = repo.save(name, tensors, graph=chain(3), quality=0.5, metadata={"epoch": 3, "tags": ["a"]})
        assert saved.ref == ModelRef(name, 1)
        assert saved.bytes_written == sum(t.nbytes for t in tensors.values())
        loaded = repo.load(saved.ref)
        assert loaded.keys() == tensors.keys()
        for key, array in loaded.items():
            np.testing.assert_array_equal(array, tensors[key])
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        info = repo.info(name)
        assert (info.quality, info.metadata, info.parent) == (0.5, {"epoch": 3, "tags": ["a"]}, None)
        assert info.created.tzinfo is not None
        assert info.bytes_owned == info.bytes_total == saved.bytes_written
        assert info.codec is None
        assert repo.graph(name) == chain(3)

    @pytest.mark.parametrize("nbytes", [100, 200_000, 40 << 20], ids=["inline", "staged", "two-segments"])
    def test_every_way_in_gives_the_same_bytes(self, repo: Repository, name: str, nbytes: int) -> None:
        rng = np.random.default_rng(1)
        tensors = {f"t{i}": rng.integers(0, 256, nbytes // 3 + i, np.uint8) for i in range(3)}
        repo.save(name, tensors)
        other = Repository.connect(repo.name)
        try:
            for reader in (repo, other):
                loaded = reader.load(name)
                assert all(np.array_equal(loaded[k], v) for k, v in tensors.items())
                assert all(array.ctypes.data % 64 == 0 for array in loaded.values() if nbytes > 1 << 17)
        finally:
            other.close()
            repo.retire(name)

    def test_a_client_that_cannot_map_the_memory_has_its_blocks_carried(
        self, repo: Repository, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(13, "no such memory here")

        tensors = {"big": np.arange(6 << 20, dtype=np.int64), "small": np.ones(3), "other": np.zeros(200_000)}
        monkeypatch.setattr("tensorvine.actors.client.connections.MemoryView", refuse)
        far = Repository.connect(repo.name)
        try:
            saved = far.save(name, tensors)
            assert "cannot map its memory, tensors are copied by other transports" in caplog.text
            for reader in (far, repo):
                loaded = reader.load(saved.ref)
                assert all(np.array_equal(loaded[k], v) for k, v in tensors.items())
                assert not loaded["big"].flags.writeable
            assert far.load(saved.ref, tensors=["small"])["small"].sum() == 3
            repo.retire(saved.ref)
            assert np.array_equal(loaded["big"], tensors["big"])
        finally:
            far.close()

    def test_a_full_store_says_so_and_has_room_again_after_a_retirement(self, cluster: object) -> None:
        with Repository.start("tight", shards=1, store_bytes=36 << 20, preallocate_bytes=0) as tight:
            tensors = {f"t{i}": np.full(5 << 20, i, np.uint8) for i in range(5)}
            tight.save("m", tensors)
            with pytest.raises(StoreFullError, match=r"'n': .*of its 37\.7 MB, 26\.2 MB hold segments"):
                tight.save("n", tensors)
            assert tight.stats().shards[0].bytes_staged == 0
            tight.retire("m")
            for i in range(3):
                tight.save("n", {k: v + i for k, v in tensors.items()}, inherit=None)
                assert all(np.array_equal(tight.load("n")[k], v + i) for k, v in tensors.items())
                tight.retire("n")

    def test_memory_that_somebody_reads_is_not_used_again(self, cluster: object) -> None:
        with Repository.start("held", shards=1, store_bytes=64 << 20, preallocate_bytes=0) as tight:
            first = {"t": np.full(40 << 20, 1, np.uint8)}
            tight.save("m", first)
            held = tight.load("m")
            tight.retire("m")
            with pytest.raises((StoreFullError, TimeoutError)):
                tight.save("n", {"t": np.full(40 << 20, 2, np.uint8)}, timeout=1.0)
            assert (held["t"] == 1).all()
            view = held["t"][5:10].reshape(1, 5)
            del held
            with pytest.raises((StoreFullError, TimeoutError)):
                tight.save("n", {"t": np.full(40 << 20, 2, np.uint8)}, timeout=1.0)
            assert (view == 1).all()
            del view
            tight.save("n", {"t": np.full(40 << 20, 2, np.uint8)})
            assert (tight.load("n")["t"] == 2).all()

    @pytest.mark.parametrize(
        "dtype",
        DTYPES,
    )
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
    def test_every_dtype_and_shape(self, repo: Repository, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        array = np.random.default_rng(0).integers(0, 2, shape).astype(kind)
        repo.save(name, {"t": array})
        loaded = repo.load(name)["t"]
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert loaded.tobytes() == array.tobytes()

    def test_strided_and_fortran_arrays(self, repo: Repository, name: str) -> None:
        base = np.arange(2 << 16, dtype=np.float32).reshape(256, -1)
        tensors = {"columns": base[:, ::3], "backward": base[::-1], "fortran": np.asfortranarray(base), "T": base.T}
        repo.save(name, tensors)
        assert all(np.array_equal(repo.load(name)[k], v) for k, v in tensors.items())

    def test_selected_layers_and_tensors(self, repo: Repository, name: str) -> None:
        graph, tensors = chain(4), weights(chain(4))
        repo.save(name, tensors, graph=graph)
        assert set(repo.load(name, layers=["d1", "d3"])) == {"d1/kernel", "d1/bias", "d3/kernel", "d3/bias"}
        assert list(repo.load(name, tensors=["d2/bias"])) == ["d2/bias"]
        assert repo.load(name, layers=[]) == {}

    def test_into_fills_the_callers_buffers(self, repo: Repository, name: str) -> None:
        tensors = weights(chain(2))
        repo.save(name, tensors, graph=chain(2))
        buffers = {key: np.empty_like(array) for key, array in tensors.items()}
        answer = repo.load(name, into=buffers)
        assert all(answer[key] is buffers[key] for key in tensors)
        assert all(np.array_equal(buffers[key], tensors[key]) for key in tensors)

    def test_into_fills_big_endian_buffers(self, repo: Repository, name: str) -> None:
        repo.save(name, {"a": np.arange(3.0), "b": np.arange(3, dtype=np.int16)})
        buffers = {"a": np.zeros(3, ">f8"), "b": np.zeros(3, ">i2")}
        answer = repo.load(name, into=buffers)
        assert all(answer[key] is buffers[key] for key in buffers)
        assert [buffer.tolist() for buffer in buffers.values()] == [[0, 1, 2], [0, 1, 2]]

    @pytest.mark.parametrize("buffer", [[0.0] * 3, np.ma.zeros(3), np.broadcast_to(np.zeros(1), (3,)), 0.0, None])
    def test_into_refuses_what_would_not_be_filled(self, repo: Repository, name: str, buffer: object) -> None:
        repo.save(name, {"a": np.ones(3), "b": np.ones(3)})
        buffers = {"a": np.zeros(3), "b": buffer}
        with pytest.raises(TensorMismatchError, match=r"into\['b'\]: expected"):
            repo.load(name, into=buffers)
        assert not buffers["a"].any()
        with pytest.raises(TensorMismatchError, match=r"into=: expected a mapping"):
            repo.load(name, into=[buffer])  # type: ignore[arg-type]

    def test_into_checks_all_before_it_writes_any(self, repo: Repository, name: str) -> None:
        repo.save(name, {"a": np.ones(3), "b": np.ones(3)})
        buffers = {"a": np.zeros(3), "b": np.zeros(4)}
        with pytest.raises(TensorMismatchError, match=r"into\['b'\].*float64 \(3,\).*found float64 \(4,\)"):
            repo.load(name, into=buffers)
        assert not buffers["a"].any()

    def test_into_refuses_buffers_that_have_memory_in_common(self, repo: Repository, name: str) -> None:
        one, two, memory = np.ones(3), np.full(3, 2.0), np.zeros(6)
        repo.save(name, {"a": one, "b": two, "tied": one})
        for buffers in ({"a": memory[:3], "b": memory[:3]}, {"a": memory[:3], "b": memory[2:5]}):
            with pytest.raises(TensorMismatchError, match=r"into=: .* the buffers of '[ab]' and '[ab]' overlap"):
                repo.load(name, into=buffers)
            assert not memory.any()
        with pytest.raises(
            TensorMismatchError, match=r"the buffers of 'tied' and 'a' overlap|of 'a' and 'tied' overlap"
        ):
            repo.load(name, into={"a": memory[:3], "tied": memory[1:4]})
        repo.load(name, into={"a": memory[::2], "b": memory[1::2], "tied": memory[::2]})
        assert memory.tolist() == [1, 2] * 3

    def test_a_save_may_go_on_while_the_caller_changes_its_tensors(self, repo: Repository, name: str) -> None:
        array = np.ones(1 << 20, np.float32)
        pending = repo.save_async(name, {"t": array})
        pending.staged(30)
        array[:] = 2
        assert pending.committed(30).ref.version == 1
        assert (repo.load(name)["t"] == 1).all()

    def test_saves_of_one_name_from_two_clients_at_once_get_a_version_each(self, repo: Repository, name: str) -> None:
        other = Repository.connect(repo.name)
        try:
            pending = [client.save_async(name, {"t": np.full(9, i)}) for i in range(10) for client in (repo, other)]
            versions = sorted(p.committed(60).ref.version for p in pending)
        finally:
            other.close()
        assert versions == list(range(1, 21))

    def test_saves_of_one_client_keep_their_order(self, repo: Repository, name: str) -> None:
        pending = [repo.save_async(name, {"t": np.full(9, i)}) for i in range(20)]
        assert [p.committed(60).ref.version for p in pending] == list(range(1, 21))
        assert repo.load(f"{name}@7")["t"][0] == 6

    def test_several_threads_may_share_a_client(self, repo: Repository, name: str) -> None:
        errors: list[Exception] = []

        def work(i: int) -> None:
            try:
                repo.save(f"{name}/{i}", {"t": np.full(100, i)})
                assert repo.load(f"{name}/{i}")["t"][0] == i
            except Exception as exc:  # noqa: BLE001  reported below
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []


class TestSharing:
    def test_equal_tensors_are_shared_with_the_parent(self, repo: Repository, name: str) -> None:
        tensors = weights(chain(3))
        repo.save(name, tensors, graph=chain(3))
        tensors["d2/bias"] = tensors["d2/bias"] + 1
        child = repo.save(name, tensors)
        assert child.bytes_written == tensors["d2/bias"].nbytes
        assert child.bytes_inherited == sum(t.nbytes for t in tensors.values()) - child.bytes_written
        owners = repo.owners(child.ref)
        assert owners["d2/bias"] == child.ref
        assert {owners[t] for t in tensors if t != "d2/bias"} == {ModelRef(name, 1)}
        assert repo.contributions(child.ref)[child.ref] == ["d2/bias"]
        assert repo.graph(child.ref) == chain(3)
        assert np.array_equal(repo.load(child.ref)["d0/kernel"], tensors["d0/kernel"])

    def test_layers_are_inherited_by_name_from_another_model(self, repo: Repository, name: str) -> None:
        parent_graph, child_graph = chain(3), chain(3, last="Other")
        repo.save(f"{name}/parent", weights(parent_graph), graph=parent_graph)
        fresh = {t: a for t, a in weights(child_graph, seed=1).items() if t.startswith("d2")}
        inherit = {"in": "in", "d0": "d0", "d1": "d1"}
        child = repo.save(name, fresh, graph=child_graph, parent=f"{name}/parent", inherit=inherit)
        assert child.bytes_written == sum(a.nbytes for a in fresh.values())
        assert repo.lineage(name) == [ModelRef(name, 1), ModelRef(f"{name}/parent", 1)]
        assert np.array_equal(repo.load(name)["d1/kernel"], weights(parent_graph)["d1/kernel"])
        assert repo.descendants(f"{name}/parent") == [child.ref]

    def test_inherit_none_writes_everything(self, repo: Repository, name: str) -> None:
        tensors = {"t": np.ones(10)}
        repo.save(name, tensors)
        assert repo.save(name, tensors, inherit=None).bytes_inherited == 0
        assert set(repo.owners(name).values()) == {ModelRef(name, 2)}

    def test_inherited_tensors_outlive_the_parent(self, repo: Repository, name: str) -> None:
        before = repo.stats()
        tensors = {"kept": np.ones(50_000), "dropped": np.ones(70_000)}
        parent = repo.save(name, tensors)
        child = repo.save(name, {"kept": tensors["kept"], "new": np.zeros(3)})
        repo.retire(parent.ref)
        left = before.bytes_memory + 50_000 * 8 + 24
        eventually(lambda: repo.stats().bytes_memory == left, "what the child has not goes")
        assert np.array_equal(repo.load(child.ref)["kept"], tensors["kept"])
        assert repo.lineage(child.ref) == [child.ref, parent.ref]
        assert repo.owners(child.ref)["kept"] == parent.ref
        with pytest.raises(ModelNotFoundError, match="retired"):
            repo.load(parent.ref)
        repo.retire(child.ref)

        def stored() -> tuple[int, int]:
            stats = repo.stats()
            return stats.bytes_memory, stats.tensors

        eventually(lambda: stored() == (before.bytes_memory, before.tensors), "what the child had goes, too")

    def test_lineage_questions(self, repo: Repository, name: str) -> None:
        root = repo.save(name, {"t": np.zeros(2)}, quality=0.25).ref
        left = repo.save(f"{name}-left", {"t": np.ones(2)}, parent=root, quality=0.5).ref
        right = repo.save(f"{name}-right", {"t": np.ones(2)}, parent=root).ref
        leaf = repo.save(f"{name}-leaf", {"t": np.ones(2)}, parent=left).ref
        assert repo.lineage(leaf) == [leaf, left, root]
        assert repo.common_ancestor(leaf, right) == root
        assert repo.common_ancestor(leaf, left) == left
        assert repo.common_ancestor(leaf, repo.save(f"{name}-stranger", {"w": np.zeros(1)}).ref) is None
        assert repo.descendants(root) == sorted([left, right, leaf])
        repo.retire(left)
        assert repo.qualities(repo.lineage(leaf)) == {left: 0.5, root: 0.25}
        assert repo.descendants(root) == sorted([right, leaf])
        assert repo.lineage(leaf) == [leaf, left, root]


class TestQueries:
    def test_longest_prefix_finds_pins_and_releases(self, repo: Repository, name: str) -> None:
        units = 17  # no other test's prefix
        repo.save(f"{name}/short", weights(chain(1, units), units=units), graph=chain(1, units), quality=0.9)
        repo.save(f"{name}/long", weights(chain(4, units), units=units), graph=chain(4, units), quality=0.1)
        query = chain(5, units, last="Head")
        with repo.longest_prefix(query) as match:
            assert (match.ref.name, match.quality) == (f"{name}/long", 0.1)
            assert match.layers == {layer: layer for layer in ("in", "d0", "d1", "d2", "d3")}
            assert match.tensors["d3/kernel"] == "d3/kernel"
            repo.retire(match.ref)
            assert match.ref not in repo.models()
            assert set(repo.load(match.ref, layers=["d0"])) == {"d0/kernel", "d0/bias"}
            head = {t: a for t, a in weights(query, units=units).items() if t.startswith("d4")}
            child = repo.save(name, head, graph=query, parent=match.ref, inherit=match.layers)
        with pytest.raises(ModelNotFoundError, match="retired"):
            repo.load(match.ref)
        assert set(repo.load(child.ref)) == set(query.tensors)

    def test_ties_go_to_quality_then_to_the_newer(self, repo: Repository, name: str) -> None:
        graph = chain(2, units=19)
        for suffix, quality in (("a", 0.5), ("b", 0.7), ("c", 0.7), ("d", None)):
            repo.save(f"{name}/{suffix}", weights(graph, units=19), graph=graph, quality=quality)
        with repo.longest_prefix(graph) as match:
            assert match.ref.name == f"{name}/c"

    def test_batches_answer_each_query(self, repo: Repository, name: str) -> None:
        repo.save(name, weights(chain(2, 23), units=23), graph=chain(2, 23))
        nothing = ModelGraph([Layer("x", {"class": uuid.uuid4().hex})])
        first, none, last = repo.longest_prefixes([chain(2, 23), nothing, chain(1, 23, last="Other")])
        assert first is not None
        assert first.ref.name == name
        assert none is None
        assert last is not None
        assert set(last.layers) == {"in"}
        assert repo.longest_prefixes([]) == []
        first.release()
        last.release()
        first.release()

    def test_find(self, repo: Repository, name: str) -> None:
        graph = chain(2, 29)
        ref = repo.save(name, weights(graph, units=29), graph=graph).ref
        assert repo.find([{"class": "Dense", "units": [29, 30]}, {"class": "Dense", "i": 1}]) == [ref]
        assert repo.find([{"units": 29, "i": 1}, {}]) == []
        assert repo.find([{"shape": [29]}, {}, {}], exact=True) == [ref]

    def test_find_gives_the_versions_of_exactly_an_architecture(self, repo: Repository, name: str) -> None:
        graph, other = chain(2, 31, last=name), chain(2, 31, last="Other")
        refs = [repo.save(f"{name}/{i}", weights(graph, i, 31), graph=graph).ref for i in range(3)]
        repo.save(f"{name}/other", weights(other, units=31), graph=other)
        renamed = ModelGraph(
            [Layer(f"x{n}", one.config, [f"x{n - 1}"][: len(one.inputs)], []) for n, one in enumerate(graph.layers)]
        )
        assert repo.find(graph) == repo.find(renamed) == refs
        assert repo.find(chain(1, 31)) == []
        repo.retire(refs[1])
        assert repo.find(graph) == [refs[0], refs[2]]

    def test_queries_in_a_row_share_their_connections(self, repo: Repository, name: str) -> None:
        graph = chain(2, 61)
        repo.save(name, weights(graph), graph=graph)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(300):
            match = repo.longest_prefix(graph)
            assert match is not None
            match.release(wait=False)
        assert len(os.listdir("/proc/self/fd")) < before + 50
        eventually(lambda: repo.stats().catalog.pins == 0, "all pins are removed")

    @pytest.mark.parametrize("ask", [Repository.longest_prefix, Repository.find])
    def test_what_has_no_architecture_is_refused(self, repo: Repository, ask: Callable[..., object]) -> None:
        with pytest.raises(GraphError, match=r"expected a ModelGraph, a Keras model or a torch module; .*found int"):
            ask(repo, 3)

    def test_an_answer_about_a_version_is_taken_as_the_version(self, repo: Repository, name: str) -> None:
        graph = chain(1, 37)
        saved = repo.save(name, weights(graph, units=37), graph=graph)
        repo.save(name, weights(graph, 1, 37), graph=graph)
        with repo.longest_prefixes([graph])[0] or pytest.fail("found none") as match:
            assert repo.info(match).ref == match.ref
        assert repo.info(repo.info(saved)).ref == saved.ref
        assert repo.load(saved).keys() == set(graph.tensors)
        child = repo.save(f"{name}/child", weights(graph, 2, 37), graph=graph, parent=saved)
        assert repo.lineage(child) == [child.ref, saved.ref]
        repo.retire(saved)
        assert saved.ref not in repo.models()

    def test_an_unknown_name_is_answered_with_names_near_it(self, repo: Repository) -> None:
        shared = uuid.uuid4().hex
        wrong, right = f"{shared}-digtis", f"{shared}-digits"
        repo.save(right, {"w": np.zeros(1)})
        with pytest.raises(ModelNotFoundError, match=f"^expected a model named '{wrong}'.*names near it: '{right}'"):
            repo.load(wrong)
        with pytest.raises(ModelNotFoundError, match=f"found no {wrong}@1 and no other version; names near it"):
            repo.info(f"{wrong}@1")

    def test_a_name_that_no_repository_has_is_answered_with_those_that_run(self, repo: Repository) -> None:
        with pytest.raises(RepositoryNotFoundError, match=f"named 'e2e-none'; found .*'{repo.name}'"):
            Repository.connect("e2e-none")

    def test_models_are_listed_by_prefix(self, repo: Repository, name: str) -> None:
        refs = [repo.save(f"{name}/{i}", {"w": np.zeros(1)}).ref for i in range(3)]
        assert repo.models(f"{name}/") == refs

    def test_wait_newer_is_pushed(self, repo: Repository, name: str) -> None:
        assert repo.wait_newer(name, timeout=0.05) is None
        answers: list[ModelRef | None] = []
        waiter = threading.Thread(target=lambda: answers.append(repo.wait_newer(name, timeout=30)))
        waiter.start()
        other = Repository.connect(repo.name)
        try:
            saved = other.save(name, {"t": np.ones(1)})
        finally:
            other.close()
        waiter.join(30)
        assert answers == [saved.ref]
        assert repo.wait_newer(name, after=0, timeout=5) == saved.ref


class TestReadersAndRetirement:
    def test_arrays_stay_intact_while_their_model_is_retired(self, repo: Repository, name: str) -> None:
        array = np.arange(1 << 20, dtype=np.float32)
        ref = repo.save(name, {"t": array}).ref
        held = repo.load(ref)["t"]
        repo.retire(ref)
        for i in range(4):  # new blocks would take the freed memory
            repo.retire(repo.save(f"{name}/{i}", {"t": np.full(1 << 20, i, np.float32)}).ref)
        assert np.array_equal(held, array)

    def test_another_client_sees_a_retirement_at_once(self, repo: Repository, name: str) -> None:
        ref = repo.save(name, {"t": np.ones(100_000)}).ref
        other = Repository.connect(repo.name)

        def is_gone() -> bool:
            with contextlib.suppress(ModelNotFoundError):
                other.load(ref)
                return False
            return True

        try:
            other.load(name)
            other.load(ref)
            repo.retire(ref)
            for ask in (other.load, other.info):
                with pytest.raises(ModelNotFoundError):
                    ask(name)
            eventually(is_gone, "a load of it by its number, that was made before, finds its memory freed")
        finally:
            other.close()

    def test_a_client_without_the_pin_does_not_see_a_retired_model(self, repo: Repository, name: str) -> None:
        graph = chain(2, 31)
        repo.save(name, weights(graph, units=31), graph=graph)
        other = Repository.connect(repo.name)
        try:
            with repo.longest_prefix(graph) as match:
                repo.retire(match.ref)
                assert repo.load(match.ref)
                with pytest.raises(ModelNotFoundError):
                    other.load(match.ref)
        finally:
            other.close()


class TestBadInput:
    @pytest.mark.parametrize("bad", ["", "/x", "a/../b", "a b", "x" * 201, "m@x", "m@0", 3])
    def test_malformed_names(self, repo: Repository, bad: object) -> None:
        with pytest.raises(InvalidNameError, match="expected"):
            repo.load(bad)  # type: ignore[arg-type]
        if not isinstance(bad, str) or "@" not in bad:
            with pytest.raises(InvalidNameError, match="expected"):
                repo.save(bad, {})  # type: ignore[arg-type]

    @pytest.mark.parametrize("method", ["load", "info", "graph", "owners", "lineage", "descendants", "retire"])
    def test_unknown_models(self, repo: Repository, name: str, method: str) -> None:
        with pytest.raises(ModelNotFoundError, match=name):
            getattr(repo, method)(name)
        ref = repo.save(name, {"w": np.zeros(1)}).ref
        with pytest.raises(ModelNotFoundError, match=rf"{name}@2.*live versions are \[1\]"):
            getattr(repo, method)(f"{name}@2")
        repo.retire(ref)
        with pytest.raises(ModelNotFoundError, match=name):
            getattr(repo, method)(ref)

    def test_unknown_layers_and_tensors(self, repo: Repository, name: str) -> None:
        repo.save(name, weights(chain(1)), graph=chain(1))
        with pytest.raises(TensorNotFoundError, match="d9"):
            repo.load(name, layers=["d9"])
        with pytest.raises(TensorNotFoundError, match="nope"):
            repo.load(name, tensors=["nope"])
        with pytest.raises(TensorNotFoundError, match="found the string"):
            repo.load(name, tensors="d0/bias")
        for bad in (3, [3], [["d0"]], [None]):
            for kind in ("layers", "tensors"):
                with pytest.raises(TensorNotFoundError, match=f"load: {kind}"):
                    repo.load(name, **{kind: bad})  # type: ignore[arg-type]

    @pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**400])
    def test_a_timeout_may_be_longer_than_any_wait(self, repo: Repository, name: str, timeout: float) -> None:
        repo.save(name, {"a": np.ones(3)}, timeout=timeout)
        repo.save_async(name, {"a": np.zeros(3)}, timeout=timeout).committed(timeout)
        assert repo.wait_newer(name, 1, timeout=timeout) == ModelRef(name, 2)
        assert repo.scale(len(repo.shards), timeout=timeout).tensor_bytes_moved == 0
        with pytest.raises(StorageError, match="path"):
            repo.flush(timeout=timeout)
        assert not repo.load(name, timeout=timeout)["a"].any()

    @pytest.mark.parametrize("timeout", [math.nan, None, "3"])
    def test_a_timeout_that_is_no_number(self, repo: Repository, name: str, timeout: Any) -> None:
        for call in (repo.load, lambda name, timeout: repo.save(name, {}, timeout=timeout)):
            with pytest.raises(OptionError, match="timeout: expected"):
                call(name, timeout=timeout)
        for wait in (lambda: repo.scale(1, timeout=timeout), lambda: repo.flush(timeout=timeout)):
            with pytest.raises(OptionError, match="timeout: expected"):
                wait()
        with pytest.raises(OptionError, match="transport: expected"):
            repo.load(name, transport=timeout)

    @pytest.mark.parametrize("shards", ["2", 2.0, True, math.nan])
    def test_a_number_of_shards_that_is_none(self, repo: Repository, shards: Any) -> None:
        for call in (lambda: repo.scale(shards), lambda: Repository.start("never", shards=shards)):
            with pytest.raises(OptionError, match="shards: expected an integer; found"):
                call()

    def test_a_wrong_parent(self, repo: Repository, name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="nobody"):
            repo.save(name, {"t": np.ones(1)}, parent="nobody")
        assert repo.models(name) == []

    @pytest.mark.parametrize(
        ("inherit", "message"),
        [
            ({"nope": "d0"}, "layers of the graph that is saved; found 'nope'"),
            ({"d0": "nope"}, "layers of the parent .*found 'nope'"),
            ({"d0": "d1"}, "expected layer 'd0' to match 'd1'.*configs differ"),
        ],
    )
    def test_inherit_of_layers_that_do_not_match(
        self, repo: Repository, name: str, inherit: dict[str, str], message: str
    ) -> None:
        repo.save(name, weights(chain(2)), graph=chain(2))
        with pytest.raises(GraphError, match=message):
            repo.save(name, weights(chain(2)), graph=chain(2), inherit=inherit)
        assert repo.models(name) == [ModelRef(name, 1)]

    def test_inherit_of_other_shapes(self, repo: Repository, name: str) -> None:
        repo.save(name, weights(chain(1)), graph=chain(1))
        given = {"d0/kernel": np.ones((2, 2)), "d0/bias": np.ones(4, np.float32)}
        with pytest.raises(TensorMismatchError, match=r"d0/kernel.*expected float32 \(4, 4\).*found float64 \(2, 2\)"):
            repo.save(name, given, graph=chain(1), inherit={"d0": "d0"})

    def test_inherit_of_two_tensors_into_one_that_two_layers_have(self, repo: Repository, name: str) -> None:
        a, b = Layer("a", {"class": "A"}, (), ("a/w",)), Layer("b", {"class": "B"}, ("a",), ("b/w",))
        tied = ModelGraph([a, Layer("b", {"class": "B"}, ("a",), ("a/w",))])
        apart = ModelGraph([a, b])
        repo.save(name, {"a/w": np.zeros(3), "b/w": np.ones(3)}, graph=apart)
        message = f"tensor 'a/w' of several layers: expected the same tensor of {name}@1 for all.*'b/w', for layer 'b'"
        with pytest.raises(GraphError, match=message):
            repo.save(name, {}, graph=tied, inherit={"a": "a", "b": "b"})
        repo.save(name, {"a/w": np.full(3, 2.0)}, graph=tied)
        saved = repo.save(name, {}, graph=tied, inherit={"a": "a", "b": "b"})
        assert (repo.load(saved.ref)["a/w"] == 2).all()

    def test_a_graph_whose_tensors_are_missing(self, repo: Repository, name: str) -> None:
        with pytest.raises(TensorNotFoundError, match="d0/kernel"):
            repo.save(name, {}, graph=chain(1))

    def test_arrays_of_objects(self, repo: Repository, name: str) -> None:
        with pytest.raises(TensorMismatchError, match=f"{name}.*'t'"):
            repo.save(name, {"t": np.array([object()])})
        with pytest.raises(TensorMismatchError, match="metadata"):
            repo.save(name, {}, metadata={"f": object()})

    def test_a_save_larger_than_the_store(self, repo: Repository, name: str) -> None:
        huge = np.broadcast_to(np.float32(0), (1 << 40,))
        before = [(s.tensors, s.bytes_allocated, s.bytes_staged) for s in repo.stats().shards]
        with pytest.raises(StoreFullError, match=rf"{name}.*expected at most [\d.]+ .B.*found 4\.4 TB"):
            repo.save(name, {"t": huge})
        assert [(s.tensors, s.bytes_allocated, s.bytes_staged) for s in repo.stats().shards] == before

    def test_a_version_without_a_tensor(self, repo: Repository, name: str) -> None:
        graph = ModelGraph([Layer("in", {"class": "Input"})])
        for options in ({}, {"graph": graph}, {"inherit": None}, {"graph": graph, "inherit": {}}):
            with pytest.raises(
                TensorMismatchError, match=f"save of '{name}': expected at least one tensor, own or inherited"
            ):
                repo.save(name, {}, **options)
        repo.save(name, {"w": np.zeros(1)}, graph=graph)
        with pytest.raises(
            TensorMismatchError, match=f"save of '{name}': expected at least one tensor, own or inherited"
        ):
            repo.save_async(name, {}, graph=graph, inherit={"in": "in"}).committed(60.0)
        assert repo.models(name) == [ModelRef(name, 1)]

    def test_a_prefix_of_names_that_is_no_text(self, repo: Repository) -> None:
        with pytest.raises(OptionError, match="models: prefix: expected text; found 3"):
            repo.models(3)  # type: ignore[arg-type]

    def test_a_repository_is_not_sent_to_other_processes(self, repo: Repository) -> None:
        for dumps in (pickle.dumps, cloudpickle.dumps, copy.copy):
            with pytest.raises(OptionError, match=rf"connect there with Repository.connect\('{repo.name}'\)") as raised:
                dumps(repo)
            assert "\n" not in str(raised.value)

    def test_scalars_of_numpy_in_metadata_are_stored_as_numbers(self, repo: Repository, name: str) -> None:
        metadata = {"loss": np.float32(0.5), "epoch": np.int64(3), "best": np.bool_(True), "of": [np.float16(2), 1]}
        repo.save(name, {"w": np.zeros(1)}, metadata=metadata)
        assert repr(dict(repo.info(name).metadata)) == "{'loss': 0.5, 'epoch': 3, 'best': True, 'of': [2.0, 1]}"

    def test_more_replicas_than_nodes(self, repo: Repository) -> None:
        with pytest.raises(ValueError, match="replicas=2 with 1 living nodes and 1 shards"):
            Repository.start(f"{repo.name}-other", replicas=2)

    def test_durability_that_this_repository_cannot_give(self, repo: Repository, name: str) -> None:
        with pytest.raises(StorageError, match=r"expected a repository with path="):
            repo.save(name, {}, durability="disk")
        with pytest.raises(StorageError, match=r"expected a repository with path="):
            repo.flush()
        with pytest.raises(ValueError, match="durability"):
            repo.save(name, {}, durability="tape")  # type: ignore[arg-type]

    def test_no_such_repository(self, cluster: object) -> None:
        with pytest.raises(RepositoryNotFoundError, match="nowhere"):
            Repository.connect("nowhere")


class TestLife:
    def test_a_second_start_joins_and_leaves_it_running(self, cluster: object) -> None:
        with Repository.start("joined", shards=1, preallocate_bytes=0) as first:
            first.save("m", {"t": np.ones(1)})
            with Repository.start("joined") as second:
                assert second.models() == [ModelRef("m", 1)]
            assert first.load("m")["t"] == 1
            with pytest.raises(ValueError, match="is already running with 1 shards"):
                Repository.start("joined", shards=2)
        with pytest.raises(RepositoryNotFoundError):
            Repository.connect("joined")

    def test_two_starters_at_once_give_one_repository(self, cluster: object) -> None:
        started: list[Repository] = []
        threads = [
            threading.Thread(target=lambda: started.append(Repository.start("race", shards=2, preallocate_bytes=0)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert len(started) == 2
        started[0].save("m", {"w": np.zeros(1)})
        assert started[1].models() == [ModelRef("m", 1)]
        for repository in started:
            repository.close()

    def test_a_client_that_has_stopped_its_repository_says_that_it_is_closed(self, cluster: object) -> None:
        repository = Repository.start("closed", shards=1, preallocate_bytes=0)
        repository.close()
        repository.close()
        with pytest.raises(ClosedError, match="repository 'closed': expected it to be open; it was closed"):
            repository.save("m", {"w": np.zeros(1)})
