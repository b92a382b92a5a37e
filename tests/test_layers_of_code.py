"""The layers of the code: imports go downward only, the engine stays in its place, and what is public is told.

Rules
- The sources are read, not imported: an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("store", "planner", "actors", "clusters")
TOP = ("examples", "benchmarks")
ENGINE = ("actors", "clusters", *TOP)
"""Who may import Ray."""
SOURCES = [path for layer in (*LAYERS, *TOP) for path in sorted((ROOT / layer).rglob("*.py"))]
IDS = [path.relative_to(ROOT).as_posix() for path in SOURCES]


def imports_of(text: str, module: str) -> Iterator[str]:
    """Give the absolute names that a module imports; `module` is its own, packages ending in `.__init__`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def layer_of(imported: str) -> str | None:
    """Name the layer of ours that an absolute import reaches into."""
    parts = imported.removeprefix("tensorvine.").split(".")
    ours = imported.startswith("tensorvine.") and parts[0] in LAYERS
    return parts[0] if ours or parts[0] in TOP else None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("tensorvine", *parts) if parts[0] in LAYERS else parts)


def upward(layer: str, imported: str) -> bool:
    """Say whether code of `layer` must not import `imported`."""
    target = layer_of(imported)
    if target in TOP:
        return layer != target
    return layer in LAYERS and target is not None and LAYERS.index(target) > LAYERS.index(layer)


def exported(package: str) -> set[str]:
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / package / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(names) == len(set(names))
    return set(names)


class TestReader:
    """The reader of imports sees what it must, so that the tests below can fail."""

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("import tensorvine.actors.engine as e", "actors"),
            ("from tensorvine.planner import home_of", "planner"),
            ("from tensorvine import actors", "actors"),
            ("from ..actors import engine", "actors"),
            ("from .. import clusters", "clusters"),
            ("def f():\n    from ..actors.engine import group", "actors"),
            ("from benchmarks.measure import Tensors", "benchmarks"),
            ("import examples.finetune", "examples"),
        ],
    )
    def test_an_upward_import_is_found_however_it_is_written(self, line: str, expected: str) -> None:
        assert expected in {layer_of(name) for name in imports_of(line, "tensorvine.store.graph")}
        assert any(upward("store", name) for name in imports_of(line, "tensorvine.store.graph"))

    @pytest.mark.parametrize("line", ["from .refs import ModelRef", "import json", "from . import keras", "import ray"])
    def test_an_import_within_the_layer_or_from_outside_is_not_upward(self, line: str) -> None:
        assert not any(upward("store", name) for name in imports_of(line, "tensorvine.store.graph"))

    def test_a_package_resolves_its_relative_imports_like_its_modules(self) -> None:
        assert "tensorvine.store.refs.ModelRef" in imports_of("from .refs import ModelRef", "tensorvine.store.__init__")


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_go_downward_only(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    wrong = [name for name in imports_of(path.read_text(), module_of(path)) if upward(layer, name)]
    assert not wrong, f"{layer} must not import {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_engines_are_imported_where_they_belong(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    roots = {name.split(".")[0] for name in imports_of(path.read_text(), module_of(path))}
    assert not roots & {"dask", "distributed"}
    assert layer in ENGINE or "ray" not in roots


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_packages_import_their_own_relatively(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] in LAYERS:
        imports = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        lines = [ast.unparse(node) for node in imports]
        assert not [line for line in lines if line.startswith(("import tensorvine", "from tensorvine"))]


def is_lazy(package: str) -> bool:
    """Say whether a package imports its names when they are first used: a table of them is what it says this by."""
    return "\n_MODULES = {" in (ROOT / package / "__init__.py").read_text()


@pytest.mark.parametrize("package", [package for package in LAYERS if not is_lazy(package)])
def test_a_package_only_re_exports_and_lists_all_that_it_does(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    imported: set[str] = set()
    for node in tree.body[1:]:
        if isinstance(node, ast.ImportFrom):
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
    for node in tree.body[1:]:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "TYPE_CHECKING"
            lines = [line for line in node.body if isinstance(line, ast.ImportFrom) and line.level == 1]
            assert len(lines) == len(node.body)
            read |= {alias.name: line.module for line in lines for alias in line.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            table = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            continue
        else:
            assert ast.unparse(node) in (
                "from __future__ import annotations",
                "from typing import TYPE_CHECKING",
                "from ..store.lazy import lazy",
                "__getattr__, __dir__ = lazy(__name__, _MODULES)",
            )
    assert read == table
    assert set(table) == exported(package)


@pytest.mark.skipif(not (ROOT / "docs/api.md").exists(), reason="docs/api.md is not written yet")
@pytest.mark.parametrize("package", LAYERS)
def test_every_public_name_is_documented(package: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {word for page in pages if page.exists() for word in re.findall(r"\w+", page.read_text())}
    assert exported(package) <= words, f"not in README.md or docs/: {sorted(exported(package) - words)}"
