"""Ray Tune on a repository: a trial's checkpoint is a reference to a stored version.

Rules
- Tune takes a checkpoint for a directory. Ours holds one file of some ten bytes, `reference.json`; the tensors are in
  the repository, and go nowhere when Tune stores, copies or hands on the checkpoint.
- Population-based training exploits by handing one trial's checkpoint to another: what that one loads is the donor's
  version, and what it saves next derives from it, if it names it as parent.
- Tune knows nothing of versions, so `Retirement` retires those that no trial can be restored from any more.
- `ray[tune]` is an extra; this file alone imports it.
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
    """Make a directory a checkpoint that stands for a version; for `Trainable.save_checkpoint`."""
    Path(directory, FILE).write_text(json.dumps({"model": str(ref)}))


@contextmanager
def checkpoint_of(ref: ModelRef) -> Generator[tune.Checkpoint]:
    """Return a checkpoint that stands for a version; its directory goes at the end of the `with` block."""
    with tempfile.TemporaryDirectory(prefix="tensorvine-") as directory:
        write_ref(directory, ref)
        yield tune.Checkpoint(directory, cast(Any, fs.LocalFileSystem()))


def report(metrics: Mapping[str, object], ref: ModelRef) -> None:
    """Report metrics from a trial, as `tune.report`, with a version as the checkpoint.

    Args:
        metrics: what Tune is told.
        ref: the version that this trial, or whoever exploits it, goes on from.

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
    """Return the version that this trial is to go on from: its own, or who it exploits; None at its beginning."""
    checkpoint = cast("tune.Checkpoint | None", tune.get_checkpoint())
    return None if checkpoint is None else ref_of(checkpoint)


def ref_of(checkpoint: tune.Checkpoint | str | Path) -> ModelRef:
    """Return the version that a checkpoint stands for.

    Args:
        checkpoint: a `tune.Checkpoint`, of any file system, or the path of its directory.

    Raises:
        StorageError: it cannot be read, or holds no reference: it was not made here.
        CorruptDataError: it holds another text than a reference.
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
    """Retires the versions of trials that no trial goes on from any more.

    Each trial saves under a name of its own and reports what it saves. Tune drops the checkpoint of a trial that it
    makes exploit another; so an earlier version of the name that did not come as a checkpoint goes too.

    Args:
        repository: the name of the running repository where the trials save; Tune stores its callbacks, so they hold
            no connection.
        keep: versions of each trial that stay; as many as it reports in a perturbation interval, and one more, since
            who exploits it is handed the one it had at the interval's end.

    Raises:
        ValueError: `keep` is not positive.

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
        """Take note of a version, and retire what it replaces."""
        ref, versions = ref_of(checkpoint), self._reported.setdefault(trial.trial_id, {})
        heard = max((other.version for other in versions.values() if other.name == ref.name), default=0)
        self._unheard |= {ModelRef(ref.name, version) for version in range(heard + 1, ref.version)}
        versions[checkpoint.path] = ref
        self._sweep(trials)

    def on_experiment_end(self, trials: list[Trial], **info: object) -> None:
        """Retire what was kept only since another trial went on from it."""
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
        """Give what Tune stores with the experiment, and gives back when that is restored."""
        return {trial: {path: str(ref) for path, ref in versions.items()} for trial, versions in self._reported.items()}

    def set_state(self, state: dict[str, dict[str, str]]) -> None:
        """Go on from there."""
        self._reported = {
            trial: {path: ModelRef.parse(text) for path, text in versions.items()} for trial, versions in state.items()
        }
