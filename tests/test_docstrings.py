"""Every module can be imported, and every example in its docstrings does what it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"tensorvine.store.keras": "keras", "tensorvine.store.torch": "torch"}
MODULES = [
    f"tensorvine.{package}" if path.stem == "__init__" else f"tensorvine.{package}.{path.stem}"
    for package in ("store", "planner", "actors", "clusters")
    for path in sorted((ROOT / package).glob("*.py"))
]


def run_examples(name: str) -> doctest.TestResults:
    if name in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[name])
    module = importlib.import_module(name)
    assert Path(module.__file__ or "").parent.parent == ROOT
    return doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    assert run_examples(name).failed == 0
