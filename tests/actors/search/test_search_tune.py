"""Ray Tune through the repository: checkpoints that are references, and a population that exploits by them."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from tensorvine.actors import Repository
from tensorvine.actors.search import connected, disconnect
from tensorvine.actors.search.tune import FILE, Retirement, checkpoint_of, ref_of, report, resumed, write_ref
from tensorvine.store import ModelRef
from tensorvine.store.errors import CorruptDataError, StorageError

from tests.support.waiting import eventually

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

REPOSITORY = "search-tune"
INTERVALS = 4
BYTES = 4096 * 8


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start(REPOSITORY, shards=1, preallocate_bytes=0) as started:
        yield started
        disconnect(REPOSITORY)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "1")
    logging.getLogger("ray.tune").setLevel(logging.ERROR)


def train(config: dict[str, Any]) -> None:
    """A training whose quality is the sum of its rates so far: who has the higher rate is exploited."""
    repo, trial = connected(REPOSITORY), tune.get_context().get_trial_id()
    tensors = {"frozen": np.arange(4096.0), "sum": np.zeros(1), "steps": np.zeros(1)}
    last = resumed()
    if last is not None:
        tensors = {name: array.copy() for name, array in repo.load(last).items()}
    begun = None if last is None else str(last)
    while tensors["steps"][0] < INTERVALS:
        tensors = {**tensors, "sum": tensors["sum"] + config["rate"], "steps": tensors["steps"] + 1}
        saved = repo.save(f"pbt/{trial}", tensors, parent=last, quality=tensors["sum"][0])
        last = saved.ref
        told = {"quality": tensors["sum"][0], "steps": tensors["steps"][0], "written": saved.bytes_written}
        report({**told, "begun": begun, "parent": str(repo.info(last).parent)}, last)
        begun = None


class Log(tune.Callback):
    """Notes what trials report."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.told.append((trial.trial_id, result))


@pytest.mark.usefixtures("quiet")
def test_a_population_exploits_through_the_repository(repo: Repository, tmp_path: Path) -> None:
    random.seed(5)
    log = Log()
    scheduler = PopulationBasedTraining(
        time_attr="steps",
        metric="quality",
        mode="max",
        perturbation_interval=1,
        synch=True,
        quantile_fraction=0.5,
        custom_explore_fn=lambda config: config,
    )
    results = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"rate": tune.grid_search([1.0, 100.0])},
        tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(
            name="population", storage_path=str(tmp_path), callbacks=[log, Retirement(REPOSITORY)], verbose=0
        ),
    ).fit()
    assert not results.errors
    resumed_from = [(trial, told) for trial, told in log.told if told["begun"] is not None]
    assert [told for trial, told in resumed_from if trial not in told["begun"]]  # exploits
    assert all(told["parent"] == told["begun"] for _, told in resumed_from)
    assert all(told["written"] == 16 for _, told in resumed_from)  # the rest is shared, with the donor too
    assert max(told["quality"] for _, told in log.told) == 100.0 * INTERVALS
    finals = {ref_of(result.checkpoint) for result in results}
    assert finals <= set(repo.models("pbt/"))
    assert len(repo.models("pbt/")) <= 4 < len(log.told)
    eventually(lambda: repo.stats().bytes_memory < 3 * BYTES, "what was retired goes")
    files = [path for path in tmp_path.rglob("checkpoint_*/*") if path.is_file()]
    assert {path.name for path in files} == {FILE}
    assert all(path.stat().st_size < 200 for path in files)


class TestReferences:
    REF = ModelRef("pbt/a", 7)

    def test_a_checkpoint_stands_for_a_version(self, tmp_path: Path) -> None:
        with checkpoint_of(self.REF) as checkpoint:
            assert isinstance(checkpoint, tune.Checkpoint)
            assert ref_of(checkpoint) == self.REF
        write_ref(tmp_path, self.REF)
        assert ref_of(tmp_path) == ref_of(str(tmp_path)) == self.REF
        assert json.loads((tmp_path / FILE).read_text()) == {"model": "pbt/a@7"}

    def test_a_directory_without_a_reference_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"expected the file reference\.json"):
            ref_of(tmp_path)

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": "pbt/a"}', '{"model": 3}', "\x00"])
    def test_a_text_that_is_no_reference_is_an_error(self, tmp_path: Path, text: str) -> None:
        (tmp_path / FILE).write_text(text)
        with pytest.raises(CorruptDataError, match="expected a reference to a version"):
            ref_of(tmp_path)


class TestRetirement:
    """What goes and what stays, step by step: a trial here is what Tune's callbacks see of one."""

    def save(self, repo: Repository, trial: Any, folder: Path, retirement: Retirement, trials: list[Any]) -> ModelRef:
        ref = repo.save(f"steps/{trial.trial_id}", {"w": np.zeros(2)}).ref
        path = folder / f"{trial.trial_id}-{ref.version}"
        path.mkdir()
        write_ref(path, ref)
        checkpoint = tune.Checkpoint.from_directory(path)
        retirement.on_checkpoint(0, trials, trial, checkpoint)
        trial.checkpoint = checkpoint
        return ref

    @pytest.fixture
    def trials(self, repo: Repository) -> Iterator[list[Any]]:
        yield [SimpleNamespace(trial_id="a", checkpoint=None), SimpleNamespace(trial_id="b", checkpoint=None)]
        for ref in repo.models("steps/"):
            repo.retire(ref)

    def test_the_last_of_each_trial_stay_and_what_another_goes_on_from(
        self, repo: Repository, tmp_path: Path, trials: list[Any]
    ) -> None:
        retirement = Retirement(REPOSITORY, keep=2)
        a, b = trials
        first = [self.save(repo, a, tmp_path, retirement, trials) for _ in range(3)]
        assert repo.models("steps/") == first[1:]
        b.checkpoint = a.checkpoint  # b exploits a
        more = [self.save(repo, a, tmp_path, retirement, trials) for _ in range(3)]
        assert repo.models("steps/") == [first[2], *more[1:]]
        again = Retirement(REPOSITORY, keep=2)
        again.set_state(json.loads(json.dumps(retirement.get_state())))
        mine = self.save(repo, b, tmp_path, again, trials)
        again.on_experiment_end(trials)
        assert repo.models("steps/") == [*more[1:], mine]

    def test_what_did_not_come_as_a_checkpoint_goes_with_the_next(
        self, repo: Repository, tmp_path: Path, trials: list[Any]
    ) -> None:
        retirement = Retirement(REPOSITORY, keep=3)
        repo.save("steps/a", {"w": np.ones(2)})
        first = self.save(repo, trials[0], tmp_path, retirement, trials)
        repo.save("steps/a", {"w": np.ones(2)})
        third = self.save(repo, trials[0], tmp_path, retirement, trials)
        assert repo.models("steps/") == [first, third]

    def test_to_keep_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected a positive number"):
            Retirement(REPOSITORY, keep=0)
