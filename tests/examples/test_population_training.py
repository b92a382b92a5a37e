"""Population-based training: `examples/population_training`, run to its end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.example_runs import check

SAYS = (
    r"\d\.\d s: \d becomes a copy of \d at step \d+, with learning rate 0\.\d+, after",
    r"exploits +[1-9]\d* +[1-9]\d*",
    r"accuracy of the best member at its end +[89]\d\.\d% +[89]\d\.\d%",  # how often they are copied, time decides
)
"""As regular expressions."""


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_it_runs_draws_its_picture_and_leaves_no_process(mark: str, tmp_path: Path) -> None:
    check("population_training", SAYS, mark, tmp_path, modules="ray.tune")


def test_nobody_who_is_being_replaced_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainers are closed in the middle of the fork otherwise."""
    folder = Path(__file__).parents[2] / "examples/population_training"
    monkeypatch.syspath_prepend(folder)
    module: Any = importlib.import_module("population")
    for name in [path.stem for path in folder.iterdir() if path.stem in sys.modules]:
        del sys.modules[name]  # another example has its own of that name
    trainers: Any = None
    members = [module.Member(number, trainers, 0.1, step=1, accuracy=number / 10) for number in range(2)]
    worst, best = members
    problem: Any = SimpleNamespace(interval=1)
    population = module.Population(problem, [0.1, 0.1], 100)
    population._members = members
    best.replaced = True
    assert population._winner(worst) is None
    best.replaced = False
    assert population._winner(worst) is best
