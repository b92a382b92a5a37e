"""The engine seam: one contract over every engine, what each engine's errors mean, and shards at work on Dask."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import ray
import ray.exceptions
from distributed import Client
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.engine.dask.clients import engine_of
from tensorvine.actors.engine.dask.engine import DaskEngine
from tensorvine.actors.engine.engine import Engine, Lifetime
from tensorvine.actors.engine.ray import engine as engine_ray
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    ShardUnavailableError,
    TensorVineError,
)
from tensorvine.store.graphs.graph import Layer, ModelGraph

from tests.support.asking import ask, begin
from tests.support.dask_cluster import local_cluster
from tests.support.probe import PATIENCE_S, Probe
from tests.support.waiting import await_shards, eventually

SOON_S = 0.2


class EngineContract:
    """What every engine promises; a subclass names the engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def spawn(self, engine: Engine) -> Iterator[Callable[..., tuple[str, Any]]]:
        """Spawn a probe under a name of its own, which a test may harm; it is killed in the end."""
        names: list[str] = []

        def one(**arguments: Any) -> tuple[str, Any]:
            names.append(new_name())
            given = {"engine": engine, **arguments}
            return names[-1], engine.spawn(Probe, names[-1], given, lifetime=Lifetime(spread=True))

        yield one
        for name in names:
            engine.kill(name)

    @pytest.fixture(scope="class")
    @classmethod
    def names(cls, engine: Engine) -> Iterator[list[str]]:
        """Names of two probes that all tests of a class share."""
        shared = [new_name(), new_name()]
        for number, name in enumerate(shared):
            engine.spawn(Probe, name, {"engine": engine, "start": number}, engine.this_node())
        yield shared
        for name in shared:
            engine.kill(name)

    @pytest.fixture
    def probe(self, engine: Engine, names: list[str]) -> Any:
        return engine.find(names[0])

    @pytest.fixture
    def other(self, engine: Engine, names: list[str]) -> Any:
        return engine.find(names[1])

    def ask(self, engine: Engine, actor: Any, method: str, *arguments: Any) -> Any:
        return ask(engine, actor, method, *arguments)

    # ---- actors ---------------------------------------------------------------------------------------

    def test_this_node_is_the_first_of_the_nodes(self, engine):
        first, *_ = engine.nodes()
        assert first.id == engine.this_node()
        assert first.memory_free > 0
        assert first.address == engine.address()

    def test_named_actors_are_found_with_what_they_were_started_with(self, engine, probe, other):
        assert [self.ask(engine, actor, "start") for actor in (probe, other)] == [0, 1]

    def test_an_actor_runs_in_another_process(self, engine, probe):
        assert self.ask(engine, probe, "pid") != os.getpid()

    def test_spawn_finds_the_actor_that_runs_under_the_name(self, engine, names, other):
        again = engine.spawn(Probe, names[1], {"engine": engine, "start": 7})
        assert self.ask(engine, again, "start") == 1

    def test_find_says_which_name_is_missing(self, engine):
        with pytest.raises(LookupError, match="no-such-actor"):
            engine.find("no-such-actor")

    def test_running_actors_are_listed_with_their_nodes(self, engine, names, probe, other):
        for actor in (probe, other):
            self.ask(engine, actor, "start")
        found = engine.actors()
        assert [found[name] for name in names] == [engine.this_node()] * 2

    def test_an_actor_that_is_being_started_is_listed_and_a_killed_one_is_not(self, engine, spawn):
        name, actor = spawn()
        assert engine.actors()[name] in (None, engine.this_node())
        self.ask(engine, actor, "start")
        assert engine.actors()[name] == engine.this_node()
        engine.kill(name)
        eventually(lambda: name not in engine.actors(), "the killed actor is listed no more", pause=0.005)

    def test_a_first_life_is_not_a_restart(self, engine, probe):
        assert self.ask(engine, probe, "life") is False

    def test_bytes_are_kept_by_name_until_they_are_let_go(self, engine):
        begin = f"{new_name()}:"
        for name, value in (("a", b"1"), ("b", b""), ("a", b"2")):
            engine.keep(begin + name, value)
        assert engine.kept(begin) == {f"{begin}a": b"2", f"{begin}b": b""}
        assert [engine.keep_absent(f"{begin}{name}", b"") for name in "acc"] == [False, True, False]
        assert engine.kept(begin) == {f"{begin}a": b"2", f"{begin}b": b"", f"{begin}c": b""}
        engine.keep(f"{begin}a", None)
        engine.keep(f"{begin}c", None)
        assert engine.kept(begin) == {f"{begin}b": b""}
        engine.keep(f"{begin}b", None)
        assert engine.kept(begin) == {}

    def test_a_killed_actor_answers_nobody_and_its_name_is_free(self, engine, spawn, probe):
        name, actor = spawn(start=1)
        assert self.ask(engine, probe, "relay", name, "start", [], PATIENCE_S) == 1
        engine.kill(name)
        with pytest.raises(ShardUnavailableError, match="probe"):
            self.ask(engine, actor, "start")
        with pytest.raises(LookupError, match=name):
            engine.find(name)
        with pytest.raises(LookupError, match=name):
            self.ask(engine, probe, "relay", name, "start", [], PATIENCE_S)
        anew = engine.spawn(Probe, name, {"engine": engine, "start": 2})
        assert self.ask(engine, anew, "start") == 2

    def test_killing_what_is_not_there_is_no_error(self, engine):
        engine.kill("no-such-actor")

    # ---- errors ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("relayed", [False, True], ids=["to-a-client", "to-an-actor"])
    def test_an_error_of_the_tree_arrives_as_itself(self, engine, names, probe, other, relayed):
        error = ModelNotFoundError("home 0: expected m@3; it was retired")
        call = (other, "relay", names[0], "fail", [error], PATIENCE_S) if relayed else (probe, "fail", error)
        with pytest.raises(TensorVineError) as caught:
            self.ask(engine, *call)
        assert type(caught.value) is ModelNotFoundError
        assert str(caught.value) == "home 0: expected m@3; it was retired"
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None

    @pytest.mark.parametrize(
        "error", [ZeroDivisionError("x"), OSError("x"), RuntimeError("x"), KeyError("x"), TimeoutError("x")], ids=repr
    )
    def test_a_foreign_error_arrives_as_itself_or_a_subclass(self, engine, probe, error):
        with pytest.raises(type(error), match="x") as caught:
            self.ask(engine, probe, "fail", error)
        assert not isinstance(caught.value, TensorVineError)

    @pytest.mark.parametrize("timeout", [SOON_S, -1.0])
    def test_an_unanswered_call_names_who_was_waited_for(self, engine, probe, timeout):
        with pytest.raises(OperationTimeoutError, match="the silent one"):
            ask(engine, probe, "hear", new_name(), timeout=timeout, who="the silent one")

    def test_an_actor_whose_call_is_unanswered_names_who_it_waited_for(self, engine, names, other):
        with pytest.raises(OperationTimeoutError, match=names[0]):
            self.ask(engine, other, "relay", names[0], "hear", [new_name()], SOON_S)

    # ---- blocks ---------------------------------------------------------------------------------------

    def test_an_actors_block_comes_back_read_only(self, engine, probe):
        block = np.arange(1 << 17).astype(np.uint8)
        (found,) = engine.get(self.ask(engine, probe, "keep", block), PATIENCE_S, "probe")
        assert np.array_equal(found, block)
        assert not found.flags.writeable

    def test_a_client_gets_its_own_block(self, engine):
        (found,) = engine.get([engine.put(np.arange(9, dtype=np.uint8))], PATIENCE_S, "itself")
        assert found.tolist() == list(range(9))
        assert not found.flags.writeable

    def test_a_block_is_what_it_was_when_it_was_put(self, engine, probe):
        (found,) = engine.get(self.ask(engine, probe, "keep_then_overwrite", 1 << 17), PATIENCE_S, "probe")
        assert not found.any()

    def test_an_actor_gets_anothers_block(self, engine, probe, other):
        handles = self.ask(engine, probe, "keep", np.ones(1 << 17, np.uint8))
        assert self.ask(engine, other, "total", handles) == 1 << 17

    # ---- concurrency ----------------------------------------------------------------------------------

    def test_a_stalled_data_call_blocks_neither_ctl_nor_watch(self, engine, probe):
        gate, topic = new_name(), new_name()
        stalled = begin(engine, probe, "stall", gate)
        polled = begin(engine, probe, "hear", topic)
        eventually(lambda: self.ask(engine, probe, "listeners", topic), "the poll waits", pause=0.005)
        self.ask(engine, probe, "tell", topic)
        assert polled.result(PATIENCE_S) == topic
        self.ask(engine, probe, "release", gate)
        assert stalled.result(PATIENCE_S) is True

    def test_long_polls_are_answered_when_there_is_news(self, engine, probe):
        topic = new_name()
        polls = [begin(engine, probe, "hear", topic) for _ in range(100)]
        eventually(lambda: self.ask(engine, probe, "listeners", topic) == 100, "all polls wait", pause=0.005)
        self.ask(engine, probe, "tell", topic)
        assert [poll.result(PATIENCE_S) for poll in polls] == [topic] * 100

    # ---- death ----------------------------------------------------------------------------------------

    def test_a_process_that_dies_takes_its_calls_and_its_blocks(self, engine, spawn):
        _, actor = spawn()
        handles = self.ask(engine, actor, "keep", np.zeros(1 << 20, np.uint8))
        with pytest.raises(ShardUnavailableError, match="probe"):
            self.ask(engine, actor, "die")
        with contextlib.suppress(ModelLostError):  # Ray may still have it on the same node
            (found,) = engine.get(handles, PATIENCE_S, "keeper")
            assert len(found) == 1 << 20
            assert not found.any()

    def test_an_actor_that_died_is_restarted_and_knows_it(self, engine, spawn):
        _, actor = spawn(start=5)
        with pytest.raises(ShardUnavailableError):
            self.ask(engine, actor, "die")
        assert eventually(lambda: self.answer_of(engine, actor, "life"), "its next life answers", pause=0.005) is True
        assert self.ask(engine, actor, "start") == 5

    def answer_of(self, engine, actor, method):
        try:
            return self.ask(engine, actor, method)
        except ShardUnavailableError:
            return None


