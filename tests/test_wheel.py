"""The wheel of `scripts/wheel`: it holds every module and the files for clusters, tells a type checker what its
functions take and give, and runs where nothing else of the checkout is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tensorvine.store.lazy import to_install

ROOT = Path(__file__).parent.parent
LAYERS = ("store", "planner", "actors", "clusters")
PYTHONS = ("3.11", "3.12", "3.13")
PAGES = ("howto/edge", "howto/operating", "howto/slurm_pbs", "tutorials/finetuning")
"""Those whose other packages have types."""
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)$", re.MULTILINE)
UNREACHABLE = re.compile(r"(connection broken by .*|ReadTimeoutError.*|IncompleteRead.*|HTTP error 5\d\d.*)")
"""What pip says when an index did not answer for the last time."""
WRONG = """
from tensorvine import Repository
with Repository.start() as repo:
    saved: int = repo.save("net", {}).ref
"""

ON_RAY = """
import numpy as np
import tensorvine.actors, tensorvine.clusters, tensorvine.planner, tensorvine.store
from tensorvine import Repository

with Repository.start() as repo:
    repo.save("a", {"w": np.ones(1000, np.float32), "b": np.zeros(2)})
    saved = repo.save("b", {"w": np.ones(1000, np.float32), "b": np.ones(2)}, parent="a")
    print(saved.ref, saved.bytes_written, saved.bytes_inherited, repo.load("b")["b"])
print(tensorvine.store.__file__)
"""

ON_DASK = """
import numpy as np
from tensorvine.actors import Repository
from tensorvine.store.errors import EngineUnavailableError

