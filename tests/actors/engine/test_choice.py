"""Which engine a program gets: by name, client or address, in a task, where both run, and where one is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster
from tensorvine.actors import Repository
from tensorvine.actors.engine import process
from tensorvine.actors.engine.choice import engine_for, engine_here, start_engine
from tensorvine.actors.engine.dask import clients
from tensorvine.actors.engine.dask.engine import DaskEngine
from tensorvine.actors.engine.dask.hosts import ASK
from tensorvine.actors.engine.engine import Engine
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.store.errors import EngineStoppedError, OptionError, RepositoryNotFoundError

from tests.support.dask_cluster import WAIT_S, local_cluster

NOTHING_IMPORTED = """
import sys
from tensorvine.actors import Consumer, Producer, Repository, start_trainers
assert not {"ray", "dask", "distributed"} & set(sys.modules), sorted(sys.modules)
"""
WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from tensorvine.actors import Repository
from tensorvine.store.errors import EngineUnavailableError
try:
    Repository.start(engine=None if sys.argv[2] == "ray" else sys.argv[2])
except EngineUnavailableError as exc:
    print(exc)
"""


def printed(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout


class TestRefused:
    @pytest.mark.parametrize("choice", ["spark", "", 8786, object()])
    def test_what_names_no_engine(self, choice: Any) -> None:
        with pytest.raises(OptionError, match='engine: expected "ray", "dask", a client of Dask or HOST:PORT; found'):
            engine_for(choice)

    @pytest.mark.parametrize("address", ["spark://127.0.0.1:7077", "127.0.0.1:port"])
    def test_an_address_that_is_none(self, address: str) -> None:
        with pytest.raises(OptionError, match=f"expected the address of a Dask scheduler; found '{address}'"):
            start_engine(address)

    def test_an_address_where_nobody_listens(self) -> None:
        with pytest.raises(RepositoryNotFoundError, match=r"at tcp://127\.0\.0\.1:1; found none"):
            start_engine("tcp://127.0.0.1:1")

    def test_a_dask_that_nothing_names(self) -> None:
        with pytest.raises(RepositoryNotFoundError, match=r"current Dask client.*DASK_SCHEDULER_ADDRESS"):
            Repository.connect(engine="dask")


class TestImports:
    def test_no_engine_is_imported_before_it_is_chosen(self) -> None:
        printed(NOTHING_IMPORTED)

    @pytest.mark.parametrize(("package", "name"), [("ray", "ray"), ("distributed", "dask")])
    def test_one_that_is_not_installed_says_how_to_install_it(self, package: str, name: str) -> None:
        assert f"pip install '.[{name}]'" in printed(WITHOUT, package, name)


@pytest.mark.ray
class TestBoth:
    @pytest.fixture
    def dask(self, ray_cluster: RayEngine, dask_cluster: DaskEngine) -> Iterator[DaskEngine]:
        """Dask beside a Ray that this process has initialised, and no engine that tests put first."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "_engines", [])
            yield dask_cluster

    def test_a_program_with_both_has_to_say_which(self, dask: DaskEngine) -> None:
        assert isinstance(engine_here(), RayEngine)
        with (
            Client(dask._seat.cluster),
            pytest.raises(OptionError, match="both Ray and a Dask client run in this process"),
        ):
            Repository.connect("anything")

    def test_a_dask_that_is_there_for_something_else_is_left_alone(self, dask: DaskEngine) -> None:
        with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0") as client:
            assert isinstance(engine_here(), RayEngine)
            with pytest.raises(OptionError, match="both Ray and a Dask client run in this process"):
                engine_for()
            assert isinstance(engine_for("ray"), RayEngine)
            assert not client.run_on_scheduler(lambda dask_scheduler: ASK in dask_scheduler.handlers)

    def test_a_name_on_one_engine_is_none_on_the_other(self, dask: DaskEngine) -> None:
        with Repository.start("on-one", shards=1, preallocate_bytes=0, engine="ray"):
            with pytest.raises(RepositoryNotFoundError, match="'on-one'"):
                Repository.connect("on-one", engine=dask)
            with Repository.start("on-one", shards=1, preallocate_bytes=0, engine=dask) as other:
                assert other.started_here
                with Repository.connect("on-one", engine="ray") as first:
                    assert first.engine is not other.engine


def connected_in_a_task(name: str) -> tuple[str, str]:
    """Be a task of Dask: say which version is there, and on which node."""
    with Repository.connect(name) as repository:
        (ref,) = repository.models()
        return str(ref), repository.engine.this_node()


@pytest.mark.own_cluster
class TestDask:
    """Programs that have a Dask and no Ray."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[LocalCluster]:
        with local_cluster(1) as made:
            yield made

    @pytest.fixture
    def client(self, cluster: LocalCluster) -> Iterator[Client]:
        with Client(cluster) as made:
            yield made

    @pytest.fixture(autouse=True)
    def joined(self) -> Iterator[None]:
        """What a test has joined by its address stays joined; the next one is to find none."""
        yield
        for joined in clients._clients.values():
            joined.close()

    def test_the_current_client_is_what_runs_here_and_its_tasks_find_it(self, client: Client) -> None:
        with Repository.start("here", shards=1, preallocate_bytes=0) as repository:
            repository.save("m", {"w": [1.0]})
            assert isinstance(repository.engine, DaskEngine)
            assert engine_for() is engine_for("dask") is engine_for(client) is repository.engine
            there = client.submit(connected_in_a_task, "here").result(WAIT_S)
            assert there == ("m@1", repository.engine.this_node())

    def test_an_address_is_joined_once_and_no_other_client_is_put_aside(self, client: Client) -> None:
        address = client.scheduler.address
        engine = engine_for(address)
        assert engine is engine_for(address)
        assert engine is not engine_for()
        assert Client.current() is client
        engine.leave()

    def test_without_a_current_client_the_address_that_was_joined_is_what_runs_here(
        self, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = engine_for(cluster.scheduler_address)
        assert engine_here() is engine
        engine.leave()
        for joined in clients._clients.values():
            joined.close()
        assert engine_here() is None

    def test_an_engine_ends_with_its_client(self, cluster: LocalCluster) -> None:
        with Client(cluster) as client:
            engine = engine_for(client)
            repository = Repository.start("ends", shards=1, preallocate_bytes=0)
            repository.leave()
        with pytest.raises(EngineStoppedError, match="it was closed"):
            engine.nodes()
        with Client(cluster) as another:
            anew = Repository.connect("ends", engine=another)
            assert anew.engine is not engine
            anew.stop()

    def test_a_client_of_a_loop_is_refused(self, cluster: LocalCluster) -> None:
        async def refused() -> None:
            async with Client(cluster.scheduler_address, asynchronous=True) as client:
                with pytest.raises(OptionError, match="expected a synchronous client"):
                    engine_for(client)

        import asyncio

        asyncio.run(refused())

    def test_one_is_started_where_none_runs_and_ends_with_the_repository(self) -> None:
        assert engine_here() is None
        with Repository.start("embedded", shards=1, preallocate_bytes=0, engine="dask") as repository:
            engine: Engine = repository.engine
            assert engine_here() is engine
            address = Client.current().scheduler.address
        assert engine_here() is None
        with pytest.raises(RepositoryNotFoundError, match="found none"):
            engine_for(address)
