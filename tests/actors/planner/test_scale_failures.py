"""A change of the shards in which somebody dies: it is completed or undone, and what is on disk is never lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors.client.repository import Repository
from tensorvine.clusters import LocalCluster
from tensorvine.store.errors import ModelLostError, OperationTimeoutError, ShardUnavailableError, StoreFullError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.refs import ModelRef

from tests.support.actors import planner_pid
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)
_serial = count(1)
MODELS = 30
PATIENCE_S = 200.0
"""How long a busy machine may take: who writes to the disk gives way to all others."""


@pytest.fixture
def repo(cluster: LocalCluster, tmp_path: Path) -> Iterator[Repository]:
    """A repository of two shards with a path."""
    where = tmp_path / "repository"
    with Repository.start(
        f"trouble-{next(_serial)}", shards=2, path=where, preallocate_bytes=0, store_bytes=64 << 20
    ) as started:
        yield started


@pytest.fixture
def in_memory(cluster: LocalCluster) -> Iterator[Repository]:
    """One of two shards without a path."""
    with Repository.start(f"trouble-{next(_serial)}", shards=2, preallocate_bytes=0, store_bytes=8 << 20) as started:
        yield started


def fill(repo: Repository) -> list[ModelRef]:
    graph = ModelGraph([Layer("in", {"class": "In"}, (), ["w"])])
    return [repo.save(f"m{i}", {"w": np.full(1, i, np.int8)}, graph=graph).ref for i in range(MODELS)]


def value(repo: Repository, ref: ModelRef) -> int:
    return int(repo.load(ref)["w"][0])


def pid_of(repo: Repository, shard: int) -> int:
    return repo._session.connection(shard).hello.pid


def changing(repo: Repository) -> bool:
    """Tell whether another number of shards than at the start is decided on, or one drains."""
    repo._session.refresh()
    return len(repo._session.shards) != 2 or bool(repo._session.topology.leaving)


class TestJoining:
    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_shard_that_dies_meanwhile_loses_nothing_that_is_on_disk(self, repo: Repository, victim: int) -> None:
        refs = fill(repo)
        repo.flush(PATIENCE_S)
        pid = pid_of(repo, victim)
        with ThreadPoolExecutor(1) as pool:
            scaling = pool.submit(repo.scale, 3)
            eventually(lambda: changing(repo), "the change begins", timeout=PATIENCE_S, pause=0.005)
            os.kill(pid, signal.SIGKILL)
            assert scaling.result(PATIENCE_S).shards_after == 3
        assert repo.models() == sorted(refs)
        assert [value(repo, ref) for ref in refs] == list(range(MODELS))
        assert repo.save("m3", {"w": np.zeros(1)}).ref == ModelRef("m3", 2)

    def test_a_planner_that_dies_leaves_a_repository_that_can_be_changed(self, repo: Repository) -> None:
        refs, planner = fill(repo), planner_pid(repo)
        with ThreadPoolExecutor(1) as pool:
            scaling = pool.submit(repo.scale, 3)
            eventually(lambda: changing(repo), "the change begins", timeout=PATIENCE_S, pause=0.005)
            os.kill(planner, signal.SIGKILL)
            with pytest.raises(ShardUnavailableError):
                scaling.result(PATIENCE_S)
        assert [value(repo, ref) for ref in refs] == list(range(MODELS))

        def scaled() -> bool:
            with contextlib.suppress(ShardUnavailableError):
                return repo.scale(2).shards_after == 2
            return False

        eventually(scaled, "the next planner makes changes", timeout=PATIENCE_S)
        assert repo.models() == sorted(refs)
        assert [value(repo, ref) for ref in refs] == list(range(MODELS))

    def test_in_memory_a_death_loses_the_versions_of_that_shard_by_name(self, in_memory: Repository) -> None:
        refs = fill(in_memory)
        pid = pid_of(in_memory, 1)
        with ThreadPoolExecutor(1) as pool:
            scaling = pool.submit(in_memory.scale, 3)
            eventually(lambda: changing(in_memory), "the change begins", timeout=PATIENCE_S, pause=0.005)
            os.kill(pid, signal.SIGKILL)
            scaling.result(PATIENCE_S)
        lost = 0
        for number, ref in enumerate(refs):
            try:
                assert value(in_memory, ref) == number
            except ModelLostError:
                lost += 1
                assert in_memory.save(ref.name, {"w": np.zeros(1)}).ref == ModelRef(ref.name, 2)
        assert lost < MODELS

    def test_shards_that_do_not_come_in_time_leave_everything_as_it_was(self, in_memory: Repository) -> None:
        ref = in_memory.save("m", {"w": np.zeros(1)}).ref
        with pytest.raises(OperationTimeoutError):
            in_memory.scale(4, timeout=0.05)
        eventually(lambda: not changing(in_memory), "the change is undone", timeout=PATIENCE_S)
        assert in_memory.shards == (0, 1)
        assert in_memory.models() == [ref]
        assert in_memory.scale(3).shards_after == 3

    def test_of_two_changes_at_once_the_second_waits(self, in_memory: Repository) -> None:
        refs = [in_memory.save(f"m{i}", {"w": np.full(1, i)}).ref for i in range(20)]
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(in_memory.scale, 3), pool.submit(in_memory.scale, 1)]
            assert {change.result(110).shards_after for change in both} == {1, 3}
        assert [int(in_memory.load(ref)["w"][0]) for ref in refs] == list(range(20))


class TestDraining:
    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_shard_that_dies_meanwhile_loses_nothing_that_is_on_disk(self, repo: Repository, victim: int) -> None:
        refs = fill(repo)
        repo.flush(PATIENCE_S)
        pid = pid_of(repo, victim)
        with ThreadPoolExecutor(1) as pool:
            scaling = pool.submit(repo.scale, 1)
            eventually(lambda: changing(repo), "the change begins", timeout=PATIENCE_S, pause=0.005)
            with contextlib.suppress(ProcessLookupError):  # it has left already
                os.kill(pid, signal.SIGKILL)
            assert scaling.result(PATIENCE_S).shards_after == 1
        assert repo.models() == sorted(refs)
        assert [value(repo, ref) for ref in refs] == list(range(MODELS))

    def test_without_room_it_is_undone(self, in_memory: Repository) -> None:
        whole = np.ones(6 << 20, np.uint8)

        def names_of() -> list[str]:
            """Return a name for each shard, once the client knows both."""
            near = {in_memory._session.near(name): name for name in (f"n{i}" for i in range(20))}
            return [near[shard] for shard in sorted(near)]

        eventually(lambda: len(names_of()) == 2, "both shards take what is saved", timeout=PATIENCE_S)
        names = names_of()
        for name in names:
            in_memory.save(name, {"w": whole})
        before = in_memory.stats()
        with pytest.raises(StoreFullError):
            in_memory.scale(1)
        in_memory._session.refresh()
        assert (in_memory.shards, in_memory._session.topology.leaving) == ((0, 1), ())
        assert [s.bytes_allocated for s in in_memory.stats().shards] == [s.bytes_allocated for s in before.shards]
        assert all(np.array_equal(in_memory.load(name)["w"], whole) for name in names)
        in_memory.retire(names[0])
        eventually(lambda: in_memory.stats().bytes_memory == whole.nbytes, "its memory is free")
        assert in_memory.scale(1).shards_after == 1
        assert np.array_equal(in_memory.load(names[1])["w"], whole)
