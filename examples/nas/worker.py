"""A worker: evaluates one candidate after another, in a process of its own.

Rules
- What a candidate does wrong (an exception, a loss that is no number, memory that is not there) is its outcome, and the
  worker goes on. What kills the worker is the controller's to notice.
- The ancestor is pinned from the query until the candidate is saved, and let go in any case.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from tensorvine.actors.search.candidate import Candidate as Inheriting
from tensorvine.store.torch import graph_of
from torch import nn

from .files import FileCandidate, FileStore
from .space import Candidate
from .store import Access
from .trainer import Trainer


@dataclass(frozen=True, slots=True)
class Task:
    """A candidate to evaluate."""

    number: int
    candidate: Candidate
    name: str
    """As which it is saved."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a candidate."""

    number: int
    quality: float | None
    """None: it failed."""
    error: str | None = None
    """Why it failed."""
    ref: str | None = None
    """As which it was saved; None: it was not."""
    ancestor: str | None = None
    """Whom it inherited from."""
    tensors: int = 0
    taken: int = 0
    """Tensors that it took over, of all it has."""
    bytes_total: int = 0
    bytes_written: int = 0
    """Of its tensors; what was saved, by what its save says."""
    began: float = 0.0
    ended: float = 0.0
    """By the worker's clock, in seconds since the epoch."""
    trained_s: float = 0.0
    stored_s: float = 0.0
    """Seconds in training, and in the repository or the files: query, load, save and release."""
    worker: str = ""
    """Who evaluated it: the process and its node."""


class Worker:
    """Evaluates candidates; becomes an actor.

    Args:
        trainer: builds and trains them.
        access: leads to where they are stored.
    """

    def __init__(self, trainer: Trainer, access: Access) -> None:
        torch.set_num_threads(1)
        torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()  # what PyTorch imports for it takes seconds
        self._trainer = trainer
        self._data = trainer.load()
        self._store = access.open()
        self._who = f"{os.uname().nodename}:{os.getpid()}"
        gc.collect()
        gc.freeze()  # the 300,000 objects that are there by now stay; a collection would look at all of them

    def ready(self) -> int:
        """Answer as soon as candidates may come: the process's id."""
        return os.getpid()

    def evaluate(self, task: Task) -> Outcome:
        """Build, inherit, train, save and let go."""
        began = time.time()
        facts: dict[str, Any] = {}
        try:
            quality = self._evaluate(task, facts)
        except Exception as exc:  # noqa: BLE001  whatever a candidate raises is its own failure, not the search's
            quality, facts["error"] = None, f"{type(exc).__name__}: {exc}"
        return Outcome(task.number, quality, began=began, ended=time.time(), worker=self._who, **facts)

    def _evaluate(self, task: Task, facts: dict[str, Any]) -> float:
        seed = self._trainer.seed_of(task.number)
        model = self._trainer.build(task.candidate, self._data, seed)
        state = model.state_dict()
        facts.update(tensors=len(state), bytes_total=sum(tensor.nbytes for tensor in state.values()))
        candidate: Inheriting | None = None
        try:
            with self._inheriting(task.name, model) as candidate:
                facts.update(ancestor=_text(candidate.ancestor), taken=taken_of(candidate))
                began = time.perf_counter()
                try:
                    quality = self._trainer.train(model, self._data, seed)
                finally:
                    facts["trained_s"] = time.perf_counter() - began
                saved = candidate.save(quality, metadata={"candidate": list(task.candidate)})
                if saved is not None:
                    facts.update(ref=str(saved.ref), bytes_written=saved.bytes_written)
        finally:
            if candidate is not None:
                facts["stored_s"] = candidate.seconds
        return quality

    def _inheriting(self, name: str, model: nn.Module) -> Inheriting:
        if isinstance(self._store, FileStore):
            return FileCandidate(self._store, name, model)
        return Inheriting(self._store, name, model)


def _text(ref: object) -> str | None:
    return None if ref is None else str(ref)


def taken_of(candidate: Inheriting) -> int:
    """Count the tensors that a candidate took over."""
    if not candidate.layers:
        return 0
    layers = graph_of(candidate.model).by_name
    return sum(len(layers[name].tensors) for name in candidate.layers)
