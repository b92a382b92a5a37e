"""Optuna on a repository: trials name their versions, and those that are not among the best are retired."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import optuna
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.search.optuna import Retirement, attach, ref_of
from tensorvine.store import ModelRef


@pytest.fixture(scope="module")
def shared(cluster: object) -> Iterator[Repository]:
    with Repository.start("search-optuna", shards=1, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def repo(shared: Repository) -> Iterator[Repository]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield shared
    for ref in shared.models():
        shared.retire(ref)


def study(direction: str = "maximize", storage: str | None = None) -> optuna.Study:
    return optuna.create_study(
        study_name="s",
        direction=direction,
        storage=storage,
        sampler=optuna.samplers.RandomSampler(1),
        load_if_exists=True,
    )


def objective_of(repo: Repository, name: str = "s") -> optuna.study.study.ObjectiveFuncType:
    def objective(trial: optuna.Trial) -> float:
        value = trial.suggest_float("value", 0.0, 1.0)
        saved = repo.save(f"{name}/{trial.number}", {"w": np.full(4, value)}, quality=value)
        attach(trial, saved.ref)
        if trial.number % 5 == 3:
            raise optuna.TrialPruned
        if trial.number % 5 == 4:
            raise FloatingPointError
        return value

    return objective


def best(of: optuna.Study, count: int) -> list[ModelRef]:
    done = [trial for trial in of.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    sign = -1.0 if of.direction == optuna.study.StudyDirection.MAXIMIZE else 1.0
    refs = [ref_of(trial) for trial in sorted(done, key=lambda trial: sign * float(trial.values[0]))[:count]]
    return sorted(ref for ref in refs if ref is not None)


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_best_trials_keep_their_versions(repo: Repository, direction: str) -> None:
    one = study(direction)
    one.optimize(objective_of(repo), 20, callbacks=[Retirement(repo, best=3)], catch=(FloatingPointError,))
    assert len(repo.models()) == 3
    assert repo.models() == best(one, 3)


def test_a_study_that_is_taken_up_again_goes_on_retiring(repo: Repository, tmp_path: object) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    for _ in range(2):
        one = study(storage=storage)
        one.optimize(objective_of(repo), 6, callbacks=[Retirement(repo, best=2)], catch=(FloatingPointError,))
    assert len(one.trials) == 12
    assert repo.models() == best(one, 2)


def test_a_version_that_a_best_trial_names_too_stays(repo: Repository) -> None:
    saved: list[ModelRef] = []

    def objective(trial: optuna.Trial) -> float:
        if trial.number < 2:
            saved.append(repo.save(f"s/{trial.number}", {"w": np.full(4, trial.number)}).ref)
        attach(trial, saved[trial.number % 2])
        return (2.0, 1.0, 2.0)[trial.number]

    study().optimize(objective, 3, callbacks=[Retirement(repo, best=1)])
    assert repo.models() == [saved[0]]


def test_a_version_that_a_waiting_or_running_trial_names_stays(repo: Repository) -> None:
    one = study()
    waits, runs, gone = (repo.save(f"s/{number}", {"w": np.zeros(4)}).ref for number in range(3))
    for ref in (waits, runs, gone):
        trial = one.ask()
        attach(trial, ref)
        one.tell(trial, state=optuna.trial.TrialState.FAIL)
    attach(one.ask(), runs)
    retried = one.trials[0].user_attrs  # as RetryFailedTrialCallback does
    one.add_trial(optuna.create_trial(state=optuna.trial.TrialState.WAITING, user_attrs=retried))
    Retirement(repo, best=1)(one, one.trials[0])
    assert repo.models() == [waits, runs]


def test_two_studies_in_one_repository_leave_each_other_alone(repo: Repository) -> None:
    one, two = study(), study()
    one.optimize(objective_of(repo, "one"), 3, callbacks=[Retirement(repo, best=2)])
    two.optimize(objective_of(repo, "two"), 3, callbacks=[Retirement(repo, best=2)])
    assert repo.models() == best(one, 2) + best(two, 2)


def test_trials_that_saved_nothing_are_passed_over(repo: Repository) -> None:
    one = study()
    one.optimize(lambda trial: trial.suggest_float("x", 0, 1), 3, callbacks=[Retirement(repo, best=1)])
    assert [ref_of(trial) for trial in one.trials] == [None] * 3


def test_a_study_of_several_objectives_and_a_count_of_none_are_refused(repo: Repository) -> None:
    several = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(ValueError, match="expected a study of one objective"):
        several.optimize(lambda trial: (1.0, 2.0), 1, callbacks=[Retirement(repo, best=1)])
    with pytest.raises(ValueError, match="expected a positive number"):
        Retirement(repo, best=0)
