"""The files for Dask's operator on Kubernetes: they fit each other, Dask's own commands and the tests' versions."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = ROOT / "clusters" / "dask"


class TestDaskOnKubernetes:
    @pytest.fixture
    def documents(self) -> dict[str, dict[str, Any]]:
        found = {
            document["kind"]: document for document in yaml.safe_load_all((FILES / "daskcluster.yaml").read_text())
        }
        assert set(found) == {"PersistentVolumeClaim", "NetworkPolicy", "DaskCluster"}
        return found

    @pytest.fixture
    def spec(self, documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
        manifest = documents["DaskCluster"]
        assert (manifest["apiVersion"], manifest["metadata"]["name"]) == ("kubernetes.dask.org/v1", "tensorvine")
        return manifest["spec"]

    @pytest.fixture
    def pods(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        return [spec["scheduler"]["spec"], spec["worker"]["spec"]]

    @pytest.mark.parametrize("kind", ["scheduler", "worker"])
    def test_dask_knows_the_options_that_a_pod_starts_it_with(self, spec: dict[str, Any], kind: str) -> None:
        (container,) = spec[kind]["spec"]["containers"]
        command, found, *options = container["args"]
        assert (command, found) == ("dask", kind)
        main = import_module(f"distributed.cli.dask_{kind}").main
        known = {option for parameter in main.params for option in parameter.opts}
        assert {word for word in options if word.startswith("--")} <= known

    def test_tasks_may_take_half_of_a_workers_memory(self, spec: dict[str, Any]) -> None:
        (container,) = spec["worker"]["spec"]["containers"]
        limit = container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]["memory"] == limit
        said = container["args"][container["args"].index("--memory-limit") + 1]
        assert 2 * int(said.removesuffix("GiB")) == int(limit.removesuffix("Gi"))

    def test_the_service_is_the_schedulers(self, spec: dict[str, Any]) -> None:
        (container,) = spec["scheduler"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"tcp-comm": 8786, "http-dashboard": 8787}
        service = spec["scheduler"]["service"]
        assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
        assert service["selector"] == {"dask.org/cluster-name": "tensorvine", "dask.org/component": "scheduler"}

    def test_only_its_own_pods_and_the_operator_are_let_in(self, documents: dict[str, dict[str, Any]]) -> None:
        policy = documents["NetworkPolicy"]["spec"]
        own = {"matchLabels": {"dask.org/cluster-name": "tensorvine"}}
        operator = {"matchLabels": {"kubernetes.io/metadata.name": "dask-operator"}}
        assert policy["podSelector"] == own
        assert policy["ingress"] == [{"from": [{"podSelector": own}, {"namespaceSelector": operator}]}]
        assert "-n dask-operator " in (FILES / "daskcluster.yaml").read_text()

    def test_its_pods_satisfy_the_restricted_standard(self, pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            (container,) = pod["containers"]
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 1000)
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["automountServiceAccountToken"] is False

    def test_its_image_is_the_dockerfiles_in_the_tests_versions(self, pods: list[dict[str, Any]]) -> None:
        text = (FILES / "Dockerfile").read_text()
        (image,) = {container["image"] for pod in pods for container in pod["containers"]}
        assert f"-t {image} dist/\n" in text
        version, _, dask = image.rpartition(":")[2].partition("-dask")
        assert version == PROJECT["version"]
        assert f"\ndask=={dask} \\\n" in (ROOT / "requirements.lock").read_text()
        (user,) = {(pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) for pod in pods}
        assert f"\nUSER {user[0]}:{user[1]}\n" in text
        assert f"useradd --uid {user[0]} --gid {user[1]} " in text
        assert "--constraint /opt/tensorvine/constraints.txt" in text
        assert re.search(r"^FROM python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
