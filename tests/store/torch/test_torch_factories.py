"""A stored name is not a permission: which factories are called, and which names import nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorvine.store.errors import GraphError
from tensorvine.store.torch import build, factories, recipe_of, register_factory
from torch import nn

ZOO = """
import os, pathlib, torch
from subprocess import Popen
from torch import load
pathlib.Path(WRITTEN).write_text("imported")

def make(width, names=()):
    return torch.nn.Linear(width, len(names) or 1)

class Held:
    make = staticmethod(make)
    load = torch.load

class Net(torch.nn.Linear):
    def __init__(self, width=2):
        super().__init__(width, 1)
        self.hparams = {"width": width}

number = 3
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factories, "_registered", {})


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a package with a visible effect when it is imported. Return the file that it writes."""
    written = tmp_path / "written"
    code = ZOO.replace("WRITTEN", repr(str(written)))
    for path in ("zoo_of_tests/__init__.py", "zoo_of_tests/inner.py", "zoo_of_tests/__main__.py", "zoo_of_tests2.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(code)
    (tmp_path / "zoo_of_tests" / "ends.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    yield written
    for name in [name for name in sys.modules if name.startswith("zoo_of_tests")]:
        del sys.modules[name]


def stated(name: str, **arguments: object) -> str:
    return recipe_of(nn.Linear(3, 2), name, arguments)


NAME = "zoo_of_tests.inner:make"
GIVEN: dict[str, Any] = {"width": 3, "names": ("a", "b")}


def test_saving_imports_nothing(imported: Path) -> None:
    stated(NAME, **GIVEN)
    assert not imported.exists()


def named_by(kind: str, name: str) -> str:
    """Write a recipe of each kind that names a class or function."""
    recipe = json.loads(stated(name, **GIVEN))
    recipe["torch"][kind] = recipe["torch"].pop("factory")
    return json.dumps(recipe)


@pytest.mark.parametrize("trusted", [[], ["zoo"], ["zoo_of_tests2", "torch"], ["zoo_of_tests.other"]])
@pytest.mark.parametrize("kind", ["factory", "config", "hparams"])
def test_a_name_without_permission_imports_nothing(kind: str, trusted: list[str], imported: Path) -> None:
    with pytest.raises(GraphError, match=f"factory '{NAME}': expected permission to import it"):
        build(named_by(kind, NAME), trusted_packages=trusted)
    assert not imported.exists()
    assert "zoo_of_tests" not in sys.modules


@pytest.mark.parametrize("name", ["zoo_of_tests:Net", "zoo_of_tests.inner:make"])
def test_the_version_before_imports_nothing(name: str, imported: Path) -> None:
    model = {"module": {"class": name, "arguments": {}}}
    nested = {"module": {"class": "torch.nn.modules.container:Sequential", "children": [["0", model]]}}
    argument = {"module": {"class": "torch.nn.modules.linear:Linear", "arguments": {"in_features": {"named": name}}}}
    for written in (model, nested, argument):
        recipe = json.dumps({"torch": {**json.loads(recipe_of(nn.ReLU()))["torch"], "model": written}})
        with pytest.raises(
            GraphError, match=f"{name}: expected a (module of torch.nn|function of torch.nn.functional)"
        ):
            build(recipe, trusted_packages=["zoo_of_tests"])
    assert not imported.exists()


@pytest.mark.parametrize("trusted", [["zoo_of_tests"], ["other", "zoo_of_tests.inner"]])
def test_a_trusted_package_is_imported(trusted: list[str], imported: Path) -> None:
    again = build(stated(NAME, **GIVEN), trusted_packages=trusted)
    assert (again.in_features, again.out_features) == (3, 2)
    assert imported.exists()
    assert build(stated("zoo_of_tests.inner:Held.make", **GIVEN), trusted_packages=trusted).in_features == 3


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("os.mkdir", "os is a module"),
        ("torch.load", "torch is a module"),
        ("Popen", "found <class 'subprocess.Popen'>"),
        ("load", "found <function load"),
        ("Held.load", "found <function load"),
        ("number", "number is a int"),
        ("gone", "has no attribute 'gone'"),
    ],
)
def test_a_trusted_package_does_not_give_what_it_imports(path: str, found: str, imported: Path) -> None:
    with pytest.raises(GraphError, match=rf"factory 'zoo_of_tests\.inner:{path}': expected .*{found}"):
        build(stated(f"zoo_of_tests.inner:{path}"), trusted_packages=["zoo_of_tests"])


def test_the_callers_factory_needs_no_permission(imported: Path) -> None:
    recipe = stated("gone.models:make", **GIVEN)
    assert build(recipe, lambda width, names: nn.Linear(width, len(names))).in_features == 3
    assert not imported.exists()
    assert build(recipe, NAME).in_features == 3
    with pytest.raises(GraphError, match=r"factory 'gone.models:make': .*ModuleNotFoundError"):
        build(recipe, "gone.models:make")


def test_a_registered_factory_is_called_in_place_of_an_import() -> None:
    @register_factory
    def make(width: int, names: tuple[str, ...]) -> nn.Module:
        return nn.Linear(width, len(names))

    make.__module__, make.__qualname__ = "gone.models", "make"
    register_factory(make)
    assert build(stated("gone.models:make", **GIVEN)).in_features == 3

    @register_factory
    class Moved(nn.Linear):
        def __init__(self, width: int = 2) -> None:
            super().__init__(width, 1)
            self.hparams = {"width": width}

    Moved.__module__, Moved.__qualname__ = "gone.models", "Moved"
    register_factory(Moved)
    assert type(build(recipe_of(Moved(4)))) is Moved


@pytest.mark.parametrize(
    "name", ["", "make", "zoo:", ":make", ".zoo:make", "zoo:make()", "zoo..a:make", "zoo/a:make", 3]
)
def test_a_name_of_another_form_is_refused(name: Any) -> None:
    with pytest.raises(GraphError, match=r"expected a name such as 'package\.module:function'"):
        recipe_of(nn.Linear(3, 2), name)
    forged = json.loads(stated("zoo:make"))
    forged["torch"]["factory"] = name
    with pytest.raises(GraphError, match=r"expected a name such as 'package\.module:function'"):
        build(json.dumps(forged), trusted_packages=["zoo"])


@pytest.mark.parametrize("value", [object(), torch.ones(2), [{"a": len}]])
def test_an_argument_that_cannot_be_stored_is_named(value: object) -> None:
    with pytest.raises(GraphError, match=r"argument 'width' of zoo:make.*: expected numbers"):
        stated("zoo:make", width=value)


def test_a_program_is_not_run(imported: Path) -> None:
    with pytest.raises(GraphError, match=r"found the program 'zoo_of_tests\.__main__'"):
        build(stated("zoo_of_tests.__main__:make"), trusted_packages=["zoo_of_tests"])
    assert not imported.exists()


def test_functions_of_the_running_program_are_found() -> None:
    main: Any = sys.modules["__main__"]
    main.OfMain = type("OfMain", (nn.Linear,), {"__module__": "__main__"})
    recipe = recipe_of(nn.Linear(3, 2), "__main__:OfMain", {"in_features": 3, "out_features": 2})
    try:
        assert type(build(recipe, trusted_packages=["__main__"])) is main.OfMain
    finally:
        del main.OfMain


class Ending(BaseException):
    """Of no usual kind."""


RAISED = [SystemExit(3), GeneratorExit(), Ending("now"), asyncio.CancelledError(), MemoryError()]


@pytest.mark.parametrize("raised", RAISED, ids=repr)
def test_all_exceptions_of_a_factory_are_errors_of_one_kind(raised: BaseException) -> None:
    def make(**given: object) -> nn.Module:
        raise raised

    with pytest.raises(GraphError, match=r"make\(width, names\): expected the call to succeed; found "):
        build(stated("zoo:make", **GIVEN), make)


def test_an_import_that_ends_the_process_is_an_error(imported: Path) -> None:
    with pytest.raises(GraphError, match=r"factory 'zoo_of_tests\.ends:make': expected .*; found SystemExit\(3\)"):
        build(stated("zoo_of_tests.ends:make"), trusted_packages=["zoo_of_tests"])


def test_an_interrupt_stays_one() -> None:
    def make() -> nn.Module:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(stated("zoo:make"), make)


def test_a_factory_that_returns_no_module_is_refused() -> None:
    with pytest.raises(GraphError, match=r"dict\(width, names\): expected a torch module; found dict"):
        build(stated("zoo:make", **GIVEN), dict)
