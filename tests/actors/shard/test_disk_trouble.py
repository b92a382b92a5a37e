"""Trouble with the disk: the error names the file, what was committed stays whole, and when it is over all goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.store import Layer, ModelGraph, Zstd
from tensorvine.store.errors import (
    CodecUnavailableError,
    CorruptDataError,
    RepositoryNotFoundError,
    StorageError,
    TensorVineError,
)

from tests.support.disk import MIB, in_catalog, is_refused, manifests, noise, same, segments, start, weights
from tests.support.hostile import place
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(240)

MOUNT, UMOUNT, CHATTR = (shutil.which(tool) or "" for tool in ("mount", "umount", "chattr"))


@pytest.fixture(autouse=True, scope="module")
def short_goodbye() -> Iterator[None]:
    """A test that fails while the disk is in trouble must not wait for it when it closes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorvine.actors.client.deployment.FLUSH_TIMEOUT_S", 20.0)
        yield


def tensors(seed: int) -> dict[str, np.ndarray]:
    return {"a": weights(50_000, seed), "b": noise(300_000, seed)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "repository"


class TestPathGoneForAWhile:
    def test_durable_saves_fail_by_name_and_others_wait_in_order(self, cluster: object, path: Path) -> None:
        apart = path.with_name("apart")
        with start(path) as repo:
            repo.save("m", tensors(1), durability="disk")
            path.rename(apart)
            with pytest.raises(StorageError, match=f"{path}.*No such file"):
                repo.save("m", tensors(2), durability="disk", timeout=20)
            assert repo.models() == [repo.info("m@1").ref]
            refs = [repo.save("m", tensors(n)).ref for n in range(3, 7)]
            eventually(lambda: is_refused(repo), "the disk has refused")
            with pytest.raises(StorageError, match=f"{path}"):
                repo.flush(timeout=4)
            assert repo.stats().catalog.versions_unwritten == len(refs)
            with pytest.raises(StorageError, match=f"{path}"):
                repo.retire("m@1")
            assert same(repo.load("m@1"), tensors(1))
            apart.rename(path)
            repo.flush()
            assert manifests(path) == ["m@1", *(str(ref) for ref in refs)]
            saved = repo.save("m", tensors(8), durability="disk").ref
            assert saved.version == refs[-1].version + 1
            assert repo.verify() == []

    def test_a_close_gives_up_and_names_what_is_not_on_disk(
        self, cluster: object, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gives_up_soon(actor: Any) -> None:
            from tensorvine.actors.catalog import durable

            durable.GIVE_UP_S = 1.0

        monkeypatch.setattr("tensorvine.actors.client.deployment.QUIET_S", 0.1)
        monkeypatch.setattr("tensorvine.actors.client.deployment.FLUSH_TIMEOUT_S", 600.0)
        repo = start(path)
        repo.save("m", tensors(1), durability="disk")
        path.rename(path.with_name("apart"))
        refs = [repo.save("m", tensors(n)).ref for n in (2, 3)]
        eventually(lambda: is_refused(repo), "the disk has refused")
        in_catalog(repo, gives_up_soon)
        named = ", ".join(map(str, refs))
        with pytest.raises(StorageError, match=rf"close of repository '.*': 2 versions \({named}\)"):
            repo.close()
        assert f"waiting for writes to its path: 2 versions ({named})" in caplog.text
        with pytest.raises(RepositoryNotFoundError):
            Repository.connect(repo.name)

    def test_savers_wait_when_too_much_waits(self, cluster: object, path: Path) -> None:
        with start(path, lag_bytes=0) as repo:
            (path / "segments").write_text("no folder")
            repo.save("m", tensors(1))
            eventually(lambda: is_refused(repo), "the disk has refused")
            with pytest.raises(StorageError, match=rf"save of 'n'.*{path}/segments"):
                repo.save("n", tensors(2), timeout=4)
            stats = repo.stats()
            assert (stats.catalog.versions_unwritten, stats.shards[0].bytes_unwritten) == (1, 500_000)
            waiting = repo.save_async("n", tensors(3), timeout=60)
            eventually(lambda: repo.stats().shards[0].waiting_for_disk == 1, "the save waits")
            (path / "segments").unlink()
            assert waiting.committed(60).ref.version == 1
            assert repo.stats().shards[0].waiting_for_disk == 0
            repo.flush()
            assert manifests(path) == ["m@1", "n@1"]

    def test_a_disk_that_is_full(self, cluster: object, tmp_path: Path) -> None:
        if (
            not MOUNT
            or subprocess.run([MOUNT, "-t", "tmpfs", "-o", "size=6m", "x", str(tmp_path)], check=False).returncode
        ):
            pytest.skip("no small file system can be mounted here")
        try:
            with start(tmp_path) as repo:
                given = {"t": noise(4 * MIB, 1)}
                repo.save("m", given, durability="disk")
                with pytest.raises(StorageError, match=rf"{tmp_path}/segments/.*No space left on device"):
                    repo.save("m", {"t": noise(4 * MIB, 2)}, durability="disk")
                assert same(repo.load("m"), given)
                waiting = repo.save("m", {"t": noise(4 * MIB, 3)}).ref
                eventually(lambda: is_refused(repo), "the disk has refused")
                with pytest.raises(StorageError, match="No space left on device"):
                    repo.flush(timeout=4)
                repo.retire("m@1")
                repo.flush()
                assert str(waiting) in manifests(tmp_path)
                assert repo.verify() == []
                assert not list(tmp_path.rglob("*.tmp"))
        finally:
            subprocess.run([UMOUNT, "-l", str(tmp_path)], check=True)


@pytest.fixture
def damaged(cluster: object, path: Path) -> Iterator[tuple[Repository, dict[str, Path]]]:
    """A repository started on four versions, each with one segment; the fixture says which file is whose."""
    owner: dict[str, Path] = {}
    with start(path, shards=1) as repo:
        for n, name in enumerate(("good", "flipped", "cut", "absent")):
            before = set(segments(path))
            repo.save(name, tensors(n), durability="disk")
            (owner[name],) = set(segments(path)) - before
    flip(owner["flipped"], -100_000)
    with open(owner["cut"], "r+b") as file:
        file.truncate(owner["cut"].stat().st_size - 4096)
    owner["absent"].unlink()
    with start(path, shards=1) as repo:
        yield repo, owner


def keeper_of(repo: Repository, name: str) -> int:
    """Return the shard that has a version's file."""
    session = repo._session
    ((shard, _),) = session.ask(CatalogCalls.locate(session.client, name, None, None)).places.values()
    return shard


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


class TestDamagedFiles:
    def test_loads_name_file_and_tensor_and_verify_finds_just_them(
        self, damaged: tuple[Repository, dict[str, Path]]
    ) -> None:
        repo, owner = damaged
        with pytest.raises(CorruptDataError, match=rf"{owner['flipped']}: tensor 'b'.*checksum"):
            repo.load("flipped")
        assert same(repo.load("flipped", tensors=["a"]), {"a": tensors(1)["a"]})
        with pytest.raises(CorruptDataError, match=f"{owner['cut']}"):
            repo.load("cut")
        with pytest.raises(TensorVineError, match="absent@1 is lost"):
            repo.load("absent")
        assert same(repo.load("good"), tensors(0))
        found = {problem.ref.name: problem.text for problem in repo.verify()}
        assert found.keys() == {"flipped", "cut"}, "the other one is lost by name"
        assert "absent@1" not in map(str, repo.models())
        assert f"{owner['flipped']}" in found["flipped"]
        assert "'b'" in found["flipped"]
        assert repo.verify("good") == []
        assert [str(p.ref) for p in repo.verify("cut")] == ["cut@1"] * len(repo.verify("cut"))
        assert repo.save("cut", tensors(7), inherit=None, durability="disk").ref.version == 2
        assert same(repo.load("cut"), tensors(7))

    @pytest.mark.parametrize("shards", [1, 2])
    def test_a_save_with_such_a_parent_writes_all_its_tensors(
        self, cluster: object, path: Path, shards: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Only what it takes from the damaged file by name is an error, where the shard that commits has the file."""
        graph = ModelGraph([Layer(name, {"class": "Dense"}, tensors=[name]) for name in "ab"])
        names = [f"m{number}" for number in range(8)]
        with start(path) as repo:
            for name in names:
                repo.save(name, tensors(1), graph=graph, durability="disk")
        for number, file in enumerate(segments(path)):
            if number % 2:
                os.truncate(file, file.stat().st_size - 1)
            else:
                file.write_bytes(file.read_bytes()[:-64] + bytes(64))
        with start(path, shards=shards) as repo:
            keepers = {keeper_of(repo, name): name for name in names}
            assert len(keepers) == shards
            for keeper, name in keepers.items():
                with pytest.raises(CorruptDataError, match=f"{path}/segments/"):
                    repo.load(name)
                if keeper == repo._session.near(name):
                    with pytest.raises(CorruptDataError, match=f"{path}/segments/"):
                        repo.save(name, {"b": tensors(2)["b"]}, graph=graph, inherit={"a": "a"})
                assert repo.save(name, tensors(2), graph=graph).bytes_inherited == 0
                assert caplog.text.count(f"save of '{name}': cannot compare with {name}@1, ") == 1
                assert same(repo.load(name), tensors(2))
                saved = repo.save(name, tensors(2), graph=graph, inherit={}, parent=f"{name}@1")
                assert repo.save(name, {"b": tensors(3)["b"]}, graph=graph, inherit={"a": "a"}).bytes_inherited
                assert same(repo.load(saved.ref), tensors(2))
            eventually(lambda: not any(s.bytes_staged for s in repo.stats().shards), "nothing is staged")
            eventually(lambda: not repo.stats().catalog.pins, "nothing is pinned")

    def test_a_file_that_is_cut_while_it_is_open(self, cluster: object, path: Path) -> None:
        with start(path) as repo:
            repo.save("m", {"t": noise(3 * MIB), "u": noise(3 * MIB, 1)}, durability="disk")
        with start(path) as repo:
            repo.load("m", tensors=["t"])
            process = repo._session.connection(0).hello.pid
            (file,) = segments(path)
            os.truncate(file, 64 << 10)
            with pytest.raises(TensorVineError, match=f"{file}"):
                repo.load("m", tensors=["u"])
            assert repo._session.connection(0).hello.pid == process
            assert np.array_equal(repo.load("m", tensors=["t"])["t"], noise(3 * MIB))

    def test_a_damaged_manifest_hides_its_version_only(self, cluster: object, path: Path) -> None:
        with start(path) as repo:
            for n in (1, 2):
                repo.save("m", tensors(n), inherit=None, durability="disk")
            repo.save("other", tensors(3), durability="disk")
            for n in (2, 3):
                repo.save("other", {"a": tensors(3)["a"], f"new{n}": noise(100)}, durability="disk")
            broken = path / "manifests" / "m@2.arrow"
            whole = broken.read_bytes()
            flip(broken, 700)
            (problem,) = repo.verify()
            assert (str(problem.ref), str(broken) in problem.text) == ("m@2", True)
            before = segments(path)
        blocked = path / "manifests" / "other@2.arrow"
        place(blocked, "FIFO")
        place(path / "manifests" / "loop", "loop of links")
        with start(path) as repo:
            assert len(repo.models()) == 5, "the journal has what they said"
            assert same(repo.load("m@2"), tensors(2))
        shutil.rmtree(path / "catalog")
        with start(path) as repo:
            assert [str(ref) for ref in repo.models()] == ["m@1", "other@1", "other@3"]
            for ref, file in (("m@2", broken), ("other@2", blocked)):
                with pytest.raises(CorruptDataError, match=f"{ref}: {file}: expected "):
                    repo.load(ref)
                (problem,) = repo.verify(ref)
                assert (str(problem.ref), str(file) in problem.text) == (ref, True)
            found = repo.unreadable()
            assert [(file.file, file.ref and str(file.ref)) for file in found] == [
                ("manifests/loop", None),
                ("manifests/m@2.arrow", "m@2"),
                ("manifests/other@2.arrow", "other@2"),
            ]
            assert [(p.ref, p.text) for p in repo.verify()] == [(file.ref, file.reason) for file in found]
            assert str(repo.verify()[0]) == found[0].reason
            assert repo.stats().catalog.manifests_unread == 3
            assert same(repo.load("other@3"), {"a": tensors(3)["a"], "new3": noise(100)})
            assert str(repo.owners("other@3")["a"]) == "other@1"
            assert [str(ref) for ref in repo.lineage("other@3")] == ["other@3", "other@2"]
            assert same(repo.load("m@1"), tensors(1))
            assert repo.save("m", tensors(4), durability="disk").ref.version == 3
            assert set(before) <= set(segments(path))
        broken.write_bytes(whole)
        with start(path) as repo:
            assert same(repo.load("m@2"), tensors(2))

    def test_quality_that_is_no_number(self, cluster: object, path: Path) -> None:
        with start(path) as repo:
            repo.save("m", tensors(1), quality=float("nan"), durability="disk")
            assert repo.verify() == []


class TestPathsThatCannotBeUsed:
    def test_a_format_of_the_future(self, cluster: object, path: Path) -> None:
        path.mkdir()
        (path / "repository.json").write_text(json.dumps({"format": 99}))
        with pytest.raises(CorruptDataError, match=rf"{path}/repository.json: expected format 1; found 99"):
            start(path)

    def test_a_file(self, cluster: object, path: Path) -> None:
        path.write_text("text")
        with pytest.raises(StorageError, match=f"{path}.*Not a directory"):
            start(path)

    def test_a_directory_of_something_else(self, cluster: object, path: Path) -> None:
        path.mkdir()
        (path / "thesis.tex").write_text("text")
        with pytest.raises(StorageError, match=r"expected an empty directory or a repository; found \['thesis.tex'\]"):
            start(path)
        assert os.listdir(path) == ["thesis.tex"]

    def test_one_that_may_not_be_written(self, cluster: object, path: Path) -> None:
        path.mkdir()
        if not CHATTR or subprocess.run([CHATTR, "+i", str(path)], check=False).returncode:
            path.chmod(0o555)
            if os.access(path, os.W_OK):
                pytest.skip("nothing keeps this user from writing here")
        try:
            with pytest.raises(StorageError, match=f"{path}.*not permitted|{path}.*Permission denied"):
                start(path)
        finally:
            if CHATTR:
                subprocess.run([CHATTR, "-i", str(path)], check=False)
            path.chmod(0o755)

    def test_names_with_signs_that_mean_something_in_a_uri(self, cluster: object, tmp_path: Path) -> None:
        path = tmp_path / "a b%20#ü?x=1"
        with start(path) as repo:
            repo.save("m", tensors(1), durability="disk")
        assert manifests(path) == ["m@1"]

    def test_a_second_repository_here_and_from_another_process(
        self, foreign: tuple[Repository, Path, dict[str, Any]]
    ) -> None:
        repo, path, said = foreign
        with pytest.raises(StorageError, match=f"{path}: expected a path of its own; another repository"):
            start(path)
        assert said["second"][0] == StorageError.__name__
        assert "another repository runs on it" in said["second"][1]
        assert repo.save("m", tensors(2), durability="disk").ref.version == 2
        assert repo.verify() == []


@pytest.fixture(scope="module")
def foreign(
    cluster: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Repository, Path, dict[str, Any]]]:
    """A repository that runs, its path, and what a process with a Ray of its own says of it and of another path."""
    running, ended = (tmp_path_factory.mktemp("foreign") / name for name in ("running", "ended"))
    with start(ended, codec=Zstd()) as repo:
        repo.save("m", {"a": np.zeros(300_000, np.float32)}, durability="disk")
        repo.save("noise", {"a": noise(300_000)}, durability="disk")
    with start(running) as repo:
        repo.save("m", tensors(1), durability="disk")
        child = subprocess.run(
            [sys.executable, "-m", "tests.support.without_zstandard", str(ended), str(running)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "RAY_ADDRESS": "local"},
            capture_output=True,
            timeout=200,
            check=False,
        )
        assert child.returncode == 0, child.stderr.decode()[-3000:]
        yield repo, running, json.loads(child.stdout)


class TestCodecNotInstalled:
    def test_starting_and_reading_say_which(self, foreign: tuple[Repository, Path, dict[str, Any]]) -> None:
        _, _, said = foreign
        assert said["start"][0] == said["load"][0] == CodecUnavailableError.__name__
        assert "zstandard" in said["start"][1]
        assert "zstandard" in said["load"][1]
        assert said["noise"] == 300_000
