"""Search with Ray Tune: the checkpoint of a trial is a reference to a version in a repository.

The checkpoint directory contains one small file, `reference.json`. The tensors stay in the repository when Tune stores
or copies the checkpoint, or passes the checkpoint to another trial.

In population-based training, a trial can receive the checkpoint of another trial and load the version to which the
checkpoint refers. Pass the loaded version as `parent` of the next save, so that the new version derives from it.

Tune deletes old checkpoints, but not the versions in the repository. `Retirement` retires the versions from which no
trial can continue. This module needs the package `ray[tune]`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pyarrow import fs
from ray import tune
from ray.tune.experiment import Trial

from ...store.bounds import jsontext
from ...store.errors import CorruptDataError, StorageError
from ...store.refs import ModelRef
from ..tasks.connection import connected
from .retirement import retire

FILE = "reference.json"


def write_ref(directory: str | os.PathLike[str], ref: ModelRef) -> None:
    """Write a reference to a version into a checkpoint directory. Call `write_ref` in `Trainable.save_checkpoint`.

    Args:
        directory: The checkpoint directory.
        ref: The version.
    """
    Path(directory, FILE).write_text(json.dumps({"model": str(ref)}))


@contextmanager
def checkpoint_of(ref: ModelRef) -> Generator[tune.Checkpoint]:
    """Return a context manager that yields a checkpoint with a reference to a version.

    The checkpoint directory is deleted at the end of the `with` block.
    """
    with tempfile.TemporaryDirectory(prefix="tensorvine-") as directory:
        write_ref(directory, ref)
        yield tune.Checkpoint(directory, cast(Any, fs.LocalFileSystem()))


def report(metrics: Mapping[str, object], ref: ModelRef) -> None:
    """Report the metrics of a trial to Tune, with a reference to a version as the checkpoint.

    Args:
        metrics: Mapping of metric names to values, as in `tune.report`.
        ref: Version from which this trial, or another trial that exploits this trial, continues.

    >>> def train(config):                                                        # doctest: +SKIP
    ...     repo, name = connected("pbt"), tune.get_context().get_trial_id()
    ...     model, last = build(config), resumed()
    ...     if last is not None:
    ...         repo.load_model(last, into=model)
    ...     for accuracy in train_intervals(model):
    ...         last = repo.save_model(name, model, parent=last, quality=accuracy).ref
    ...         report({"accuracy": accuracy}, last)
    """
    with checkpoint_of(ref) as checkpoint:
        tune.report(dict(metrics), checkpoint=checkpoint)


def resumed() -> ModelRef | None:
    """Return the version from which this trial continues, or None if the trial has no checkpoint.

    The version was reported by this trial, or by another trial that this trial exploits.
    """
    checkpoint = cast("tune.Checkpoint | None", tune.get_checkpoint())
    return None if checkpoint is None else ref_of(checkpoint)


def ref_of(checkpoint: tune.Checkpoint | str | Path) -> ModelRef:
    """Return the version to which a checkpoint refers.

    Args:
        checkpoint: A `tune.Checkpoint` on any file system, or the path of a checkpoint directory.

    Raises:
        StorageError: if the checkpoint cannot be read, or was not created by this module.
        CorruptDataError: if `reference.json` does not contain a reference to a version.
    """
    if isinstance(checkpoint, (str, Path)):
        checkpoint = cast(tune.Checkpoint, tune.Checkpoint.from_directory(checkpoint))
    path = str(PurePosixPath(cast(str, checkpoint.path), FILE))
    try:
        with cast(Any, checkpoint.filesystem).open_input_file(path) as file:
            text: bytes = file.readall()
    except OSError as exc:
        raise StorageError(f"checkpoint {checkpoint.path}: expected the file {FILE}; found {exc}") from exc
    try:
        return ModelRef.parse(jsontext.mapping(text, path)["model"])
    except (CorruptDataError, KeyError, TypeError, ValueError) as exc:
        raise CorruptDataError(f"{path}: expected a reference to a version; found {text[:250]!r}") from exc


class Retirement(tune.Callback):
    """A Tune callback that retires versions from which no trial can continue.

    Each trial must use its own model name, and must report every version that it saves. When a trial exploits another
    trial, Tune can drop the last checkpoint of the exploiting trial without a call of `on_checkpoint`. When the
    exploiting trial reports its next checkpoint, the callback therefore also retires the versions of its dropped
    checkpoints.

    Args:
        repository: Name of the running repository in which the trials save. The argument is a name and not a client,
            because Tune stores the callback with the experiment.
        keep: Number of newest versions to keep for each trial. For population-based training, use the number of reports
            per perturbation interval plus 1. An exploiting trial continues from the version that the exploited trial
            reported at the end of the interval.

    Raises:
        ValueError: if `keep` is not positive.

    >>> tune.RunConfig(callbacks=[Retirement("pbt")])                             # doctest: +SKIP
    """

    def __init__(self, repository: str, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Retirement: keep: expected a positive number; found {keep!r}")
        self.keep = keep
        self._repository = repository
        self._reported: dict[str, dict[str, ModelRef]] = {}
        """Trial -> path of a checkpoint -> its version, oldest first."""
        self._unheard: set[ModelRef] = set()
        """Versions that did not come as checkpoints."""

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: tune.Checkpoint, **info: object
    ) -> None:
        """Record the version of a new checkpoint, and retire versions from which no trial can continue."""
        ref, versions = ref_of(checkpoint), self._reported.setdefault(trial.trial_id, {})
        heard = max((other.version for other in versions.values() if other.name == ref.name), default=0)
        self._unheard |= {ModelRef(ref.name, version) for version in range(heard + 1, ref.version)}
        versions[checkpoint.path] = ref
        self._sweep(trials)

    def on_experiment_end(self, trials: list[Trial], **info: object) -> None:
        """For each trial, retire all versions except the newest `keep` and the version of the latest checkpoint."""
        self._sweep(trials)

    def _sweep(self, trials: Iterable[Trial]) -> None:
        repository = connected(self._repository)
        used: set[str] = {trial.checkpoint.path for trial in trials if trial.checkpoint is not None}
        known, kept = set(self._unheard), set[ModelRef]()
        for versions in self._reported.values():
            known.update(versions.values())
            kept.update(list(versions.values())[-self.keep :])
            kept.update(ref for path, ref in versions.items() if path in used)
        gone = {ref for ref in known - kept if retire(repository, ref)}
        self._unheard -= gone
        for trial, versions in self._reported.items():
            self._reported[trial] = {path: ref for path, ref in versions.items() if ref not in gone}

    def get_state(self) -> dict[str, dict[str, str]]:
        """Return the recorded versions of all trials. Tune stores this state with the experiment."""
        return {trial: {path: str(ref) for path, ref in versions.items()} for trial, versions in self._reported.items()}

    def set_state(self, state: dict[str, dict[str, str]]) -> None:
        """Restore the recorded versions of all trials from a state that `get_state` returned."""
        self._reported = {
            trial: {path: ModelRef.parse(text) for path, text in versions.items()} for trial, versions in state.items()
        }
