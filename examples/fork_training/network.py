"""What the ranks train: a network that tells scikit-learn's digits apart, on data that may be perturbed.

Rules
- A function reaches an actor by its name: it is imported there, from beside the script that was started. The samples
  travel with it, so that the actors need no scikit-learn.
- PyTorch computes with one thread per rank: here many ranks share few cores.
- What a step gives is the loss on images that are never trained on nor perturbed: that of the batch would be small
  where the data are easy, and could not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensorvine.actors import RankContext, TorchTraining
from torch import nn

SEED = 7
WIDTH = 512
"""Of both hidden layers: 301,066 parameters."""
BATCH = 64
"""Images of a step, of all ranks together."""
RATE = 1e-3
"""Adam's learning rate."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Images and the digits they show."""

    images: NDArray[np.float32]
    """(N, 64), in 0 to 1."""
    digits: NDArray[np.int64]
    """(N,)."""


def load_samples() -> tuple[Samples, Samples]:
    """Return samples to train on, and others to test with."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    parts = train_test_split(images, digits, test_size=360, stratify=digits, random_state=SEED)
    return Samples(parts[0], parts[2]), Samples(parts[1], parts[3])


def perturbed(samples: Samples, options: Mapping[str, Any]) -> Samples:
    """Return samples as the options want them.

    Args:
        samples: as they are.
        options: "pixel_noise": standard deviation of what is added to each pixel; "wrong_labels": share of the images
            whose digit is replaced by any; "without": a digit that is left out.
    """
    rng = np.random.default_rng(SEED)
    if noise := options.get("pixel_noise"):
        added = rng.normal(scale=noise, size=samples.images.shape).astype(np.float32)
        samples = replace(samples, images=samples.images + added)
    if share := options.get("wrong_labels"):
        wrong = rng.random(len(samples.digits)) < share
        samples = replace(samples, digits=np.where(wrong, rng.integers(0, 10, len(wrong)), samples.digits))
    if (digit := options.get("without")) is not None:
        kept = samples.digits != digit
        samples = Samples(samples.images[kept], samples.digits[kept])
    return samples


def network() -> nn.Sequential:
    """Build the network."""
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    return nn.Sequential(*layers)


class Tested(TorchTraining):
    """A training whose steps give the loss on the test samples.

    Args:
        context: what the rank is built from.
        train, test: the samples.
    """

    def __init__(self, context: RankContext, train: Samples, test: Samples) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        model = network()
        images, digits = torch.from_numpy(train.images), torch.from_numpy(train.digits)
        self._test = torch.from_numpy(test.images), torch.from_numpy(test.digits)

        def batches(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = np.random.default_rng([SEED, step]).choice(len(digits), BATCH, replace=False)[rank::size]
            return images[chosen], digits[chosen]

        super().__init__(context, model, torch.optim.Adam(model.parameters(), RATE), cross_entropy, batches)

    def step(self) -> float:
        """Train one step; gives the loss on the test samples after it."""
        super().step()
        with torch.inference_mode():
            return float(cross_entropy(self.model, self._test))


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy over a batch of images and digits."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build(train: Samples, test: Samples, context: RankContext) -> Tested:
    """Make a rank's training; its options say what is perturbed."""
    return Tested(context, perturbed(train, context.options), test)


def accuracy(tensors: Mapping[str, np.ndarray], test: Samples) -> float:
    """Return the share of test images that a stored version is right about.

    Args:
        tensors: its state, as a trainer saved it.
        test: the samples.
    """
    model, prefix = network(), "model/"
    weights = {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    with torch.inference_mode():
        return float(np.mean(model(torch.from_numpy(test.images)).numpy().argmax(axis=1) == test.digits))
