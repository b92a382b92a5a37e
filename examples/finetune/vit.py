"""The network and its data: a small vision transformer, and scikit-learn's digits in two tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

SEED = 7
BATCH = 16
FIRST, LATER = range(6), range(6, 10)
"""Digits of the two tasks."""
MANY, FEW = 500, 48
"""Training images of the two tasks."""
LAYERS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """Images to tell apart."""

    name: str
    train: tuple[Tensor, Tensor]
    """Images (N, 1, 8, 8) float32 from 0 to 1, and labels (N,) from 0."""
    test: tuple[Tensor, Tensor]

    def logits(self, model: nn.Module) -> Tensor:
        """Return the outputs (N, classes) of a model for the test images."""
        model.eval()
        with torch.inference_mode():
            return model(pixel_values=self.test[0]).logits

    def accuracy(self, model: nn.Module) -> float:
        """Return the share of test images that a model classifies correctly."""
        return (self.logits(model).argmax(1) == self.test[1]).float().mean().item()


def tasks() -> tuple[Task, Task]:
    """Return the first task, with many images, and the later task, with few."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    return tuple(_task(images, labels, digits, size) for digits, size in ((FIRST, MANY), (LATER, FEW)))


def _task(images: np.ndarray, labels: np.ndarray, digits: Sequence[int], size: int) -> Task:
    chosen = np.isin(labels, digits)
    parts = train_test_split(
        images[chosen],
        labels[chosen] - digits[0],
        train_size=size,
        stratify=labels[chosen],
        random_state=SEED,
    )
    train_x, test_x, train_y, test_y = map(torch.from_numpy, parts)
    return Task(f"digits {digits[0]} to {digits[-1]}", (train_x, train_y), (test_x, test_y))


def vit(labels: int, layers: int = LAYERS) -> ViTForImageClassification:
    """Build a network with random weights: patches of 2 x 2 pixels, hidden size 64, 4 heads.

    Args:
        labels: Number of classes.
        layers: Number of transformer layers.
    """
    torch.manual_seed(SEED)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_labels=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def train(model: nn.Module, task: Task, rate: float, epochs: int) -> None:
    """Train the parameters that require gradients."""
    images, labels = task.train
    optimizer = torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=rate)
    torch.manual_seed(SEED)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixel_values=images[batch]).logits, labels[batch]).backward()
            optimizer.step()
