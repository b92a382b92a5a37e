"""The search of `examples/nas` on Dask: workers that die or never start, and the example where there is no Ray."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import Client
from tensorvine.actors import Repository
from tensorvine.actors.engine.dask.clients import engine_of
from tensorvine.actors.engine.dask.engine import DaskEngine
from tensorvine.store import ModelRef
from typer.testing import CliRunner

from examples.nas import crew as crews
from examples.nas import run as command_line
from examples.nas.crew import Crew
from examples.nas.data import Data
from examples.nas.plan import Plan
from examples.nas.space import AttnSpace
from examples.nas.store import Access
from examples.nas.trainer import Trainer
from tests.support import nas_search
from tests.support.dask_cluster import local_cluster
from tests.support.example_runs import check

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPACE = AttnSpace(2, range(4, 82))
PLAN = Plan(data="wine", candidates=10, population=4, sample=2)
DIES = 5
"""A candidate whose first worker is killed while it trains."""
SAYS = (
    r"1\.5e\+19 candidates in 18 decisions; 8 are evaluated",
    r"The best candidates, repository",
    r"candidates \(of these, failed\) +8 \(0\)",
)
"""As regular expressions."""


@dataclass(frozen=True)
class Troubled(Trainer):
    """A trainer whose process is killed for one candidate, once."""

    note: str = ""
    """A file that says that it was."""

    def train(self, model: Any, data: Data, seed: int) -> float:
        if seed == DIES and not (note := Path(self.note)).exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Trainer.train(self, model, data, seed)


@pytest.fixture(scope="module")
def engine() -> Iterator[DaskEngine]:
    with local_cluster(1) as workers, Client(workers) as client, closing(engine_of(client)) as made:
        yield made


@pytest.mark.own_cluster
def test_a_worker_that_is_killed_costs_its_candidate_and_nothing_else(engine: DaskEngine, tmp_path: Path) -> None:
    with Repository.start("nas-dask", shards=1, preallocate_bytes=0, engine=engine) as repository:
        told, keeper, deaths = nas_search.run(
            repository, PLAN, Troubled(SPACE, "wine", note=str(tmp_path / "note")), tmp_path
        )
        assert deaths == 1
        found = {one.outcome.number: one.outcome for one in told}
        assert sorted(found) == list(range(PLAN.candidates))
        assert all(outcome.quality is not None for outcome in found.values())
        assert found[DIES].ref == f"{keeper.name_of(DIES, 2)}@1"
        last = [ModelRef.parse(one.outcome.ref or "") for one in told[-PLAN.population :]]
        assert repository.models() == sorted(last)
        assert repository.verify() == []


@pytest.mark.own_cluster
def test_workers_that_never_start_are_an_error_with_the_reason(
    engine: DaskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "STARTS", starts := 2)
    with Crew(engine, Trainer(SPACE, "no such data"), Access(), 1) as crew:
        for _ in range(starts - 1):
            assert crew.next(60.0) is None
        with pytest.raises(RuntimeError, match=rf"{starts} in a row died before: data: expected one of digits"):
            crew.next(60.0)


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_it_runs_without_ray_draws_its_picture_and_leaves_no_process(mark: str, tmp_path: Path) -> None:
    options = ("--engine", "dask", "--mode", "repository", "--candidates", "8", "--data", "wine")
    check("nas", SAYS, mark, tmp_path, *options, without_ray=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--search", "deephyper"], "expected evolution with --engine dask"),
        (["--elastic"], "expected --engine ray: Ray's autoscaler makes the nodes"),
        (["--address", "auto"], "expected none with --engine dask; found 'auto'"),
    ],
)
def test_what_dask_cannot_do_is_refused(options: list[str], says: str) -> None:
    told = CliRunner().invoke(command_line.app, ["--engine", "dask", *options], env={"COLUMNS": "200"})
    assert told.exit_code == 2
    assert says in " ".join(told.output.replace("│", " ").split())
