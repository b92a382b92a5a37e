"""The automatic mode on a real repository: shards join for bytes, drain when they are gone, and trouble is outlived."""

from __future__ import annotations

import numpy as np
import pytest
from tensorvine.actors.client.repository import Repository
from tensorvine.clusters import LocalCluster
from tensorvine.planner import ScalePolicy

from tests.support.actors import restart_planner
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_engines

ROOM = 8 << 20


def shards_of(repo: Repository) -> int:
    return len(repo.stats().shards)


def fill(repo: Repository, count: int, first: int = 0) -> dict[str, np.ndarray]:
    """Save models of 1 MiB each."""
    kept = {f"m/{i}": np.full(1 << 20, i, np.uint8) for i in range(first, first + count)}
    for name, array in kept.items():
        repo.save(name, {"w": array})
    return kept


def test_shards_follow_the_bytes_and_nothing_is_lost(cluster: LocalCluster) -> None:
    policy = ScalePolicy(most=3, full=0.5, join_after_s=0.0, drain_after_s=0.5)
    with Repository.start("auto", shards=1, store_bytes=ROOM, preallocate_bytes=0, scaling=policy) as repo:
        kept = fill(repo, 6)
        eventually(lambda: shards_of(repo) >= 2, "one joins: more than half is in use")
        assert all((repo.load(name)["w"] == array).all() for name, array in kept.items())
        for name in list(kept)[1:]:
            repo.retire(name)
        eventually(lambda: shards_of(repo) == 1, "one is enough again")
        assert (repo.load("m/0")["w"] == kept["m/0"]).all()
        assert [str(ref) for ref in repo.models()] == ["m/0@1"]


def test_a_planner_that_starts_again_goes_on_following(cluster: LocalCluster) -> None:
    policy = ScalePolicy(most=2, full=0.5, join_after_s=0.0)
    with Repository.start("auto-again", shards=1, store_bytes=ROOM, preallocate_bytes=0, scaling=policy) as repo:
        restart_planner(repo)
        fill(repo, 6)
        eventually(lambda: shards_of(repo) == 2, "the next life of the planner follows, too")


def test_fewer_shards_than_replicas_are_refused(cluster: LocalCluster) -> None:
    with pytest.raises(ValueError, match="scaling: expected least >= replicas=2"):
        Repository.start("auto-wrong", replicas=2, scaling=ScalePolicy())
