"""The training: a network that classifies scikit-learn's digits, as ranks of PyTorch DDP and as clones of a fork.

Rules
- Workers import these functions by name from the folder of the script. The samples are sent along.
- Each rank uses one thread of PyTorch, because many ranks share few cores.
- A step returns the loss on test images that are never trained on nor perturbed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tensorvine.actors import ForkableRank, RankContext, TorchTraining
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SEED = 7
WIDTH, BATCH, RATE = 512, 64, 1e-3
"""Width of both hidden layers (301,066 parameters), images of a step of all ranks together, learning rate of Adam."""
GO_S = 120.0
Samples = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Images (N, 64) from 0 to 1, and digits (N,)."""


def load_samples() -> tuple[Samples, Samples]:
    """Return training samples and test samples."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    parts = train_test_split(images, digits, test_size=360, stratify=digits, random_state=SEED)
    return (parts[0], parts[2]), (parts[1], parts[3])


def perturbed(samples: Samples, options: Mapping[str, Any]) -> Samples:
    """Return samples as the options of a clone want them.

    Args:
        samples: Training samples.
        options: "pixel_noise": standard deviation of noise that is added to each pixel; "wrong_labels": share of the
            images whose digit is drawn at random; "without": a digit that is left out.
    """
    (images, digits), rng = samples, np.random.default_rng(SEED)
    if noise := options.get("pixel_noise"):
        images = images + rng.normal(scale=noise, size=images.shape).astype(np.float32)
    if share := options.get("wrong_labels"):
        wrong = rng.random(len(digits)) < share
        digits = np.where(wrong, rng.integers(0, 10, len(wrong)), digits)
    if (digit := options.get("without")) is not None:
        images, digits = images[digits != digit], digits[digits != digit]
    return images, digits


class Task:
    """The network, its optimizer, batches and test samples: everything that ranks and clones have in common."""

    def __init__(self, train: Samples, test: Samples) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), RATE)
        self._train, self._test = (tuple(map(torch.from_numpy, part)) for part in (train, test))

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the rank's share of a step's images and digits. It depends on the arguments only."""
        images, digits = self._train
        chosen = np.random.default_rng([SEED, step]).choice(len(digits), BATCH, replace=False)[rank::size]
        return images[chosen], digits[chosen]

    def test_loss(self) -> float:
        """Return the loss on the test samples."""
        with torch.inference_mode():
            return float(loss_of(self.model, self._test))


def network() -> nn.Sequential:
    """Build the network."""
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy over a batch of images and digits."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def ddp_rank(run: str, rank: int, size: int, folder: str, steps: int, train: Samples, test: Samples) -> list[float]:
    """Train as a rank of DDP. This is an ordinary loop; `ForkableRank` and the block of each step make it forkable.

    The first step waits for the file `go` in the folder, so that the fork can be ordered before its step.

    Returns:
        The loss on the test samples after each step.
    """
    task, losses = Task(train, test), list[float]()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        model = DistributedDataParallel(task.model)
        with ForkableRank(run, rank, size, task.model, task.optimizer) as forkable:
            _await(Path(folder, "go"))
            for _ in range(steps):
                with forkable.step() as step:
                    task.optimizer.zero_grad()
                    loss_of(model, task.batch(step, rank, size)).backward()
                    task.optimizer.step()
                losses.append(task.test_loss())
    finally:
        dist.destroy_process_group()
    return losses


def _await(file: Path) -> None:
    deadline = time.monotonic() + GO_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {file} within {GO_S:.0f} s")
        time.sleep(0.01)


class Clone(TorchTraining):
    """The same training in a clone. `step` returns the loss on the test samples."""

    def __init__(self, context: RankContext, train: Samples, test: Samples) -> None:
        self._task = Task(perturbed(train, context.options), test)
        super().__init__(context, self._task.model, self._task.optimizer, loss_of, self._task.batch)

    def step(self) -> float:
        """Train one step."""
        super().step()
        return self._task.test_loss()


def build(train: Samples, test: Samples, context: RankContext) -> Clone:
    """Build the training of a clone."""
    return Clone(context, train, test)


def accuracy(state: Mapping[str, np.ndarray], test: Samples) -> float:
    """Return the share of test images that a saved training state classifies correctly."""
    model, prefix = network(), "model/"
    weights = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    with torch.inference_mode():
        return float(np.mean(model(torch.from_numpy(test[0])).numpy().argmax(axis=1) == test[1]))
