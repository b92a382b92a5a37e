"""What the engine on Dask does that is no part of the contract: on one cluster, which no test harms."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster
from tensorvine.actors.engine.dask.clients import engine_of
from tensorvine.actors.engine.dask.engine import DaskEngine
from tensorvine.actors.engine.dask.hosts import TRIMMING, environment_of_actors
from tensorvine.actors.engine.engine import SERVICE, Lifetime
from tensorvine.actors.engine.groups import GROUPS
from tensorvine.actors.engine.sockets.packing import APART_BYTES
from tensorvine.store.errors import (
    EngineStoppedError,
    ModelLostError,
    OperationTimeoutError,
    OptionError,
    ShardUnavailableError,
    StorageError,
)

from tests.support.asking import ask, begin
from tests.support.dask_cluster import is_running, local_cluster
from tests.support.dask_probe import DaskProbe
from tests.support.waiting import eventually

WAIT_S = 60.0
LARGE = 64 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def engine(client: Client) -> Iterator[DaskEngine]:
    with closing(engine_of(client)) as made:
        yield made


@pytest.fixture
def spawn(engine: DaskEngine) -> Iterator[Callable[..., Any]]:
    names: list[str] = []

    def one(lifetime: Lifetime = SERVICE, **arguments: Any) -> Any:
        names.append(f"probe-{uuid.uuid4().hex[:8]}")
        return engine.spawn(DaskProbe, names[-1], {"engine": engine, **arguments}, lifetime=lifetime)

    yield one
    for name in names:
        engine.kill(name)


def is_missing(engine: DaskEngine, name: str) -> bool:
    try:
        engine.find(name)
    except LookupError:
        return True
    return False


class TestProcesses:
    def test_an_actor_is_a_process_that_loads_neither_ray_nor_dask(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        facts = [ask(engine, spawn(), "facts") for _ in range(2)]
        assert len({os.getpid(), *(fact["pid"] for fact in facts), *(fact["template"] for fact in facts)}) == 4
        assert {fact["host"] for fact in facts} == {os.getpid()}, "the nannies of a local cluster are in this process"
        assert [fact["loaded"] for fact in facts] == [[], []]
        assert {fact["node"] for fact in facts} == {engine.this_node()}

    def test_an_actor_does_not_give_memory_back_as_workers_are_told_to(
        self, engine: DaskEngine, spawn: Callable[..., Any], client: Client
    ) -> None:
        assert set(client.run(os.environ.get, TRIMMING).values()) == {"65536"}
        assert ask(engine, spawn(), "facts")["trimming"] is None

    @pytest.mark.parametrize(("there", "passed_on"), [("65536", None), ("131072", "131072")])
    def test_an_actor_is_told_of_memory_what_the_user_set_and_not_what_nannies_do(
        self, there: str, passed_on: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(TRIMMING, there)
        monkeypatch.setenv("OTHERS", "stay")
        found = environment_of_actors()
        assert (found.get(TRIMMING), found["OTHERS"]) == (passed_on, "stay")

    def test_template_and_actor_stay_in_the_session_and_have_groups_of_their_own(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        facts = ask(engine, spawn(), "facts")
        pids = (os.getpid(), facts["template"], facts["pid"])
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
        assert len({os.getpgid(pid) for pid in pids}) == 3

    def test_actors_draw_different_numbers(self, engine: DaskEngine, spawn: Callable[..., Any]) -> None:
        drawn = [ask(engine, spawn(), "draw") for _ in range(2)]
        assert len({number for pair in drawn for number in pair}) == 4

    def test_an_actor_has_the_event_loops_that_it_has_on_ray(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        pytest.importorskip("uvloop")
        assert ask(engine, spawn(), "facts")["loop"] == "uvloop"

    def test_the_engine_is_there_without_ray(self) -> None:
        script = "import sys; sys.modules['ray'] = None; from tensorvine.actors.engine.dask import clients, hosts"
        subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)

    def test_kill_gives_back_when_the_process_has_ended(self, engine: DaskEngine, spawn: Callable[..., Any]) -> None:
        actor = spawn()
        pid = ask(engine, actor, "facts")["pid"]
        engine.kill(actor.name)
        assert not is_running(pid)

    def test_it_lives_when_workers_die_and_when_nannies_start_them_anew(
        self, engine: DaskEngine, spawn: Callable[..., Any], client: Client
    ) -> None:
        actor = spawn()
        before, node = ask(engine, actor, "facts"), engine.this_node()
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(client.scheduler_info()["workers"]) == 0, "no worker is left")
        client.wait_for_workers(2, timeout=WAIT_S)
        client.restart(timeout=WAIT_S)
        assert ask(engine, actor, "facts") == before
        assert [known.id for known in engine.nodes()] == [node]
        assert not engine.nodes()[0].leaving

    def test_a_constructors_error_is_that_of_the_first_calls(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        actor = spawn(error=StorageError("/data: expected a folder; found none"))
        with pytest.raises(StorageError, match="/data: expected a folder"):
            ask(engine, actor, "facts")
        eventually(lambda: is_missing(engine, actor.name), "the actor is gone")

    def test_a_process_that_ends_in_its_constructor_is_said_to(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        actor = spawn(Lifetime(restarts=False), ends=True)
        with pytest.raises(ShardUnavailableError, match=r"probe: .*its process ended with 3"):
            ask(engine, actor, "facts")

    def test_it_has_what_its_lifetime_takes_and_nothing_else(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        cpus = engine.nodes()[0].resources["CPU"]
        first, second = spawn(Lifetime(cpus=cpus)), spawn(Lifetime(cpus=cpus))
        assert ask(engine, first, "facts")["gpus"] == ""
        with pytest.raises(OperationTimeoutError):
            ask(engine, second, "facts", timeout=0.5, who="it waits for room")
        engine.kill(first.name)
        assert ask(engine, second, "facts")["pid"]
        for refused in (Lifetime(bundle=(None, 0)), Lifetime(gpus=1.5)):
            with pytest.raises(OptionError, match="expected"):
                spawn(refused)


class TestOwners:
    def test_what_an_actor_starts_and_reserves_for_itself_ends_with_it(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        starter, name = spawn(), f"started-{uuid.uuid4().hex[:8]}"
        started = ask(engine, starter, "start", name)
        pid = ask(engine, started, "facts")["pid"]
        free = engine.nodes()[0].memory_free
        assert ask(engine, starter, "reserve", name, engine.this_node(), 1 << 20)
        assert (engine.reserved(name), engine.nodes()[0].memory_free) == ({name: engine.this_node()}, free - (1 << 20))
        with pytest.raises(ShardUnavailableError):
            ask(engine, starter, "die")
        eventually(lambda: is_missing(engine, name), "what it started is gone")
        eventually(lambda: not is_running(pid), "the process of what it started has ended")
        eventually(lambda: engine.reserved(name) == {}, "nothing is reserved")

    def test_what_a_client_starts_and_reserves_for_itself_ends_with_it(
        self, engine: DaskEngine, cluster: LocalCluster
    ) -> None:
        name = f"started-{uuid.uuid4().hex[:8]}"
        with Client(cluster) as other, closing(engine_of(other)) as theirs:
            theirs.spawn(DaskProbe, name, {"engine": theirs}, lifetime=Lifetime(outlives=False))
            assert theirs.reserve(name, theirs.this_node(), 100)
            assert not theirs.reserve(f"{name}-more", theirs.this_node(), theirs.nodes()[0].memory_free + 1, wait=False)
            assert ask(engine, engine.find(name), "facts")["pid"]
        eventually(lambda: is_missing(engine, name), "what the client started is gone")
        eventually(lambda: engine.reserved(name) == {}, "nothing is reserved")

    def test_a_closed_client_stops_its_engine(self, cluster: LocalCluster) -> None:
        with Client(cluster) as other:
            stopped = engine_of(other)
        for asked in (stopped.nodes, lambda: stopped.find("a"), lambda: stopped.put(np.zeros(1))):
            with pytest.raises(EngineStoppedError):
                asked()
        stopped.kill("a")
        stopped.close()


class TestBytes:
    def test_a_large_argument_is_what_it_was_when_it_was_sent(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        actor, array = spawn(), np.ones(LARGE, np.uint8)
        ask(engine, actor, "facts")
        answer = begin(engine, actor, "total", array)
        array[:] = 2
        assert answer.result(WAIT_S) == (LARGE, False)

    @pytest.mark.parametrize("nbytes", [0, 1, APART_BYTES - 8, APART_BYTES, LARGE])
    def test_arrays_of_any_size_come_back(self, engine: DaskEngine, spawn: Callable[..., Any], nbytes: int) -> None:
        array = np.arange(nbytes, dtype=np.uint8)
        sent = {"first": array, "second": [array.view(), b"x" * nbytes], "third": np.asfortranarray(np.eye(50))}
        found = ask(engine, spawn(), "echo", sent)
        assert np.array_equal(found["first"], array)
        assert np.array_equal(found["second"][0], array)
        assert found["second"][1] == b"x" * nbytes
        assert np.array_equal(found["third"], np.eye(50))

    def test_a_function_and_a_class_of_a_program_travel_by_value(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        offset = 3
        assert ask(engine, spawn(), "echo", lambda value: value + offset)(4) == 7

    def test_a_block_that_was_let_go_of_is_lost(self, engine: DaskEngine, spawn: Callable[..., Any]) -> None:
        actor = spawn()
        for block in (np.arange(3), np.ones(LARGE, np.uint8)):
            handles = ask(engine, actor, "hold", block)
            (found,) = engine.get(handles, WAIT_S, "probe")
            assert np.array_equal(found, block)
            assert not found.flags.writeable
        kept = engine.put(np.arange(5))
        ((first, second),) = [ask(engine, actor, "echo", [kept, kept])]
        assert [array.tolist() for array in engine.get([first, second], WAIT_S, "itself")] == [[0, 1, 2, 3, 4]] * 2
        del kept
        with pytest.raises(ModelLostError, match="it was released"):
            engine.get([first], WAIT_S, "itself")


class TestLimits:
    def test_a_group_carries_out_as_many_calls_at_once_as_it_may(
        self, engine: DaskEngine, spawn: Callable[..., Any]
    ) -> None:
        actor, most = spawn(), GROUPS["data"]
        for _ in range(most + 20):
            begin(engine, actor, "pass_gate")
        eventually(lambda: ask(engine, actor, "going") == (most, most), "as many calls go on as may")
        waiting = begin(engine, actor, "nothing")
        with pytest.raises(OperationTimeoutError):
            waiting.result(0.3)
        assert ask(engine, actor, "going") == (most, most)

    def test_what_it_cannot_be_asked_is_said(self, engine: DaskEngine, spawn: Callable[..., Any]) -> None:
        with pytest.raises(AttributeError, match=r"expected one of .*'echo'.*; found 'no_such'"):
            ask(engine, spawn(), "no_such")


def test_of_a_machines_workers_that_of_its_node_is_closed_last(engine: DaskEngine, client: Client) -> None:
    (worker,) = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close(n=2))
    assert worker in client.scheduler_info()["workers"]
    assert len(engine.nodes()) == 1


def test_a_cluster_of_threads_is_refused() -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(OptionError, match="of a cluster with processes"),
    ):
        engine_of(client)


def test_two_engines_of_two_clusters_in_one_process(engine: DaskEngine) -> None:
    with (
        local_cluster(1) as cluster,
        Client(cluster, set_as_default=False) as client,
        closing(engine_of(client)) as other,
    ):
        name = f"twin-{uuid.uuid4().hex[:8]}"
        actors = [each.spawn(DaskProbe, name, {"engine": each}) for each in (engine, other)]
        facts = [ask(each, actor, "facts") for each, actor in zip((engine, other), actors, strict=True)]
        assert facts[0]["pid"] != facts[1]["pid"]
        assert [fact["node"] for fact in facts] == [engine.this_node(), other.this_node()]
        template = facts[1]["template"]
        engine.kill(name)
        assert ask(other, actors[1], "facts") == facts[1]
    eventually(lambda: not is_running(facts[1]["pid"]), "the actor's process has ended")
    eventually(lambda: not is_running(template), "its template has ended")
    assert psutil.pid_exists(facts[0]["template"])
