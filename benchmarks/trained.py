"""Trained weights, and consecutive versions of a fine-tuning, to measure codecs and checkpoints on.

Rules
- The weights are really trained (`training`): what compresses in random ones says nothing about a model.
- What was trained once is kept under the temporary folder, under a hash of the recipe, of the code that trains
  and of PyTorch's version; two processes that train the same at once do no harm to each other.
- `tiled` makes a model larger without training a larger one: such sizes serve for bandwidth, and a ratio
  measured on them is that of the small model.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import training as training_module
from .measure import Tensors, progress
from .training import Recipe, Task, Training, training

FULL: dict[Task, Recipe] = {
    "resnet": Recipe("resnet", width=64, steps=300, batch=32, rate=0.02),
    "ptychonn": Recipe("ptychonn", width=32, steps=200, batch=16, rate=5e-4),
    "words": Recipe("words", width=64, steps=3000, batch=512, rate=5e-3),
}
QUICK: dict[Task, Recipe] = {
    "resnet": Recipe("resnet", width=16, steps=100, batch=32, rate=0.02),
    "ptychonn": Recipe("ptychonn", width=8, steps=60, batch=16, rate=1e-3),
    "words": Recipe("words", width=16, steps=400, batch=512, rate=5e-3),
}
STEPS_BETWEEN = 10
"""Batches from one version of a fine-tuning to the next."""
PERTURBATION = 1e-3
"""Standard deviation, relative to each value, of what `tiled` changes."""


def recipe_of(name: Task, *, quick: bool = False) -> Recipe:
    """Return the recipe that a name stands for; `quick` is a narrower network, trained for seconds."""
    return (QUICK if quick else FULL)[name]


def trained_weights(name: Task, *, quick: bool = False) -> Tensors:
    """Return a trained network's weights, from the cache or by training it (up to a minute and a half).

    Args:
        name: `resnet` (11.2 M parameters), `ptychonn` (1.15 M) or `words` (8.6 M, nearly all in one table).
        quick: narrower networks: 0.7 M, 0.07 M and 2.1 M parameters.

    Returns:
        Tensor name -> array, as PyTorch's `state_dict` has them: float32, counters int64.
    """
    return {key: value for key, value in trained_state(name, quick=quick).items() if not _of_optimizer(key)}


def trained_state(name: Task, *, quick: bool = False) -> Tensors:
    """Return the weights, and the optimizer's tensors under `optimizer/KIND/PARAMETER`."""
    recipe = recipe_of(name, quick=quick)
    path = _cached(recipe, "state")
    if not path.exists():
        _store(path, _train(recipe))
    return _read(path)


def fine_tuning(name: Task, versions: int, *, quick: bool = False) -> list[Tensors]:
    """Return the weights at consecutive versions of a fine-tuning, ten batches apart, oldest first.

    The first is `trained_weights`. The network goes on with data that it has not seen: `resnet` with five of
    the ten digits and its first half frozen, `ptychonn` with another object and its encoder frozen; `words`
    with another text, which changes few rows of its table.

    Args:
        name: as in `trained_weights`.
        versions: how many to give.
        quick: as in `trained_weights`.

    Raises:
        ValueError: if less than one version is asked for.
    """
    if versions < 1:
        raise ValueError(f"fine_tuning({name!r}): expected at least one version; found {versions}")
    recipe = recipe_of(name, quick=quick)
    start = trained_weights(name, quick=quick)
    paths = [_cached(recipe, f"version-{place}") for place in range(1, versions)]
    if not all(path.exists() for path in paths):
        progress(f"fine-tuning {name}: {versions} versions")
        run = resumed(recipe, start)
        run.fine_tune()
        for path in paths:
            for _ in range(STEPS_BETWEEN):
                run.step()
            _store(path, run.weights())
    return [start, *(_read(path) for path in paths)]


def resumed(recipe: Recipe, weights: Mapping[str, NDArray[Any]]) -> Training:
    """Set a training up that goes on from the weights given, with an optimizer that remembers nothing."""
    import torch

    run = training(recipe)
    run.model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
    return run


def tiled(weights: Mapping[str, NDArray[Any]], nbytes: int) -> Tensors:
    """Repeat layers under new names until `nbytes` are reached; the last tensor may go beyond.

    Each value of a repeated float tensor is changed by about a thousandth, so that no two are equal bytes.

    Args:
        weights: what to repeat; float32 or integers, any shape.
        nbytes: bytes that the result has at least.

    Raises:
        ValueError: if there are no bytes to repeat.

    >>> [(name, value.shape) for name, value in tiled({"w": np.ones(4, np.float32)}, 40).items()]
    [('w', (4,)), ('copy1/w', (4,)), ('copy2/w', (4,))]
    """
    if not any(value.nbytes for value in weights.values()):
        raise ValueError("tiled: expected weights with at least one value; found none")
    rng = np.random.default_rng(0)
    made: Tensors = {}
    have = 0
    for turn in count():
        for name, value in weights.items():
            if have >= nbytes:
                return made
            made[f"copy{turn}/{name}" if turn else name] = _perturbed(value, rng) if turn else value
            have += value.nbytes
    raise AssertionError("count() has no end")


def _perturbed(value: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    if value.dtype != np.float32:
        return value.copy()
    return value * (1 + PERTURBATION * rng.standard_normal(value.shape, dtype=np.float32))


def _train(recipe: Recipe) -> Tensors:
    run = training(recipe)
    progress(f"training {recipe.task}, width {recipe.width}: {recipe.steps} steps (once; kept in {_folder()})")
    losses = [run.step() for _ in range(recipe.steps)]
    few = max(1, recipe.steps // 20)
    progress(
        f"{recipe.task}: loss {np.mean(losses[:few]):.3g} -> {np.mean(losses[-few:]):.3g}, score {run.score():.3g}"
    )
    return run.weights() | run.optimizer_state()


def _of_optimizer(name: str) -> bool:
    return name.startswith("optimizer/")


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / "tensorvine-trained"


def _cached(recipe: Recipe, what: str) -> Path:
    source = Path(training_module.__file__).read_bytes()
    key = hashlib.sha256(f"{recipe}{STEPS_BETWEEN}{version('torch')}".encode() + source).hexdigest()[:16]
    return _folder() / f"{recipe.task}-{key}-{what}.safetensors"


def _store(path: Path, tensors: Tensors) -> None:
    from safetensors.numpy import save_file

    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, unfinished)
    unfinished.replace(path)


def _read(path: Path) -> Tensors:
    from safetensors.numpy import load_file

    return load_file(path)
