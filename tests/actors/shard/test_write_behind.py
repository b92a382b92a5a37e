"""Write-behind: a save returns before the disk has it, and the disk gets all of it in the order of the commits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store import Gzip, Shuffle
from tensorvine.store.errors import OperationTimeoutError

from tests.support.disk import (
    MIB,
    check,
    hold_disk,
    manifests,
    name_at,
    same,
    segments,
    start,
    weights,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

SLOW = Shuffle() | Gzip(9)
"""Takes a second for some 10 MiB."""
LAG = 2 * MIB
FLUSH_S = 400.0
"""What writes goes behind all others, and this codec needs a core for seconds: a busy machine takes minutes."""


@pytest.fixture(scope="class")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow")


@pytest.fixture(scope="class")
def repo(cluster: object, path: Path) -> Iterator[Repository]:
    with start(path, shards=2, codec=SLOW, lag_bytes=LAG) as started:
        yield started


class TestSlowDisk:
    def test_saves_return_before_the_write_and_reach_the_disk_in_order(
        self, repo: Repository, path: Path, tmp_path: Path
    ) -> None:
        names = [name_at(repo, shard, stem) for shard in (0, 1) for stem in ("x", "y")]
        for shard in (0, 1):
            hold_disk(repo, shard, tmp_path / "gate", "write_segment", after=1)
        given = {}
        for n in range(12):
            given[repo.save(names[n % 4], {"t": weights(MIB // 16, n)}).ref] = n
        assert repo.stats().catalog.versions_unwritten >= 10
        assert len(manifests(path)) <= 2
        for ref, n in given.items():
            assert same(repo.load(ref), {"t": weights(MIB // 16, n)})
        (tmp_path / "gate").touch()
        repo.flush(FLUSH_S)
        assert repo.stats().catalog.versions_unwritten == 0
        appeared = manifests(path)
        for name in names:
            mine = [str(ref) for ref in given if ref.name == name]
            assert [ref for ref in appeared if ref in mine] == mine

    def test_savers_wait_so_that_the_lag_is_bounded(self, repo: Repository) -> None:
        name, size = name_at(repo, 0), LAG // 3
        for n in range(10):
            repo.save(name, {"t": weights(size // 4, n)})
            assert repo.stats().shards[0].bytes_unwritten <= LAG + size
        repo.flush(FLUSH_S)

    def test_many_may_wait_at_once(self, repo: Repository, tmp_path: Path) -> None:
        for shard in (0, 1):
            hold_disk(repo, shard, tmp_path / "gate", "write_segment")
            repo.save(name_at(repo, shard, "p"), {"t": weights(MIB // 16, shard)})
        with ThreadPoolExecutor(20) as pool:
            waits = [pool.submit(repo.flush, FLUSH_S) for _ in range(20)]
            assert repo.stats().catalog.versions_unwritten == 2
            (tmp_path / "gate").touch()
            assert [wait.result(FLUSH_S) for wait in waits] == [None] * 20
        assert repo.stats().catalog.versions_unwritten == 0

    def test_a_durable_save_does_not_wait_for_what_was_committed_before_it(
        self, repo: Repository, path: Path, tmp_path: Path
    ) -> None:
        name, slow = name_at(repo, 1), name_at(repo, 0)
        hold_disk(repo, 0, tmp_path / "gate", "write_segment")
        before = [str(repo.save(at, {"t": weights(MIB // 8, n)}).ref) for n, at in enumerate((name, slow, name))]
        ref = repo.save(name, {"t": np.ones(9)}, durability="disk").ref
        assert str(ref) in manifests(path)
        assert before[1] not in manifests(path)
        (tmp_path / "gate").touch()
        repo.flush(FLUSH_S)
        assert {*before, str(ref)} <= set(manifests(path))

    def test_a_version_that_is_retired_before_it_is_written_is_not_written(self, repo: Repository, path: Path) -> None:
        name = name_at(repo, 0, "gone")
        repo.flush(FLUSH_S)
        known = set(segments(path))
        first = repo.save(name, {"t": weights(MIB // 4, 1)}).ref
        doomed = repo.save(name, {"t": weights(MIB // 4, 2)}).ref
        repo.retire(doomed)
        repo.retire(first)
        repo.flush(FLUSH_S)
        eventually(lambda: set(segments(path)) == known, "no tensor of the two on disk")
        assert repo.verify() == []
        assert repo.save(name, {"w": np.zeros(1)}).ref.version == doomed.version + 1

    def test_a_durable_save_that_takes_too_long_never_exists(
        self, repo: Repository, path: Path, tmp_path: Path
    ) -> None:
        name = name_at(repo, 1, "late")
        repo.flush(FLUSH_S)
        known = set(segments(path))
        waits = hold_disk(repo, 1, tmp_path / "gate", "write_segment")
        with pytest.raises(OperationTimeoutError, match="the disk is slower"):
            repo.save(name, {f"t{n}": weights(50_000, n) for n in range(6)}, durability="disk", timeout=8)
        assert waits.exists()
        assert [ref for ref in repo.models() if ref.name == name] == []
        (tmp_path / "gate").touch()
        repo.flush(FLUSH_S)
        assert not any(name in manifest for manifest in manifests(path))
        eventually(lambda: set(segments(path)) == known, "no tensor of it on disk")
        assert repo.save(name, {"t": np.ones(5)}, durability="disk").ref.version == 2
        check(repo)


class TestClose:
    def test_who_started_it_leaves_when_all_is_on_disk(self, cluster: object, tmp_path: Path) -> None:
        path, gate = tmp_path / "repository", tmp_path / "gate"
        given = {"t": weights(MIB // 4, 1)}
        repo = start(path, codec=SLOW)
        hold_disk(repo, 0, gate, "write_segment")
        pending = [repo.save_async("m", {k: v + n for k, v in given.items()}) for n in range(3)]
        gate.touch()
        repo.close()
        assert [p.committed(1).ref.version for p in pending] == [1, 2, 3]
        assert manifests(path) == ["m@1", "m@2", "m@3"]
