"""Search with Ray Tune: the checkpoint of a trial is a reference to a version in a repository.

The checkpoint's directory holds one small file, `reference.json`. The tensors stay in the repository when Tune stores
or copies the checkpoint, or gives it to another trial.

Population-based training gives the checkpoint of one trial to a second trial, which then loads the version of the
checkpoint. If the second trial saves its next version with this version as `parent`, the next version derives from it.

Tune cannot delete versions. `Retirement` retires the versions from which no trial can be restored. This module needs
the package `ray[tune]`.
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
    """Write a reference to a version into the directory of a checkpoint. Call this in `Trainable.save_checkpoint`.

    Args:
        directory: Directory of the checkpoint.
        ref: The version.
    """
    Path(directory, FILE).write_text(json.dumps({"model": str(ref)}))


@contextmanager
def checkpoint_of(ref: ModelRef) -> Generator[tune.Checkpoint]:
    """Return a context manager that creates a checkpoint with a reference to a version.

    The directory of the checkpoint is deleted at the end of the `with` block.
    """
    with tempfile.TemporaryDirectory(prefix="tensorvine-") as directory:
        write_ref(directory, ref)
        yield tune.Checkpoint(directory, cast(Any, fs.LocalFileSystem()))


def report(metrics: Mapping[str, object], ref: ModelRef) -> None:
    """Report the metrics of a trial to Tune, with a reference to a version as the checkpoint.

    Args:
        metrics: Metrics, as in `tune.report`.
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
    """Return the version from which this trial continues, or None if it starts from the beginning.

    This is a version that the trial itself reported, or the version of another trial that this trial exploits.
    """
    checkpoint = cast("tune.Checkpoint | None", tune.get_checkpoint())
    return None if checkpoint is None else ref_of(checkpoint)


def ref_of(checkpoint: tune.Checkpoint | str | Path) -> ModelRef:
    """Return the version to which a checkpoint refers.

    Args:
        checkpoint: A `tune.Checkpoint` on any file system, or the path of a checkpoint's directory.

    Raises:
        StorageError: if the checkpoint cannot be read, or was not created by this module.
        CorruptDataError: if the file of the checkpoint does not contain a reference.
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

    Each trial must save under a model name of its own and report the versions that it saves. Earlier versions of this
    name that Tune did not keep as checkpoints are retired too, because Tune drops the checkpoint of a trial that
    exploits another trial.

    Args:
        repository: Name of the running repository in which the trials save. The callback takes a name and not a client,
            because Tune stores its callbacks with the experiment.
        keep: Number of newest versions that are kept for each trial. In population-based training, use the number of
            reports in a perturbation interval plus 1, because a trial that exploits another trial continues from the
            version at the end of the interval.

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
        """Record the version of a new checkpoint, and retire the versions from which no trial can continue now."""
        ref, versions = ref_of(checkpoint), self._reported.setdefault(trial.trial_id, {})
        heard = max((other.version for other in versions.values() if other.name == ref.name), default=0)
        self._unheard |= {ModelRef(ref.name, version) for version in range(heard + 1, ref.version)}
        versions[checkpoint.path] = ref
        self._sweep(trials)

    def on_experiment_end(self, trials: list[Trial], **info: object) -> None:
        """Retire the versions that were kept only because another trial continued from them."""
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
        """Return the recorded versions of all trials, which Tune stores with the experiment."""
        return {trial: {path: str(ref) for path, ref in versions.items()} for trial, versions in self._reported.items()}

    def set_state(self, state: dict[str, dict[str, str]]) -> None:
        """Restore the recorded versions of all trials from a stored experiment."""
        self._reported = {
            trial: {path: ModelRef.parse(text) for path, text in versions.items()} for trial, versions in state.items()
        }
