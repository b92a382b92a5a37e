"""The package `tensorvine`: its names, deleted names, and what its packages list without an extra."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import tensorvine
from tensorvine.actors import Repository

WITHOUT = """
import inspect, io, pydoc, sys
for module in sys.argv[1].split(","):
    sys.modules[module] = None
import tensorvine.actors
from tensorvine.actors import *
members = dict(inspect.getmembers(tensorvine.actors))
helped = io.StringIO()
pydoc.Helper(output=helped).help(tensorvine.actors)
missing = sorted(set(tensorvine.actors._MODULES) - members.keys())
print(missing, "Repository" in globals(), "Producer" in helped.getvalue())
"""
OF_KERAS = ["CheckpointCallback", "ForkCallback", "KerasTraining"]
HEAVY = "{'ray', 'distributed', 'torch', 'keras', 'numpy'}"


def test_it_has_the_names_of_a_first_program() -> None:
    assert tensorvine.Repository is Repository
    assert tensorvine.connect.__doc__
    assert tensorvine.__version__ == importlib.metadata.version("tensorvine")
    assert dir(tensorvine) == ["Repository", "__version__", "connect"]
    everything: dict[str, object] = {}
    exec("from tensorvine import *", everything)  # noqa: S102  a program's first line
    assert {"Repository", "connect", "__version__"} <= everything.keys()


def test_it_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'tensorvine' has no attribute 'Repo'"):
        tensorvine.Repo  # type: ignore[attr-defined]  # noqa: B018


def test_importing_it_imports_no_engine_and_no_framework() -> None:
    script = (
        "import sys, tensorvine; print(sorted({'ray', 'distributed', 'torch', 'keras', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("modules", "left_out"), [("ray.serve", []), ("keras,tensorflow,ray.serve", OF_KERAS)])
def test_its_packages_can_be_listed_and_imported_whole_without_an_extra(modules: str, left_out: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT, modules], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == f"{left_out} True True\n"


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("tensorvine.actors.collective.stock", "register", "tensorvine.actors.collective.connect"),
        ("tensorvine.planner", "schedule_front", r"optimal_schedule\("),
        ("tensorvine.store.errors", "CollectiveError", "PeerLostError"),
        ("tensorvine.store.torch", "architecture_of", "graph_of"),
    ],
)
def test_importing_a_deleted_name_says_what_to_use(module: str, name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=rf"{module}\.{name} was removed: use .*{instead}"):
        exec(f"from {module} import {name}")  # noqa: S102
