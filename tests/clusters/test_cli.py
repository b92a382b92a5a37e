"""The command line: what it prints, and its exit codes, without a cluster and on one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import tensorvine
from tensorvine.actors import Repository
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.actors.rpc.catalog_messages import UnreadFile
from tensorvine.clusters.cli import life as cli_life
from tensorvine.clusters.cli.main import application, main
from tensorvine.planner.owner import Owner
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import RepositoryNotFoundError, StorageError
from typer.testing import CliRunner

from tests.support.commands import on, run

COMMANDS = ("up", "status", "top", "ls", "show", "lineage", "verify", "export", "import", "wait", "retire", "scale")
COMMANDS += ("flush", "down", "diff", "metrics", "web")
CHANGING = [["flush"], ["scale", "2"], ["retire", "m"], ["export", "m", "m.arrow"], ["import", "m.arrow", "m"]]
WAIT_S = 200.0
MODEL = ModelGraph(
    [
        Layer("in", {"class": "Input", "shape": [4]}),
        Layer("stem", {"class": "Dense", "units": 8, "name[0]": "[bold]x[/bold]"}, ("in",), ("stem/w",)),
        Layer("head", {"class": "Dense", "units": 2}, ("stem",), ("head/w",)),
    ]
)


def test_it_prints_its_version() -> None:
    assert command("--version") == (0, f"{tensorvine.__version__}\n", "")


def command(*words: str) -> tuple[int, str, str]:
    """Run a command in this process; give its exit code and what it printed."""
    done = CliRunner().invoke(application(), list(words))
    return done.exit_code, done.stdout, done.stderr


class TestUsage:
    def test_help_names_every_command(self) -> None:
        code, out, _ = command("--help")
        assert code == 0
        for name in COMMANDS:
            assert f" {name} " in out

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_help_on_each_of_its_options(self, name: str) -> None:
        code, out, _ = command(name, "--help")
        assert code == 0
        assert "--name" in out
        assert "--address" in out
        assert "--scheduler" in out

    def test_help_needs_no_engine(self) -> None:
        program = (
            "import sys; from tensorvine.clusters.cli.main import main\n"
            "try: main(['--help'])\n"
            "finally: print(bool({'ray', 'dask'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
        assert done.stdout.rstrip().endswith("False")

    @pytest.mark.parametrize(
        "words",
        [["nonsense"], ["show"], ["ls", "--nonsense"], ["up", "--shards", "many"], ["up", "--wait-nodes", "0"]],
        ids=" ".join,
    )
    def test_wrong_usage_ends_with_code_2(self, words: list[str]) -> None:
        code, out, err = command(*words)
        assert (code, out) == (2, "")
        assert "Error" in err

    @pytest.mark.parametrize("address", ["nonsense", "host:", ":1", "host:port"])
    def test_an_address_that_is_none_is_wrong_usage(self, address: str, no_ray: None) -> None:
        code, _, err = command("ls", "--address", address)
        assert code == 2
        assert "HOST:PORT" in err


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is attached to no Ray, and none is written down on this machine."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


class TestNoCluster:
    @pytest.mark.parametrize(
        "words",
        [["ls"], ["status"], ["show", "m"], ["verify"], ["down"], ["lineage", "m"], *CHANGING, ["top"], ["wait", "m"]],
    )
    def test_without_a_ray_a_command_says_so_in_one_line(
        self, words: list[str], no_ray: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (1, "")
        assert err.startswith("tensorvine: expected a Ray")
        assert err.count("\n") == 1

    def test_nobody_at_the_address_is_said_at_once(self, no_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and it does not listen
            port = taken.getsockname()[1]
            with pytest.raises(SystemExit) as ended:
                main(["ls", "--address", f"127.0.0.1:{port}"])
        assert ended.value.code == 1
        assert f"no server answers at 127.0.0.1:{port}" in capsys.readouterr().err

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can write what another user wrote")
    def test_a_ray_that_another_user_wrote_down_is_not_joined_and_that_is_told(
        self, no_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "ray" / "ray_current_cluster"
        file.parent.mkdir()
        file.write_text("127.0.0.1:6379")
        os.chown(file, 65534, 65534)
        with pytest.raises(SystemExit) as ended:
            main(["ls"])
        out, err = capsys.readouterr()
        warned, said = err.splitlines()
        assert (ended.value.code, out) == (1, "")
        assert warned.startswith(f"tensorvine: the Ray that {file} names is not joined: the file belongs to user 65534")
        assert said.startswith("tensorvine: expected a Ray")

    def test_a_codec_that_is_none_is_said_before_anything_starts(
        self, no_ray: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["up", "--codec", "nonsense"])
        assert ended.value.code == 1
        assert "nonsense" in capsys.readouterr().err


@pytest.fixture(scope="module")
def looked_at(cluster: object) -> Iterator[Repository]:
    """A repository of three versions that all tests here look at and none changes."""
    stem, head = np.ones((4, 8), np.float32), np.zeros((8, 2), np.float32)
    with Repository.start("looked-at", shards=1, preallocate_bytes=0) as repository:
        repository.save("net", {"stem/w": stem, "head/w": head}, graph=MODEL, quality=0.5, metadata={"a": [1]})
        repository.save("net", {"stem/w": stem, "head/w": head + 1}, graph=MODEL, quality=0.75)
        repository.save("other", {"x": np.ones(3)})
        yield repository


@pytest.fixture
def filled(looked_at: Repository, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """That repository; a command that looks at it leaves this process's Ray alone."""
    from tensorvine.actors.engine.ray.engine import RayEngine

    monkeypatch.setattr(RayEngine, "leave", lambda _: None)
    return looked_at


