"""The search: DeepHyper's aged evolution draws candidates; its Ray evaluator or Ray Tune runs them.

Rules
- A file has one line for each finished candidate. It is everything that a stopped search needs to continue.
- A candidate that fails, or whose worker dies, costs only this candidate: its objective is "F_...".
- Workers need not find this package: it is sent to them.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from deephyper.evaluator import RunningJob
from deephyper.evaluator.callback import Callback
from ray import tune
from ray.tune.search import Searcher
from tensorvine.actors import Repository
from tensorvine.actors.search import Population
from tensorvine.actors.search import tune as hooks
from tensorvine.actors.search.deephyper import AgedEvolution, Retirement, SparingEvaluator, run_function
from tensorvine.store import ModelRef
from torch import nn

from ..shared.starting import quiet_tune
from .space import AttnModel, AttnSpace, Data, load

BATCH, RATE = 32, 1e-3
RunFunction = Callable[[RunningJob], Mapping[str, Any]]
Line = Mapping[str, Any]
TOLD = ("ref", "ancestor", "layers", "repository_s")
"""What a run function says of a candidate, besides the objective."""
JOB = "job"
"""Entry of a trial's configuration: the id of its job. Ray Tune's own ids are not numbers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What must stay the same if a search is resumed."""

    data: str = "digits"
    population: int = 50
    sample: int = 5
    seed: int = 0
    name: str = "nas"
    """Prefix of the model names."""


class Evaluation:
    """Builds and trains candidates. The data are loaded once in each process."""

    def __init__(self, plan: Plan, first: int = 0, load: Callable[[str, int], Data] = load) -> None:
        self._plan, self._first, self._load = plan, first, load
        self._space, self._data = AttnSpace(), None

    def build(self, job: RunningJob) -> nn.Module:
        """Build the model of a job."""
        torch.set_num_threads(1)
        self._data = self._data or self._load(self._plan.data, self._plan.seed)
        number = self._first + int(str(job.id).rpartition(".")[2])
        torch.manual_seed(1_000_003 * self._plan.seed + number)
        features, classes = self._data[0].shape[1], int(self._data[2].max()) + 1
        return AttnModel(self._space, self._space.candidate(job), features, classes)

    def train(self, model: nn.Module) -> float:
        """Train what is not frozen for one epoch, and return the mean accuracy of the classes."""
        train, test, answers, truth = self._data or ()
        learning, loss = [tensor for tensor in model.parameters() if tensor.requires_grad], torch.zeros(())
        optimizer = torch.optim.Adam(learning, RATE) if learning else None
        for batch in torch.randperm(len(answers)).split(BATCH) if optimizer else ():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(train[batch]), answers[batch])
            loss.backward()
            optimizer.step()
        if not math.isfinite(loss.item()):
            raise ArithmeticError(f"expected a finite loss; found {loss.item()}")
        with torch.inference_mode():
            right = (model(test).argmax(1) == truth).double()
        return float(torch.stack([right[truth == label].mean() for label in truth.unique()]).mean())

    def run(self, repository: str | None, prefix: str) -> RunFunction:
        """Return a run function whose candidates inherit through a repository, or, without one, do not inherit."""
        if repository is None:
            return lambda job: {"objective": self.train(self.build(job)), "metadata": {}}
        train = lambda candidate, job: self.train(candidate.model)  # noqa: E731
        return run_function(self.build, train, repository=repository, prefix=prefix)


class Results(Callback):
    """Writes a line for each candidate.

    Args:
        path: The file.
        lines: Its lines.
        store: The repository, if there is one.
        show: Is called with all lines after each candidate.
    """

    def __init__(
        self,
        path: Path,
        lines: list[Line],
        store: Repository | None,
        show: Callable[[Sequence[Line]], object],
    ) -> None:
        self._path, self._lines, self._repo, self._show = path, lines, store, show
        self._began = time.monotonic() - (lines[-1]["at"] if lines else 0.0)

    def on_done(self, job: Any) -> None:
        """Write what became of a candidate, as soon as its version outlives the process."""
        told = {"ref": "", "repository_s": 0.0, "bytes_written": 0, **job.metadata}
        if self._repo is not None and told["ref"]:
            told["bytes_written"] = self._repo.info(told["ref"]).bytes_owned
            if self._repo.has_path:
                self._repo.flush()
        space = 0 if self._repo is None else self._repo.stats().bytes_memory
        quality = None if isinstance(job.objective, str) else job.objective
        line = {"number": len(self._lines), "config": dict(job.args), "quality": quality, **told}
        line |= {"at": time.monotonic() - self._began, "space_bytes": space}
        self._lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._show(self._lines)


def read(path: Path, plan: Plan) -> tuple[Plan, list[Line]]:
    """Read the file of a search, or begin it: the plan with the name of the search, and the finished candidates.

    Raises:
        ValueError: if the file was written with another plan.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(plan)) + "\n")
    text = path.read_text().rpartition("\n")[0] + "\n"
    path.write_text(text)  # without a line that was cut off
    head, *lines = map(json.loads, text.splitlines())
    if {**asdict(plan), "name": head["name"]} != head:
        raise ValueError(f"{path}: expected the plan with which the search began, {head}; found {asdict(plan)}")
    return Plan(**head), lines


