"""Consumers outside the cluster of repositories that run: shards that die, move and start anew are followed."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.edge.consumer import EdgeConsumer
from tensorvine.actors.rpc.redis_connection import posted_shards, present_start
from tensorvine.store import ModelRef
from tensorvine.store.errors import ShardUnavailableError, StorageError

from tests.support.disk import name_at
from tests.support.edge_site import Asking, Site, Tagged, tagged
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE_S, eventually


@pytest.fixture
def repo(cluster: object, server: RedisServer) -> Iterator[Repository]:
    with start(server) as repository:
        yield repository


def start(server: RedisServer, **options: Any) -> Repository:
    name = options.pop("name", f"edge/{uuid.uuid4().hex[:6]}")
    return Repository.start(name, shards=2, preallocate_bytes=0, redis=server.url, **options)


def kill_shard(repo: Repository, shard: int) -> None:
    process = psutil.Process(repo._session.connection(shard).hello.pid)
    process.kill()
    psutil.wait_procs([process], timeout=PATIENCE_S)


@pytest.mark.both_engines
class TestRepository:
    @pytest.mark.parametrize("shard", [0, 1])
    def test_saves_arrive_and_inherited_tensors_with_them(
        self, server: RedisServer, repo: Repository, shard: int
    ) -> None:
        name = name_at(repo, shard)
        tensors = {**tagged(1), "d": np.ones((4 << 20) + 3, np.uint8)}
        with EdgeConsumer(server.url, name, repository=repo.name) as consumer:
            repo.save(name, tensors, quality=0.5, metadata={"step": 7})
            assert consumer.wait_newer(0, PATIENCE_S) == ModelRef(name, 1)
            repo.save(name, {**tensors, "b": tagged(2)["b"]})
            assert consumer.wait_newer(1, PATIENCE_S) == ModelRef(name, 2)
            found = consumer.load()
            assert consumer.info(f"{name}@1") == repo.info(f"{name}@1")
            repo.retire(f"{name}@1")
            eventually(lambda: consumer.info().ref == ModelRef(name, 2), "the second")
            again = consumer.load()
        for loaded in (found, again):
            assert loaded.keys() == tensors.keys()
            assert all(np.array_equal(loaded[n], array) for n, array in {**tensors, "b": tagged(2)["b"]}.items())

    def test_one_of_the_same_name_that_another_cluster_runs_is_not_replaced(
        self, cluster: object, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tensorvine.actors.client.launch.OTHERS_END_S", 0.0)
        other = Site(server)
        try:
            eventually(lambda: len(posted_shards(server.url, "repo")) == 1, "where the other's shard is")
            with pytest.raises(StorageError, match="no other running repository named 'repo'; found one"):
                start(server, name="repo")
            assert present_start(server.url, "repo") == "s1"
        finally:
            other.close()
        with start(server, name="repo"):
            assert present_start(server.url, "repo") != "s1"

    def test_a_shard_that_is_killed_stands_elsewhere_and_its_next_version_arrives(
        self, server: RedisServer, repo: Repository
    ) -> None:
        name = name_at(repo, 1)
        with EdgeConsumer(server.url, name, Tagged, repository=repo.name) as consumer:
            repo.save(name, tagged(1))
            consumer.wait_for(1, PATIENCE_S)
            with Asking(consumer) as asking:
                kill_shard(repo, 1)
                asking.more()
                ref = saved_again(repo, name)
                consumer.wait_for(ref.version, PATIENCE_S)
                asking.more()
            assert asking.wrong == []

    def test_a_repository_that_grows_and_shrinks_is_followed(self, server: RedisServer, repo: Repository) -> None:
        names = [name_at(repo, shard) for shard in (0, 1)]
        with (
            EdgeConsumer(server.url, names[0], repository=repo.name) as one,
            EdgeConsumer(server.url, names[1], Tagged, repository=repo.name) as two,
        ):
            for name in names:
                repo.save(name, tagged(1))
            two.wait_for(1, PATIENCE_S)
            with Asking(two) as asking:
                for version, shards in ((2, 3), (3, 1), (4, 2)):
                    repo.scale(shards)
                    for name, consumer in zip(names, (one, two), strict=True):
                        assert int(consumer.load(f"{name}@{version - 1}", PATIENCE_S)["c"]) == version - 1
                        assert repo.save(name, tagged(version)).ref.version == version
                        assert consumer.wait_newer(version - 1, PATIENCE_S) == ModelRef(name, version)
                        assert int(consumer.load(timeout=PATIENCE_S)["c"]) == version
                    two.wait_for(version, PATIENCE_S)
                    asking.more()
            assert asking.wrong == []

    def test_a_repository_with_a_path_posts_again_what_its_disk_has(
        self, server: RedisServer, cluster: object, tmp_path: Path
    ) -> None:
        name = f"edge/{uuid.uuid4().hex[:6]}"
        with start(server, name=name, path=str(tmp_path / "path")) as repo:
            model = name_at(repo, 0)
            with EdgeConsumer(server.url, model, repository=name) as consumer:
                repo.save(model, tagged(1), durability="disk")
                assert consumer.wait_newer(0, PATIENCE_S) == ModelRef(model, 1)
                kill_shard(repo, 0)
                assert int(consumer.load(timeout=PATIENCE_S)["c"]) == 1
        with (
            start(server, name=name, path=str(tmp_path / "path")) as repo,
            EdgeConsumer(server.url, model, repository=name) as consumer,
        ):
            assert consumer.wait_newer(0, PATIENCE_S) == ModelRef(model, 1)
            assert int(consumer.load()["c"]) == 1
            repo.save(model, tagged(2))
            assert consumer.wait_newer(1, PATIENCE_S) == ModelRef(model, 2)

    def test_a_repository_in_memory_that_starts_anew_is_followed(self, server: RedisServer, cluster: object) -> None:
        name = f"edge/{uuid.uuid4().hex[:6]}"
        with start(server, name=name) as repo:
            repo.save("m", tagged(1))
            repo.save("m", tagged(2))
            consumer = EdgeConsumer(server.url, "m", Tagged, repository=name)
            consumer.wait_for(2, PATIENCE_S)
        with consumer, start(server, name=name) as repo:
            assert consumer.infer(None).ref == ModelRef("m", 2)
            repo.save("m", tagged(1))
            eventually(lambda: consumer.ref == ModelRef("m", 1), "the new repository's first version")

    def test_no_save_waits_for_redis(self, server: RedisServer, repo: Repository) -> None:
        server.kill()
        begun = time.monotonic()
        for version in range(1, 6):
            repo.save("m", tagged(version))
        assert time.monotonic() - begun < PATIENCE_S / 3
        assert repo.wait_newer("m", 4) == ModelRef("m", 5)
        server.start()
        with EdgeConsumer(server.url, "m", repository=repo.name) as consumer:
            assert consumer.wait_newer(0, PATIENCE_S) == ModelRef("m", 5)
            assert int(consumer.load()["c"]) == 5


def saved_again(repo: Repository, name: str) -> ModelRef:
    """Save a version whose tag is its number, once the shard is back."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return repo.save(name, tagged(2), inherit=None).ref
        except ShardUnavailableError:
            if time.monotonic() > deadline:
                raise
        threading.Event().wait(0.05)
