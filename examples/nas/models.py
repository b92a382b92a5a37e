"""A candidate as a PyTorch module.

Rules
- Modules are made in the order of the forward pass, so that equal beginnings draw equal first values.
- A skip goes through a projection, a dense layer without activation, only where the widths differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .space import CELLS, AttnSpace, Candidate, Cell, Nt3Space

ACTIVATIONS = {"none": nn.Identity, "swish": nn.SiLU, "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


class CellModule(nn.Module):
    """One cell of the ATTN space.

    Args:
        cell: what it is made of.
        widths: of the anchors; the last one is what the cell takes.
    """

    def __init__(self, cell: Cell, widths: list[int]) -> None:
        super().__init__()
        self.width = cell.dense.units if cell.dense else widths[-1]
        self.skips = cell.skips
        self.dense = nn.Linear(widths[-1], self.width) if cell.dense else None
        activation = cell.dense.activation if cell.dense else "none"
        self.activation = None if activation == "none" else ACTIVATIONS[activation]()
        self.projections = nn.ModuleDict(
            {str(n): nn.Linear(widths[n], self.width) for n in cell.skips if widths[n] != self.width}
        )
        self.relu = nn.ReLU()

    def forward(self, anchors: list[Tensor]) -> Tensor:
        """Return the cell's output from the sub-graph's anchors."""
        output = anchors[-1]
        if self.dense is not None:
            output = self.dense(output)
        if self.activation is not None:
            output = self.activation(output)
        for number in self.skips:
            anchor = anchors[number]
            output = output + (self.projections[str(number)](anchor) if str(number) in self.projections else anchor)
        return self.relu(output)


class AttnModel(nn.Module):
    """The cells, one after the other, and a last dense layer."""

    def __init__(self, space: AttnSpace, candidate: Candidate, features: int, classes: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList()
        widths: list[int] = [features]
        for cells in space.chain(candidate):
            widths = widths[-1:]
            for cell in cells:
                module = CellModule(cell, widths)
                self.cells.append(module)
                widths.append(module.width)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the classes' scores (N, classes) for features (N, F)."""
        anchors = [features]
        for place, cell in enumerate(self.cells):
            if place % CELLS == 0:
                anchors = anchors[-1:]
            anchors.append(cell(anchors))
        return self.head(anchors[-1])


def nt3_model(space: Nt3Space, candidate: Candidate, classes: int) -> nn.Module:
    """Build a candidate of the NT3 space: it takes features (N, length)."""
    *stages, dense = space.parts(candidate)
    layers: list[nn.Module] = [nn.Unflatten(1, (1, space.length))]
    channels, length = 1, space.length
    for stage in stages:
        if stage.kernel:
            layers.append(nn.Conv1d(channels, space.filters, stage.kernel))
            channels, length = space.filters, length - stage.kernel + 1
        layers.append(ACTIVATIONS[stage.activation]())
        if stage.pool > 1:
            layers.append(nn.MaxPool1d(stage.pool))
            length //= stage.pool
    layers += [nn.Flatten(), nn.Linear(channels * length, dense.units), ACTIVATIONS[dense.activation]()]
    return nn.Sequential(*layers, nn.Linear(dense.units, classes))


def build(space: AttnSpace | Nt3Space, candidate: Candidate, features: int, classes: int, seed: int) -> nn.Module:
    """Build a candidate's model with fresh weights.

    Args:
        space: that the candidate is of.
        candidate: what to build.
        features: of one sample.
        classes: how many scores the model gives.
        seed: of the weights.

    Raises:
        GraphError: it cannot be built; names the decision.
    """
    space.check(candidate)
    torch.manual_seed(seed)
    if isinstance(space, AttnSpace):
        return AttnModel(space, candidate, features, classes)
    if features != space.length:
        raise ValueError(f"space {space.name!r}: expected {space.length} features; found {features}")
    return nt3_model(space, candidate, classes)