def evolution_of(plan: Plan, lines: Sequence[Line], folder: Path) -> AgedEvolution:
    """Return the evolution of a search with the finished candidates."""
    evolution = AgedEvolution(
        AttnSpace().problem(),
        random_state=plan.seed + len(lines),
        log_dir=str(folder),
        checkpoint_history_to_csv=False,
        population_size=plan.population,
        sample_size=plan.sample,
    )
    evolution.tell([(line["config"], line["quality"]) for line in lines if line["quality"] is not None])
    return evolution


def retirement_of(repo: Repository, plan: Plan, lines: Sequence[Line], prefix: str) -> Retirement:
    """Return the callback that retires what leaves the population, and retire what a stopped search left behind."""
    population = Population(repo, plan.population)
    known = [ModelRef.parse(line["ref"]) for line in lines if line["ref"] and line["quality"] is not None]
    population.restore(known)
    for ref in set(repo.models(f"{plan.name}/")).difference(known):
        population.drop(ref)
    return Retirement(population, prefix)


def with_deephyper(
    evolution: AgedEvolution, run: RunFunction, callbacks: Sequence[Callback], count: int, workers: int
) -> None:
    """Evaluate candidates with DeepHyper's Ray evaluator: each is a Ray task with one CPU slot."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__package__])
    evaluator = SparingEvaluator(run, num_workers=workers, num_cpus_per_task=1, callbacks=list(callbacks))
    try:
        evolution.search(evaluator, max_evals=count, max_evals_strict=True)
    except BaseException:  # Ctrl-C, too
        evaluator.abandon()
        raise


def with_tune(
    evolution: AgedEvolution, run: RunFunction, callbacks: Sequence[Callback], count: int, workers: int, folder: Path
) -> None:
    """Evaluate candidates with Ray Tune: each is a trial with one CPU slot, whose checkpoint is its version."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__package__])

    def trial(config: Mapping[str, Any]) -> None:
        job = RunningJob(parameters=dict(config))
        job.id = job.pop(JOB)
        result = run(job)
        metrics = {"objective": result["objective"], **result["metadata"]}
        if metrics.get("ref"):
            hooks.report(metrics, ModelRef.parse(metrics["ref"]))
        else:
            tune.report(metrics)

    quiet_tune()
    search = Evolving(evolution, callbacks)
    tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        tune_config=tune.TuneConfig(
            search_alg=search, num_samples=count, max_concurrent_trials=workers, reuse_actors=True
        ),
        run_config=tune.RunConfig(name="tune", storage_path=str(folder), verbose=0),
    ).fit()


class Evolving(Searcher):
    """DeepHyper's evolution as a search algorithm of Ray Tune."""

    def __init__(self, evolution: AgedEvolution, callbacks: Sequence[Callback]) -> None:
        super().__init__(metric="objective", mode="max")
        self._evolution, self._callbacks = evolution, callbacks
        self._asked: dict[str, tuple[str, dict[str, Any]]] = {}
        """Trial -> id and configuration of its job. The jobs are numbered from 0, as DeepHyper does."""
        self._numbers = itertools.count()

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Draw a candidate."""
        job, config = self._asked[trial_id] = f"0.{next(self._numbers)}", self._evolution.ask(1)[0]
        return {**config, JOB: job}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take what became of a candidate."""
        found = {"objective": "F_TuneError"} if error or result is None else result
        told = {name: found[name] for name in TOLD if name in found}
        name, config = self._asked.pop(trial_id)
        job = SimpleNamespace(id=name, args=config, objective=found["objective"], metadata=told)
        for callback in self._callbacks:
            callback.on_done(job)
        self._evolution.tell([(job.args, job.objective)])

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing for Tune to store: a search continues from its own file."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Do nothing, for the same reason."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing."""
