"""Architecture search with DeepHyper. Candidates inherit layers from stored models and are saved in a repository.

The model name of a candidate is the prefix of the search followed by the id of the job. Two searches in one repository
need different prefixes, because DeepHyper numbers the jobs of each search from 0.

The population of DeepHyper contains only hyperparameter configurations. The callback `Retirement` records the version
saved for each configuration, and retires this version when the configuration leaves the population. The objective of a
failed job begins with `"F_"`, so DeepHyper does not add this job to the population. `Retirement` retires all versions
that a failed job saved.

This module needs the package `deephyper`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import ray
from ConfigSpace import util
from ConfigSpace.exceptions import ForbiddenValueError
from ConfigSpace.hyperparameters import CategoricalHyperparameter, Hyperparameter, OrdinalHyperparameter
from deephyper.evaluator import HPOJob, Job, RunningJob
from deephyper.evaluator._ray import RayEvaluator
from deephyper.evaluator.callback import Callback
from deephyper.evaluator.storage import MemoryStorage, RayStorage, Storage
from deephyper.hpo import HpProblem, RegularizedEvolution, utils
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...store.errors import OperationTimeoutError, RepositoryNotFoundError, ShardUnavailableError
from ...store.refs import ModelRef, check_name
from ..tasks.connection import connected, disconnect
from .candidate import Candidate
from .retirement import Population

log = logging.getLogger(__name__)

DRAWS = 1000
"""Maximum number of random draws of one hyperparameter value, and of one child. A numerical value is drawn again if it
equals the value of the parent. A child is drawn again if the search space forbids the child."""


def run_function(
    build: Callable[[RunningJob], object],
    train: Callable[[Candidate, RunningJob], float],
    *,
    repository: str,
    prefix: str,
    freeze: bool = True,
) -> Callable[[RunningJob], dict[str, object]]:
    """Return a run function for a DeepHyper evaluator. The function builds, trains and saves the candidate of one job.

    Each candidate inherits layers from a stored model, as described for `Candidate`.

    Args:
        build: Function that builds and returns the model of a job. If the model is a Keras model, `build` must not
            compile it.
        train: Function that trains `candidate.model` and returns the quality of the model. Higher is better.
        repository: Name of a running repository. The jobs of a worker process share one connection.
        prefix: Prefix of the model names of this search, such as "nas/a/". It must differ from the prefixes of all
            other searches in the repository, including earlier ones.
        freeze: Whether to exclude inherited layers from training.

    Returns:
        The run function. The metadata of each result contains "ref" (the saved version, as text), "ancestor" (the
        version from which layers were inherited, as text), "layers" (number of inherited layers) and "repository_s"
        (seconds spent on calls to the repository). "ref" is empty if no version was saved, and "ancestor" is empty if
        no layers were inherited. If building, training or saving raises an error, or the quality is not finite, the
        objective is `"F_"` followed by the name of the error type.

    Raises:
        InvalidNameError: if the name of a model cannot begin with `prefix`.

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
    """A DeepHyper callback that retires a candidate's version when the candidate leaves the population of the search.

    Args:
        population: Population of versions. Its size must equal the population size of the search.
        prefix: Prefix of the model names of the search, as in `run_function`.
    """

    def __init__(self, population: Population, prefix: str) -> None:
        self._population = population
        self._prefix = prefix
        self._left: dict[str, ModelRef | None] = {}
        """Names that workers which died may have left versions under -> the version that stays."""

    def on_done(self, job: Job) -> None:
        """Add a finished candidate to the population, or retire all versions that a failed candidate saved.

        Raises:
            ValueError: if the metadata of a job that did not fail contains no version under "ref", for example because
                `run_function` did not create the run function of the job.
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
            log.warning("versions of failed jobs are retired after the next job: %s", exc)

    def on_done_other(self, job: Job) -> None:
        """Call `on_done` for a job that was run by another process of this search."""
        self.on_done(job)


class AgedEvolution(RegularizedEvolution):
    """A variant of DeepHyper's `RegularizedEvolution`: each mutation changes the value of one active hyperparameter.

    In `RegularizedEvolution`, a mutation can draw the current value of the hyperparameter again. The child is then a
    copy of its parent: it inherits all layers, and its training adds no information to the search. The constructor has
    the same arguments as `RegularizedEvolution`.
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
        raise ValueError(
            f"mutation of {parent}: expected a child that the space allows; all {DRAWS} drawn are forbidden"
        )


class SparingEvaluator(RayEvaluator):
    """A variant of DeepHyper's `RayEvaluator`. If a worker dies, only the worker's job fails, and the search continues.

    The failed job is not retried, so a job that exhausts the memory of one worker cannot exhaust the memory of another
    worker. `Retirement` retires all versions that the failed job saved. The records of the jobs are kept on the node of
    the driver, so the search also survives the death of other nodes. The constructor has the same arguments as
    `RayEvaluator`.
    """

    def __init__(
        self,
        run_function: Callable[..., object],
        callbacks: list[Callback] | None = None,
        run_function_kwargs: dict[str, object] | None = None,
        storage: Storage | None = None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        kept = _DriverStorage() if storage is None else storage
        super().__init__(run_function, callbacks, run_function_kwargs, kept, *arguments, **options)
        self._remote_run_function = self._remote_run_function.options(max_retries=0)

    async def execute(self, job: Job) -> Job:
        """Run a job on a worker, and return the finished job.

        If the worker dies, the objective of the job is `"F_"` followed by the name of the error type.
        """
        try:
            return await super().execute(job)
        except RayError as exc:
            log.warning("job %s: its worker was lost: %s", job.id, exc)
            return self._update_job_when_done(job, f"F_{type(exc).__name__}")

    def abandon(self) -> None:
        """Stop waiting for the jobs of a search that was interrupted, for example by Ctrl-C.

        Call this method before Ray is shut down. Otherwise, DeepHyper requests the results of these jobs when Python
        deletes the evaluator. The request starts a new Ray cluster, and DeepHyper waits for jobs that do not exist
        there.
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


class _DriverStorage(RayStorage):
    """DeepHyper's records of jobs, in an actor on the driver's node. Ray would place it on any node with a free CPU."""

    def _connect(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = cast(Any, ray.remote(MemoryStorage))
        actor = remote.options(name=self.actor_name, namespace="deephyper", num_cpus=0, scheduling_strategy=here)
        self.memory_storage_actor = actor.remote()
        self.connected = True


def other_value(decision: Hyperparameter[object, np.number], value: object, random: np.random.RandomState) -> object:
    """Draw a random value of a hyperparameter, different from the current value.

    For a categorical hyperparameter, the values are drawn according to their weights in the search space.

    Args:
        decision: Hyperparameter of the search space, with at least two values.
        value: The current value of the hyperparameter.
        random: Source of random numbers.

    Raises:
        ValueError: if `DRAWS` draws in a row give the current value.
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
    raise ValueError(
        f"mutation of {decision.name!r}: expected another value than {value!r}; found none in {DRAWS} draws"
    )


def _ref_of(name: str, text: str | None) -> ModelRef:
    if not text:
        raise ValueError(f"Retirement: job {name!r}: expected the metadata of run_function; found no 'ref'")
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
