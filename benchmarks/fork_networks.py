"""What `fork` trains: NT3 by Keras, and the shapes of ResNet-50 and DenseNet-121 with work that stands for theirs.

Rules
- Every tensor changes in every step, by SGD with momentum, in the order of the backward pass; ranks average gradients.
- The shapes' work is matrix products, a third of them before the backward pass and the rest within it; their gradients
  are made up. What a step does depends on the state, the step and the rank alone, and its loss on every tensor.
- Memory is touched when a training is built, as initial values do it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tensorvine.actors import RankContext, Training

Shapes = dict[str, tuple[int, ...]]
STATISTICS = ("moving_mean", "moving_variance")
RATE, MOMENTUM = np.float32(1e-3), np.float32(0.9)
PRODUCT = 256
"""Rows and columns of the matrices that are multiplied."""
LAG_BYTES = 8 << 20
"""Gradients that are being averaged while the next ones are computed."""
SAMPLES = 64
"""Elements of each tensor on which the loss depends."""


@dataclass(frozen=True)
class Net:
    """Something to train."""

    name: str
    """As the tables call it."""
    build: Callable[[RankContext], Training]
    """Makes a rank's training; goes to the ranks' processes."""


# ---- NT3 ------------------------------------------------------------------------------------------------


def nt3(name: str, units: int, features: int, filters: int, batch: int = 20) -> Net:
    """NT3 of CANDLE, by Keras: a few tensors, of which one is nearly all.

    Args:
        name: as the tables call it.
        units: of the first dense layer; 600 is the paper's NT3.C at full width.
        features: length of a profile; 60,483 at full width.
        filters: of both convolutions; 128 at full width.
        batch: samples of a step on each rank.
    """
    return Net(name, partial(_train_nt3, units=units, features=features, filters=filters, batch=batch))


def _train_nt3(context: RankContext, units: int, features: int, filters: int, batch: int) -> Training:
    import keras
    from keras import layers
    from tensorvine.actors import KerasTraining

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            layers.Input((features, 1)),
            layers.Conv1D(filters, 20, activation="relu"),
            layers.MaxPooling1D(1),
            layers.Conv1D(filters, 10, activation="relu"),
            layers.MaxPooling1D(10),
            layers.Flatten(),
            layers.Dense(units, activation="relu"),
            layers.Dropout(0.1, seed=1),
            layers.Dense(20, activation="relu"),
            layers.Dropout(0.1, seed=2),
            layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(float(RATE), momentum=float(MOMENTUM)), "categorical_crossentropy")

    def batches(step: int, rank: int, size: int) -> tuple[Any, Any]:
        random = np.random.default_rng((step, rank, size))
        labels = random.integers(2, size=batch)
        profiles = random.random((batch, features, 1), dtype=np.float32) + labels[:, None, None].astype(np.float32)
        return profiles, np.eye(2, dtype=np.float32)[labels]

    return KerasTraining(context, model, batches)


# ---- shapes ---------------------------------------------------------------------------------------------


def shaped(name: str, shapes: Callable[[], Shapes], products: int) -> Net:
    """Make a training of given shapes.

    Args:
        name: as the tables call it.
        shapes: gives name -> shape in the order of a forward pass.
        products: matrix products of `PRODUCT` rows and columns in a step of a rank.
    """
    return Net(name, partial(_train_shapes, shapes=shapes, products=products))


def resnet50() -> Shapes:
    """ResNet-50 as Keras has it: 320 tensors, 25,636,712 parameters."""
    net: Shapes = {}
    _convolution(net, "conv1", 7, 3, 64, bias=True)
    width = 64
    for stage, (filters, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
        for block in range(1, blocks + 1):
            name = f"conv{stage}_block{block}"
            if block == 1:
                _convolution(net, f"{name}_0", 1, width, 4 * filters, bias=True)
            _convolution(net, f"{name}_1", 1, width, filters, bias=True)
            _convolution(net, f"{name}_2", 3, filters, filters, bias=True)
            _convolution(net, f"{name}_3", 1, filters, 4 * filters, bias=True)
            width = 4 * filters
    return net | {"predictions/kernel": (width, 1000), "predictions/bias": (1000,)}


def densenet121() -> Shapes:
    """DenseNet-121 as Keras has it: 606 tensors, 8,062,504 parameters."""
    net: Shapes = {}
    _convolution(net, "conv1", 7, 3, 64, bias=False)
    width = 64
    for stage, blocks in enumerate((6, 12, 24, 16), start=2):
        for block in range(1, blocks + 1):
            name = f"conv{stage}_block{block}"
            _normalisation(net, f"{name}_0_bn", width)
            _convolution(net, f"{name}_1", 1, width, 128, bias=False)
            net[f"{name}_2_conv/kernel"] = (3, 3, 128, 32)
            width += 32
        if stage < 5:
            _normalisation(net, f"pool{stage}_bn", width)
            net[f"pool{stage}_conv/kernel"] = (1, 1, width, width // 2)
            width //= 2
    _normalisation(net, "bn", width)
    return net | {"predictions/kernel": (width, 1000), "predictions/bias": (1000,)}


def _convolution(net: Shapes, name: str, kernel: int, inputs: int, filters: int, *, bias: bool) -> None:
    net[f"{name}_conv/kernel"] = (kernel, kernel, inputs, filters)
    if bias:
        net[f"{name}_conv/bias"] = (filters,)
    _normalisation(net, f"{name}_bn", filters)


def _normalisation(net: Shapes, name: str, width: int) -> None:
    net |= {f"{name}/{part}": (width,) for part in ("gamma", "beta", *STATISTICS)}


def _train_shapes(context: RankContext, shapes: Callable[[], Shapes], products: int) -> Training:
    from tensorvine.actors import NumpyTraining

    made = shapes()
    random = np.random.default_rng(7)
    weights = {name: random.random(shape, dtype=np.float32) - np.float32(0.5) for name, shape in made.items()}
    trained = [name for name in weights if not name.endswith(STATISTICS)]
    momenta = {f"momentum/{name}": np.full(made[name], 1e-4, np.float32) for name in trained}
    work = _Work(weights, trained, products)
    updates = [name for name in weights if name not in trained]
    updates += [part for name in reversed(trained) for part in (f"momentum/{name}", name)]
    local = [name for name in weights if name not in trained]
    return NumpyTraining(context, weights | momenta, work, parameters=trained, updates=updates, local=local)


class _Work:
    """One step."""

    def __init__(self, weights: dict[str, np.ndarray], trained: list[str], products: int) -> None:
        self._weights, self._trained = list(weights), trained
        self._statistics = [name for name in weights if name not in trained]
        self._gradients = {name: np.ones_like(weights[name]) for name in trained}
        self._forward, self._backward = products // 3, products - products // 3
        self._left = np.random.default_rng(1).random((PRODUCT, PRODUCT), dtype=np.float32)
        self._right, self._out = self._left.T.copy(), np.empty_like(self._left)

    def __call__(self, now: Any) -> float:
        self._multiply(self._forward)
        loss = sum(float(_sample(now[name]).mean(dtype=np.float64)) for name in self._weights)
        drift = np.float32(1e-4 * (loss % 1 + now.rank) + 1e-6 * now.step)
        for name in self._statistics:
            with now.changing(name) as statistic:
                statistic += drift
        waiting: deque[str] = deque()
        lag, done, count = 0, 0, len(self._trained)
        for place, name in enumerate(reversed(self._trained), start=1):
            due = self._backward * place // count
            self._multiply(due - done)
            done = due
            gradient = self._gradients[name]
            np.multiply(now[name], np.float32(1e-2), out=gradient)
            gradient += drift
            now.reduce(name, gradient)
            waiting.append(name)
            lag += gradient.nbytes
            while waiting and (now.size == 1 or lag > LAG_BYTES):
                lag -= self._update(now, waiting.popleft())
        while waiting:
            self._update(now, waiting.popleft())
        return loss

    def _update(self, now: Any, name: str) -> int:
        gradient = now.mean(name)
        with now.changing(f"momentum/{name}") as momentum:
            momentum *= MOMENTUM
            momentum += gradient
        with now.changing(name) as weight:
            np.multiply(momentum, RATE, out=gradient)
            weight -= gradient
        return gradient.nbytes

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            np.matmul(self._left, self._right, out=self._out)


def _sample(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // SAMPLES)]
