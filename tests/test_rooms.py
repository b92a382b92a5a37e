"""The rooms of the source: what stands where, who imports how, and what is public is told.

That imports go down only, and in no circle, is held by import-linter (`[tool.importlinter]` of pyproject.toml).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("store", "planner", "actors", "clusters")
SOURCES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
IDS = [path.relative_to(ROOT).as_posix() for path in SOURCES]
PACKAGES = [path.parent.relative_to(ROOT).as_posix() for path in SOURCES if path.name == "__init__.py"]

ITSELF = "clusters/package"
"""Installed as the package `tensorvine`."""
FILES = [f"clusters/{folder}" for folder in ("batch", "dask", "kuberay", "ray_up")]
"""Folders without modules: files for clusters, which the wheel has, too."""


def test_actors_holds_rooms_only() -> None:
    entries = [path for path in (ROOT / "actors").iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert {path.name for path in entries if not (path / "__init__.py").exists()} == {"__init__.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_room_says_what_it_is_for(package: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))


def test_few_functions_take_or_give_any() -> None:
    found: list[str] = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            signature = [*ast.walk(node.args), *(ast.walk(node.returns) if node.returns else ())]
            if any(isinstance(part, ast.Name) and part.id == "Any" for part in signature):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert len(found) <= 150, found


def test_tests_mirror_the_source() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    beside = {".", "benchmarks", "branches", "examples", "fuzz", "hosts", "simulation", "soak"}
    assert folders - beside <= set(PACKAGES)


def test_actors_are_called_by_channels_only() -> None:
    callers = {path.relative_to(ROOT).as_posix() for path in SOURCES if ".remote(" in path.read_text()}
    of_libraries = {"actors/search/deephyper.py", "actors/updates/ray_serve.py"}  # DeepHyper's and Ray Serve's actors
    assert callers == {"actors/engine/ray/engine.py", *of_libraries}


def exported(package: str) -> set[str]:
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse((ROOT / package / "__init__.py").read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(names) == len(set(names))
    return set(names)


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_packages_import_their_own_relatively(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = [ast.unparse(node) for node in imports]
    assert not [line for line in lines if line.startswith(("import tensorvine", "from tensorvine"))]


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_no_call_passes_eight_arguments_by_place(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    many = [call for call in calls if len(call.args) >= 8]
    lines = [f"line {call.lineno}: {ast.unparse(call.func)}" for call in many]
    assert not [line for line in lines if not re.search(r": _?log\.", line)]  # a log's text takes its values by place


def is_lazy(package: str) -> bool:
    """Say whether a package imports its names when they are first used: a table of them is what it says this by."""
    return "\n_MODULES = {" in (ROOT / package / "__init__.py").read_text()


@pytest.mark.parametrize("package", [package for package in LAYERS if not is_lazy(package)])
def test_a_package_only_re_exports_and_lists_all_that_it_does(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    imported: set[str] = set()
    for node in tree.body[1:]:
        if ast.unparse(node) == "from typing import TYPE_CHECKING" or ast.unparse(node).endswith("import removed"):
            continue
        if isinstance(node, ast.If):
            assert ast.unparse(node).startswith("if not TYPE_CHECKING:\n    __getattr__ = removed(__name__, {")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            imported |= {alias.asname or alias.name for alias in node.names}
        else:
            assert isinstance(node, ast.Assign), ast.unparse(node)
            assert ast.unparse(node.targets[0]) == "__all__"
    assert imported == exported(package)


@pytest.mark.parametrize("package", [package for package in LAYERS if is_lazy(package)])
def test_a_lazy_package_only_re_exports_and_its_table_says_what_a_type_checker_reads(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    read: dict[str, str | None] = {}
    table: dict[str, str] = {}
    listed: list[str] = []
    for node in tree.body[1:]:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "TYPE_CHECKING"
            *lines, names = node.body
            imports = [line for line in lines if isinstance(line, ast.ImportFrom) and line.level == 1]
            assert len(imports) == len(lines)
            assert isinstance(names, ast.Assign)
            assert ast.unparse(names.targets[0]) == "__all__"
            listed = ast.literal_eval(names.value)
            read |= {
                alias.name: line.module for line in lines if isinstance(line, ast.ImportFrom) for alias in line.names
            }
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            table = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NEEDS":
            assert ast.literal_eval(node.value).keys() <= table.keys()
        else:
            assert ast.unparse(node) in (
                "from __future__ import annotations",
                "from typing import TYPE_CHECKING",
                "from ..store.lazy import lazy",
                "__getattr__, __dir__ = lazy(__name__, _MODULES)",
                "__getattr__, __dir__ = lazy(__name__, _MODULES, _NEEDS)",
            )
    assert read == table
    assert len(set(listed)) == len(listed)
    assert set(listed) == table.keys()
    assert set(table) == exported(package)
