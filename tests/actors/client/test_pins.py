"""The pins and numbers of a client: none stays after a query or save that failed, and none is lost without a word."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client.match import PrefixMatch
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.store.errors import ModelLostError, ModelNotFoundError, OperationTimeoutError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

from tests.support.catalog_room import CatalogRoom, catalog_room
from tests.support.room_client import Wire, clients
from tests.support.shard_room import disk_at
from tests.support.waiting import eventually

GRAPH = ModelGraph([Layer("in", {"class": "In"}), Layer("dense", {"units": 1}, ["in"], ["w"])])
LARGE = {"w": np.arange(20_000)}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[CatalogRoom]:
    with catalog_room(tmp_path / "private", 2) as made:
        yield made


@pytest.fixture
def wire(room: CatalogRoom) -> Wire:
    return Wire(room)


@pytest.fixture
def pair(room: CatalogRoom, wire: Wire) -> Iterator[tuple[Repository, Repository]]:
    """Two clients, and a version "m"."""
    with clients(room, 2) as (first, second):
        first.save("m", LARGE, graph=GRAPH)
        yield first, second


@pytest.fixture
def repo(pair: tuple[Repository, Repository]) -> Repository:
    return pair[0]


def pins(repo: Repository) -> int:
    return repo.stats().catalog.pins


def matched(repo: Repository) -> PrefixMatch:
    match = repo.longest_prefix(GRAPH)
    assert match is not None
    return match


def stored(repo: Repository) -> tuple[int, int]:
    """Bytes that hold segments, and that are being filled."""
    shards = repo.stats().shards
    return sum(s.bytes_allocated for s in shards), sum(s.bytes_staged for s in shards)


class TestQueries:
    def test_one_pins_its_match_until_that_is_released_and_is_over_then(self, repo: Repository) -> None:
        match = matched(repo)
        assert pins(repo) == 1
        assert len(repo._session.requests.declared().open) == 1
        match.release()
        match.release()
        assert pins(repo) == 0
        assert repo._session.requests.declared().open == ()

    def test_of_several_each_is_released_by_itself(self, repo: Repository) -> None:
        one, other, none = repo.longest_prefixes([GRAPH, GRAPH, ModelGraph([Layer("x", {"class": "X"})])])
        assert one is not None
        assert other is not None
        assert none is None
        one.release()
        assert pins(repo) == 1
        assert other.layers == {"in": "in", "dense": "dense"}
        del other
        gc.collect()
        eventually(lambda: pins(repo) == 0, "a match that is garbage is unpinned")
        assert repo._session.requests.declared().open == ()

    def test_one_whose_answer_was_lost_pins_once(self, repo: Repository, wire: Wire) -> None:
        wire.losing.add("catalog.match")
        match = matched(repo)
        assert pins(repo) == 1
        match.release()
        assert pins(repo) == 0

    def test_a_release_whose_answer_was_lost_is_made_again(self, repo: Repository, wire: Wire) -> None:
        match = matched(repo)
        wire.losing.add("catalog.unpin")
        match.release(wait=False)
        eventually(lambda: pins(repo) == 0 and not wire.losing, "it is unpinned")

    def test_one_that_is_interrupted_leaves_no_pin(self, repo: Repository, wire: Wire) -> None:
        """The interrupt comes before each message in turn."""
        for stop in range(4):
            left = stop

            def interrupt(message: str) -> None:
                nonlocal left
                left -= message in ("catalog.match", "catalog.abort", "catalog.unpin")
                if left == -1:
                    left = -2
                    raise KeyboardInterrupt

            wire.before = interrupt
            with contextlib.suppress(KeyboardInterrupt):
                matched(repo).release()
            wire.before = lambda message: None
            gc.collect()
            eventually(lambda: pins(repo) == 0, f"no pin is left after {stop} messages")

    def test_one_whose_work_beside_it_fails_leaves_no_pin(self, repo: Repository) -> None:
        def fail() -> None:
            raise ModelLostError("this is no model")

        with pytest.raises(ModelLostError, match="this is no model"):
            repo._prefixes.longest([GRAPH], meanwhile=fail)
        eventually(lambda: pins(repo) == 0, "its pin is dropped")
        assert repo._session.requests.declared().open == ()


class TestANewTerm:
    def test_matches_are_pinned_again(
        self,
        pair: tuple[Repository, Repository],
        room: CatalogRoom,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        repo, other = pair
        match = matched(repo)
        room.start_catalog()
        with caplog.at_level(logging.WARNING):
            repo._session._renew()
            repo._session._renew()
        assert pins(repo) == 1
        assert caplog.text.count("pinned 1 versions again") == 1
        other.retire("m")
        assert (repo.load(match.ref)["w"] == LARGE["w"]).all()
        assert match.layers == {"in": "in", "dense": "dense"}
        match.release()
        assert pins(repo) == 0

    def test_one_whose_version_is_gone_raises(
        self, repo: Repository, room: CatalogRoom, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        match = matched(repo)
        refused = {match._lease: "m@1 was retired"}
        ask = repo._session.pins._ask

        def asked(request: object, *rest: float) -> object:
            return refused if request.remote is CatalogCalls.pin else ask(request, *rest)  # type: ignore[attr-defined]

        monkeypatch.setattr(repo._session.pins, "_ask", asked)
        room.start_catalog()
        with caplog.at_level(logging.ERROR):
            repo._session._renew()
            repo._session._renew()
        assert caplog.text.count("m@1: expected it to be pinned; its pin went with the catalog's process") == 1
        for read in (lambda: match.layers, lambda: match.tensors):
            with pytest.raises(ModelNotFoundError, match="m@1 was retired"):
                read()
        match.release()

    def test_what_a_client_asks_waits_for_it(self, repo: Repository, room: CatalogRoom, wire: Wire) -> None:
        """The old process refuses all calls once it has no lease; the client asks on until the next one answers."""
        room.real._context.lease.end()
        asked: list[str] = []

        def restart(message: str) -> None:
            if message == "catalog.models":
                asked.append(message)
                if len(asked) == 3:
                    room.start_catalog()

        wire.before = restart
        assert repo.models() == [ModelRef("m", 1)]
        assert len(asked) >= 3


class TestNumbers:
    def test_a_save_that_failed_is_over_and_leaves_nothing(self, repo: Repository, wire: Wire) -> None:
        before = stored(repo)

        def fail(message: str) -> None:
            if message.endswith(".commit"):
                raise OperationTimeoutError("as told")

        wire.before = fail
        with pytest.raises(OperationTimeoutError, match="as told"):
            repo.save("n", LARGE)
        wire.before = lambda message: None
        eventually(lambda: stored(repo) == before, "its memory comes back")
        assert (pins(repo), repo._session.requests.declared().open) == (0, ())

    def test_reserved_memory_stays_open_until_it_is_given_back(self, repo: Repository) -> None:
        before = stored(repo)
        ref = repo.save_async("n", LARGE).committed(60.0).ref
        eventually(lambda: repo._saves.saver.reserved._waiting is not None, "memory waits for the next save")
        assert len(repo._session.requests.declared().open) == 1
        repo._session._renew()
        assert stored(repo)[1] > 0
        repo._saves.saver.reserved._waiting = None  # as if nobody had been told to give it back
        gc.collect()
        repo._session._renew()
        repo.retire(ref)
        eventually(lambda: stored(repo) == before, "what no open request has is free")

    def test_a_durable_save_may_inherit_some_of_what_was_copied_to_the_shard(self, tmp_path: Path) -> None:
        disk = disk_at(tmp_path / "path")
        with catalog_room(tmp_path / "durable", 1, disk) as room, clients(room) as (client,):
            tensors = {"a": np.arange(20_000), "b": np.ones(30_000)}
            client.save_async("m", tensors, durability="disk").committed(60.0)
            eventually(lambda: client._saves.saver.reserved._waiting is not None, "memory waits for the next save")
            saved = client.save_async("m", tensors | {"b": np.zeros(30_000)}, durability="disk").committed(60.0)
            assert (saved.bytes_written, saved.bytes_inherited) == (240_000, 160_000)
            assert client.verify() == []

    def test_a_retirement_that_is_repeated_gets_the_first_answer(self, repo: Repository, wire: Wire) -> None:
        repo.save("m", LARGE, graph=GRAPH)
        wire.losing.add("catalog.retire")
        repo.retire("m")
        assert repo.models() == [ModelRef("m", 1)]
