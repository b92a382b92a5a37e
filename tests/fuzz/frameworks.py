"""Targets that import Keras or PyTorch: recipes, and a weights file that is read into a model. They share a process.

Rules
- A model is of the smallest layers. A recipe of a huge model is a recipe, and takes the memory that it says: so numbers
  in recipes stay small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tensorvine.store.archive import interchange

from tests.fuzz.imported import forked, resealed
from tests.fuzz.mutations import of_bytes, of_json
from tests.fuzz.target import Read, Target

_LARGE = re.compile(rb"(?<=[:,\[\s])(\d{4})\d+")


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,), name="in"), keras.layers.Dense(2, name="a"), keras.layers.BatchNormalization(name="b")]
    model = keras.Sequential(layers, name="m")
    model.compile("sgd", "mse")
    return model


def _recipes(folder: Path) -> list[bytes]:
    from tensorvine.store.keras.recipe import recipe_of

    return [recipe_of(_model()).encode()]


@contextmanager
def _recipe_reading(folder: Path) -> Iterator[Read]:
    import keras
    from tensorvine.store.keras.recipe import build

    def read(content: bytes) -> object:
        keras.utils.clear_session(free_memory=False)
        return build(content.decode(errors="replace"))

    yield read


def _damaged_recipe(dice: Random, valid: Sequence[bytes]) -> bytes:
    content = dice.choice(valid)
    if dice.random() < 0.2:
        found = of_bytes(dice, content, valid)
    else:
        found = json.dumps(of_json(dice, json.loads(content))).encode()
    return _LARGE.sub(rb"\1", found)


def _module_recipes(folder: Path) -> list[bytes]:
    import torch
    from tensorvine.store.torch import recipe_of

    layers = [torch.nn.Linear(3, 2), torch.nn.GRU(2, 3), torch.nn.ModuleDict({"a": torch.nn.Softmax(1)})]
    return [recipe_of(torch.nn.Sequential(*layers)).encode()]


@contextmanager
def _module_reading(folder: Path) -> Iterator[Read]:
    from tensorvine.store.torch import build

    yield lambda content: build(content.decode(errors="replace"))


def _weights(folder: Path) -> list[bytes]:
    path = folder / "made.weights.h5"
    interchange.write_keras(path, _model())
    return [path.read_bytes()]


@contextmanager
def _weights_reading(folder: Path) -> Iterator[Read]:
    model, path = _model(), folder / "read.weights.h5"

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return interchange.read_keras(path, model)

    with forked():
        yield read


def _damaged_weights(dice: Random, valid: Sequence[bytes]) -> bytes:
    return resealed(of_bytes(dice, dice.choice(valid), valid))


FRAMEWORKS = (
    Target("recipe", _recipes, _recipe_reading, _damaged_recipe, trusted=True, heavy=True),
    Target("module", _module_recipes, _module_reading, _damaged_recipe, trusted=True, heavy=True),
    Target("weights", _weights, _weights_reading, _damaged_weights, heavy=True),
)