class TestRayEngine(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, cluster):
        return RayEngine()


class TestDaskEngine(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, dask):
        return dask


@pytest.fixture(scope="module")
def dask() -> Iterator[DaskEngine]:
    """The engine of a cluster of Dask with two workers."""
    with (
        local_cluster(2) as workers,
        Client(workers) as client,
        closing(engine_of(client)) as engine,
    ):
        yield engine


def new_name() -> str:
    return f"probe-{uuid.uuid4().hex[:8]}"


# ---- what Ray's errors mean ---------------------------------------------------------------------------


def task_error(cause: Exception) -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError("Shard.fetch", "the remote traceback", cause)


LOST = [
    ray.exceptions.ObjectLostError("00" * 28, None, "call site"),
    ray.exceptions.OwnerDiedError("00" * 28, None, "call site"),
    ray.exceptions.ObjectFreedError("00" * 28, None, "call site"),
]
DIED = [
    ray.exceptions.RayActorError(),
    ray.exceptions.ActorDiedError(),
    ray.exceptions.ActorUnavailableError("restarting", None),
    ray.exceptions.NodeDiedError("node"),
    ray.exceptions.RaySystemError("system"),
]
LATE = [ray.exceptions.GetTimeoutError("late"), TimeoutError("late")]
MAPPINGS = (
    [(error, ModelLostError) for error in LOST]
    + [(error, ShardUnavailableError) for error in DIED]
    + [(error, OperationTimeoutError) for error in LATE]
)


