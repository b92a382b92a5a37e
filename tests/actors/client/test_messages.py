"""What a client sends: how many messages a call takes, and what becomes of it when a catalog or an answer is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client.session import Session
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.store.errors import ModelNotFoundError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

from tests.support.catalog_room import CatalogRoom, catalog_room
from tests.support.interrupts import Interrupt
from tests.support.room_client import Wire, clients
from tests.support.waiting import PATIENCE_S, await_shards, eventually

SMALL = {"a": np.arange(100), "b": np.ones(7)}
LARGE = {"a": np.arange(20_000), "b": np.ones(7)}
GRAPH = ModelGraph([Layer("in", {"class": "In"}, (), ("a", "b"))])


@pytest.fixture(params=[1, 2, 4])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CatalogRoom]:
    with catalog_room(tmp_path / "private", request.param) as made:
        yield made


@pytest.fixture
def wire(room: CatalogRoom) -> Wire:
    return Wire(room)


@pytest.fixture
def repo(room: CatalogRoom, wire: Wire) -> Iterator[Repository]:
    with clients(room) as (client,):
        client.save("warm", LARGE)
        client.save("warm2", SMALL)
        await_shards(client)
        for name in ("", "m"):  # greets the shards of the first saves
            client._session.near(name)
        yield client


@contextmanager
def clients_of(repo: Repository) -> Iterator[Repository]:
    """Have another client, which knows the shards."""
    other = Repository(repo.engine, repo.name)
    try:
        other._session.near()
        yield other
    finally:
        other.close()


def commit(repo: Repository, name: str = "m") -> list[str]:
    return [f"shard-{repo._session.near(name)}.commit", "catalog.commit"]


class TestSaves:
    def test_small_ones_are_two_nested_messages(self, repo: Repository, wire: Wire) -> None:
        for number in range(3):
            with wire.during() as sent:
                saved = repo.save("m", SMALL | {"b": np.full(7, number)}, graph=GRAPH)
            assert sent == commit(repo)
            assert (saved.ref.version, saved.bytes_inherited) == (number + 1, 800 if number else 0)
        assert repo.lineage("m") == [ModelRef("m", version) for version in (3, 2, 1)]

    def test_large_ones_ask_for_memory_and_the_first_one_for_its_parent(self, repo: Repository, wire: Wire) -> None:
        near = repo._session.near("m")
        with wire.during() as sent:
            repo.save("m", LARGE)
        assert sent == ["catalog.begin", f"shard-{near}.grant", *commit(repo)]
        with wire.during() as sent:
            saved = repo.save("m", {"a": LARGE["a"], "b": np.full(20_000, 3.0)})
        assert sent == [f"shard-{near}.grant", *commit(repo)]
        assert saved.bytes_inherited == LARGE["a"].nbytes
        with wire.during() as sent:
            assert repo.save("m", {"a": LARGE["a"]}, parent="m@1").bytes_written == 0
        assert sent == commit(repo)

    def test_memory_that_was_reserved_costs_no_message(self, repo: Repository, wire: Wire) -> None:
        repo.save_async("m", LARGE).committed(60.0)
        for number in range(2):
            eventually(lambda: repo._saves.saver.reserved._waiting is not None, "memory waits for the next save")
            with wire.during() as sent:
                repo.save_async("m", {"a": LARGE["a"] + number, "b": LARGE["b"]}).committed(60.0)
            assert sent == commit(repo)
        assert (repo.load("m")["a"] == LARGE["a"] + 1).all()

    def test_inheriting_layers_of_a_version_that_was_loaded(self, repo: Repository, wire: Wire) -> None:
        repo.save("m", LARGE, graph=GRAPH)
        with clients_of(repo) as other:
            other.load("m")
            other.graph("m")
            other._session.near("child")
            with wire.during() as sent:
                other.save("child", {}, graph=GRAPH, parent="m@1", inherit={"in": "in"})
            assert sent == commit(other, "child")

    def test_what_is_known_of_a_parent_may_be_old(self, repo: Repository, wire: Wire) -> None:
        repo.save("m", SMALL)
        with clients_of(repo) as other:
            other.save("m", SMALL | {"c": np.zeros(1)})
            with wire.during() as sent:
                saved = repo.save("m", SMALL | {"c": np.zeros(1)})
            assert sent == [*commit(repo), "catalog.begin", *sent[3:-2], *commit(repo)]
            assert (saved.ref.version, saved.bytes_written) == (3, 0)
        assert repo.lineage("m") == [ModelRef("m", version) for version in (3, 2, 1)]

    @pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
    def test_a_parent_that_was_retired_since(self, repo: Repository, tensors: dict[str, np.ndarray]) -> None:
        repo.save("m", tensors)
        with clients_of(repo) as other:
            other.retire("m")
            saved = repo.save("m", tensors)
            assert (saved.ref.version, saved.bytes_inherited) == (2, 0)
            assert repo.lineage("m") == [saved.ref]
            assert (other.load("m")["a"] == tensors["a"]).all()
            other.retire("m")
            with pytest.raises(ModelNotFoundError):
                repo.save("n", tensors, parent="m@2")

    def test_a_lost_answer_of_a_commit_is_asked_for_again(self, repo: Repository, wire: Wire) -> None:
        near = repo._session.near("m")
        for number, lost in enumerate((f"shard-{near}.commit", "catalog.commit"), 1):
            wire.losing.add(lost)
            assert repo.save("m", SMALL).ref == ModelRef("m", number)
        assert repo.models("m") == [ModelRef("m", 1), ModelRef("m", 2)]

    def test_a_catalog_that_restarts_in_a_save(self, repo: Repository, room: CatalogRoom, wire: Wire) -> None:
        repo.save("m", LARGE)
        restarts = [True]

        def restart(message: str) -> None:
            if message == "catalog.commit" and restarts:
                restarts.pop()
                room.start_catalog()

        wire.before = restart
        saved = repo.save("m", {"a": LARGE["a"] + 1, "b": LARGE["b"]})
        assert not restarts
        assert saved.ref == ModelRef("m", 2)
        assert (repo.load("m")["a"] == LARGE["a"] + 1).all()
        assert (repo.load("m@1")["a"] == LARGE["a"]).all()

    def test_a_catalog_that_restarts_after_it_refused_an_interrupted_commit(
        self, repo: Repository, room: CatalogRoom, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the shard has sent on may exist after all, but not later than the call ends."""
        near, call = repo._session.near("m"), Session.call
        proposed, aborted = threading.Event(), threading.Event()

        def restart(message: str) -> None:
            if message == "catalog.commit" and not proposed.is_set():
                proposed.set()
                assert aborted.wait(PATIENCE_S)
                room.start_catalog()
            elif message == f"shard-{near}.abort":
                aborted.set()

        def interrupt(session: Session, shard: int, request: Request[Any], *rest: Any) -> Any:
            if request.remote is not ShardCalls.commit:
                return call(session, shard, request, *rest)
            session.send(shard, request)
            assert proposed.wait(PATIENCE_S)
            raise Interrupt

        wire.before = restart
        with monkeypatch.context() as patch:
            patch.setattr(Session, "call", interrupt)
            with pytest.raises(Interrupt):
                repo.save("m", SMALL)
        assert not room.state(near).sent
        found = repo.models("m")
        assert repo.save("m", SMALL).ref.version == len(found) + 1


