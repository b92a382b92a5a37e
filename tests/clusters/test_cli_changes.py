"""Commands that change a repository, move its versions, or watch it: what they print and do, on one repository."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensorvine.actors import Repository
from tensorvine.clusters.cli import look as cli_look
from tensorvine.clusters.cli import top as cli_top
from tensorvine.clusters.nodes import check_there
from tensorvine.planner.scaling import ScalePolicy
from tensorvine.store.errors import RepositoryNotFoundError
from tensorvine.store.shard import ShardStats
from tensorvine.store.versions.retention import KeepBest, KeepLast

from tests.support.commands import on, run
from tests.support.processes import stand_still
from tests.support.waiting import eventually

STORE = 64 << 20


@pytest.fixture(scope="module")
def repo(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository with a path, which all tests here share: each has names of models of its own."""
    path = str(tmp_path_factory.mktemp("cli") / "models")
    with Repository.start("changed", shards=1, path=path, store_bytes=STORE, preallocate_bytes=0) as started:
        yield started


def told(repo: Repository, *words: str, code: int = 0) -> Any:
    """Run a command with --json; give what it printed."""
    ended, out, err = on(repo, *words, "--json")
    assert ended == code, err
    return json.loads(out)


class TestRetire:
    def test_several_go_and_are_named(self, repo: Repository) -> None:
        for n in range(4):
            repo.save("gone", {"w": np.full(9, n)})
        assert on(repo, "retire", "gone@1", "gone", "gone@4") == (0, "gone@1 is retired\ngone@4 is retired\n", "")
        assert told(repo, "retire", "gone@2", "gone@3") == {"retired": ["gone@2", "gone@3"], "missing": []}
        assert repo.models("gone") == []

    def test_one_that_is_missing_is_told_and_the_others_go(self, repo: Repository) -> None:
        repo.save("some", {"w": np.ones(9)})
        code, out, err = on(repo, "retire", "nobody", "some@7", "some@1")
        assert (code, out) == (1, "some@1 is retired\n")
        first, second = err.splitlines()
        assert first.startswith("tensorvine: ")
        assert "'nobody'" in first
        assert "some@7" in second
        assert told(repo, "retire", "nobody", code=1) == {"retired": [], "missing": ["nobody"]}

    def test_nothing_goes_when_one_is_no_reference(self, repo: Repository) -> None:
        repo.save("kept", {"w": np.ones(9)})
        code, out, err = on(repo, "retire", "kept", "kept@x")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "kept@x" in err
        assert len(repo.models("kept")) == 1


class TestFiles:
    def test_a_version_goes_to_a_file_and_comes_back(self, repo: Repository, tmp_path: Path) -> None:
        repo.save("out", {"w": np.arange(1000, dtype=np.float32)}, quality=0.5, metadata={"a": 1})
        file = str(tmp_path / "out.arrow")
        assert on(repo, "export", "out", file) == (0, f"out@1, 4.0 kB of tensors, is in {file}\n", "")
        code, out, err = on(repo, "import", file, "back")
        assert (code, out, err) == (0, "back@1 is saved: 4.0 kB written, 0 inherited\n", "")
        assert np.array_equal(repo.load("back")["w"], np.arange(1000, dtype=np.float32))
        info = repo.info("back")
        assert (info.quality, dict(info.metadata)) == (0.5, {"a": 1})

    def test_as_json_with_a_parent_and_a_quality(self, repo: Repository, tmp_path: Path) -> None:
        repo.save("root", {"w": np.ones(500), "v": np.zeros(2)}, quality=0.5)
        file = str(tmp_path / "root.safetensors")
        assert told(repo, "export", "root@1", file) == {"ref": "root@1", "file": file, "bytes_total": 4016}
        saved = told(repo, "import", file, "child", "--parent", "root", "--quality", "0.75")
        assert saved == {"ref": "child@1", "bytes_written": 0, "bytes_inherited": 4016}
        assert (str(repo.info("child").parent), repo.info("child").quality) == ("root@1", 0.75)

    def test_what_cannot_be_is_one_line(self, repo: Repository, tmp_path: Path) -> None:
        damaged, text = tmp_path / "damaged.safetensors", tmp_path / "notes.txt"
        damaged.write_bytes(b"no model at all")
        text.write_text("no model either")
        refused = {
            ("import", str(damaged), "m"): "damaged.safetensors",
            ("import", str(text), "m"): "expected a name that ends in one of .safetensors",
            ("import", str(tmp_path / "missing.arrow"), "m"): "No such file",
            ("export", "nobody", str(tmp_path / "m.arrow")): "'nobody'",
            ("export", "nobody", str(tmp_path / "m.txt")): "expected a name that ends in one of .safetensors",
        }
        for words, said in refused.items():
            code, out, err = on(repo, *words)
            assert (code, out, err.count("\n")) == (1, "", 1), words
            assert err.startswith("tensorvine: ")
            assert said in err
        assert not (tmp_path / "m.arrow").exists()
        assert repo.models("m") == []