@pytest.mark.parametrize(
    ("error", "meaning"), MAPPINGS, ids=lambda value: getattr(value, "__name__", type(value).__name__)
)
def test_an_error_of_rays_is_mapped_to_the_tree_and_names_who(error, meaning):
    with pytest.raises(meaning, match="shard 3") as caught:
        engine_ray._translate(error, 1.5, "shard 3")
    assert type(caught.value) is meaning
    assert caught.value.__cause__ is error


def test_an_error_of_the_tree_is_unwrapped():
    cause = ModelNotFoundError("gone")
    with pytest.raises(ModelNotFoundError) as caught:
        engine_ray._translate(task_error(cause), 1.0, "shard 3")
    assert caught.value is cause


def test_a_foreign_error_is_raised_in_its_own_class_without_the_remote_traceback():
    wrapped = task_error(ZeroDivisionError("by nought")).as_instanceof_cause()
    with pytest.raises(ZeroDivisionError) as caught:
        engine_ray._translate(wrapped, 1.0, "shard 3")
    assert type(caught.value) is ZeroDivisionError
    assert str(caught.value) == "by nought"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ray.exceptions.ActorDiedError(
                ray.exceptions.RayTaskError("C.__init__", "Traceback:\n  x\nValueError: no GPU", ValueError())
            ),
            "(ValueError: no GPU)",
        ),
        (ray.exceptions.ActorDiedError(), "The actor died unexpectedly before finishing this task."),
    ],
)
def test_the_death_of_an_actor_is_said_in_one_line(error, said):
    with pytest.raises(ShardUnavailableError) as caught:
        engine_ray._translate(error, 1.0, "shard 3")
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


def test_an_error_of_rays_that_means_nothing_here_stays_itself():
    error = ray.exceptions.RuntimeEnvSetupError("no such package")
    with pytest.raises(ray.exceptions.RuntimeEnvSetupError) as caught:
        engine_ray._translate(error, 1.0, "shard 3")
    assert caught.value is error


@pytest.mark.parametrize("asked", [lambda e: e.find("a"), lambda e: e.kill("a"), lambda e: e.spawn(Probe, "a", {})])
def test_a_head_that_does_not_answer_is_an_error_of_the_tree(asked, monkeypatch):
    def late(*_, **__):
        raise ray.exceptions.GetTimeoutError("the head is under high load")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_actor", late)
    with pytest.raises(ShardUnavailableError, match="a: expected an answer from the cluster's head; the head is under"):
        asked(engine_ray.RayEngine())


