"""The planner and shards that die together: what stayed is not lost, what is lost is named, and no number recurs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.clusters import LocalCluster
from tensorvine.store.errors import ModelLostError, ModelNotFoundError, OperationTimeoutError, ShardUnavailableError
from tensorvine.store.refs import ModelRef

from tests.support.actors import planner_pid

pytestmark = pytest.mark.both_engines

_serial = count(1)


def start(shards: int, path: Path | None = None) -> Repository:
    return Repository.start(
        f"together-{next(_serial)}", shards=shards, path=path, preallocate_bytes=0, store_bytes=16 << 20
    )


def kill_together(repo: Repository, *shards: int) -> None:
    """Kill the planner and shards at one moment: none of them can answer another before all are dead."""
    victims = [planner_pid(repo)]
    victims += [repo._session.connection(shard).hello.pid for shard in shards]
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for victim in victims:
            os.kill(victim, sign)


def again(asked: Callable[[], Any]) -> Any:
    """Ask until all have started again."""
    deadline = time.monotonic() + 100
    while True:
        try:
            return asked()
        except (ShardUnavailableError, OperationTimeoutError):
            assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def name_at(repo: Repository, shard: int, begin: str) -> str:
    return next(n for i in range(1000) if repo._session.home(n := f"{begin}{i}") == shard)


class TestPlannerAndShardTogether:
    def test_after_a_scale_with_a_path_all_that_was_written_is_there_and_each_name_has_one_home(
        self, cluster: LocalCluster, tmp_path: Path
    ) -> None:
        with start(2, tmp_path / "repository") as repo:
            refs = [repo.save(f"m{i}", {"w": np.full(20_000, i)}).ref for i in range(12)]
            repo.scale(3)
            refs += [repo.save(f"n{i}", {"w": np.full(20_000, 12 + i)}).ref for i in range(6)]
            repo.flush()
            files = sorted((tmp_path / "repository" / "segments").iterdir())
            topology = repo._session.topology
            kill_together(repo, 0)
            assert [again(lambda ref=ref: repo.load(ref)["w"].max()) for ref in refs] == list(range(18))
            assert again(repo.models) == sorted(refs)
            repo._session.refresh()
            assert repo._session.topology == topology
            for shard in repo.shards:
                assert again(lambda shard=shard: repo._session.call(shard, ShardCalls.topology())) == topology
            assert sorted((tmp_path / "repository" / "segments").iterdir()) == files
            assert again(lambda: repo.save("m3", {"w": np.zeros(1)})).ref == ModelRef("m3", 2)

    def test_without_a_path_what_is_lost_is_named_and_the_healthy_shard_keeps_all(self, cluster: LocalCluster) -> None:
        with start(2) as repo:
            gone, kept = name_at(repo, 0, "gone"), name_at(repo, 1, "kept")
            for name in (gone, kept, kept):
                repo.save(name, {"w": np.ones(5)})
            repo.retire(f"{kept}@1")
            kill_together(repo, 0)
            with pytest.raises(ModelLostError, match=f"{gone}@1 is lost"):
                again(lambda: repo.info(gone))
            assert again(lambda: repo.load(kept))["w"].sum() == 5
            assert again(lambda: repo.save(gone, {"w": np.ones(5)})).ref == ModelRef(gone, 2)
            kill_together(repo, 1)  # what the healthy shard held before counts as well
            with pytest.raises(ModelLostError, match=f"{kept}@2 is lost"):
                again(lambda: repo.info(kept))
            with pytest.raises(ModelNotFoundError, match=f"{kept}@1 was retired"):
                again(lambda: repo.info(f"{kept}@1"))
            assert again(lambda: repo.save(kept, {"w": np.ones(5)})).ref == ModelRef(kept, 3)

    def test_when_all_die_numbers_are_not_used_again(self, cluster: LocalCluster) -> None:
        with start(2) as repo:
            names = [name_at(repo, shard, "all") for shard in (0, 1)]
            before = [repo.save(name, {"w": np.ones(5)}).ref for name in names]
            kill_together(repo, 0, 1)
            after = [again(lambda name=name: repo.save(name, {"w": np.ones(5)})).ref for name in names]
            assert all(new.version > old.version for new, old in zip(after, before, strict=True))
