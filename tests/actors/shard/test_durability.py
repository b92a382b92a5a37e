"""What `durability="disk"` promises: whatever is killed, a version whose save had returned is there, bit for bit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client.session import Session
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import actor_name, catalog_name
from tensorvine.store import Delta, ModelRef, Shuffle, Zstd
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    ShardUnavailableError,
    StorageError,
)

from tests.support.actors import kill_planner
from tests.support.disk import (
    MIB,
    check,
    hold_disk,
    kill_shard,
    manifests,
    name_at,
    noise,
    same,
    segments,
    start,
    weights,
)
from tests.support.saver import tensors_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True, scope="module")
def short_goodbye() -> Iterator[None]:
    """A test that fails while the disk is in trouble must not wait for it when it closes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorvine.actors.client.deployment.FLUSH_TIMEOUT_S", 20.0)
        yield


def saved_until_killed(path: Path, first: int, returns: int, log: Path) -> dict[str, int]:
    """Run the saver, and kill it with every process under it when it has said `returns` saves."""
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    command = [sys.executable, "-m", "tests.support.saver", str(path), str(first)]
    with open(log, "wb") as errors:
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, env=environment)
        said: dict[str, int] = {}
        with child:
            assert child.stdout is not None
            for line in child.stdout:
                ref, _, seed = line.decode().strip().partition(" ")
                if seed:
                    said[ref] = int(seed)
                if len(said) >= returns:
                    break
            tree = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
            for process in tree:
                process.kill()
            psutil.wait_procs(tree, timeout=30)
            for line in child.stdout:  # what it had said before it was killed
                ref, _, seed = line.decode().strip().partition(" ")
                if seed and line.endswith(b"\n"):
                    said[ref] = int(seed)
    assert len(said) >= returns, log.read_text()[-3000:]
    return said


