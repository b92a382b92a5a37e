"""The cluster files: Ray's own checks accept what Ray reads, and the job scripts run with a stand-in launcher."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click import Command
from packaging.requirements import Requirement
from tensorvine.actors.engine.room import STORE_MOST
from tensorvine.clusters.head import free_port

from tests.support.control_groups import ENTER, memory_group

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = ROOT / "clusters"
RAY_UP = sorted((FILES / "ray_up").glob("*.yaml"))
SCRIPTS = sorted((FILES / "batch").glob("*.sh"))
CLOUDS = ("aws", "gcp")
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


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


class TestRayUp:
    @pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
    def test_ray_accepts_it_as_ray_up_does(self, path: Path) -> None:
        from ray.autoscaler._private.util import prepare_config, validate_config

        (config,) = read(path)
        prepared = prepare_config(config)
        validate_config(prepared)
        assert prepared["cluster_name"] == f"tensorvine-{path.stem}"

    @pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
    def test_the_head_starts_the_repository_on_a_path_that_all_nodes_reach(self, path: Path) -> None:
        (config,) = read(path)
        up = config["head_start_ray_commands"][-1]
        assert up.startswith("tensorvine up --")
        assert " --path " in up
        assert {"hosts": "/shared/", "aws": "s3://", "gcp": "gs://"}[path.stem] in up

    @pytest.mark.parametrize("kind", ["aws", "gcp"])
    def test_workers_that_go_when_they_are_idle_hold_no_shards(self, kind: str) -> None:
        (config,) = read(FILES / "ray_up" / f"{kind}.yaml")
        assert "--nodes tensorvine=1 " in config["head_start_ray_commands"][-1]
        holding = [name for name, node in config["available_node_types"].items() if "tensorvine" in node["resources"]]
        assert holding == [config["head_node_type"]]

    @pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
    def test_its_ray_start_commands_have_only_options_that_ray_knows(self, path: Path) -> None:
        (config,) = read(path)
        known = options_of_ray_start()
        for line in [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]:
            _, found, words = line.partition("ray start ")
            for option in [word.partition("=")[0] for word in words.split()] if found else ():
                assert option == "$sizes" or option in known, line

    @pytest.mark.parametrize("cloud", CLOUDS)
    def test_a_cloud_has_a_head_without_and_workers_with_a_gpu_that_come_and_go(self, cloud: str) -> None:
        (config,) = read(FILES / "ray_up" / f"{cloud}.yaml")
        kinds = config["available_node_types"]
        assert "GPU" not in kinds[config["head_node_type"]]["resources"]
        (worker,) = [kind for name, kind in kinds.items() if name != config["head_node_type"]]
        assert worker["resources"]["GPU"] >= 1
        assert worker["min_workers"] < worker["max_workers"]

    @pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
    def test_every_node_has_the_token_and_starts_ray_with_it(self, path: Path) -> None:
        (config,) = read(path)
        assert ("~/.ray/auth_token", "~/.ray/auth_token") in config["file_mounts"].items()
        for kind in ("head", "worker"):
            (start,) = [line for line in config[f"{kind}_start_ray_commands"] if "ray start" in line]
            assert start.startswith("chmod 600 ~/.ray/auth_token; ")
            settings, _, rest = start.partition("; sizes=$(tensorvine ray-sizes) && ")[2].partition(" ray start ")
            assert settings == "RAY_memory_monitor_refresh_ms=0 RAY_AUTH_MODE=token"
            assert "$sizes" in rest.split()

    @pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
    def test_every_node_gets_this_versions_wheel_and_installs_it_in_the_tests_versions(self, path: Path) -> None:
        (config,) = read(path)
        wheel = f"tensorvine-{PROJECT['version']}-py3-none-any.whl"
        assert {remote: local for remote, local in config["file_mounts"].items() if "token" not in remote} == {
            f"~/tensorvine/{wheel}": f"dist/{wheel}",
            "~/tensorvine/constraints.txt": "dist/constraints.txt",
            "~/tensorvine/install.sh": "clusters/batch/install.sh",
        }
        (install,) = [line for line in config["setup_commands"] if "install.sh" in line]
        assert f"bash ~/tensorvine/install.sh ~/tensorvine/{wheel} " in install
        for line in [*config["setup_commands"], *config.get("head_setup_commands", ())]:
            assert "pip install" not in line or "--constraint ~/tensorvine/constraints.txt" in line

    def test_a_fixed_set_of_hosts_asks_for_the_autoscaler_that_starts_its_workers(self) -> None:
        import inspect

        from ray.autoscaler._private import autoscaler as first
        from ray.autoscaler.v2 import autoscaler as second

        (config,) = read(FILES / "ray_up" / "hosts.yaml")
        (start,) = [line for line in config["head_start_ray_commands"] if "ray start" in line]
        assert "; export RAY_enable_autoscaler_v2=0; " in start
        known = [("record_local_head_state_if_needed" in inspect.getsource(module)) for module in (first, second)]
        assert known == [True, False]  # when the second knows the local head, too, the line can go

    @pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
    def test_it_says_which_ports_must_be_closed(self, path: Path) -> None:
        said = [line for line in path.read_text().splitlines() if line.startswith("#")]
        for port in ("6379", "8076", "8265", "10001", "10002-19999", "32768-60999"):
            assert any(port in line for line in said), port

    def test_a_wrong_one_is_refused(self) -> None:
        import jsonschema
        from ray.autoscaler._private.util import prepare_config, validate_config

        (config,) = read(FILES / "ray_up" / "aws.yaml")
        with pytest.raises(jsonschema.ValidationError):
            validate_config(prepare_config({**config, "max_workers": "many"}))


def options_of_ray_start() -> set[str]:
    from ray.scripts.scripts import start

    assert isinstance(start, Command)
    return {option for parameter in start.params for option in parameter.opts}


class TestKubeRay:
    @pytest.fixture
    def documents(self) -> dict[str, dict[str, Any]]:
        found = {document["kind"]: document for document in read(FILES / "kuberay" / "raycluster.yaml")}
        assert set(found) == {"PersistentVolumeClaim", "NetworkPolicy", "RayCluster"}
        return found

    @pytest.fixture
    def manifest(self, documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return documents["RayCluster"]

    @pytest.fixture
    def pods(self, manifest: dict[str, Any]) -> list[dict[str, Any]]:
        groups = (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"])
        return [group["template"]["spec"] for group in groups]

    def test_rays_autoscaler_derives_its_own_configuration_from_it(self, manifest: dict[str, Any]) -> None:
        from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
        from ray.autoscaler._private.util import validate_config

        placed = {**manifest, "metadata": {**manifest["metadata"], "namespace": "default"}}
        config = _derive_autoscaling_config_from_ray_cr(placed)
        validate_config(config)
        kinds = config["available_node_types"]
        assert kinds[config["head_node_type"]]["resources"]["CPU"] == 8
        assert "GPU" not in {k for k, v in kinds[config["head_node_type"]]["resources"].items() if v}
        assert kinds["gpu"]["resources"]["GPU"] == 1
        assert [name for name, kind in kinds.items() if "tensorvine" in kind["resources"]] == [config["head_node_type"]]
        assert "tensorvine up --nodes tensorvine=1 " in (FILES / "kuberay" / "raycluster.yaml").read_text()
        assert (kinds["gpu"]["min_workers"], kinds["gpu"]["max_workers"]) == (0, 8)

    def test_it_has_what_the_operator_needs(self, manifest: dict[str, Any]) -> None:
        assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
        spec = manifest["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())
            assert {f"--{name}" for name in group["rayStartParams"]} <= options_of_ray_start()
            pod = group["template"]["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            for container in pod["containers"]:
                assert container["image"]
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes - {"kubernetes"}
                assert "/models" in {mount["mountPath"] for mount in container["volumeMounts"]}

    def test_ray_promises_no_more_memory_than_its_pods_have(self, manifest: dict[str, Any]) -> None:
        spec = manifest["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            (container,) = group["template"]["spec"]["containers"]
            limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
            store = int(group["rayStartParams"]["object-store-memory"])
            assert store == STORE_MOST
            assert int(group["rayStartParams"]["memory"]) == limit - store

    def test_ray_asks_for_a_token(self, manifest: dict[str, Any]) -> None:
        assert manifest["spec"]["authOptions"] == {"mode": "token"}
        major, minor, _ = map(int, manifest["spec"]["rayVersion"].split("."))
        assert (major, minor) >= (2, 52)  # the operator refuses an older one

    def test_only_the_clusters_own_pods_are_let_in(
        self, documents: dict[str, dict[str, Any]], manifest: dict[str, Any]
    ) -> None:
        policy = documents["NetworkPolicy"]["spec"]
        own = {"matchLabels": {"ray.io/cluster": manifest["metadata"]["name"]}}
        assert policy == {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}

    def test_its_pods_satisfy_the_restricted_standard(
        self, manifest: dict[str, Any], pods: list[dict[str, Any]]
    ) -> None:
        contexts = [container["securityContext"] for pod in pods for container in pod["containers"]]
        for context in [*contexts, manifest["spec"]["autoscalerOptions"]["securityContext"]]:
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        for pod in pods:
            context = pod["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] > 0
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}

    def test_code_on_ray_finds_no_token_of_kubernetes(
        self, manifest: dict[str, Any], pods: list[dict[str, Any]]
    ) -> None:
        head, *workers = pods
        assert all(pod["automountServiceAccountToken"] is False for pod in pods)
        (volume,) = [one for one in head["volumes"] if "projected" in one]
        (mount,) = manifest["spec"]["autoscalerOptions"]["volumeMounts"]
        assert mount == {
            "name": volume["name"],
            "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
            "readOnly": True,
        }
        files = {
            entry.get("path") or entry["items"][0]["path"]
            for source in volume["projected"]["sources"]
            for entry in source.values()
        }
        assert files == {"token", "ca.crt", "namespace"}
        mounted = {mount["name"] for pod in pods for one in pod["containers"] for mount in one["volumeMounts"]}
        assert volume["name"] not in mounted
        assert not any("projected" in one for pod in workers for one in pod["volumes"])

    def test_its_images_are_named_in_full(self, manifest: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        for image in [container["image"] for pod in pods for container in pod["containers"]]:
            assert re.fullmatch(rf"[\w./-]+:[\d.]+-ray{manifest['spec']['rayVersion']}", image)

    def test_its_image_is_the_dockerfiles_with_the_pods_user_and_what_the_probes_call(
        self, manifest: dict[str, Any], pods: list[dict[str, Any]]
    ) -> None:
        text = (FILES / "kuberay" / "Dockerfile").read_text()
        (image,) = {container["image"] for pod in pods for container in pod["containers"]}
        assert f"-t {image} dist/\n" in text
        assert image.rpartition(":")[2].startswith(f"{PROJECT['version']}-")
        assert f"\nray=={manifest['spec']['rayVersion']} \\\n" in (ROOT / "requirements.lock").read_text()
        (user,) = {(pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) for pod in pods}
        assert f"\nUSER {user[0]}:{user[1]}\n" in text
        assert f"useradd --uid {user[0]} --gid {user[1]} " in text
        assert re.search(r"^FROM python:3\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
        assert " wget " in text  # KubeRay's probes
        assert re.search(r"^ARG EXTRAS=\S*\bserve\b", text, re.MULTILINE)  # what they ask
        assert "--constraint /opt/tensorvine/constraints.txt" in text


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
    """A folder with a short path: Ray puts sockets there. What still runs with it at the end is killed."""
    folder = Path(tempfile.mkdtemp(prefix="tv", dir="/tmp"))
    (folder / "bin").mkdir()
    for name in ("srun", "mpiexec"):
        shutil.copy(ROOT / "tests/support/launcher.sh", folder / "bin" / name)
        (folder / "bin" / name).chmod(0o755)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "nodes").write_text("here\nthere\n")
    yield folder
    for process in started(folder):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


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


def test_every_requirement_of_ray_is_of_one_that_knows_tokens() -> None:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = [Requirement(text) for text in itertools.chain(*lists)]
    rays = [requirement for requirement in found if requirement.name == "ray"]
    assert len(rays) >= 5
    for requirement in rays:
        assert "2.58.9" not in requirement.specifier
        assert "2.59.0" in requirement.specifier


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


def started(folder: Path) -> list[psutil.Process]:
    """Find the processes that run with this folder as Ray's."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def left(folder: Path) -> list[psutil.Process]:
    """Return the processes that are still there when all have had a while to end."""
    _, alive = psutil.wait_procs(started(folder), timeout=END_S)
    return alive
