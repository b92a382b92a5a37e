"""The hooks for DeepHyper against DeepHyper itself: searches on Ray, failures, retirement, and the mutation."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ConfigSpace import EqualsCondition, ForbiddenAndConjunction, ForbiddenEqualsClause, OrdinalHyperparameter
from deephyper.evaluator import Evaluator
from deephyper.evaluator.callback import Callback
from deephyper.hpo import HpProblem, RegularizedEvolution
from tensorvine.actors import Repository
from tensorvine.actors.search import Candidate, Population, disconnect
from tensorvine.actors.search.deephyper import AgedEvolution, Retirement, SparingEvaluator, run_function
from tensorvine.store import ModelRef
from tensorvine.store.errors import InvalidNameError, ShardUnavailableError
from torch import nn

from tests.support.waiting import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*random_state:DeprecationWarning"),
    pytest.mark.workers_import("torch", "deephyper.evaluator", "deephyper.hpo", "tensorvine.actors.search.deephyper"),
]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

REPOSITORY = "search-deephyper"
WIDTHS = [4, 6, 8, 10]
DECISIONS = ("a", "b", "c")
FAILS, NAN, DIES = 6, 8, 10
"""Widths of the last layer with which a candidate fails."""


def problem(last: list[int] = WIDTHS) -> HpProblem:
    space = HpProblem()
    for name in DECISIONS[:-1]:
        space.add_hyperparameter(WIDTHS, name)
    space.add_hyperparameter(last, DECISIONS[-1])
    return space


def build(job: Any) -> nn.Module:
    torch.manual_seed(0)
    widths = [8, *(job[name] for name in DECISIONS)]
    parts = [nn.Linear(before, after) for before, after in pairwise(widths)]
    return nn.Sequential(*parts, nn.Linear(widths[-1], 2))


def train(candidate: Candidate, job: Any) -> float:
    """Change what may change; the quality is what the widths are worth, so that the search has something to find."""
    if job["c"] == FAILS:
        raise MemoryError("such a wide layer does not fit")
    if job["c"] == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        for parameter in candidate.model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    return float("nan") if job["c"] == NAN else float(job["a"] + job["b"])


@pytest.fixture(scope="module")
def shared(cluster: object) -> Iterator[Repository]:
    with Repository.start(REPOSITORY, shards=1, preallocate_bytes=0) as started:
        yield started
        disconnect(REPOSITORY)


@pytest.fixture
def repo(shared: Repository) -> Iterator[Repository]:
    yield shared
    for ref in shared.models():
        shared.retire(ref)
    eventually(lambda: shared.stats().tensors == 0, "nothing to be pinned")


def search(
    repo: Repository, prefix: str, folder: Path, evals: int, last: list[int] = WIDTHS, evaluator: Any = SparingEvaluator
) -> tuple[Any, Population]:
    """Search; gives what was tried, as a table, and the population."""
    population = Population(repo, size=4)
    run = run_function(build, train, repository=repo.name, prefix=prefix)
    workers = evaluator(run, num_workers=2, callbacks=[Retirement(population, prefix)])
    evolution = AgedEvolution(problem(last), random_state=3, log_dir=str(folder), population_size=4, sample_size=2)
    return evolution.search(workers, max_evals=evals), population


class Begun:
    """A function of Ray's that knows which of its tasks have begun."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.begun: list[Any] = []

    def remote(self, *arguments: Any, **options: Any) -> Any:
        self.begun.append(self._function.remote(*arguments, **options))
        return self.begun[-1]