class TestEverythingKilled:
    def test_every_version_whose_save_had_returned_is_there(self, cluster: object, tmp_path: Path) -> None:
        path, said = tmp_path / "repository", {}
        for number, returns in enumerate((1, 12)):
            said |= saved_until_killed(path, 100 * number, returns, tmp_path / f"{number}.log")
        with start(path, shards=2, store_bytes=192 * MIB) as repo:
            assert not list(path.rglob("*.tmp"))
            found = {str(ref) for ref in repo.models()}
            assert said.keys() <= found
            for ref in sorted(found):
                if "memory" not in ref:
                    seed = repo.info(ref).metadata["seed"]
                    assert said.get(ref, seed) == seed
                    assert same(repo.load(ref), tensors_of(seed)), ref
            assert repo.verify() == []
            for name in {ref.partition("@")[0] for ref in found}:
                newest = max(int(ref.partition("@")[2]) for ref in found if ref.partition("@")[0] == name)
                assert repo.save(name, {"t": np.ones(3)}, durability="disk").ref.version > newest
        serials = [file.name.partition(".")[0] for file in segments(path)]
        assert len(serials) == len(set(serials))

    def test_no_number_is_given_again_and_what_was_only_in_memory_is_lost_by_name(
        self, cluster: object, tmp_path: Path
    ) -> None:
        """All actors end at once, while most versions wait for the disk; nothing but the path is left."""
        with start(tmp_path, shards=2) as repo:
            kept = repo.save("m", {"t": np.ones(3)}, durability="disk").ref
            for shard in (0, 1):
                hold_disk(repo, shard, tmp_path / "never", after=1)
            refs = [repo.save(name, {"t": weights(MIB // 4, n)}).ref for n in range(4) for name in ("m", "n", "o")]
            for name in (*(actor_name(repo.name, shard) for shard in (0, 1)), catalog_name(repo.name)):
                repo.engine.kill(name)
            reached = set(manifests(tmp_path))
            repo.leave()  # who closes waits for what waits for the disk, and here nobody answers
        for shards in (3, 1):  # what is lost is known to the start after the next, too
            with start(tmp_path, shards=shards) as repo:
                assert kept in repo.models()
                lost = [ref for ref in refs if ref not in repo.models()]
                assert lost
                assert reached <= set(map(str, repo.models()))
                for ref in lost:
                    with pytest.raises(ModelLostError, match=f"{ref}"):
                        repo.load(ref)
                for name in ("m", "n", "o"):
                    ref = repo.save(name, {"t": np.ones(3)}, durability="disk").ref
                    assert ref.version > max(other.version for other in refs if other.name == name)


@pytest.fixture
def repo(cluster: object, tmp_path: Path) -> Iterator[Repository]:
    with start(tmp_path, shards=2, codec=Delta() | Shuffle() | Zstd(1)) as started:
        yield started


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `shared` keeps its history."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def shared(cluster: object, place: Path) -> Iterator[Repository]:
    """One for tests of names of their own, after each of which all that was saved is whole."""
    with start(place, shards=2, codec=Delta() | Shuffle() | Zstd(1)) as started:
        yield started


def tensors(seed: int) -> dict[str, np.ndarray]:
    return {"a": weights(50_000, seed), "b": weights(MIB // 4, seed), "c": np.array(seed)}


def answers(repo: Repository) -> bool:
    try:
        repo.stats()
    except (ShardUnavailableError, OperationTimeoutError):
        return False
    return True


class TestShardKilled:
    def test_what_was_on_disk_is_back_and_the_rest_is_lost_by_name(self, repo: Repository, tmp_path: Path) -> None:
        name, elsewhere = name_at(repo, 0), name_at(repo, 1)
        on_disk = repo.save(name, tensors(1), metadata={"n": 1}, quality=0.5, durability="disk").ref
        child = repo.save(elsewhere, {**tensors(1), "c": np.array(9)}, parent=on_disk).ref
        gone = repo.save(name, tensors(5), durability="disk").ref
        repo.retire(gone)
        repo.flush()
        held = repo.load(on_disk)
        hidden = name_at(repo, 0, "deep/at")
        hold_disk(repo, 0, tmp_path / "never")  # its file cannot be written
        lost = repo.save(hidden, tensors(2)).ref
        kill_shard(repo, 0)
        with pytest.raises(
            ModelLostError, match=f"{lost} is lost: its tensors were only in the memory of a shard that died"
        ):
            repo.load(lost)
        assert same(held, tensors(1))
        assert repo.info(on_disk).metadata == {"n": 1}
        assert same(repo.load(name), tensors(1))
        assert same(repo.load(on_disk), tensors(1))
        assert same(repo.load(child), {**tensors(1), "c": np.array(9)})
        assert repo.lineage(child) == [child, on_disk]
        with pytest.raises(ModelNotFoundError, match=f"{gone} was retired"):
            repo.load(gone)
        assert repo.models() == sorted([on_disk, child])
        again = repo.save(hidden, tensors(3), durability="disk").ref
        assert again.version > lost.version
        repo.flush()
        assert repo.verify() == []
        repo.retire(on_disk)
        assert same(repo.load(child), {**tensors(1), "c": np.array(9)})
        for ref in (child, again):
            repo.retire(ref)
        # where the lost version's segment was written before the kill, it goes as an orphan: after two looks
        eventually(lambda: segments(tmp_path) == [], "nothing left on disk", timeout=240.0)
        check(repo)

    def test_one_that_starts_again_waits_for_its_disk(self, repo: Repository, tmp_path: Path) -> None:
        place, apart = tmp_path, tmp_path.with_name(f"{tmp_path.name}-apart")
        ref = repo.save(name_at(repo, 0, "again"), tensors(1), durability="disk").ref
        repo.flush()
        place.rename(apart)
        kill_shard(repo, 0)
        began = time.monotonic()
        with pytest.raises((ShardUnavailableError, OperationTimeoutError, StorageError)):
            repo.load(ref, timeout=1)
        with pytest.raises((ShardUnavailableError, OperationTimeoutError, StorageError)):
            repo.save(ref.name, tensors(3), timeout=1, durability="disk")
        assert time.monotonic() - began < 20, "a timeout ends the wait for a connection, too"
        apart.rename(place)
        eventually(lambda: answers(repo), "the shard is back")
        assert same(repo.load(ref), tensors(1))
        assert repo.save(ref.name, tensors(2), durability="disk").ref.version >= 2
        assert repo.verify() == []

    def test_what_a_version_without_a_manifest_inherits_stays(self, repo: Repository, tmp_path: Path) -> None:
        """A version elsewhere that inherits from the dead shard's segments, and is not on disk itself."""
        parent, child = name_at(repo, 0), name_at(repo, 1)
        base = repo.save(parent, tensors(1), durability="disk").ref
        (tmp_path / "manifests").rename(tmp_path / "apart")
        (tmp_path / "manifests").write_text("no folder")
        ref = repo.save(child, tensors(1), parent=base).ref
        (tmp_path / "manifests").unlink()
        (tmp_path / "apart").rename(tmp_path / "manifests")
        kill_shard(repo, 0)
        eventually(lambda: answers(repo), "the shard is back")
        repo.flush()
        repo.retire(base)
        assert same(repo.load(ref), tensors(1))
        assert repo.verify() == []

    @pytest.mark.parametrize("phase", ["begin", "grant", "commit", "retire"])
    def test_killed_at(self, shared: Repository, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
        repo, sent, fatal = shared, {"send": Session.send, "_asked": Session._asked}, threading.Event()
        name = name_at(repo, 0, phase)
        kept = repo.save(name, tensors(1), durability="disk").ref

        def deadly(way: str) -> Callable[..., object]:
            def called(self: Session, *arguments: Any) -> object:
                request: Request[Any] = arguments[-1]
                if request.remote.name == phase and not fatal.is_set():
                    fatal.set()
                    process = psutil.Process(self.connection(0).hello.pid)
                    answer = sent[way](self, *arguments)
                    process.kill()
                    return answer
                return sent[way](self, *arguments)

            return called

        for way in sent:  # to a shard, and to the catalog
            monkeypatch.setattr(Session, way, deadly(way))
        made: ModelRef | None = None
        with contextlib.suppress(ShardUnavailableError, OperationTimeoutError):
            if phase == "retire":
                repo.retire(kept)
            elif phase == "begin":
                with Repository.connect(repo.name) as other:  # who does not know the parent yet
                    made = other.save(name, tensors(2), durability="disk").ref
            else:
                made = repo.save(name, tensors(2), durability="disk").ref
        assert fatal.is_set()
        eventually(lambda: answers(repo), "the shard is back")
        found = [ref for ref in repo.models() if ref.name == name]
        if phase == "retire":
            assert found in ([], [kept])
        else:
            assert kept in found
            assert made is None or made in found
        for ref in found:
            assert same(repo.load(ref), tensors(1 if ref == kept else 2))
        assert repo.verify() == []
        assert repo.save(name, tensors(3), durability="disk").ref.version > kept.version + (made is not None)

    @pytest.mark.parametrize("victim", [0, 1], ids=["home", "other"])
    def test_killed_while_it_writes(self, repo: Repository, tmp_path: Path, victim: int) -> None:
        parent, name = name_at(repo, 1), name_at(repo, 0)
        base = repo.save(parent, {"p": weights(MIB, 7)}).ref
        given = {f"t{n}": weights(2 * MIB, n) for n in range(5)} | {"p": weights(MIB, 7)}
        before = len(segments(tmp_path))
        pending = repo.save_async(name, given, parent=base, durability="disk", timeout=40)
        eventually(lambda: len(segments(tmp_path)) > before, "it writes")
        kill_shard(repo, victim)
        made: ModelRef | None = None
        with contextlib.suppress(ShardUnavailableError, OperationTimeoutError, ModelLostError):
            made = pending.committed(60).ref
        eventually(lambda: answers(repo), "the shard is back")
        found = [ref for ref in repo.models() if ref.name == name]
        assert made is None or found == [made]
        for ref in found:
            assert same(repo.load(ref), given)
        assert all(problem.ref == base for problem in repo.verify())
        again = repo.save(name, given, durability="disk").ref
        assert same(repo.load(again), given)
        assert again.version > max((ref.version for ref in found), default=0)


class TestPlannerKilled:
    def test_saves_go_on_and_the_path_is_its_own_again(self, repo: Repository, tmp_path: Path) -> None:
        name = name_at(repo, 0)
        repo.save(name, tensors(1), durability="disk")
        kill_planner(repo)

        def saves() -> bool:
            try:
                repo.save(name, tensors(2), durability="disk")
            except ShardUnavailableError:
                return False
            return True

        eventually(saves, "durable saves go on")
        refs = repo.models()
        assert {str(ref) for ref in refs} <= set(manifests(tmp_path))
        kill_shard(repo, 0)
        eventually(lambda: answers(repo), "the shard is back")
        assert repo.models() == refs
        with pytest.raises(OSError, match="another repository runs on it"):
            start(tmp_path)
        assert repo.save(name, {"n": noise(10)}, durability="disk").ref.version > refs[-1].version
        assert repo.verify() == []
