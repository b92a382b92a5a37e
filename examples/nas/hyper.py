"""DeepHyper's search in the place of ours: its evolution asks, its Ray evaluator runs the candidates on the cluster.

Rules
- The hooks are those of `tensorvine.actors.search.deephyper`; here is only what the example adds to them.
- The journal is the same, and so are tables and picture. It cannot be gone on with: DeepHyper keeps its population in
  its own memory, and the numbers of candidates in its own store.
- A candidate that fails, or whose worker dies, costs that candidate: DeepHyper hears of an objective "F_...".
- DeepHyper and its parts are imported by this file alone, and this file by who asks for that search.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from deephyper.evaluator import RunningJob
from deephyper.evaluator.callback import Callback
from deephyper.hpo import HpProblem
from tensorvine.actors import Repository
from tensorvine.actors.search import Candidate as Inheriting
from tensorvine.actors.search import Population, connected
from tensorvine.actors.search.deephyper import AgedEvolution, Retirement, SparingEvaluator, run_function
from torch import nn

from .data import Data
from .evolution import Asked
from .journal import Journal, Told
from .plan import Plan
from .space import Candidate, Space
from .store import Keeper
from .trainer import Trainer
from .worker import Outcome, taken_of

DIED = ("F_WorkerCrashedError", "F_NodeDiedError", "F_OutOfMemoryError")
"""What DeepHyper hears of a candidate whose worker died."""


def problem_of(space: Space) -> HpProblem:
    """Return a space as DeepHyper's: a decision is a choice among the numbers of its options."""
    problem = HpProblem()
    for place, decision in enumerate(space.decisions):
        problem.add_hyperparameter(list(range(len(decision.options))), name_of(place))
    return problem


def name_of(place: int) -> str:
    """Return what DeepHyper calls a decision; names of ours hold what its own may not."""
    return f"d{place:02d}"


def candidate_of(space: Space, chosen: Any) -> Candidate:
    """Return the candidate of a job, or of its arguments."""
    return tuple(int(chosen[name_of(place)]) for place in range(len(space.decisions)))


def number_of(job: Any) -> int:
    """Return the number of a job's candidate; its id is that of the search, a dot, and the number."""
    return int(str(job.id).rpartition(".")[2])


class Evaluation:
    """What a process does with the jobs that come to it; the data are loaded once."""

    def __init__(self, trainer: Trainer, repository: str, prefix: str) -> None:
        self._trainer, self._repository = trainer, repository
        self._data: Data | None = None
        self._facts: dict[str, object] = {}
        self._run = run_function(self._build, self._train, repository=repository, prefix=prefix)

    def __call__(self, job: RunningJob) -> dict[str, object]:
        """Evaluate one; gives what `run_function` does, and in the metadata what the journal says of a candidate."""
        began, self._facts = time.time(), {}
        torch.set_num_threads(1)
        result = self._run(job)
        metadata: Any = result["metadata"]
        if metadata["ref"]:
            self._facts["bytes_written"] = connected(self._repository).info(metadata["ref"]).bytes_owned
        who = f"{os.uname().nodename}:{os.getpid()}"
        metadata |= {**self._facts, "began": began, "ended": time.time(), "worker": who}
        return result

    def _build(self, job: RunningJob) -> nn.Module:
        if self._data is None:
            self._data = self._trainer.load()
        model = self._trainer.build(candidate_of(self._trainer.space, job), self._data, self._seed(job))
        state = model.state_dict()
        self._facts |= {"tensors": len(state), "bytes_total": sum(tensor.nbytes for tensor in state.values())}
        return model

    def _train(self, candidate: Inheriting, job: RunningJob) -> float:
        self._facts["taken"] = taken_of(candidate)
        began = time.perf_counter()
        try:
            model: Any = candidate.model
            assert self._data is not None  # noqa: S101  `_build` comes first
            return self._trainer.train(model, self._data, self._seed(job))
        finally:
            self._facts["trained_s"] = time.perf_counter() - began

    def _seed(self, job: RunningJob) -> int:
        return self._trainer.seed_of(number_of(job))


class Notes(Callback):
    """Writes the journal; comes after `Retirement`, so that what was retired is not counted."""

    def __init__(self, space: Space, journal: Journal, keeper: Keeper, watch: Callable[[Told], None]) -> None:
        self.told: list[Told] = []
        self.deaths = 0
        self._space, self._journal, self._keeper, self._watch = space, journal, keeper, watch
        self._began: float | None = None

    def on_launch(self, job: Any) -> None:
        """Note that a candidate was asked for."""
        self._began = self._began or time.monotonic()
        self._journal.ask(Asked(number_of(job), candidate_of(self._space, job.args), None))

    def on_done(self, job: Any) -> None:
        """Note what became of a candidate."""
        self._keeper.settle()
        at = time.monotonic() - (self._began or 0.0)
        told = Told(at, outcome_of(job), self._keeper.space())
        self._journal.tell(told)
        self._journal.sync()
        self.told.append(told)
        self.deaths += str(job.objective) in DIED
        self._watch(told)


def outcome_of(job: Any) -> Outcome:
    """Return what became of a job's candidate."""
    facts = dict(job.metadata)
    known = ("tensors", "taken", "bytes_total", "bytes_written", "began", "ended", "trained_s", "worker")
    given: dict[str, Any] = {name: facts[name] for name in known if name in facts}
    given |= {"ancestor": facts.get("ancestor") or None, "stored_s": facts.get("repository_s", 0.0)}
    if isinstance(job.objective, str):
        return Outcome(number_of(job), None, f"DeepHyper was told {job.objective}", **given)
    return Outcome(number_of(job), float(job.objective), ref=facts["ref"] or None, **given)


def search(
    plan: Plan,
    trainer: Trainer,
    repository: Repository,
    journal: Journal,
    workers: int,
    cpus: float,
    out: Path,
    watch: Callable[[Told], None],
) -> tuple[list[Told], int]:
    """Let DeepHyper search.

    Args:
        plan: of the search.
        trainer: builds and trains the candidates.
        repository: that they inherit through.
        journal: is written.
        workers: how many candidates are evaluated at once.
        cpus: CPU slots of each.
        out: where DeepHyper writes its own table, `results.csv`.
        watch: is called with each candidate that was told.

    Returns:
        What became of each candidate, in order, and how many workers died.
    """
    # Workers need not find this package: it travels with them.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__package__])
    prefix = f"{plan.name}/"
    evaluation = Evaluation(trainer, repository.name, prefix)

    def evaluate(job: RunningJob) -> dict[str, object]:
        return evaluation(job)

    notes = Notes(trainer.space, journal, Keeper(repository, plan.name, None), watch)
    retirement = Retirement(Population(repository, plan.candidates if plan.keep else plan.population), prefix)
    evaluator = SparingEvaluator(evaluate, num_workers=workers, num_cpus_per_task=cpus, callbacks=[retirement, notes])
    evolution = AgedEvolution(
        problem_of(trainer.space),
        random_state=plan.seed,
        log_dir=str(out),
        population_size=plan.population,
        sample_size=plan.sample,
    )
    try:
        evolution.search(evaluator, max_evals=plan.candidates, max_evals_strict=True)
    except BaseException:  # Ctrl-C, too
        evaluator.abandon()
        raise
    return notes.told, notes.deaths
