"""DeepHyper on a repository: the run function, the population's retirement, a mutation, and an evaluator.

Rules
- A candidate is named after its job: `prefix` and `job.id`. Two searches in one repository need two prefixes, for
  DeepHyper counts the jobs of each from 0.
- A job that fails leaves nothing behind: neither a pin nor a version. DeepHyper hears of it by an objective that
  begins with "F_", and does not let it into its population; so it does not enter ours.
- DeepHyper's population keeps configurations only. `Retirement` keeps the versions, in the same order.
- `deephyper` is an extra; this file alone imports it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from ConfigSpace import util
from ConfigSpace.exceptions import ForbiddenValueError
from ConfigSpace.hyperparameters import CategoricalHyperparameter, Hyperparameter, OrdinalHyperparameter
from deephyper.evaluator import HPOJob, Job, RunningJob
from deephyper.evaluator._ray import RayEvaluator
from deephyper.evaluator.callback import Callback
from deephyper.hpo import HpProblem, RegularizedEvolution, utils
from ray.exceptions import RayError

from ...store.errors import OperationTimeoutError, RepositoryNotFoundError, ShardUnavailableError
from ...store.refs import ModelRef, check_name
from ..tasks.connection import connected, disconnect
from .candidate import Candidate
from .retirement import Population

log = logging.getLogger(__name__)

DRAWS = 1000
"""How often a child is drawn again that the space forbids."""


def run_function(
    build: Callable[[RunningJob], object],
    train: Callable[[Candidate, RunningJob], float],
    *,
    repository: str,
    prefix: str,
    freeze: bool = True,
) -> Callable[[RunningJob], dict[str, object]]:
    """Make a run function for a DeepHyper evaluator: each candidate inherits, is trained, and is saved.

    Args:
        build: makes the model of a job: built, not compiled.
        train: trains `candidate.model` and gives its quality, higher is better. Called between query and save.
        repository: the name of a running repository; workers connect to it once per process.
        prefix: what the names of this search's models begin with, such as "nas/a/", and those of no other search,
            earlier ones in the same repository included.
        freeze: layers that are taken over do not learn.

    Returns:
        The run function. Its metadata: "ref" and "ancestor" (references as text; empty for none), "layers" (how many
        were taken over), "repository_s" (seconds spent in the repository). A candidate that raises, or whose quality
        is not finite, gives the objective "F_" and the error's type.

    Raises:
        InvalidNameError: models' names cannot begin so.

    >>> run = run_function(build, train, repository="nas", prefix="nas/")         # doctest: +SKIP
    >>> callbacks = [Retirement(Population(repo, 50), prefix="nas/")]             # doctest: +SKIP
    >>> evaluator = SparingEvaluator(run, num_workers=4, callbacks=callbacks)     # doctest: +SKIP
    >>> AgedEvolution(problem, population_size=50, sample_size=5).search(evaluator, 1000)  # doctest: +SKIP
    """
    check_name(f"{prefix}0.0")

    def run(job: RunningJob) -> dict[str, object]:
        return _evaluate(job, build, train, repository, f"{prefix}{job.id}", freeze)

    return run


class Retirement(Callback):
    """Replication the population of the search into the repository: who falls out of it is retired.

    Args:
        population: of the size of the search's.
        prefix: as in `run_function`.
    """

    def __init__(self, population: Population, prefix: str) -> None:
        self._population = population
        self._prefix = prefix
        self._left: dict[str, ModelRef | None] = {}
        """Names that workers which died may have left versions under -> the version that stays."""

    def on_done(self, job: Job) -> None:
        """Take a finished candidate in; of a failed one, take away what it saved.

        Raises:
            ValueError: the job was not run by `run_function`.
        """
        name = f"{self._prefix}{job.id}"
        if isinstance(cast(HPOJob, job).objective, str):
            self._left[name] = None
        else:
            ref = _ref_of(name, cast("dict[str, str]", job.metadata).get("ref"))
            if ref.version > 1:
                self._left[name] = ref
            self._population.add(ref)
        try:
            for left, but in list(self._left.items()):
                self._population.drop_versions(left, but)
                del self._left[left]
        except (ShardUnavailableError, OperationTimeoutError) as exc:
            log.warning("what failed jobs saved is taken away after the next job: %s", exc)

    def on_done_other(self, job: Job) -> None:
        """Do the same for a candidate that another process of this search evaluated."""
        self.on_done(job)


class AgedEvolution(RegularizedEvolution):
    """DeepHyper's `RegularizedEvolution` whose children differ from their parent in exactly one decision.

    Its own mutation may draw the parent's value again; such a child is a copy, which inherits everything and learns
    nothing new. Arguments as there.
    """

    _problem: HpProblem
    _population: deque[tuple[dict[str, object], float]]

    def _ask(self, n: int = 1) -> list[dict[str, object]]:
        if len(self._population) < self.population_size:
            return cast("list[dict[str, object]]", super()._ask(n))
        return [self._child(self._parent()) for _ in range(n)]

    def _parent(self) -> dict[str, object]:
        chosen = self._random_state.choice(self.population_size, size=self.sample_size, replace=False)
        return max((self._population[index] for index in chosen), key=lambda member: member[1])[0]

    def _child(self, parent: dict[str, object]) -> dict[str, object]:
        """Change one active decision; drawn again where the space forbids what came out.

        Raises:
            ValueError: the space has no decision, or allows no child of `parent`.
        """
        space = self._problem.space
        active = space.get_active_hyperparameters(util.deactivate_inactive_hyperparameters(parent, space))
        decisions = sorted(name for name in active if space[name].size > 1)
        if not decisions:
            raise ValueError(f"mutation of {parent}: expected a decision with at least two values; found none")
        for _ in range(DRAWS):
            name = str(self._random_state.choice(decisions))
            decision = cast("Hyperparameter[object, np.number]", space[name])
            child = {**parent, name: other_value(decision, parent[name], self._random_state)}
            try:
                legal = dict(util.deactivate_inactive_hyperparameters(child, space))
            except ForbiddenValueError:
                continue
            return {
                name: _plain(
                    legal[name]
                    if name in legal
                    else cast(object, utils.get_inactive_value_of_hyperparameter(space[name]))
                )
                for name in self._problem.hyperparameter_names
            }
        raise ValueError(f"mutation of {parent}: expected a child that the space allows; {DRAWS} drawn are forbidden")


class SparingEvaluator(RayEvaluator):
    """DeepHyper's `RayEvaluator`, for which the death of a worker costs one job, and not the search.

    A job is not begun again, so that one which takes a worker's memory does not take that of the next; it fails, and
    `Retirement` takes away what it may have saved. Arguments as there.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._remote_run_function = self._remote_run_function.options(max_retries=0)

    async def execute(self, job: Job) -> Job:
        """Run a job on a worker."""
        try:
            return await super().execute(job)
        except RayError as exc:
            log.warning("job %s: its worker was lost: %s", job.id, exc)
            return self._update_job_when_done(job, f"F_{type(exc).__name__}")

    def abandon(self) -> None:
        """Wait for nothing any more, after a search that was interrupted, such as by Ctrl-C.

        DeepHyper would ask Ray for its jobs when the evaluator is collected; where Ray has been stopped by then, that
        would start another one, and wait for jobs that it does not know.
        """
        loop, self.loop = self.loop, None
        if loop is None or loop.is_closed():
            return
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:  # what gathers none is of the thread's own loop
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


