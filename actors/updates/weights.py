"""Viper's two calls (section 4.2): save a model's weights, load the newest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..client.repository import Repository
from ..client.save.request import Saved
from .source import Source


def save_weights(repo: Repository, name: str, weights: object, *, timeout: float = 60.0) -> Saved:
    """Save a model's weights as a new version.

    Args:
        repo: The repository.
        name: Name of the model.
        weights: A mapping of names to arrays, a list of arrays such as `model.get_weights()`, a Keras model, or a torch
            module. The name of an array in a list is its index with six digits, such as "000000".
        timeout: Seconds to wait for the save.

    Raises:
        TensorVineError: the errors of `Repository.save`.
    """
    if isinstance(weights, (list, tuple)):
        weights = {f"{place:06d}": array for place, array in enumerate(cast("Sequence[Any]", weights))}
    source = Source(weights)
    return repo.save(name, source.tensors(weights), graph=source.graph, timeout=timeout)


def load_weights(repo: Repository, name: str, *, timeout: float = 60.0) -> Mapping[str, np.ndarray]:
    """Load the weights of a model's newest version.

    If the weights were saved as a list, `list(load_weights(repo, name).values())` has the same order.

    Args:
        repo: The repository.
        name: Name of the model.
        timeout: Seconds to wait for the weights.

    Returns:
        A mapping of tensor names to read-only arrays.

    Raises:
        ModelNotFoundError: if the model does not exist.
        TensorVineError: the errors of `Repository.load`.
    """
    return repo.load(name, timeout=timeout)
