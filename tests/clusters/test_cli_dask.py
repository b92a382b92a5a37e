"""The command line on a Dask: every command reaches a repository there, without Ray, and leaves the cluster alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.clusters.nodes import check_there
from tensorvine.store.errors import RepositoryNotFoundError

from tests.support.commands import run
from tests.support.dask_cluster import DaskProcesses, dask_processes

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(400)]

WAIT_S = 200.0
WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from tensorvine.clusters.cli.main import main
main()
"""


def without_ray(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_RAY, *words], capture_output=True, text=True, timeout=WAIT_S)


@pytest.fixture(scope="module")
def dask() -> Iterator[DaskProcesses]:
    """A cluster of two nodes."""
    with dask_processes("a", "b") as (processes, _):
        yield processes


@pytest.fixture(scope="module")
def up(dask: DaskProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the scheduler; a command has started a repository on it, with two versions of m by now."""
    path = str(tmp_path_factory.mktemp("models"))
    words = ("--store-bytes", "32MiB", "--preallocate", "0", "--path", path, "--wait-nodes", "2")
    done = without_ray("up", "--engine", "dask", "--scheduler", dask.address, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Repository default is up on Dask at {dask.address}: 2 shards, 0 models\n"
    with Repository.connect(engine=dask.address) as repository:
        repository.save("m", {"w": np.ones(500, np.float32), "v": np.ones(3, np.float32)}, quality=0.5)
        repository.save("m", {"w": np.ones(500, np.float32), "v": np.zeros(3, np.float32)}, quality=0.75)
    yield dask.address
    code, out, err = run("down", "--scheduler", dask.address, "--json")
    assert (code, err) == (0, "")
    ended = {"repository": "default", "unwritten": None, "ray_ended": False, "other_repositories": []}
    assert json.loads(out) == ended
    assert dask.scheduler.poll() is None


def test_every_question_is_answered_without_ray(up: str) -> None:
    done = without_ray("status", "--scheduler", up, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert sorted(node["shards"] for node in told["nodes"]) == [[0], [1]]
    assert {(node["address"], node["store_bytes"]) for node in told["nodes"]} == {("127.0.0.1", 0)}
    assert all(node["memory_bytes"] > 0 for node in told["nodes"])


def test_the_table_of_nodes_has_no_object_stores(up: str) -> None:
    code, out, err = run("status", "--scheduler", up)
    assert (code, err) == (0, "")
    assert out.startswith("2 nodes")
    assert "memory" in out
    assert "object store" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls"], "2 versions"),
        (["show", "m"], "m@2"),
        (["lineage", "m"], "└── m@2  quality 0.75  wrote 1 of 2 tensors: v"),
        (["verify"], "2 versions checked, 0 problems"),
        (["wait", "m@1"], "m@2"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_reaches_the_repository(up: str, words: list[str], said: str) -> None:
    code, out, err = run(*words, "--scheduler", up)
    assert (code, err) == (0, "")
    assert said in out


def test_flush_waits_for_the_disk(up: str) -> None:
    code, out, err = run("flush", "--scheduler", up)
    assert code == 0, err  # on a busy machine the error output says what it still waits for
    assert out == "Repository default: all of it is on disk\n"


def test_dasks_own_variable_names_the_scheduler(up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", up.removeprefix("tcp://"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert [row["ref"] for row in json_of("ls")] == ["m@1", "m@2"]


def test_top_says_on_which_node_each_shard_is(up: str) -> None:
    told = json_of("top", "--once", "--interval", "0.1", "--scheduler", up)
    assert [(row["shard"], row["node"], row["answers"]) for row in told["shards"]] == [
        (0, "127.0.0.1", True),
        (1, "127.0.0.1", True),
    ]


def test_versions_come_and_go_and_shards_too(up: str, tmp_path: Path) -> None:
    file = str(tmp_path / "m.arrow")
    assert run("export", "m", file, "--scheduler", up)[0] == 0
    assert json_of("import", file, "copy", "--scheduler", up)["ref"] == "copy@1"
    assert json_of("retire", "copy", "--scheduler", up)["retired"] == ["copy@1"]
    assert json_of("scale", "1", "--scheduler", up)["shards_after"] == 1
    assert json_of("scale", "per-node", "--scheduler", up)["shards_after"] == 2
    assert run("verify", "--scheduler", up)[1] == "2 versions checked, 0 problems\n"


def test_a_second_up_joins(up: str) -> None:
    told = json_of("up", "--scheduler", up)
    known = {"repository": "default", "engine": "dask", "address": up, "ray_started": False, "joined": True}
    assert told == {**known, "shards": 2, "models": 2}


def test_down_leaves_others_and_the_cluster(up: str, dask: DaskProcesses) -> None:
    words = ("--name", "other", "--scheduler", up)
    assert run("up", "--store-bytes", "32MiB", "--preallocate", "0", "--shards", "1", *words)[0] == 0
    assert json_of("down", *words)["other_repositories"] == ["default"]
    code, out, err = run("ls", *words)
    assert (code, out) == (1, "")
    assert err == "tensorvine: expected a running repository named 'other'; found 'default'\n"
    with Repository.connect(engine=dask.address) as repository:
        check_there(repository.engine, "default")
        with pytest.raises(RepositoryNotFoundError, match=r"'other'.*it was stopped"):
            check_there(repository.engine, "other")


def test_nodes_that_do_not_come_are_waited_for_in_vain(up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorvine.clusters.cli.life.NODES_S", 0.5)
    code, _, err = run("up", "--name", "nowhere", "--wait-nodes", "7", "--scheduler", up)
    assert code == 1
    assert "expected 7 nodes within 0 s; found 2" in err


def test_no_scheduler_at_the_address_is_said_at_once() -> None:
    code, out, err = run("ls", "--scheduler", "127.0.0.1:9")
    assert (code, out) == (1, "")
    assert err.startswith("tensorvine: expected a Dask scheduler at tcp://127.0.0.1:9; found none: ")
    assert err.count("\n") == 1


def json_of(*words: str) -> Any:
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)
