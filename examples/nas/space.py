"""The ATTN cell space, its candidates as PyTorch models, and the data (EvoStore, section 5.3; AgEBO-Tabular).

A candidate is a chain of sub-graphs of three cells. A cell applies a dense layer or the identity to the output of the
cell before it, adds up to three anchors (the input of the sub-graph and the outputs of its cells), each through a
projection if its width differs, and ends with a relu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from deephyper.hpo import HpProblem

UNITS, SMALL_UNITS = range(50, 2000, 25), range(8, 242, 3)
"""Widths of a dense layer: as published, and as many that are about an eighth as wide, for a CPU."""
ACTIVATIONS = {"none": nn.Identity, "swish": nn.SiLU, "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
CELLS = 3
Candidate = tuple[int, ...]
"""Number of the option that each decision takes."""
Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Features (N, F) float32 for training and for the quality, and the classes (N,) of both."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a candidate."""

    dense: tuple[int, str] | None
    """Width and activation of its dense layer. None: the identity."""
    skips: tuple[int, ...]
    """Numbers of the added anchors: 0 is the sub-graph's input, n the output of its n-th cell."""


class AttnSpace:
    """The space: 2 sub-graphs give 18 decisions and 1.46e19 candidates, 6 give 54 and the paper's 3.1e57.

    >>> space = AttnSpace(2)
    >>> len(space.decisions), len(space.decisions[0])
    (18, 391)
    """

    def __init__(self, subgraphs: int = 2, units: Sequence[int] = SMALL_UNITS) -> None:
        self.subgraphs = subgraphs
        dense = (None, *((width, activation) for width in units for activation in ACTIVATIONS))
        graph = [options for cell in range(CELLS) for options in (dense, *[(False, True)] * (cell + 1))]
        self.decisions = subgraphs * graph
        """The options of each decision: the dense layer of a cell, then each of its anchors."""

    def problem(self) -> HpProblem:
        """Return the space as DeepHyper's problem."""
        from deephyper.hpo import HpProblem

        problem = HpProblem()
        for place, options in enumerate(self.decisions):
            problem.add_hyperparameter(list(range(len(options))), f"d{place:02d}")
        return problem

    def candidate(self, config: Mapping[str, object]) -> Candidate:
        """Return the candidate of one of DeepHyper's configurations."""
        return tuple(int(str(config[f"d{place:02d}"])) for place in range(len(self.decisions)))

    def chain(self, candidate: Candidate) -> Iterator[list[Cell]]:
        """Yield the cells of each sub-graph of a candidate."""
        chosen = iter([options[number] for options, number in zip(self.decisions, candidate, strict=True)])
        for _ in range(self.subgraphs):
            yield [Cell(next(chosen), tuple(n for n in range(cell + 1) if next(chosen))) for cell in range(CELLS)]


class CellModule(nn.Module):
    """A cell. `widths` are those of the anchors; the last one is the width of its input."""

    def __init__(self, cell: Cell, widths: Sequence[int]) -> None:
        super().__init__()
        self.width, activation = cell.dense or (widths[-1], "none")
        self.dense = nn.Linear(widths[-1], self.width) if cell.dense else nn.Identity()
        self.activation = ACTIVATIONS[activation]()
        other = {n: nn.Linear(widths[n], self.width) for n in cell.skips if widths[n] != self.width}
        self.skips = nn.ModuleDict({str(n): other.get(n, nn.Identity()) for n in cell.skips})
        self.relu = nn.ReLU()

    def forward(self, anchors: Sequence[Tensor]) -> Tensor:
        """Return the cell's output."""
        output = self.activation(self.dense(anchors[-1]))
        for number, projection in self.skips.items():
            output = output + projection(anchors[int(number)])
        return self.relu(output)


class AttnModel(nn.Module):
    """A candidate: its cells, and a last dense layer. Maps features (N, F) to scores (N, classes)."""

    def __init__(self, space: AttnSpace, candidate: Candidate, features: int, classes: int) -> None:
        super().__init__()
        self.cells, width = nn.ModuleList(), features
        for cells in space.chain(candidate):
            widths = [width]
            for cell in cells:
                self.cells.append(CellModule(cell, widths))
                widths.append(width := self.cells[-1].width)
        self.head = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores."""
        anchors = [features]
        for place, cell in enumerate(self.cells):
            anchors = anchors[-1:] if place % CELLS == 0 else anchors
            anchors.append(cell(anchors))
        return self.head(anchors[-1])


def load(name: str, seed: int) -> Data:
    """Load a data set of scikit-learn: digits, breast_cancer or wine."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    train, test, answers, truth = train_test_split(features, labels, test_size=0.2, stratify=labels, random_state=seed)
    scale = np.where(train.std(axis=0) > 0, train.std(axis=0), 1)
    train, test = (torch.from_numpy(((part - train.mean(axis=0)) / scale).astype(np.float32)) for part in (train, test))
    return train, test, torch.from_numpy(answers), torch.from_numpy(truth)
