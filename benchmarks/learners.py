"""NT3, TC1 and PtychoNN at CPU size, as trainings that can be taken up again at any iteration.

Rules
- Nothing is downloaded: NT3 reads scikit-learn's breast cancer data, spread over 600 noisy features; TC1 classes that
  are drawn here; PtychoNN diffraction patterns of scikit-learn's sample images, as `training` makes them.
- What an iteration does follows from its number and from the state before it: two trainings of one name that stand at
  the same state go the same way, whatever is published of them.
- Samples are fixed; those held out are never trained on.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .training import PtychoNN, Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

Net = Literal["nt3", "tc1", "ptychonn"]

FEATURES = 600
HELD_OUT = 60
"""Samples that an inference is about."""


class Learner(ABC):
    """A network, its optimizer and its samples."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self._optimizer = optimizer

    def step(self, iteration: int) -> float:
        """Train on the batch of an iteration; gives its loss."""
        import torch

        torch.manual_seed(iteration)  # dropout's
        self.model.train()
        self._optimizer.zero_grad()
        loss = self._loss(iteration)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def state(self) -> Any:
        """Return a copy of all that training changes."""
        return copy.deepcopy((self.model.state_dict(), self._optimizer.state_dict()))

    def restore(self, state: Any) -> None:
        """Go back to a state."""
        model, optimizer = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)

    @abstractmethod
    def held_out_loss(self) -> float:
        """Return the loss on the samples held out, as a consumer has it: without dropout."""

    @abstractmethod
    def _loss(self, iteration: int) -> Tensor: ...


def learner(name: Net) -> Learner:
    """Make a learner, with its initial weights.

    >>> run = learner("nt3")
    >>> sum(parameter.numel() for parameter in run.model.parameters())
    62686
    >>> losses = [run.step(iteration) for iteration in range(3)]
    """
    return {"nt3": _NT3, "tc1": _TC1, "ptychonn": _Ptycho}[name]()


class _Expression(Learner):
    """A network on gene expression profiles: NT3's, with as many classes as there are labels."""

    def __init__(self, samples: NDArray[np.float32], labels: NDArray[np.int64], *, batch: int, rate: float) -> None:
        import torch
        from torch import nn
        from torch.optim import SGD

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(
                *(nn.Conv1d(1, 16, 20), nn.ReLU(), nn.Conv1d(16, 16, 10), nn.ReLU(), nn.MaxPool1d(10), nn.Flatten()),
                *(nn.Linear(57 * 16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 20), nn.ReLU(), nn.Dropout(0.1)),
                nn.Linear(20, int(labels.max()) + 1),
            )
            for parameter in model.parameters():  # as in Keras, which they are written in
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
                else:
                    nn.init.zeros_(parameter)
        super().__init__(model, SGD(model.parameters(), rate))
        self._samples = torch.from_numpy(samples[:, None])
        self._labels = torch.from_numpy(labels)
        self._trained = len(samples) - HELD_OUT
        self._batch = batch

    def held_out_loss(self) -> float:
        import torch
        from torch.nn.functional import cross_entropy

        self.model.eval()
        with torch.no_grad():
            return cross_entropy(self.model(self._samples[self._trained :]), self._labels[self._trained :]).item()

    def _loss(self, iteration: int) -> Tensor:
        import torch
        from torch.nn.functional import cross_entropy

        epoch, place = divmod(iteration * self._batch, self._trained)
        order = np.random.default_rng(epoch).permutation(self._trained)
        chosen = torch.from_numpy(order[place : place + self._batch])
        return cross_entropy(self.model(self._samples[chosen]), self._labels[chosen])


class _NT3(_Expression):
    """Tumor or normal tissue; 1,120 samples, 56 iterations an epoch."""

    def __init__(self) -> None:
        super().__init__(*_tumors(1120 + HELD_OUT), batch=20, rate=0.004)


class _TC1(_Expression):
    """Eighteen types of tumor; 4,320 samples, 216 iterations an epoch."""

    def __init__(self) -> None:
        super().__init__(*_types(4320 + HELD_OUT, classes=18), batch=20, rate=0.006)


class _Ptycho(Learner):
    """PtychoNN of width 8; 640 patterns, 40 iterations an epoch."""

    def __init__(self) -> None:
        self._batch = 16
        self._parts = _Patterns(Recipe("ptychonn", width=8, steps=0, batch=self._batch, rate=1e-3))
        self._samples = self._parts.draw(40)
        self._held_out = self._parts.draw(1)[0]
        super().__init__(self._parts.model, self._parts.optimizer)

    def held_out_loss(self) -> float:
        import torch

        self.model.eval()
        with torch.no_grad():
            return self._parts.error(self._held_out).item()

    def _loss(self, iteration: int) -> Tensor:
        return self._parts.error(self._samples[iteration % len(self._samples)])


class _Patterns(PtychoNN):
    """PtychoNN whose batches are drawn once."""

    def draw(self, count: int) -> list[Any]:
        """Return the next batches of the scan."""
        return [next(self._batches) for _ in range(count)]

    def error(self, batch: Any) -> Tensor:
        """Return the mean absolute error of amplitude and phase."""
        return self._loss(batch)


# ---- data -----------------------------------------------------------------------------------------------


def _tumors(count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw from the breast cancer data, its 30 features mixed into 600, with noise."""
    from sklearn.datasets import load_breast_cancer

    found: Any = load_breast_cancer()
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(found.target), count)
    features = (found.data - found.data.mean(0)) / found.data.std(0)
    samples = features[chosen] @ _mixing(rng, features.shape[1]) + rng.normal(0, 1.5, (count, FEATURES))
    return _scaled(samples), found.target[chosen]


def _types(count: int, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw profiles around one centre per class, with noise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, count)
    centres = rng.normal(0, 1, (classes, 12))
    hidden = centres[labels] + rng.normal(0, 0.7, (count, 12))
    return _scaled(hidden @ _mixing(rng, 12) + rng.normal(0, 1.0, (count, FEATURES))), labels


def _mixing(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Spread features over neighbours, as genes of one pathway vary together: (count, 600)."""
    weights = rng.normal(0, 1, (count, FEATURES))
    window = np.hanning(20)
    return np.stack([np.convolve(row, window / np.linalg.norm(window), mode="same") for row in weights])


def _scaled(samples: NDArray[np.float64]) -> NDArray[np.float32]:
    """Scale by the greatest magnitude, as CANDLE does."""
    return (samples / np.abs(samples).max(0)).astype(np.float32)
