"""A recipe names parts of models and functions of tensors; whatever the code of these raises is one kind of error."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tensorvine.store.errors import GraphError
from tensorvine.store.torch import build, recipe_of
from torch import nn


class Ending(BaseException):
    """Of no usual kind."""


class Given(nn.Module):
    """Is given a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function


class Raising(nn.Module):
    raises: BaseException | None = None

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.width = width
        if self.raises is not None:
            raise self.raises


def named(name: str) -> str:
    return recipe_of(Given(torch.relu)).replace('"torch:relu"', json.dumps(name))


@pytest.mark.parametrize(
    "name",
    [
        "torch:from_file",
        "torch:import_ir_module",
        "torch:import_ir_module_from_buffer",
        "torch:set_num_threads",
        "torch:set_flush_denormal",
        "torch:fork",
        "torch:frombuffer",
        "torch:_C._set_grad_enabled",
        "torch:load",
        "torch.nn.modules.module:register_module_forward_hook",
        "torch.nn.attention:register_flash_attention_impl",
    ],
)
def test_functions_of_pytorch_that_are_not_of_tensors_are_refused(name: str) -> None:
    with pytest.raises(GraphError, match=f"{name.rpartition('.')[2].rpartition(':')[2]}: expected"):
        build(named(name))


def test_nor_are_they_written() -> None:
    with pytest.raises(GraphError, match="torch:from_file: expected a module class or a function on tensors"):
        recipe_of(Given(torch.from_file))


OF_TENSORS = [
    *(torch.relu, torch.relu_, torch.softmax, torch.zeros, torch.randn_like),
    *(F.gelu, F.silu, F.relu, F.tanh, F.hardswish, F.leaky_relu_),
    *(nn.init.xavier_uniform_, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm),
]


@pytest.mark.parametrize("function", OF_TENSORS)
def test_functions_of_tensors_come_back(function: Callable[..., Any]) -> None:
    assert build(recipe_of(Given(function))).function is function


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a package that can be imported, and is a program: returns the file that this writes."""
    written = tmp_path / "ran"
    (tmp_path / "a_program").mkdir()
    (tmp_path / "a_program" / "__init__.py").write_text("")
    text = f"import sys, pathlib\npathlib.Path({str(written)!r}).write_text('')\nsys.exit(3)\n"
    for name in ("__main__", "ends"):
        (tmp_path / "a_program" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_program", raising=False)  # of a test before
    return written


@pytest.mark.parametrize("kind", ["class", "partial", "module"])
def test_a_program_is_not_run(kind: str, program: Path) -> None:
    name = "a_program.__main__:Net"
    if kind == "module":
        recipe = recipe_of(nn.Sequential(nn.ReLU())).replace("torch.nn.modules.activation:ReLU", name)
    else:
        given: Any = name if kind == "class" else [name, [], {"dict": []}]
        recipe = recipe_of(Given(torch.relu)).replace('{"named":"torch:relu"}', json.dumps({kind: given}))
    with pytest.raises(GraphError, match=r"found the program 'a_program\.__main__'"):
        build(recipe)
    assert not program.exists()


def test_a_module_that_ends_the_process_when_it_is_imported_is_an_error(program: Path) -> None:
    recipe = recipe_of(nn.Sequential(nn.ReLU())).replace("torch.nn.modules.activation:ReLU", "a_program.ends:Net")
    with pytest.raises(GraphError, match=r"a_program\.ends:Net: expected .*; found SystemExit\(3\)"):
        build(recipe)
    assert program.exists()


def test_classes_of_the_running_program_are_found() -> None:
    main: Any = sys.modules["__main__"]
    kind = type("OfMain", (nn.Module,), {"__module__": "__main__"})
    main.OfMain = kind
    try:
        assert type(build(recipe_of(kind()))) is kind
    finally:
        del main.OfMain


@pytest.mark.parametrize(
    "raised", [SystemExit(3), GeneratorExit(), Ending("now"), asyncio.CancelledError(), MemoryError()]
)
def test_whatever_a_constructor_raises_is_an_error_of_ours(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(Raising())
    monkeypatch.setattr(Raising, "raises", raised)
    with pytest.raises(GraphError, match=r"Raising\(width\): expected the constructor to succeed; found "):
        build(recipe)


def test_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(Raising())
    monkeypatch.setattr(Raising, "raises", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build(recipe)
