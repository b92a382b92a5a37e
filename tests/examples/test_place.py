"""Where examples run: a Ray and a repository that run already, or their own; and what SIGTERM leaves of each."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import ray
import ray.util
import typer
from tensorvine.actors import Repository
from tensorvine.actors.client import launch
from tensorvine.clusters import LocalCluster
from tensorvine.planner.owner import Owner
from tensorvine.store.errors import RepositoryNotFoundError

from examples.shared import place
from examples.shared.place import AUTO, Place
from examples.shared.starting import TERMINATED
from tests.support import example_runs
from tests.support.example_runs import ROOT, address, await_line
from tests.support.marked import MARK, outlive

OWN = {"shards": 1, "preallocate_bytes": 0}
WEIGHTS = {"w": np.arange(5.0)}


def refused(captured: pytest.CaptureFixture[str], error: pytest.ExceptionInfo[typer.Exit]) -> str:
    """Return the one line that was written."""
    assert error.value.exit_code == 1
    (line,) = captured.readouterr().err.splitlines()
    return line


class TestNames:
    def test_no_two_runs_have_the_same_ones(self) -> None:
        first, second = (Place("nas", AUTO, "models") for _ in range(2))
        assert first.repository == second.repository == "models"
        assert first.prefix != second.prefix
        assert re.fullmatch(r"nas-[0-9a-f]{8}/", first.prefix)
        own, other = Place("nas", AUTO), Place("nas")
        assert own.prefix == other.prefix == ""
        assert own.repository != other.repository


class TestJob:
    """What Ray tells a program that `ray job submit --working-dir .` runs."""

    @pytest.fixture(autouse=True)
    def script(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["examples/fork_training/run.py"])

    def test_workers_import_what_lies_beside_the_script(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(place.JOB, '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip", "env_vars": {}}}')
        assert place._script_folder() == {"env_vars": {"PYTHONPATH": "examples/fork_training"}}

    @pytest.mark.parametrize("job", [None, "{}", '{"runtime_env": {"env_vars": {}}}'])
    def test_elsewhere_ray_sees_to_that(self, job: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(place.JOB, raising=False)
        if job is not None:
            monkeypatch.setenv(place.JOB, job)
        assert place._script_folder() is None


class TestRepository:
    def test_one_that_runs_is_joined_and_keeps_what_was_saved(
        self, repository: Repository, capsys: pytest.CaptureFixture[str]
    ) -> None:
        repository.save("theirs", WEIGHTS)
        here = Place("finetune", address(), repository.name)
        with here.ray(), here.open({"shards": 7}) as joined:
            saved = joined.save(f"{here.prefix}m", WEIGHTS).ref
        assert capsys.readouterr().out == f"Joined {repository.name!r}; models are named {here.prefix}...\n"
        assert ray.is_initialized()  # this process had it before
        assert [str(ref) for ref in repository.models()] == [str(saved), "theirs@1"]
        np.testing.assert_array_equal(repository.load(saved)["w"], WEIGHTS["w"])

    @pytest.mark.parametrize("named", [None, "test-place-new"])
    def test_one_that_does_not_run_is_started_and_stopped(
        self, named: str | None, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        here = Place("finetune", address(), named)
        with here.ray(), here.open(OWN) as started:
            assert (started.name, len(started.shards)) == (here.repository, 1)
        says = "" if named is None else f"Started {named!r}; models are named {here.prefix}...\n"
        assert capsys.readouterr().out == says
        with pytest.raises(RepositoryNotFoundError):
            Repository.connect(here.repository)

    def test_one_that_runs_without_what_is_needed_is_one_line(
        self, repository: Repository, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(typer.Exit) as error, Place("x", named=repository.name).open(shards=2):
            pytest.fail("joined")
        assert "is already running with 1 shards; found shards=2" in refused(capsys, error)
        assert repository.models() == []

    def test_a_name_that_is_none_is_one_line(self, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(typer.Exit) as error, Place("x", named="../x").open(OWN):
            pytest.fail("started")
        assert "'../x'" in refused(capsys, error)

    def test_another_users_is_joined_only_by_its_name(
        self, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with monkeypatch.context() as other:
            other.setattr(launch.Owner, "here", lambda: Owner("ada", 4711, "node-7"))
            theirs = Repository.start("finetune", **OWN)
        with theirs:
            with Place("finetune").open(OWN) as own:
                own.save("m", WEIGHTS)
            assert theirs.models() == []
            here = Place("finetune", named="finetune")
            with here.open(OWN) as joined:
                saved = joined.save(f"{here.prefix}m", WEIGHTS).ref
            assert theirs.models() == [saved]
        assert "Joined 'finetune'" in capsys.readouterr().out


class TestAddress:
    @pytest.mark.parametrize("given", ["ray://127.0.0.1:10001", "local"])
    def test_what_names_no_ray_that_runs_is_one_line(self, given: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(typer.Exit) as error, Place("x", given).ray():
            pytest.fail("attached")
        assert refused(capsys, error).endswith(f"found {given!r}")

    def test_auto_finds_none(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "local")
        with pytest.raises(typer.Exit) as error, Place("x", AUTO).ray():
            pytest.fail("attached")
        assert refused(capsys, error).endswith("found none")

    def test_nobody_listens_there(self, mark: str) -> None:
        with socket.socket() as bound:  # nobody else gets the port
            bound.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{bound.getsockname()[1]}"
            process = start(mark, where, "-")
            output, _ = process.communicate(timeout=example_runs.LIMIT_S)
        assert process.returncode == 1
        (line,) = output.splitlines()
        assert f"no server answers at {where}" in line


class TestSigterm:
    """What `ray job stop` sends."""

    def test_a_repository_that_was_joined_goes_on(self, repository: Repository, mark: str) -> None:
        process = start(mark, address(), repository.name)
        await_line(process, "/m@5\n")
        stop(process)
        models = repository.models()
        assert len(models) >= 5
        assert re.fullmatch(r"placed-[0-9a-f]{8}/m", models[0].name)
        assert_usable(repository)
        assert outlive(mark) == []

    def test_one_that_was_started_ends(self, cluster: LocalCluster, mark: str) -> None:
        process = start(mark, address(), "-")
        assert process.stdout is not None
        name = process.stdout.readline().split()[-1]
        await_line(process, "m@5\n")
        assert f"{name}/planner" in actors()
        stop(process)
        assert [actor for actor in actors() if actor.startswith(name)] == []
        assert outlive(mark) == []


def start(mark: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the program that saves."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.support.placed", *arguments],
        cwd=ROOT,
        env={**os.environ, MARK: mark, "RAY_ADDRESS": "local"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background job of a shell
    )


def stop(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM: the program says that it was stopped, and ends without a traceback."""
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=example_runs.LIMIT_S)
    assert process.returncode == TERMINATED, rest
    assert "stopped by SIGTERM" in rest
    assert "Traceback" not in rest


def actors() -> list[str]:
    """Return the names of the actors that live."""
    return [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]


def assert_usable(repository: Repository) -> None:
    """See that a repository is whole, holds nothing for those who are gone, and takes and gives models."""
    assert repository.verify() == []
    example_runs.await_no_pins(repository)
    for ref in repository.models():
        assert repository.load(ref)
    saved = repository.save("after", WEIGHTS).ref
    np.testing.assert_array_equal(repository.load(saved)["w"], WEIGHTS["w"])
