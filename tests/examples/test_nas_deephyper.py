"""The search of `examples/nas` when DeepHyper does it: failing candidates, a dying worker, and what cannot be asked."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deephyper", reason="DeepHyper is not installed")

import ray
from tensorvine.actors import Repository
from tensorvine.actors.search import disconnect
from typer.testing import CliRunner

from examples.nas import hyper
from examples.nas import run as command_line
from examples.nas.data import Data
from examples.nas.journal import Journal, Told, read
from examples.nas.plan import Plan, Search
from examples.nas.results import results_of
from examples.nas.space import AttnSpace
from examples.nas.trainer import Trainer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*random_state:DeprecationWarning"),
    pytest.mark.workers_import("torch", "deephyper.evaluator", "deephyper.hpo", "tensorvine.actors.search.deephyper"),
]
FAILS, DIES = 3, 5


@dataclass(frozen=True)
class Troubled(Trainer):
    """A trainer with trouble for two candidates."""

    def train(self, model: Any, data: Data, seed: int) -> float:
        if seed == FAILS:
            raise MemoryError("no memory for it")
        if seed == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        return Trainer.train(self, model, data, seed)


def test_the_journal_is_that_of_a_search_and_the_repository_holds_its_population(
    repository: Repository, tmp_path: Path
) -> None:
    plan = Plan(data="wine", candidates=12, population=4, sample=2, search=Search.DEEPHYPER)
    trainer = Troubled(AttnSpace(2, range(4, 82)), "wine")
    seen: list[Told] = []
    with Journal(tmp_path / "journal.jsonl", plan) as journal:
        told, deaths = hyper.search(plan, trainer, repository, journal, 2, 0.0, tmp_path, seen.append)
    disconnect(repository.name)
    found, events = read(tmp_path / "journal.jsonl")
    assert (found, results_of(found, events).told, seen) == (plan, told, told)
    assert sorted(one.outcome.number for one in told) == list(range(12))
    failed = {one.outcome.number: one.outcome.error or "" for one in told if one.outcome.quality is None}
    assert set(failed) == {FAILS, DIES}
    assert "F_MemoryError" in failed[FAILS]
    assert ("F_WorkerCrashed" in failed[DIES], deaths) == (True, 1)
    population = deque((one.outcome.ref for one in told if one.outcome.quality is not None), maxlen=4)
    assert sorted(map(str, repository.models())) == sorted(map(str, population))
    assert any(one.outcome.ancestor and one.outcome.taken for one in told)
    assert all(one.outcome.bytes_written for one in told if one.outcome.ref)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--search", "deephyper", "--resume"], "cannot be resumed"),
        (["--search", "deephyper", "--elastic"], "expected a search by evolution"),
        (["--search", "deephyper", "--mode", "hdf5"], "expected repository with --search deephyper"),
        (["--search", "random"], "expected one of evolution, deephyper"),
    ],
)
def test_what_it_cannot_do_is_refused(options: list[str], says: str) -> None:
    told = CliRunner().invoke(command_line.app, options, env={"COLUMNS": "200"})
    assert told.exit_code == 2
    assert says in " ".join(told.output.replace("│", " ").split())


def test_without_deephyper_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    told = CliRunner().invoke(command_line.app, ["--search", "deephyper"], env={"COLUMNS": "200"})
    assert told.exit_code == 2
    assert "pip install '.[search]'" in " ".join(told.output.replace("│", " ").split())