def other_value(decision: Hyperparameter[object, np.number], value: object, random: np.random.RandomState) -> object:
    """Draw a value of a decision that is not `value`: by the decision's own weights, as far as it has some.

    Raises:
        ValueError: none was drawn.
    """
    if isinstance(decision, OrdinalHyperparameter):
        others = [other for other in decision.sequence if other != value]
        return others[random.randint(len(others))]
    if isinstance(decision, CategoricalHyperparameter):
        weights = dict(zip(decision.choices, decision.probabilities, strict=True))
        others = [other for other in decision.choices if other != value]
        odds = np.array([weights[other] for other in others], float)
        odds = odds / odds.sum() if odds.sum() else np.full(len(others), 1 / len(others))
        return others[random.choice(len(others), p=odds)]
    for _ in range(DRAWS):
        other = decision.sample_value(seed=random)
        if other != value:
            return other
    raise ValueError(f"mutation of {decision.name!r}: expected another value than {value!r}; {DRAWS} draws gave none")


def _ref_of(name: str, text: str | None) -> ModelRef:
    if not text:
        raise ValueError(f"Retirement: job {name!r}: expected the metadata that run_function gives; found no 'ref'")
    return ModelRef.parse(text)


def _plain(value: object) -> object:
    """Return what JSON can hold in the place of NumPy's scalars."""
    return cast(Any, value).item() if isinstance(value, np.generic) else value


def _evaluate(
    job: RunningJob,
    build: Callable[[RunningJob], object],
    train: Callable[[Candidate, RunningJob], float],
    repository: str,
    name: str,
    freeze: bool,
) -> dict[str, object]:
    told: dict[str, object] = {"ref": "", "ancestor": "", "layers": 0, "repository_s": 0.0}
    try:
        with Candidate(connected(repository), name, build(job), freeze=freeze) as candidate:
            told |= {"ancestor": str(candidate.ancestor or ""), "layers": len(candidate.layers)}
            quality = float(train(candidate, job))
            saved = candidate.save(quality)
            told["ref"] = str(saved.ref) if saved is not None else ""
        told["repository_s"] = candidate.seconds
    except Exception as exc:  # whatever a candidate raises costs this candidate only
        log.warning("candidate %s failed", name, exc_info=exc)
        if isinstance(exc, (RepositoryNotFoundError, ShardUnavailableError)):
            disconnect(repository)
        return {"objective": f"F_{type(exc).__name__}", "metadata": told}
    return {"objective": quality, "metadata": told}