class TestWait:
    def test_a_version_that_is_there_or_a_newer_one_is_not_waited_for(self, repo: Repository) -> None:
        for n in range(2):
            repo.save("there", {"w": np.full(9, n)})
        assert on(repo, "wait", "there@1") == (0, "there@2\n", "")
        assert told(repo, "wait", "there@2") == {"ref": "there@2"}

    @pytest.mark.parametrize("before", [0, 1])
    def test_without_a_version_the_next_one_is_waited_for(
        self, repo: Repository, before: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name, asked, wait_newer = f"next-{before}", threading.Event(), Repository.wait_newer
        for n in range(before):
            repo.save(name, {"w": np.full(9, n)})

        def noted(self: Repository, name: str, after: int = 0, timeout: float = 30.0) -> Any:
            assert after == before
            asked.set()
            return wait_newer(self, name, after, timeout)

        monkeypatch.setattr(Repository, "wait_newer", noted)

        def save() -> None:
            assert asked.wait(60.0)
            repo.save(name, {"w": np.full(9, 9)})

        with ThreadPoolExecutor(1) as threads:
            saving = threads.submit(save)
            assert on(repo, "wait", name, "--timeout", "60") == (0, f"{name}@{before + 1}\n", "")
            saving.result(60.0)

    def test_when_none_comes_in_time_that_is_said(self, repo: Repository) -> None:
        code, out, err = on(repo, "wait", "never", "--timeout", "0.05", "--json")
        assert (code, out) == (1, "")
        assert err == "tensorvine: never: expected a version above 0 within 0.05 s; found none\n"


class TestUpkeep:
    def test_the_number_of_shards_changes_and_what_moved_is_told(self, repo: Repository) -> None:
        names = [f"moved-{n}" for n in range(8)]
        for name in names:
            repo.save(name, {"w": np.ones(1000)})
        report = told(repo, "scale", "2")
        assert (report["repository"], report["shards_before"], report["shards_after"]) == ("changed", 1, 2)
        assert report["tensor_bytes_moved"] == 0
        code, out, err = on(repo, "scale", "1")
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[0] == "Repository changed has 1 shard; before: 2"
        assert lines[1].startswith("  tensors moved: ")
        assert [str(ref) for ref in repo.models("moved-")] == [f"{name}@1" for name in names]

    def test_all_is_on_disk_after_a_flush(self, repo: Repository) -> None:
        repo.save("written", {"w": np.ones(1000)})
        assert on(repo, "flush")[:2] == (0, "Repository changed: all of it is on disk\n")
        assert repo.stats().catalog.versions_unwritten == 0
        assert told(repo, "flush") == {"repository": "changed", "on_disk": True}

    def test_without_a_path_there_is_nothing_to_flush_to(self, repository: Repository) -> None:
        code, out, err = on(repository, "flush")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "expected a repository with path=" in err

    def test_a_change_that_takes_too_long_is_an_error_of_one_line(self, repo: Repository) -> None:
        code, out, err = on(repo, "scale", "2", "--timeout", "0")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("tensorvine: ")
        assert told(repo, "scale", "per-node")["shards_after"] == 1

    def test_verify_as_json(self, repo: Repository) -> None:
        repo.save("checked", {"w": np.ones(9)})
        assert told(repo, "verify", "checked") == {"versions": 1, "problems": []}


@pytest.fixture
def one_again(repo: Repository) -> Iterator[None]:
    """After the test there is one shard, as before."""
    yield
    repo.scale(1)


class TestTop:
    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli_top, "ANSWER_S", 60.0)

    def test_one_table(self, repo: Repository) -> None:
        code, out, err = on(repo, "top", "--once", "--interval", "0.1")
        assert (code, err) == (0, "")
        title, header, _, row = out.splitlines()
        assert title.startswith("repository changed, 20")
        assert header.split()[:2] == ["shard", "node"]
        assert row.split()[0] == "0"
        assert "67.1 MB" in row

    def test_as_json(self, repo: Repository) -> None:
        repo.save("watched", {"w": np.ones(1000)})
        seen = told(repo, "top", "--once", "--interval", "0.1")
        (shard,) = seen["shards"]
        assert (seen["repository"], shard["shard"], shard["answers"]) == ("changed", 0, True)
        assert shard["node"] == told(repo, "status")["nodes"][0]["address"]
        rates = [shard[rate] for rate in ("requests_per_s", "saved_per_s", "sent_per_s")]
        assert (shard["capacity"], rates) == (STORE, [0.0, 0.0, 0.0])
        assert shard["bytes_saved"] >= 8000
        assert shard["bytes_used"] >= 8000
        assert (shard["waiting_for_memory"], shard["waiting_for_disk"]) == (0, 0)

    def test_ctrl_c_ends_it_well(self, repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        looks, ask = list[Any](), Repository.stats_by_shard

        def third_is_pressed(self: Repository, timeout: float = 2.0) -> Any:
            looks.append(ask(self, timeout))
            if len(looks) == 3:
                raise KeyboardInterrupt  # a signal would be ignored where the tests run in the background
            return looks[-1]

        monkeypatch.setattr(Repository, "stats_by_shard", third_is_pressed)
        code, out, err = on(repo, "top", "--interval", "0.1")
        assert (code, err) == (0, "")
        assert out.count("repository changed") == 2

    def test_a_shard_that_stands_still_is_shown_so_and_comes_back(
        self, repo: Repository, one_again: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert repo.scale(2).shards_after == 2
        running, still = repo.shards

        def seen(*words: str) -> tuple[int, str, str]:
            """Run a command with so much patience that the shard that runs answers in time."""
            for patience in (0.2, 1.0, 5.0, 25.0):
                monkeypatch.setattr(cli_top, "ANSWER_S", patience)
                monkeypatch.setattr(cli_look, "PATIENCE_S", patience)
                found = on(repo, *words)
                if found[1] and f"changed/shard-{running}: " not in found[1]:
                    return found
            pytest.fail(f"shard {running} does not answer within {patience} s: {found}")

        process = psutil.Process(repo._session.connection(still).hello.pid)
        stand_still(process)
        try:
            code, out, err = seen("top", "--once", "--interval", "0.1")
            status, as_json = seen("status"), seen("status", "--json")
        finally:
            process.resume()
        assert code == 0, err
        for said in (out, status[1]):
            assert f"shard {still} does not answer: changed/shard-{still}: " in said
            assert f"shard {running} does not answer" not in said
        assert [status[0], as_json[0]] == [1, 1]
        told = json.loads(as_json[1])
        assert [shard["shard"] for shard in told["shards"]] == [running]
        assert list(told["silent"]) == [str(still)]
        assert sorted(told["nodes"][0]["shards"]) == sorted(repo.shards)
        eventually(
            lambda: all(isinstance(one, ShardStats) for one in repo.stats_by_shard().values()),
            "both answer",
        )

    def test_shards_that_joined_are_seen_by_who_watches_already(self, repo: Repository, one_again: None) -> None:
        with Repository.connect(repo.name) as watcher:
            assert len(watcher.stats_by_shard()) == 1
            repo.scale(2)
            eventually(lambda: len(watcher.stats_by_shard()) == 2, "the new shard is seen")
            repo.scale(1)
            eventually(lambda: len(watcher.stats_by_shard()) == 1, "the drained shard is seen no more")

    def test_a_repository_that_was_stopped_is_not_there(self, repo: Repository) -> None:
        check_there(repo.engine, repo.name)
        with pytest.raises(RepositoryNotFoundError, match=r"'nowhere'.*it was stopped"):
            check_there(repo.engine, "nowhere")


class TestUpAndDown:
    def test_what_a_repository_that_runs_already_does_not_take_is_said(self, repo: Repository) -> None:
        code, out, err = on(repo, "up", "--store-bytes", "1GB", "--preallocate", "0")
        assert code == 0
        assert "already running and keeps its options: --store-bytes, --preallocate had no effect" in err
        assert "1 shard" in out

    def test_options_reach_the_repository(
        self, repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import ray

        given: dict[str, Any] = {}
        start = Repository.start

        def noted(name: str | None = None, **options: Any) -> Repository:
            given.update(options)
            return start(name, **options)

        monkeypatch.setattr(Repository, "start", noted)
        monkeypatch.setattr("tensorvine.actors.engine.ray.engine.RayEngine.leave", lambda _: None)
        where = ["--name", "standing", "--address", ray.get_runtime_context().gcs_address, "--json"]
        words = ["--shards", "1", "--path", str(tmp_path), "--keep", "last(1)|best(1)", "--store-bytes", "32MiB"]
        code, out, err = run("up", *words, "--preallocate", "0", "--scaling", "least=1,most=2", *where)
        assert code == 0, err
        made = json.loads(out)
        assert (made["repository"], made["ray_started"], made["shards"], made["models"]) == ("standing", False, 1, 0)
        assert (given["keep"], given["store_bytes"]) == (KeepLast(1) | KeepBest(1), 32 << 20)
        assert (given["preallocate_bytes"], given["scaling"]) == (0, ScalePolicy(least=1, most=2))
        with Repository.connect("standing") as standing:
            assert standing.stats().shards[0].capacity == 32 << 20
        code, out, err = run("down", *where)
        assert (code, err) == (0, "")
        ended = json.loads(out)
        assert "changed" in ended.pop("other_repositories")
        assert ended == {"repository": "standing", "unwritten": None, "ray_ended": False}
