"""Viper's two calls (section 4.2): save a model's weights, load the newest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..client.repository import Repository
from ..client.save.request import Saved
from .source import Source


def save_weights(repo: Repository, name: str, weights: object, *, timeout: float = 60.0) -> Saved:
    """Save a model's weights as a new version, and wake those who wait for it.

    Args:
        repo: the repository.
        name: the model's name.
        weights: a mapping of names to arrays, a list of arrays as `model.get_weights()` gives it, a Keras model, or a
            torch module.
        timeout: seconds.

    Raises:
        TensorVineError: as in `Repository.save`.
    """
    if isinstance(weights, (list, tuple)):
        weights = {f"{place:06d}": array for place, array in enumerate(cast("Sequence[Any]", weights))}
    source = Source(weights)
    return repo.save(name, source.tensors(weights), graph=source.graph, timeout=timeout)


def load_weights(repo: Repository, name: str, *, timeout: float = 60.0) -> Mapping[str, np.ndarray]:
    """Load the newest weights, read-only.

    Those of a list come under numbers, in their order: `list(load_weights(repo, name).values())` is the list.

    Raises:
        ModelNotFoundError: there is no such model.
    """
    return repo.load(name, timeout=timeout)
