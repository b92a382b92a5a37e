"""A training's whole state in the repository: saved between two steps, and taken up again.

Rules
- A version holds all tensors of the state, and the facts in its metadata: it can be gone on with.
- The parent of what is saved is what was saved or restored before: so lineage follows the state.
- A version that does not fit is refused before anything is changed.
- Facts and metadata may have numbers that JSON has not, such as the infinite best loss of a schedule: these travel by
  name. What looks like such a name is wrapped, so that it comes back as it was.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...store.arrays import as_bytes, dtype_name
from ...store.errors import TensorMismatchError
from ...store.refs import Model, ModelRef
from ..client.repository import Repository
from ..client.save.pending import PendingSave
from ..collective.buffers import writable
from .training import Training

if TYPE_CHECKING:
    from torch import Tensor

FACTS = "training"
"""The key of a version's metadata under which the facts are."""
ORIGIN = "fork"
"""The key under which a clone says where it comes from."""
_NAMED, _NAMES = "float", ("nan", "inf", "-inf")
"""The key under which a number stands that JSON has not, and what there are."""


class Versions:
    """What a rank saves and restores.

    Args:
        repository: its name; None: there is none, and every call says so.
        where: whose it is, for errors.
    """

    def __init__(self, repository: str | None, where: str) -> None:
        self.last: ModelRef | None = None
        """The version that was saved or restored last."""
        self.origin: Mapping[str, Any] | None = None
        """Of which fork the training is a clone; what it saves says so as "fork" in its metadata."""
        self._name, self._where = repository, where
        self._repo: Repository | None = None
        self._lock = threading.Lock()

    def connect(self) -> Repository:
        """Connect, if that was not done yet.

        Raises:
            ValueError: there is no repository.
            RepositoryNotFoundError: it does not run.
        """
        if self._name is None:
            raise ValueError(f"{self._where}: start_trainers: repository: expected a repository; found None")
        with self._lock:
            if self._repo is None:
                self._repo = Repository.connect(self._name)
            return self._repo

    def stage(
        self, training: Training, name: str, quality: float | None, metadata: Mapping[str, object]
    ) -> PendingSave:
        """Begin to save a training's state; returns when the training may change it.

        Args:
            training: it stands between two steps.
            name: the model's name.
            quality: as in `Repository.save`.
            metadata: JSON values, NaN and infinity too, to which the facts are added as "training".

        Raises:
            ValueError: there is no repository.
            TensorVineError: what `Repository.save` raises.
        """
        tensors = {spec.name: training.tensor(spec.name) for spec in training.specs()}
        said = {**metadata, FACTS: training.facts()}
        if self.origin is not None:
            said[ORIGIN] = dict(self.origin)
        try:
            metadata = cast("Mapping[str, object]", with_names(said))
        except RecursionError as exc:
            raise TensorMismatchError(f"{self._where}: metadata: expected a mapping of JSON values; {exc}") from exc
        return self.connect()._submit(
            name, tensors, None, until="staged", parent=self.last, quality=quality, metadata=metadata
        )

    def restore(self, training: Training, model: Model) -> ModelRef:
        """Set the state of a training to a version's.

        Args:
            training: it stands between two steps.
            model: the version.

        Raises:
            ValueError: there is no repository, or the version has no facts of such a training.
            TensorMismatchError: its tensors are not those of the training.
            TensorVineError: what `Repository.load` raises.
        """
        repo = self.connect()
        info = repo.info(model)
        facts = info.metadata.get(FACTS)
        if not isinstance(facts, Mapping):
            raise ValueError(
                f"{self._where}: expected a version that Trainers.save saved; {info.ref} has no state of a training"
            )
        arrays = repo.load(info.ref)
        expected = {spec.name: (spec.dtype, tuple(spec.shape)) for spec in training.specs()}
        found = {name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise TensorMismatchError(
                    f"{self._where}: {info.ref}: tensor {name!r}: expected {expected.get(name, 'none')}; "
                    f"found {found.get(name, 'none')}"
                )
        training.restore(cast("Mapping[str, object]", with_numbers(cast("Mapping[str, object]", facts))))
        for name, array in arrays.items():
            _fill(training.memory(name), array, f"{self._where}: tensor {name!r}")
            training.filled(name)
        self.last = info.ref
        return info.ref

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            if self._repo is not None:
                self._repo.close()
                self._repo = None


def with_names(facts: object) -> object:
    """Return facts with the names of NaN and the infinities in their place.

    >>> with_names({"best": math.inf, "rates": (0.5, 1)})
    {'best': {'float': 'inf'}, 'rates': [0.5, 1]}
    >>> with_names({"float": "inf"})
    {'float': ['inf']}
    """
    if isinstance(facts, float) and not math.isfinite(facts):
        return {_NAMED: str(float(facts))}
    if isinstance(facts, Mapping):
        entries = cast("Mapping[object, object]", facts)
        if _looks_named(entries):
            return {_NAMED: [entries[_NAMED]]}
        return {key: with_names(value) for key, value in entries.items()}
    if isinstance(facts, list | tuple):
        return [with_names(value) for value in cast("list[object]", facts)]
    return facts


def with_numbers(facts: object) -> object:
    """Undo `with_names`.

    >>> with_numbers({"best": {"float": "-inf"}, "float": "inf"}), with_numbers({"float": ["inf"]})
    ({'best': -inf, 'float': 'inf'}, {'float': 'inf'})
    """
    if isinstance(facts, Mapping):
        entries = cast("Mapping[object, object]", facts)
        if _looks_named(entries):
            named = entries[_NAMED]
            return float(named) if isinstance(named, str) else {_NAMED: cast("list[object]", named)[0]}
        return {key: with_numbers(value) for key, value in entries.items()}
    return [with_numbers(value) for value in cast("list[object]", facts)] if isinstance(facts, list) else facts


def _looks_named(entries: Mapping[object, object]) -> bool:
    """Tell whether a mapping is the name of a number, or one that was wrapped."""
    named = entries.get(_NAMED) if len(entries) == 1 else None
    while isinstance(named, list | tuple) and len(cast("list[object]", named)) == 1:
        named = cast("list[object]", named)[0]
    return isinstance(named, str) and named in _NAMES


def _fill(memory: object, array: np.ndarray, where: str) -> None:
    """Write an array's bytes to memory of the CPU, or to a PyTorch tensor on a GPU."""
    if getattr(memory, "is_cuda", False):
        torch = sys.modules["torch"]
        cast("Tensor", memory).reshape(-1).view(torch.uint8).copy_(torch.from_numpy(as_bytes(array).copy()))
    else:
        np.copyto(writable(memory, where), as_bytes(array))