# ---- shards at work on Dask ---------------------------------------------------------------------------


@pytest.fixture
def on_dask(dask: DaskEngine) -> Iterator[Repository]:
    """A repository of two shards, both of which the client knows."""
    options: dict[str, Any] = {"shards": 2, "store_bytes": 16 << 20, "preallocate_bytes": 0}
    with Repository.start(f"dask-{uuid.uuid4().hex[:6]}", engine="dask", **options) as repository:
        names = [f"m-{i}" for i in range(20)]
        eventually(lambda: len({repository._session.near(name) for name in names}) == 2, "both shards are known")
        yield repository


def name_near(repository: Repository, shard: int, prefix: str) -> str:
    names = (f"{prefix}-{i}" for i in range(100))
    return next(name for name in names if repository._session.near(name) == shard)


def graph_of(units: int) -> ModelGraph:
    return ModelGraph(
        [
            Layer("in", {"class": "Input", "shape": [64]}),
            Layer("body", {"class": "Dense", "units": 64}, ["in"], ["body/w"]),
            Layer("head", {"class": "Dense", "units": units}, ["body"], ["head/w"]),
        ]
    )


BODY = np.random.default_rng(1).random((64, 1 << 9), np.float32)  # 128 KiB: more than travels in a message
LARGE = np.random.default_rng(2).random((3, 1 << 18), np.float32)  # 3 MiB


def test_two_shards_on_dask_serve_save_inherit_query_load_and_retire(on_dask):
    parent, child = name_near(on_dask, 0, "parent"), name_near(on_dask, 1, "child")
    head = np.ones(10, np.float32)
    shards = [on_dask._session.connection(index).hello.pid for index in (0, 1)]
    assert len({os.getpid(), *shards}) == 3
    saved = on_dask.save(parent, {"body/w": BODY, "head/w": head}, graph=graph_of(10), quality=0.5)
    with on_dask.longest_prefix(graph_of(5)) as match:
        assert match.ref == saved.ref
        assert match.layers == {"in": "in", "body": "body"}
        successor = on_dask.save(child, {"head/w": LARGE}, graph=graph_of(5), parent=match.ref, inherit=match.layers)
    assert (successor.bytes_written, successor.bytes_inherited) == (LARGE.nbytes, BODY.nbytes)
    assert on_dask.owners(successor.ref) == {"body/w": saved.ref, "head/w": successor.ref}
    assert on_dask.lineage(successor.ref) == [successor.ref, saved.ref]

    on_dask.retire(saved.ref)
    loaded = on_dask.load(successor.ref)
    assert np.array_equal(loaded["body/w"], BODY)
    assert np.array_equal(loaded["head/w"], LARGE)
    assert not loaded["body/w"].flags.writeable
    assert on_dask.models() == [successor.ref]
    with pytest.raises(ModelNotFoundError, match=str(saved.ref)):
        on_dask.load(saved.ref)

    on_dask.retire(successor.ref)
    eventually(lambda: on_dask.stats().bytes_memory == 0, "no tensor is in memory", pause=0.005)
    stats = on_dask.stats()
    assert (stats.models, stats.tensors, stats.bytes_memory) == (0, 0, 0)
    assert [shard.bytes_staged for shard in stats.shards] == [0, 0]


def test_models_of_both_shards_on_dask_are_saved_loaded_and_counted(on_dask):
    models = {f"m-{i}": np.full((4, 8), i, np.float32) for i in range(6)}
    await_shards(on_dask)
    homes = {on_dask._session.near(name) for name in models}
    for name, value in models.items():
        on_dask.save(name, {"w": value})
    assert homes == {0, 1}
    assert [shard.tensors > 0 for shard in on_dask.stats().shards] == [True, True]
    for name, value in models.items():
        assert np.array_equal(on_dask.load(name)["w"], value)


def test_a_wait_on_a_shard_on_dask_is_woken_by_a_save(on_dask):
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(on_dask.wait_newer("m", timeout=PATIENCE_S)))
    waiter.start()
    saved = on_dask.save("m", {"w": np.zeros(1)})
    waiter.join(PATIENCE_S)
    assert found == [saved.ref]


def test_a_shard_on_dask_that_is_killed_is_started_again_and_serves(on_dask):
    name = name_near(on_dask, 0, "kept")
    on_dask.save(name, {"w": np.zeros(4, np.float32)})
    before = on_dask._session.connection(0).hello.pid
    os.kill(before, signal.SIGKILL)
    saved = on_dask.save(name, {"w": BODY})
    assert np.array_equal(on_dask.load(saved.ref)["w"], BODY)
    assert on_dask._session.connection(0).hello.pid != before