@pytest.fixture(scope="module")
def adas(cluster: object) -> Iterator[None]:
    """The repository of the default name, of another user, until it is stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Owner, "here", classmethod(lambda _: Owner("ada", 12345, "elsewhere")))
        started = Repository.start(shards=1, preallocate_bytes=0)
    with started:
        started.save("m", {"w": np.ones(3)})
        yield


@pytest.fixture
def foreign(filled: Repository, adas: None) -> Repository:
    """That repository, and that of another user beside it."""
    return filled


class TestLooking:
    """Commands on a repository in this process's Ray."""

    def test_ls_lists_versions_with_what_each_wrote(self, filled: Repository) -> None:
        code, out, _ = on(filled, "ls")
        assert code == 0
        assert "3 versions" in out
        (line,) = [line for line in out.splitlines() if "net@2" in line]
        assert line.split()[:2] == ["net@2", "net@1"]
        assert line.split()[4:] == ["0.75", "64", "B", "192", "B", "67%"]

    def test_ls_takes_a_prefix_and_gives_json(self, filled: Repository) -> None:
        code, out, _ = on(filled, "ls", "net", "--json")
        assert code == 0
        assert [(row["ref"], row["parent"], row["quality"]) for row in json.loads(out)] == [
            ("net@1", None, 0.5),
            ("net@2", "net@1", 0.75),
        ]
        assert "0 versions" in on(filled, "ls", "nothing")[1]

    def test_show_says_who_wrote_each_layer(self, filled: Repository) -> None:
        code, out, _ = on(filled, "show", "net")
        assert code == 0
        assert out.startswith("net@2\n")
        rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        assert "net@1" in rows["stem"]
        assert "[bold]x[/bold]" in rows["stem"]
        assert "net@2" in rows["head"]
        told = json.loads(on(filled, "show", "net@1", "--json")[1])
        assert told["metadata"] == {"a": [1]}
        assert told["layers"][1]["tensors"] == {"stem/w": "net@1"}
        assert json.loads(on(filled, "show", "other", "--json")[1])["other_tensors"] == {"x": "other@1"}

    def test_lineage_prints_a_tree_and_draws(self, filled: Repository, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        picture = tmp_path / "net.svg"
        code, out, err = on(filled, "lineage", "net", "--picture", str(picture))
        assert code == 0
        assert "net@1  quality 0.5  wrote 1 of 2 tensors: stem" in out
        assert "net@2  quality 0.75  wrote 1 of 2 tensors: head" in out
        assert str(picture) in err
        assert picture.read_text().lstrip().startswith("<?xml")
        assert json.loads(on(filled, "lineage", "net", "--json")[1])["layers"] == {
            "stem": "net@1",
            "head": "net@2",
        }

    def test_diff_shows_what_changed(self, filled: Repository) -> None:
        code, out, _ = on(filled, "diff", "net@1", "net@2", "--histogram", "3")
        assert code == 0
        assert "net@1 and net@2: 1 equal, 1 changed, 0 new, 0 gone" in out
        (line,) = [line for line in out.splitlines() if "head/w" in line]
        assert line.split()[-2:] == ["100.00%", "4"]
        assert "█" in line
        told = json.loads(on(filled, "diff", "net", "other", "--json")[1])
        assert (told["a"], told["new"], told["gone"]) == ("net@2", ["x"], ["stem/w", "head/w"])
        assert told["changed"] == {}

    def test_repos_lists_what_runs(self, filled: Repository) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RayEngine, "leave", lambda _: None)
            cluster = ("--address", ray.get_runtime_context().gcs_address)
            code, out, _ = run("repos", *cluster)
            assert code == 0
            assert [line.split()[-1] for line in out.splitlines() if line.split()[:1] == [filled.name]] == ["1"]
            told = json.loads(run("repos", "--json", *cluster)[1])
            assert {"repository": filled.name, "shards": 1} in told

    def test_status_shows_nodes_and_shards(self, filled: Repository) -> None:
        code, out, _ = on(filled, "status")
        assert code == 0
        assert "1 node" in out
        assert f"repository {filled.name}" in out
        told = json.loads(on(filled, "status", "--json")[1])
        assert told["models"] == 3
        assert [node["shards"] for node in told["nodes"]] == [[0]]

    def test_verify_counts_what_it_checked(self, filled: Repository) -> None:
        code, out, _ = on(filled, "verify")
        assert (code, out.strip()) == (0, "3 versions checked, 0 problems")
        code, out, _ = on(filled, "verify", "net@1")
        assert (code, out.strip()) == (0, "1 version checked, 0 problems")

    def test_verify_ends_with_code_1_when_something_is_wrong(
        self, filled: Repository, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tensorvine.actors import Problem

        monkeypatch.setattr(Repository, "verify", lambda self, ref: [Problem(ref, "tensor 'w' is [missing]")])
        code, out, _ = on(filled, "verify", "net@1")
        assert code == 1
        assert "net@1: tensor 'w' is [missing]" in out
        monkeypatch.setattr(Repository, "verify", lambda self, ref: [])
        unread = [UnreadFile("manifests/a@1.arrow", ModelRef("a", 1), "a [FIFO]"), UnreadFile("odd", None, "a link")]
        monkeypatch.setattr(Repository, "unreadable", lambda self: unread)
        code, out, _ = on(filled, "verify")
        assert code == 1
        assert "a@1: a [FIFO]\nodd: a link\n3 versions checked, 2 problems" in out

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["show", "nothing"], "nothing"),
            (["show", "net@9"], "net@9"),
            (["lineage", "net@x"], "name@version"),
            (["verify", "nothing"], "nothing"),
            (["lineage", "net", "--picture", "net.txt"], "expected a name that ends in .svg"),
            (["ls", "--name", "nowhere"], "nowhere"),
            (["down", "--name", "nowhere"], "nowhere"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_an_error_is_one_line(
        self, filled: Repository, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import ray

        named = [] if "--name" in words else ["--name", filled.name]
        with pytest.raises(SystemExit) as ended:
            main([*words, *named, "--address", ray.get_runtime_context().gcs_address])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (1, "")
        assert err.startswith("tensorvine: ")
        assert err.count("\n") == 1
        assert said in err

    def test_up_on_a_running_ray_stays_until_down(self, filled: Repository) -> None:
        import ray

        address = ["--address", ray.get_runtime_context().gcs_address]
        code, out, _ = command("up", "--name", "standing", "--shards", "1", *address)
        assert code == 0
        assert "Repository standing is up" in out
        with Repository.connect("standing") as other:
            other.save("m", {"w": np.ones(3)})
        assert "1 version" in command("ls", "--name", "standing", *address)[1]
        code, _, err = command("up", "--name", "standing", "--shards", "2", *address)
        assert code == 2
        assert "is already running with" in err
        code, out, _ = command("down", "--name", "standing", *address)
        assert (code, out.strip()) == (0, "Repository standing is down")
        assert command("down", "--name", "standing", *address, "--json")[:2] == (1, "")
        assert filled.models("other")

    @pytest.mark.parametrize(
        "words", [["ls"], ["status"], ["show", "m"], ["verify"], ["lineage", "m"], ["up"], ["down"]]
    )
    def test_another_users_repository_must_be_named(
        self, foreign: Repository, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        import ray

        address = ["--address", ray.get_runtime_context().gcs_address]
        with pytest.raises(SystemExit) as ended:
            main([*words, *address])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (1, "")
        assert "found owner ada (user 12345) on elsewhere" in err
        assert "--name default" in err
        assert err.count("\n") == 1
        code, out, _ = command(*words, "--name", "default", *address)
        assert code == 0
        assert out

    def test_up_on_a_path_that_cannot_be_used_starts_nothing(
        self, filled: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import ray

        (tmp_path / "file").write_text("")
        words = ["--name", "nowhere", "--address", ray.get_runtime_context().gcs_address]
        with pytest.raises(SystemExit) as ended:
            main(["up", *words, "--path", str(tmp_path / "file" / "models")])
        assert ended.value.code == 1
        assert capsys.readouterr().err.startswith("tensorvine: ")
        with pytest.raises(RepositoryNotFoundError):
            Repository.connect("nowhere")
        assert command("up", *words, "--codec", "zstd(3)")[0] == 2

    def test_up_gives_up_waiting_for_nodes_that_do_not_come(
        self, filled: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import ray

        monkeypatch.setattr(cli_life, "NODES_S", 0.5)
        with pytest.raises(SystemExit) as ended:
            main(["up", "--name", "nowhere", "--wait-nodes", "7", "--address", ray.get_runtime_context().gcs_address])
        assert ended.value.code == 1
        assert "expected 7 nodes" in capsys.readouterr().err

    def test_down_stops_nothing_that_cannot_be_written_unless_it_is_forced(
        self, filled: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import ray

        address = ["--address", ray.get_runtime_context().gcs_address]

        def full(self: Repository, timeout: float = 0) -> None:
            raise StorageError("no space left on device")

        assert command("up", "--name", "full", "--shards", "1", "--path", str(tmp_path), *address)[0] == 0
        with monkeypatch.context() as patched:
            patched.setattr(Repository, "flush", full)
            with pytest.raises(SystemExit) as ended:
                main(["down", "--name", "full", *address])
            assert ended.value.code == 1
            assert command("ls", "--name", "full", *address)[0] == 0
            code, out, err = command("down", "--name", "full", "--force", *address)
        assert (code, out.strip()) == (0, "Repository full is down")
        assert "no space left on device" in err
        assert command("ls", "--name", "full", *address)[0] == 1