class TestLoads:
    @pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
    def test_a_repeated_one_sends_nothing_until_there_is_a_later_version(
        self, repo: Repository, wire: Wire, tensors: dict[str, np.ndarray]
    ) -> None:
        repo.save("m", tensors)
        with clients_of(repo) as other:
            for model in ("m", "m@1"):
                other.load(model)
                with wire.during() as sent:
                    assert (other.load(model)["a"] == tensors["a"]).all()
                assert sent == []
            repo.save("m", {"a": tensors["a"] + 1})
            with wire.during() as sent:
                assert (other.load("m")["a"] == tensors["a"] + 1).all()
            assert sent[0] == "catalog.locate"
            with wire.during() as sent:
                assert (other.load("m@1")["a"] == tensors["a"]).all()
            assert sent == []

    def test_one_of_a_version_that_was_waited_for_asks_nothing(self, repo: Repository, wire: Wire) -> None:
        with clients_of(repo) as other:
            repo.save("m", LARGE)
            assert other.wait_newer("m", 0, 30.0) == ModelRef("m", 1)
            repo.save("m", {"a": LARGE["a"] + 1, "b": LARGE["b"]})
            assert other.wait_newer("m", 1, 30.0) == ModelRef("m", 2)
            for shard in other.shards:
                other._session.connection(shard)
            with wire.during() as sent:
                assert (other.load("m@2")["a"] == LARGE["a"] + 1).all()
            assert sent == []
