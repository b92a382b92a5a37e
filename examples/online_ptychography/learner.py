"""What runs in the actors: PtychoNN, and its training. They import these functions from the folder of the script."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from scans import Images, Instrument
from tensorvine.actors import Repository
from torch import Tensor, nn

if TYPE_CHECKING:
    from tensorvine.actors import Publisher

SHUTTER_S = 120.0
"""How long a producer that has warmed up waits for the shutter."""


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that a training follows from."""

    repository: str
    """Name of the repository."""
    instrument: Instrument
    width: int
    """Channels of PtychoNN's first convolution."""
    batch: int
    """Patterns of an iteration."""
    rate: float
    """Learning rate of Adam."""
    scans: int
    """In all. The first one is the warm-up."""

    @property
    def scan(self) -> int:
        """Iterations of a scan: the epoch of this training, and the warm-up."""
        return self.instrument.scan // self.batch

    def measured(self, iteration: int) -> tuple[Images, Images]:
        """Return the patterns of an iteration, counted from 1, and the truth."""
        return self.instrument.measure((iteration - 1) * self.batch, self.batch)


class PtychoNN(nn.Module):
    """Maps patterns (N, 1, 64, 64) to amplitudes from 0 to 1 and phases from -pi to pi, together (N, 2, 64, 64).

    Cherukara et al., *AI-enabled high-resolution scanning coherent diffraction imaging* (2020): 1.2 million parameters
    at width 32.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*_stages(1, (width, 2 * width, 4 * width), nn.MaxPool2d(2)))
        self.amplitude, self.phase = (
            nn.Sequential(
                *_stages(4 * width, (4 * width, 2 * width, width), nn.Upsample(scale_factor=2)),
                nn.Conv2d(width, 1, 3, padding=1),
            )
            for _ in range(2)
        )

    def forward(self, patterns: Tensor) -> Tensor:
        """Reconstruct."""
        inside = self.encoder(patterns)
        return torch.cat([self.amplitude(inside).sigmoid(), math.pi * self.phase(inside).tanh()], dim=1)


def _stages(channels: int, widths: tuple[int, ...], between: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        for inputs in (channels, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
        layers.append(between)
        channels = width
    return layers


def build(study: Study) -> nn.Module:
    """Build the model. Each actor uses one thread of PyTorch, because several actors share few cores."""
    torch.set_num_threads(1)
    return PtychoNN(study.width)


def loss_of(outputs: Tensor, truth: Tensor) -> Tensor:
    """Return the sum of the mean absolute errors of amplitudes and phases."""
    return (outputs - truth).abs().mean(dim=(0, 2, 3)).sum()


def train(publisher: Publisher, study: Study) -> float:
    """Warm up on the first scan, then learn from each batch of patterns when it is measured.

    The instrument begins when a version of `shutter(...)` is saved. A training that is too slow falls behind it.

    Returns:
        Seconds spent on training and publishing, without waiting for patterns.
    """
    torch.manual_seed(study.instrument.seed)
    model = build(study)
    optimizer = torch.optim.Adam(model.parameters(), study.rate)

    def learn(patterns: Images, truth: Images) -> float:
        optimizer.zero_grad()
        loss = loss_of(model(torch.from_numpy(patterns)), torch.from_numpy(truth))
        loss.backward()
        optimizer.step()
        return loss.item()

    for iteration in range(1, study.scan + 1):
        publisher.step(learn(*study.measured(iteration)), model)
    opened_at, period_s = _shutter_of(study.repository, publisher.name)
    busy_s = 0.0
    for number, iteration in enumerate(range(study.scan + 1, study.scan * study.scans + 1), 1):
        measured = study.measured(iteration)
        time.sleep(max(opened_at + number * period_s - time.time(), 0.0))  # until the patterns are measured
        began = time.perf_counter()
        publisher.step(learn(*measured), model)
        busy_s += time.perf_counter() - began
    return busy_s


def shutter(name: str) -> str:
    """Return the name of the model whose first version starts the instrument for the training of `name`."""
    return f"{name}/shutter"


def _shutter_of(repository: str, name: str) -> tuple[float, float]:
    with Repository.connect(repository) as repo:
        ref = repo.wait_newer(shutter(name), timeout=SHUTTER_S)
        if ref is None:
            raise TimeoutError(f"training of {name!r}: expected an open shutter within {SHUTTER_S} s")
        found: Any = repo.load(ref)
        return float(found["opened_at"]), float(found["period_s"])
