"""The cluster files for `ray up` and KubeRay: Ray's own checks accept them, and they let in only who has the token."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Command
from packaging.requirements import Requirement
from tensorvine.actors.engine.room import STORE_MOST

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = ROOT / "clusters"
RAY_UP = sorted((FILES / "ray_up").glob("*.yaml"))
CLOUDS = ("aws", "gcp")


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
        assert re.search(r"^FROM python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
        assert " wget " in text  # KubeRay's probes
        assert "[ray,$EXTRAS]" in text  # Ray's dashboard, which the probes call
        assert "--constraint /opt/tensorvine/constraints.txt" in text


def test_every_requirement_of_ray_is_of_one_that_knows_tokens() -> None:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = [Requirement(text) for text in itertools.chain(*lists)]
    rays = [requirement for requirement in found if requirement.name == "ray"]
    assert len(rays) == 2
    for requirement in rays:
        assert "2.58.9" not in requirement.specifier
        assert "2.59.0" in requirement.specifier
