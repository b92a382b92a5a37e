"""The training of a candidate: one epoch in PyTorch.

Rules
- PyTorch, because it starts a candidate in milliseconds; a Keras model of the same candidate first compiles its graph
  for about a second.
- A candidate's first values and the order of its samples follow from its seed alone.
- What is frozen is left out of the backward pass. A candidate that is frozen as a whole has nothing to learn, and is
  only judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from .data import Data, load
from .models import build
from .space import AttnSpace, Candidate, Nt3Space

BATCH, JUDGED = 32, 64
"""Samples that are trained on, and judged, at once; all of NT3's at once would take gigabytes."""
RATE = 1e-3
"""Of Adam."""


class TrainingError(RuntimeError):
    """A candidate did not train: its loss or its outputs are no numbers any more."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """Builds and trains candidates. Small, so that it can be sent to workers, which load the data themselves."""

    space: AttnSpace | Nt3Space
    data: str
    """A name of `data.NAMES`."""
    samples: int = 4000
    """Of the data set that is generated."""
    seed: int = 0
    files: str = ""
    """With CANDLE's own files, for `nt3`; empty: the data are generated."""

    def load(self) -> Data:
        """Load the data."""
        return load(self.data, self.seed, self.samples, self.files)

    def seed_of(self, number: int) -> int:
        """Return the seed of a candidate."""
        return 1_000_003 * self.seed + number

    def build(self, candidate: Candidate, data: Data, seed: int) -> nn.Module:
        """Build a candidate's model with fresh weights.

        Raises:
            GraphError: it cannot be built; names the decision.
        """
        return build(self.space, candidate, data.features, data.classes, seed)

    def train(self, model: nn.Module, data: Data, seed: int) -> float:
        """Train what is not frozen for one epoch, and give the quality.

        Raises:
            TrainingError: the loss is no number.
        """
        learning = [tensor for tensor in model.parameters() if tensor.requires_grad]
        if learning:
            generator = torch.Generator().manual_seed(seed)
            features, labels = (torch.from_numpy(part) for part in data.train)
            optimizer = torch.optim.Adam(learning, RATE)
            loss = torch.zeros(())
            model.train()
            for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
                optimizer.zero_grad(set_to_none=True)
                loss = torch.nn.functional.cross_entropy(model(features[batch]), labels[batch])
                loss.backward()
                optimizer.step()
            if not math.isfinite(value := loss.item()):
                raise TrainingError(f"expected a finite loss; found {value}")
        return judge(model, data)


def judge(model: nn.Module, data: Data) -> float:
    """Return a model's quality on the test samples.

    Raises:
        TrainingError: it answers with what is no number.
    """
    model.eval()
    with torch.inference_mode():
        outputs = torch.cat([model(part) for part in torch.from_numpy(data.test[0]).split(JUDGED)])
    if not torch.isfinite(outputs).all():
        raise TrainingError("expected finite outputs; found NaN or infinity among them")
    return data.quality(outputs.argmax(dim=1).numpy())