class TestSearch:
    def test_the_repository_holds_the_populations_and_nothing_of_failed_candidates(
        self, repo: Repository, tmp_path: Path
    ) -> None:
        table, population = search(repo, "a/", tmp_path, 16, last=[4, FAILS, NAN])
        failed = table["objective"].astype(str).str.startswith("F")
        assert set(table["objective"][failed]) == {"F_MemoryError", "F_ValueError"}
        fine = table[~failed]
        assert len(fine) > 4
        assert len(population.refs) == 4
        assert repo.models() == sorted(population.refs)
        assert {str(ref) for ref in population.refs} <= set(fine["m:ref"])
        assert fine["m:ancestor"].astype(bool).any()
        for ref in population.refs:
            assert repo.info(ref).quality == float(fine[fine["m:ref"] == str(ref)]["objective"].iloc[0])
        assert repo.verify() == []

        _, other = search(
            repo, "b/", tmp_path, 4, last=[4]
        )  # none is dropped: the first ones have only a/ to begin with
        assert repo.models() == sorted(population.refs + other.refs)
        parents = {repo.info(ref).parent for ref in other.refs}
        assert any(parent is not None and parent.name.startswith("a/") for parent in parents)

    def test_a_killed_worker_costs_its_candidate_only(self, repo: Repository, tmp_path: Path) -> None:
        table, population = search(repo, "killed/", tmp_path, 6, last=[4, DIES])
        lost = table["objective"].astype(str).str.startswith("F_WorkerCrashed")
        assert 0 < lost.sum() < len(table)
        assert repo.models() == sorted(population.refs)

    def test_one_that_is_interrupted_waits_for_nothing_more(self, repo: Repository, tmp_path: Path) -> None:
        class CtrlC(Callback):
            def on_done(self, job: Any) -> None:
                raise KeyboardInterrupt

        run = run_function(build, train, repository=repo.name, prefix="ended/")
        workers = SparingEvaluator(run, num_workers=2, callbacks=[CtrlC()])
        workers._remote_run_function = jobs = Begun(workers._remote_run_function)
        workers.abandon()  # nothing has begun
        with pytest.raises(KeyboardInterrupt):
            AgedEvolution(problem([4]), log_dir=str(tmp_path)).search(workers, max_evals=6)
        loop = workers.loop
        workers.abandon()
        assert loop is not None
        assert loop.is_closed()
        assert not asyncio.all_tasks(loop)
        assert workers.close() == []  # which DeepHyper calls when it is collected
        workers.abandon()
        workers.loop = idle = asyncio.new_event_loop()  # as when each job had ended before
        workers.abandon()
        assert idle.is_closed()
        assert jobs.begun
        _, late = ray.wait(jobs.begun, num_returns=len(jobs.begun), timeout=PATIENCE_S)
        assert not late  # what they save is there before the next test begins

    def test_deephypers_own_evaluator_runs_it_too(self, repo: Repository, tmp_path: Path) -> None:
        table, population = search(repo, "stock/", tmp_path, 4, last=[4, FAILS], evaluator=create)
        assert len(table) >= 4
        assert repo.models() == sorted(population.refs)

    def test_a_repository_that_is_not_there_fails_each_job(self, repo: Repository) -> None:
        run = run_function(build, train, repository="search-nowhere", prefix="x/")
        assert run(SimpleNamespace(id="0.1")) == {
            "objective": "F_RepositoryNotFoundError",
            "metadata": {"ref": "", "ancestor": "", "layers": 0, "repository_s": 0.0},
        }

    def test_a_space_that_yields_no_model_costs_that_candidate(self, repo: Repository) -> None:
        def impossible(job: Any) -> nn.Module:
            return nn.Linear(8, -1)

        run = run_function(impossible, train, repository=repo.name, prefix="x/")
        assert run(SimpleNamespace(id="0.1"))["objective"] == "F_RuntimeError"
        assert repo.models() == []

    def test_a_prefix_that_is_no_name_is_refused(self) -> None:
        with pytest.raises(InvalidNameError):
            run_function(build, train, repository="any", prefix="no spaces ")


def create(run: Any, **options: Any) -> Any:
    return Evaluator.create(run, method="ray", method_kwargs=options)


def job(number: int, objective: Any, ref: ModelRef | None = None) -> Any:
    return SimpleNamespace(id=f"0.{number}", objective=objective, metadata={} if ref is None else {"ref": str(ref)})


