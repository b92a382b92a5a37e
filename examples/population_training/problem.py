"""What a member of either population trains: a network of two hidden layers, in plain NumPy.

Rules
- A function reaches an actor by its name: it is imported there, from beside the script that was started. The samples
  travel with it, so that the actors need no scikit-learn.
- What a step gives is the accuracy on images that are not trained on, as it was measured last: the members' score.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorvine.actors import NumpyTraining, RankContext, StepContext

SEED = 7
BATCH = 64
MOMENTUM = 0.9
LAYERS = ("first", "second", "third")
FACTORS = (0.5, 2.0)
"""A learning rate that is copied is multiplied by one of these."""
QUANTILE = 0.25
"""Of the members: the worst ones are replaced by copies of as many best ones."""


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a member follows from, but for its learning rate."""

    images: NDArray[np.float32]
    """(N, 64), to train on."""
    digits: NDArray[np.int64]
    test_images: NDArray[np.float32]
    """Not trained on: they tell how good a member is."""
    test_digits: NDArray[np.int64]
    width: int
    """Of both hidden layers."""
    interval: int
    """Steps after which a member's accuracy is measured, and it may be replaced."""


def load_problem(width: int, interval: int) -> Problem:
    """Make the problem: labels of a tenth of the images to train on are wrong, so that small rates pay in the end."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    train, test, answers, truth = train_test_split(images, digits, test_size=600, stratify=digits, random_state=SEED)
    rng = np.random.default_rng(SEED)
    answers = np.where(rng.random(len(answers)) < 0.1, rng.integers(0, 10, len(answers)), answers)
    return Problem(train, answers, test, truth, width, interval)


def build(problem: Problem, context: RankContext) -> NumpyTraining:
    """Make a member's training; its option is "rate"."""
    rng = np.random.default_rng(SEED)
    state: dict[str, np.ndarray] = {}
    sizes = pairwise((problem.images.shape[1], problem.width, problem.width, 10))
    for name, (inputs, outputs) in zip(LAYERS, sizes, strict=True):
        state[f"{name}/kernel"] = rng.normal(scale=np.sqrt(2 / inputs), size=(inputs, outputs)).astype(np.float32)
        state[f"{name}/bias"] = np.zeros(outputs, np.float32)
    state |= {f"{name}/momentum": np.zeros_like(array) for name, array in state.items()}
    state["accuracy"] = np.zeros((), np.float64)
    return NumpyTraining(context, state, lambda now: step(problem, now), options={"rate": 0.01})


def step(problem: Problem, now: StepContext) -> float:
    """Train one step by stochastic gradient descent with momentum; gives the accuracy as it was measured last."""
    chosen = np.random.default_rng([SEED, now.step]).choice(len(problem.digits), BATCH, replace=False)
    inputs = _forward(problem.images[chosen], now)
    errors = _softmax(inputs.pop())
    errors[np.arange(BATCH), problem.digits[chosen]] -= 1.0
    errors /= BATCH
    for name, layer in zip(reversed(LAYERS), reversed(inputs), strict=True):
        kernel, bias = layer.T @ errors, errors.sum(axis=0)
        errors = (errors @ now[f"{name}/kernel"].T) * (layer > 0)
        _update(now, f"{name}/kernel", kernel)
        _update(now, f"{name}/bias", bias)
    if now.step % problem.interval == 0:
        right = _forward(problem.test_images, now)[-1].argmax(axis=1) == problem.test_digits
        now.update("accuracy", right.mean())
    return float(now["accuracy"])


def explore(options: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the options of a member that is copied from one with these."""
    return {**options, "rate": options["rate"] * rng.choice(FACTORS)}


def _forward(images: np.ndarray, now: StepContext) -> list[np.ndarray]:
    """Return the input of each layer, and the output of the last one."""
    layers = [images]
    for name in LAYERS:
        output = layers[-1] @ now[f"{name}/kernel"] + now[f"{name}/bias"]
        layers.append(output if name == LAYERS[-1] else np.maximum(output, 0))
    return layers


def _softmax(outputs: np.ndarray) -> np.ndarray:
    weights = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _update(now: StepContext, name: str, gradient: np.ndarray) -> None:
    with now.changing(f"{name}/momentum") as momentum:
        momentum *= MOMENTUM
        momentum += gradient
    with now.changing(name) as parameter:
        parameter -= np.float32(now.options["rate"]) * momentum
