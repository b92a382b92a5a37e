"""Search with Optuna: record the version that each trial saves, and keep the versions of the best trials.

`attach` records the version in a user attribute of the trial. Every Optuna storage keeps user attributes, so the
recorded versions are still known when a study is resumed. This module needs the package `optuna`.
"""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial, TrialState

from ...store.refs import ModelRef
from ..client.repository import Repository
from .retirement import retire

ATTRIBUTE = "tensorvine"


def attach(trial: optuna.Trial, ref: ModelRef) -> None:
    """Record the version that a trial saved. Call `attach` in the objective function, after the save.

    Args:
        trial: The running trial.
        ref: The saved version.

    >>> def objective(trial):                                                     # doctest: +SKIP
    ...     with Candidate(connected("nas"), f"study/{trial.number}", build(trial)) as candidate:
    ...         accuracy = train(candidate.model)
    ...         attach(trial, candidate.save(accuracy).ref)
    ...     return accuracy
    """
    trial.set_user_attr(ATTRIBUTE, str(ref))


def ref_of(trial: FrozenTrial | optuna.Trial) -> ModelRef | None:
    """Return the version that `attach` recorded for a trial, or None if no version was recorded."""
    text = trial.user_attrs.get(ATTRIBUTE)
    return None if text is None else ModelRef.parse(text)


class Retirement:
    """An Optuna callback that retires the versions of trials that failed, were pruned, or are not among the best.

    Several trials can have the same version, such as a failed trial and its retry. A version is retired when all trials
    with this version have finished and none of these trials is among the best.

    Args:
        repository: Repository in which the trials save.
        best: Number of best completed trials whose versions are kept.

    Raises:
        ValueError: if `best` is not positive.

    >>> study.optimize(objective, 100, callbacks=[Retirement(repo, best=10)])     # doctest: +SKIP
    """

    def __init__(self, repository: Repository, best: int) -> None:
        if best < 1:
            raise ValueError(f"Retirement: best: expected a positive number; found {best!r}")
        self.best = best
        self._repository = repository
        self._gone: set[ModelRef] = set()
        """Versions that were retired."""

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Retire the versions that no trial needs any longer.

        Raises:
            ValueError: if the study has several objectives.
        """
        if len(study.directions) != 1:
            raise ValueError(f"Retirement: expected a study of one objective; found {len(study.directions)}")
        sign = -1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1.0
        trials = study.get_trials(deepcopy=False)
        complete = [other for other in trials if other.state == TrialState.COMPLETE]
        ranked = sorted(complete, key=lambda other: (sign * _value(other), other.number))
        unfinished = [other for other in trials if not other.state.is_finished()]
        stay = {ref_of(other) for other in [*ranked[: self.best], *unfinished]} | self._gone
        for ref in dict.fromkeys(ref_of(other) for other in trials):
            if ref is not None and ref not in stay and retire(self._repository, ref):
                self._gone.add(ref)


def _value(trial: FrozenTrial) -> float:
    """Return the objective of a complete trial."""
    value = trial.value
    if value is None:
        raise ValueError(f"trial {trial.number}: expected a value, since it is complete; found none")
    return value
