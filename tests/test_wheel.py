"""The wheel: it holds every module, and tells a type checker what its functions take and give."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("store", "planner", "actors", "clusters")
PAGES = ("README.md", "docs/guide.md")
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
WRONG = """
from tensorvine.actors import Repository
with Repository.start() as repo:
    saved: int = repo.save("net", {}).ref
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what setuptools leaves behind is not left in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", *LAYERS):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(copy / "dist"), str(copy))
    (built,) = (copy / "dist").glob("*.whl")
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


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def errors(python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the type checker finds in the pages' examples, and in one that is wrong."""
    folder = tmp_path_factory.mktemp("examples")
    examples = [example for page in PAGES for example in EXAMPLE.findall((ROOT / page).read_text())]
    assert len(examples) >= 5
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
    assert {f"tensorvine/{module}" for module in modules} <= names


def test_the_pages_examples_are_of_the_types_that_the_wheel_says(errors: list[dict[str, Any]]) -> None:
    assert [found for found in errors if Path(found["file"]).name != "wrong.py"] == []


def test_a_wrong_example_is_refused(errors: list[dict[str, Any]]) -> None:
    (found,) = (found for found in errors if Path(found["file"]).name == "wrong.py")
    assert "ModelRef" in found["message"]
    assert found["range"]["start"]["line"] == 3
