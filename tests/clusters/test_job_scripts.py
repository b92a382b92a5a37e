"""The job scripts: what they refuse, and jobs that they run with a stand-in launcher."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tensorvine.clusters.head import free_port

from tests.support.control_groups import ENTER, memory_group
from tests.support.processes import folder_of_a_ray, of_ray_in

ROOT = Path(__file__).parents[2]
FILES = ROOT / "clusters"
SCRIPTS = sorted((FILES / "batch").glob("*.sh"))
WAIT_S = 200.0
END_S = 90.0
"""Ray's agents try for 60 s to tell a head that has died with them before they end."""

PROGRAM = """
import os, signal, sys
import numpy as np
import ray
from tensorvine.actors import Repository
from tensorvine.actors.engine.ray import control_service
with Repository.connect() as repo:
    repo.save("m", {"w": np.ones(5, np.float32)}, quality=0.5)
    asks = control_service.asks_for_token(ray.get_runtime_context().gcs_address)
    print("asks for a token" if asks else "lets everybody in", flush=True)
    print("nodes", sum(node["Alive"] for node in ray.nodes()), "shards", len(repo.stats().shards), flush=True)
if sys.argv[1] == "wait":
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


class TestScripts:
    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
    def test_bash_can_read_it(self, path: Path) -> None:
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=WAIT_S)  # noqa: S607
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_node_without_a_rank_says_so(self) -> None:
        done = run_script([str(FILES / "batch" / "node.sh")], {"TENSORVINE_HEAD": "127.0.0.1"})
        assert done.returncode == 2
        assert "expected a rank" in done.stderr

    @pytest.mark.parametrize("rank", ["0", "1"])
    def test_a_node_without_the_jobs_token_starts_no_ray(self, tmp_path: Path, rank: str) -> None:
        (tmp_path / "ray").write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / "ray").chmod(0o755)
        settings = {"SLURM_PROCID": rank, "TENSORVINE_HEAD": "127.0.0.1", "TENSORVINE_START_S": "2"}
        done = run_script([str(FILES / "batch" / "node.sh")], {**job_settings(tmp_path, tmp_path), **settings})
        assert done.returncode == 2
        assert "expected the job's RAY_AUTH_TOKEN" in done.stderr

    @pytest.mark.parametrize(("limit", "starts"), [(2 << 30, True), (512 << 20, False)])
    def test_a_node_promises_what_the_job_has_of_it(self, tmp_path: Path, limit: int, starts: bool) -> None:
        (tmp_path / "ray").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        (tmp_path / "ray").chmod(0o755)
        settings = {"SLURM_PROCID": "0", "RAY_AUTH_TOKEN": "a" * 64, "TENSORVINE_HEAD": "127.0.0.1"}
        with memory_group(limit) as procs:
            settings = {**job_settings(tmp_path, tmp_path), **settings, "PROCS": str(procs)}
            done = run_script(["-c", ENTER, "sh", "bash", str(FILES / "batch" / "node.sh")], settings)
        told = dict(word.split("=") for word in done.stdout.split() if "=" in word)
        if starts:
            store, memory = int(told["--object-store-memory"]), int(told["--memory"])
            assert store < 0.11 * limit
            assert 0.75 * limit < store + memory < limit
        else:
            assert (done.returncode, told) == (1, {})
            assert "expected at least 768 MiB of memory" in done.stderr

    def test_a_worker_without_a_head_gives_up_in_time(self, tmp_path: Path) -> None:
        settings = {"SLURM_PROCID": "1", "RAY_AUTH_TOKEN": "a" * 64, "TENSORVINE_HEAD": "127.0.0.1"}
        settings = {**job_settings(tmp_path, tmp_path), **settings}
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and it does not listen
            settings |= {"TENSORVINE_PORT": str(taken.getsockname()[1]), "TENSORVINE_START_S": "2"}
            done = run_script([str(FILES / "batch" / "node.sh")], settings)
        assert done.returncode == 1
        assert "nobody answers there" in done.stderr

    def test_a_job_whose_launcher_ends_says_so_and_ends(self, tmp_path: Path) -> None:
        launcher = tmp_path / "srun"
        launcher.write_text("#!/bin/sh\nexit 1\n")
        launcher.chmod(0o755)
        done = run_script([str(FILES / "batch" / "slurm.sh"), "true"], job_settings(tmp_path, tmp_path))
        assert done.returncode == 1
        assert "its launcher ended" in done.stderr

    def test_a_job_without_a_program_is_refused(self, tmp_path: Path) -> None:
        done = run_script([str(FILES / "batch" / "slurm.sh")], job_settings(tmp_path, tmp_path))
        assert done.returncode == 1
        assert "expected the program to run" in done.stderr

    def test_a_job_without_tensorvine_says_how_to_bring_it(self, tmp_path: Path) -> None:
        settings = {**job_settings(tmp_path, tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = run_script([str(FILES / "batch" / "slurm.sh"), "true"], settings)
        assert done.returncode == 1
        assert "expected ray and tensorvine in PATH: set TENSORVINE_WHEEL or TENSORVINE_VENV" in done.stderr

    def test_an_environment_that_is_not_there_is_not_replaced_by_another(self, tmp_path: Path) -> None:
        for name in ("ray", "tensorvine"):  # somebody's, in the PATH that a batch system hands on
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        settings = {**job_settings(tmp_path, tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = run_script([str(FILES / "batch" / "slurm.sh"), "true"], {**settings, "TENSORVINE_VENV": "/nowhere"})
        assert done.returncode == 1
        assert "expected ray and tensorvine in /nowhere/bin; found not both" in done.stderr

    def test_a_job_whose_wheel_cannot_be_installed_says_why_and_starts_nothing(self, tmp_path: Path) -> None:
        settings = {**job_settings(tmp_path, tmp_path), "TENSORVINE_WHEEL": str(tmp_path / "none.whl")}
        done = run_script([str(FILES / "batch" / "slurm.sh"), "true"], settings)
        assert done.returncode == 1
        first, last = done.stderr.splitlines()
        assert "expected a wheel of TensorVine" in first
        assert f"expected an environment of {tmp_path / 'none.whl'}" in last

    def test_a_job_that_is_told_to_end_while_it_installs_ends(self, tmp_path: Path) -> None:
        batch = tmp_path / "batch"
        shutil.copytree(FILES / "batch", batch)
        (batch / "install.sh").write_text("echo installing >&2\nexec tail -f /dev/null\n")
        settings = {"TENSORVINE_BATCH": str(batch), "TENSORVINE_WHEEL": "any.whl", "RAY_TMPDIR": str(tmp_path)}
        settings = {**job_settings(tmp_path, tmp_path), **settings}
        command = ["bash", str(batch / "slurm.sh"), "true"]
        job = subprocess.Popen(command, env=bare(settings), stderr=subprocess.PIPE, text=True)
        assert job.stderr is not None
        assert job.stderr.readline() == "installing\n"
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=WAIT_S)
        assert job.returncode == 143
        assert not left(tmp_path)


@pytest.fixture
def here() -> Iterator[Path]:
    """Where jobs run: with the commands that start ranks, a program, and the nodes."""
    with folder_of_a_ray() as folder:
        (folder / "bin").mkdir()
        for name in ("srun", "mpiexec"):
            shutil.copy(ROOT / "tests/support/launcher.sh", folder / "bin" / name)
            (folder / "bin" / name).chmod(0o755)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "nodes").write_text("here\nthere\n")
        yield folder


@pytest.mark.own_cluster
@pytest.mark.timeout(300)
class TestJobs:
    """Both scripts, with real Rays: two nodes on this machine."""

    def test_a_pbs_job_has_ray_on_each_node_and_ends_as_its_program_does(self, here: Path) -> None:
        settings = job_settings(here, here / "bin")
        elsewhere = {"PATH": f"{here / 'bin'}:/usr/bin:/bin", "TENSORVINE_VENV": sys.prefix}
        settings = {**settings, **elsewhere, "PROGRAM": f"python {here / 'program.py'} 3"}
        done = run_script([str(FILES / "batch" / "pbs.sh")], settings)
        assert done.returncode == 3, done.stderr
        assert "nodes 2 shards 2" in done.stdout
        assert "asks for a token" in done.stdout
        assert "Repository default is down" in done.stdout
        assert list((here / "models" / "manifests").glob("m*"))
        assert not left(here)

    def test_a_slurm_job_that_is_told_to_end_writes_what_was_saved_and_ends(self, here: Path) -> None:
        command = ["bash", str(FILES / "batch" / "slurm.sh"), sys.executable, str(here / "program.py"), "wait"]
        job = subprocess.Popen(command, env=bare(job_settings(here, here / "bin")), stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        for line in job.stdout:
            if "nodes 2" in line:
                break
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=WAIT_S)
        assert job.returncode == 143
        assert "Repository default is down" in said
        assert list((here / "models" / "manifests").glob("m*"))
        assert not left(here)


def job_settings(folder: Path, commands: Path) -> dict[str, str]:
    return {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TENSORVINE_BATCH": str(FILES / "batch"),
        "TENSORVINE_PORT": str(free_port()),
        "TENSORVINE_CLIENT_PORT": str(free_port()),
        "TENSORVINE_PATH": str(folder / "models"),
        "RAY_TMPDIR": str(folder),
        "SLURM_JOB_NUM_NODES": "2",
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_O_WORKDIR": str(folder),
    }


def run_script(command: list[str], settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *command],  # noqa: S607
        env=bare(settings),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def bare(settings: dict[str, str]) -> dict[str, str]:
    """Return an environment that knows of no Ray and no job but these settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "PMI"))}
    quick = {"RAY_enable_metrics_collection": "0", "RAY_prestart_worker_first_driver": "0"}
    return {**kept, "RAY_raylet_start_wait_time_s": "120", **quick, **settings}


def left(folder: Path) -> list[psutil.Process]:
    """Return the processes that are still there when all have had a while to end."""
    _, alive = psutil.wait_procs(of_ray_in(folder), timeout=END_S)
    return alive