class TestRetirement:
    def save(self, repo: Repository, number: int) -> ModelRef:
        return repo.save(f"r/0.{number}", {"w": np.full(3, number)}).ref

    def test_what_a_failed_job_saved_goes_and_the_population_stays(self, repo: Repository) -> None:
        population = Population(repo, 2)
        retirement = Retirement(population, "r/")
        refs = [self.save(repo, number) for number in range(3)]
        self.save(repo, 11)
        retirement.on_done(job(0, 0.5, refs[0]))
        retirement.on_done(job(1, "F_Error"))
        retirement.on_done_other(job(2, 0.5, refs[2]))
        assert population.refs == (refs[0], refs[2])
        assert repo.models() == [refs[0], ModelRef("r/0.11", 1), refs[2]]

    def test_what_a_worker_saved_before_it_died_goes_when_its_job_was_done_again(self, repo: Repository) -> None:
        retirement = Retirement(Population(repo, 2), "r/")
        first, second = self.save(repo, 20), self.save(repo, 20)
        retirement.on_done(job(20, 0.5, second))
        assert second.version == first.version + 1
        assert repo.models() == [second]

    def test_a_repository_that_does_not_answer_is_asked_again_after_the_next_job(
        self, repo: Repository, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        retirement = Retirement(Population(repo, 1), "r/")
        refs = [self.save(repo, number) for number in (30, 31, 32, 33)]

        def unavailable(*_: object) -> None:
            raise ShardUnavailableError("scripted")

        retirement.on_done(job(30, 0.5, refs[0]))
        with monkeypatch.context() as patch:
            patch.setattr(repo, "models", unavailable)
            patch.setattr(repo, "retire", unavailable)
            retirement.on_done(job(31, 0.5, refs[1]))
            retirement.on_done(job(32, "F_Error"))
        assert repo.models() == refs
        retirement.on_done(job(33, 0.5, refs[3]))
        assert repo.models() == [refs[3]]

    def test_a_job_of_another_run_function_is_an_error(self, repo: Repository) -> None:
        with pytest.raises(ValueError, match="expected the metadata of run_function"):
            Retirement(Population(repo, 2), "r/").on_done(job(0, 0.5))


def evolution(space: HpProblem, folder: Path, kind: type[RegularizedEvolution] = AgedEvolution, size: int = 6) -> Any:
    """Return a search whose population is full, of distinct qualities."""
    made = kind(space, random_state=1, log_dir=str(folder), population_size=size, sample_size=3)
    made.tell([(config, float(number)) for number, config in enumerate(made.ask(size))])
    return made


def distances(made: Any, count: int) -> list[int]:
    """Ask for children; gives how many decisions each differs in from the member that is most like it."""
    members = [config for config, _ in made._population]
    children = made.ask(count)
    assert children == json.loads(json.dumps(children))
    return [min(sum(child[name] != member[name] for name in member) for member in members) for child in children]


class TestMutation:
    def mixed(self) -> HpProblem:
        space = HpProblem()
        space.add_hyperparameter((1, 3), "whole")
        space.add_hyperparameter((0.1, 10.0, "log-uniform"), "real")
        space.add_hyperparameter(["x", "y"], "choice")
        space.add_hyperparameter([True, False], "flag")
        space.add_hyperparameter([8], "fixed")
        space.space.add(OrdinalHyperparameter("size", [1, 2, 4]))
        return space

    def test_a_child_differs_from_its_parent_in_one_decision(self, tmp_path: Path) -> None:
        made = evolution(self.mixed(), tmp_path, size=4)
        made.sample_size = 4  # the parent is the best
        parent = max(made._population, key=lambda member: member[1])[0]
        changed = [[name for name in parent if child[name] != parent[name]] for child in made.ask(200)]
        assert {len(names) for names in changed} == {1}
        assert {name for names in changed for name in names} == {"whole", "real", "choice", "flag", "size"}

    def test_deephypers_own_mutation_makes_copies_and_ours_does_not(self, tmp_path: Path) -> None:
        theirs = distances(evolution(problem(), tmp_path, RegularizedEvolution), 100)
        assert 0 in theirs
        ours = AgedEvolution(problem(), random_state=1, log_dir=str(tmp_path), population_size=2, sample_size=1)
        ours.tell([({"a": 4, "b": 4, "c": 4}, 0.0)] * 2)
        assert distances(ours, 100) == [1] * 100

    def test_a_child_that_the_space_forbids_is_drawn_again(self, tmp_path: Path) -> None:
        space = problem()
        forbidden = ForbiddenAndConjunction(
            ForbiddenEqualsClause(space.space["a"], 10), ForbiddenEqualsClause(space.space["b"], 10)
        )
        space.space.add(forbidden)
        children = evolution(space, tmp_path).ask(200)
        assert not [child for child in children if child["a"] == child["b"] == 10]
        assert {child["a"] for child in children} == set(WIDTHS)

    def test_what_hangs_on_a_decision_follows_it(self, tmp_path: Path) -> None:
        space = HpProblem()
        kind = space.add_hyperparameter(["plain", "wide"], "kind")
        width = space.add_hyperparameter([16, 32, 64], "width")
        space.add_condition(EqualsCondition(width, kind, "wide"))
        for child in evolution(space, tmp_path).ask(100):
            assert child["kind"] == "wide" or child["width"] == 16

    def test_a_space_without_a_choice_is_an_error(self, tmp_path: Path) -> None:
        space = HpProblem()
        space.add_hyperparameter([8], "fixed")
        made = evolution(space, tmp_path)
        with pytest.raises(ValueError, match="expected a decision with at least two values"):
            made.ask(1)

    def test_a_space_that_forbids_all_children_is_an_error(self, tmp_path: Path) -> None:
        space = HpProblem()
        space.add_hyperparameter(["x", "y"], "only")
        space.space.add(ForbiddenEqualsClause(space.space["only"], "y"))
        with pytest.raises(ValueError, match="expected a child that the space allows"):
            evolution(space, tmp_path).ask(1)
