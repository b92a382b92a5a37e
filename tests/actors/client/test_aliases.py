"""Aliases as clients see them: loads, waits and consumers by `name@alias`, and that restarts keep them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.updates.follower import Follower
from tensorvine.store.archive.aliases import FILE
from tensorvine.store.errors import InvalidNameError, ModelNotFoundError, OptionError, ShardUnavailableError
from tensorvine.store.refs import ModelRef

from tests.support.catalog_room import CatalogRoom, catalog_room
from tests.support.room_client import Wire, clients
from tests.support.shard_room import disk_at
from tests.support.waiting import eventually


class Tagged:
    """A model that answers with its version's tag."""

    def assign(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tag = int(tensors["tag"][0])

    def __call__(self, batch: object) -> int:
        return self.tag


@pytest.fixture(params=["memory", "path"])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CatalogRoom]:
    disk = disk_at(tmp_path / "path") if request.param == "path" else None
    with catalog_room(tmp_path / "private", 1, disk) as made:
        yield made


@pytest.fixture
def wire(room: CatalogRoom) -> Wire:
    return Wire(room)


@pytest.fixture
def repo(room: CatalogRoom, wire: Wire) -> Iterator[Repository]:
    with clients(room) as (client,):
        for number in (1, 2, 3):
            client.save("m", {"tag": np.full(9, number)})
        yield client


def tag(repo: Repository, model: str) -> int:
    return int(repo.load(model)["tag"][0])


def test_an_alias_moves_forward_and_back(repo: Repository) -> None:
    assert repo.alias("m", "prod", "m@2") == ModelRef("m", 2)
    assert (tag(repo, "m@prod"), tag(repo, "m")) == (2, 3)
    assert repo.alias("m", "prod", "m") == ModelRef("m", 3)
    assert repo.alias("m", "last", "m@prod") == ModelRef("m", 3)
    assert tag(repo, "m@prod") == 3
    assert repo.alias("m", "prod", ModelRef("m", 1)) == ModelRef("m", 1)
    assert (tag(repo, "m@prod"), repo.info("m@prod").ref) == (1, ModelRef("m", 1))
    assert repo.aliases() == {"m@last": ModelRef("m", 3), "m@prod": ModelRef("m", 1)}
    assert repo.aliases("n") == {}
    assert repo.alias("m", "prod", None) == ModelRef("m", 1)
    assert repo.alias("m", "prod", None) is None
    with pytest.raises(ModelNotFoundError, match="its aliases are 'last'"):
        repo.load("m@prod")


def test_a_repeated_load_by_alias_sends_nothing_until_the_alias_moves(repo: Repository, wire: Wire) -> None:
    for version in (2, 1):
        repo.alias("m", "prod", ModelRef("m", version))
        for _ in range(2):  # the first one tells the places
            assert tag(repo, "m@prod") == version
        with wire.during() as sent:
            assert tag(repo, "m@prod") == version
        assert sent == []


def test_a_child_of_the_version_of_an_alias(repo: Repository) -> None:
    repo.alias("m", "prod", "m@2")
    saved = repo.save("other", repo.load("m@prod"), parent="m@prod")
    assert (repo.lineage(saved.ref)[1], saved.bytes_written) == (ModelRef("m", 2), 0)


def test_a_version_in_use_is_not_retired(repo: Repository) -> None:
    repo.alias("m", "prod", "m@2")
    with pytest.raises(OptionError, match="found 'prod': move or remove the alias first"):
        repo.retire("m@2")
    repo.alias("m", "prod", "m@1")
    repo.retire("m@2")
    assert tag(repo, "m@prod") == 1


def test_wrong_arguments(repo: Repository) -> None:
    with pytest.raises(InvalidNameError, match="alias m@prod: expected a version of 'm'; found n@1"):
        repo.alias("m", "prod", "n@1")
    with pytest.raises(InvalidNameError, match="alias: expected 1 to 64 characters"):
        repo.alias("m", "3", "m@1")
    with pytest.raises(ModelNotFoundError):
        repo.alias("m", "prod", "m@9")
    with pytest.raises(OptionError, match="expected a version, such as 'm@3'"):
        repo.load("m", have="m@prod", into={})
    with pytest.raises(InvalidNameError, match="which is one version"):
        repo.wait_newer("m@3")


def test_an_answer_that_is_lost_moves_the_alias_once(repo: Repository, wire: Wire) -> None:
    wire.losing.add("catalog.alias")
    assert repo.alias("m", "prod", "m@2") == ModelRef("m", 2)
    assert not wire.losing


def test_the_next_catalog_has_the_aliases(repo: Repository, room: CatalogRoom) -> None:
    repo.alias("m", "prod", "m@2")
    room.start_catalog()
    eventually(lambda: tag(repo, "m@prod") == 2, "the next catalog answers", ignoring=(ShardUnavailableError,))


def test_the_path_has_the_aliases(repo: Repository, room: CatalogRoom, tmp_path: Path) -> None:
    repo.alias("m", "prod", "m@2")
    repo.alias("m", "gone", "m@3")
    repo.alias("m", "gone", None)
    if room.disk is None:
        pytest.skip("a repository in memory")
    repo.flush()
    (stream,) = (tmp_path / "path" / "catalog").glob("*.journal")
    assert '"prod": 2' in (tmp_path / "path" / FILE).read_text()
    stream.unlink()
    room.start_catalog()
    eventually(lambda: repo.aliases() == {"m@prod": ModelRef("m", 2)}, "", ignoring=(ShardUnavailableError,))


def test_a_consumer_follows_an_alias_forward_and_back(repo: Repository, room: CatalogRoom) -> None:
    repo.alias("m", "prod", "m@2")
    with clients(room) as (client,):
        follower = Follower(client, "m@prod", Tagged)
        try:
            for version in (2, 3, 1, 2):
                repo.alias("m", "prod", ModelRef("m", version))
                eventually(
                    lambda wanted=version: follower.infer(None).ref.version == wanted, "the version of the alias"
                )
            repo.save("m", {"tag": np.full(9, 4)})
            assert repo.wait_newer("m", 3) == ModelRef("m", 4)
            assert follower.infer(None).ref == ModelRef("m", 2)
            assert follower.status().skipped == 0
        finally:
            follower.close()
