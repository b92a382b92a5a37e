"""Optuna on a repository: which version a trial saved, and the retirement of those that are not among the best.

Rules
- A trial names its version in a user attribute, so that whatever storage the study has keeps it.
- The study is asked for its best trials each time: a study that is resumed needs no other state.
- Several trials may name one version: a trial that attached it again, or Optuna's retry of a failed one. It is retired
  when no trial names it that is among the best, waits or runs.
- `optuna` is an extra; this file alone imports it.
"""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial, TrialState

from ...store.refs import ModelRef
from ..client.repository import Repository
from .retirement import retire

ATTRIBUTE = "tensorvine"


def attach(trial: optuna.Trial, ref: ModelRef) -> None:
    """Note which version a trial saved: call it after the save, in the objective.

    >>> def objective(trial):                                                     # doctest: +SKIP
    ...     with Candidate(connected("nas"), f"study/{trial.number}", build(trial)) as candidate:
    ...         accuracy = train(candidate.model)
    ...         attach(trial, candidate.save(accuracy).ref)
    ...     return accuracy
    """
    trial.set_user_attr(ATTRIBUTE, str(ref))


def ref_of(trial: FrozenTrial | optuna.Trial) -> ModelRef | None:
    """Return the version that a trial saved; None if it saved none."""
    text = trial.user_attrs.get(ATTRIBUTE)
    return None if text is None else ModelRef.parse(text)


class Retirement:
    """A study's callback: retires the versions of trials that failed, were pruned, or are not among the best.

    Args:
        repository: where the trials save.
        best: how many finished trials keep their version.

    Raises:
        ValueError: `best` is not positive.

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
            ValueError: the study has several objectives.
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