if __name__ == "__main__":
    try:
        Repository.start()
    except EngineUnavailableError as exc:
        print(exc)
    with Repository.start(engine="dask") as repo:
        saved = repo.save("m", {"w": np.arange(3, dtype=np.float32)})
        print(saved.ref, repo.load("m")["w"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script makes; constraints.txt is beside it."""
    return build(tmp_path_factory.mktemp("dist"))


def build(folder: Path) -> Path:
    run([str(ROOT / "scripts/wheel"), str(folder)])
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel, and with what this one has beside."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    pip("install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    (site / "beside.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "bin" / "python"


@pytest.fixture(scope="module", params=PYTHONS)
def alone(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel with Ray, what that depends on, and nothing else."""
    return installed(request.param, wheel, "ray", tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module", params=PYTHONS)
def with_dask(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel with Dask."""
    return installed(request.param, wheel, "dask", tmp_path_factory.mktemp("with-dask"))


def interpreter(version: str) -> str:
    """Return a Python of this version, from the PATH or from pyenv, whose programs on the PATH may not run."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for found in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")):
        if found and not subprocess.run([found, "-c", ""], capture_output=True, check=False, timeout=60).returncode:
            return str(found)
    pytest.skip(f"this machine has no Python {version}")


def installed(version: str, wheel: Path, extra: str, folder: Path) -> Path:
    """Make an environment."""
    subprocess.run([interpreter(version), "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    constraints = str(wheel.parent / "constraints.txt")
    what = f"{wheel}[{extra}]"
    arguments = ["--no-compile", "--retries", "1", "--timeout", "15", "--constraint", constraints, what]
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    try:
        ended = subprocess.run(
            [*command, "install", *arguments], capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("no package index gives all that is needed within 300 s")
    if ended.returncode != 0 and (silent := UNREACHABLE.search(ended.stderr)):
        pytest.skip(f"no package index can be reached: {silent[1]}")
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder / "bin"


def pip(*arguments: str) -> None:
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments])


def run(command: list[str], folder: Path | None = None) -> str:
    """Run a program to a good end, where no environment variable leads it here; gives what it printed."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    ended = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def errors(python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the type checker finds in the pages' examples, and in one that is wrong."""
    folder = tmp_path_factory.mktemp("examples")
    examples = EXAMPLE.findall((ROOT / "README.md").read_text())
    examples += ["\n".join(EXAMPLE.findall((ROOT / f"docs/{page}.md").read_text())) for page in PAGES]
    assert len(examples) == 6
    for number, example in enumerate(examples):
        (folder / f"example_{number}.py").write_text(example)
    (folder / "wrong.py").write_text(WRONG)
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", str(python), "-p", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    said = json.loads(ended.stdout)
    assert said["summary"]["filesAnalyzed"] == len(examples) + 1
    return [found for found in said["generalDiagnostics"] if found["severity"] == "error"]


def test_every_module_is_in_it_and_each_package_is_marked_as_typed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"tensorvine/{layer}/py.typed" for layer in LAYERS} <= names
    modules = {path.relative_to(ROOT).as_posix() for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert {f"tensorvine/{module}" for module in modules - {"clusters/package/__init__.py"}} <= names
    assert {"tensorvine/__init__.py", "tensorvine/py.typed"} <= names


def test_the_pages_examples_are_of_the_types_that_the_wheel_says(errors: list[dict[str, Any]]) -> None:
    wrong = [found for found in errors if Path(found["file"]).name != "wrong.py"]
    assert [(Path(found["file"]).name, found["range"]["start"]["line"], found["message"]) for found in wrong] == []


def test_a_wrong_example_is_refused(errors: list[dict[str, Any]]) -> None:
    (found,) = (found for found in errors if Path(found["file"]).name == "wrong.py")
    assert "ModelRef" in found["message"]
    assert found["range"]["start"]["line"] == 3


def test_the_files_for_clusters_are_in_it_as_they_are(wheel: Path) -> None:
    held = zipfile.ZipFile(wheel)
    for folder, count in (("batch", 5), ("dask", 2), ("kuberay", 2), ("ray_up", 3)):
        files = [path for path in (ROOT / "clusters" / folder).iterdir() if path.is_file()]
        assert len(files) == count
        for file in files:
            assert held.read(f"tensorvine/clusters/{folder}/{file.name}") == file.read_bytes()


def test_the_web_pages_files_are_in_it_with_the_licences_of_others(wheel: Path) -> None:
    held = zipfile.ZipFile(wheel)
    static = ROOT / "clusters/web/static"
    files = [path for path in static.rglob("*") if path.is_file()]
    assert len(files) == 15
    for file in files:
        assert held.read(f"tensorvine/clusters/web/static/{file.relative_to(static)}") == file.read_bytes()


def test_the_same_source_gives_the_same_bytes_and_the_folder_has_no_other_wheel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "tensorvine-0.0.1-py3-none-any.whl").touch()
    again = build(tmp_path)
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def test_the_constraints_are_the_versions_of_the_tests(wheel: Path) -> None:
    pins = dict(PIN.findall((wheel.parent / "constraints.txt").read_text()))
    locked = dict(re.findall(r"^(\S+)==(\S+) \\$", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert len(locked) > 100
    torch = pins.pop("torch")
    assert pins == locked
    assert f" torch=={torch}\n" in (ROOT / "scripts/_venv").read_text()


@pytest.mark.own_cluster
class TestAlone:
    """The wheel in an environment of its own, from an index."""

    def test_all_that_it_brings_has_the_tests_versions(self, alone: Path, wheel: Path) -> None:
        pins = {
            name.replace("-", "_"): version
            for name, version in PIN.findall((wheel.parent / "constraints.txt").read_text())
        }
        found = [
            folder.name.removesuffix(".dist-info").split("-") for folder in alone.parent.glob("lib/*/*/*.dist-info")
        ]
        brought = {name.lower().replace(".", "_"): version for name, version in found if name != "tensorvine"}
        assert {"ray", "numpy", "pyarrow"} <= set(brought)
        assert {name: pins.get(name) for name in brought} == brought

    def test_a_repository_runs_on_ray(self, alone: Path, tmp_path: Path) -> None:
        (tmp_path / "example.py").write_text(ON_RAY)
        line, place = run([str(alone / "python"), "example.py"], tmp_path).splitlines()
        assert line == "b@1 16 4000 [1. 1.]"
        assert Path(place).is_relative_to(alone.parent)

    def test_a_repository_runs_on_dask_where_there_is_no_ray(self, with_dask: Path, tmp_path: Path) -> None:
        assert not list(with_dask.parent.glob("lib/*/*/ray"))
        (tmp_path / "example.py").write_text(ON_DASK)
        assert run([str(with_dask / "python"), "example.py"], tmp_path).splitlines() == [
            f"engine: expected the packages of ray; found no ray: {to_install('ray')}",
            "m@1 [0. 1. 2.]",
        ]

    def test_its_command_writes_the_files_for_a_cluster(self, alone: Path, wheel: Path, tmp_path: Path) -> None:
        run([str(alone / "tensorvine"), "cluster-files", "slurm", "job", "--wheel", str(wheel)], tmp_path)
        assert f":-{wheel}}}" in (tmp_path / "job/slurm.sh").read_text()
        for shared in ("install.sh", "job.sh", "node.sh"):
            assert (tmp_path / "job" / shared).read_text() == (ROOT / "clusters/batch" / shared).read_text()
