"""Models are filled by name or by architecture: whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.client.frameworks import LoadOptions, adapter_of, fill
from tensorvine.store.errors import TensorMismatchError


def keras_models() -> tuple[Any, Any]:
    keras = pytest.importorskip("keras")
    inputs, dense = keras.Input((3,)), keras.layers.Dense
    once, first, second = dense(3), dense(3), dense(3)
    return keras.Model(inputs, once(once(inputs))), keras.Model(inputs, second(first(inputs)))


def torch_models() -> tuple[Any, Any]:
    nn = pytest.importorskip("torch").nn
    once = nn.Linear(3, 3)
    return nn.Sequential(once, once), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def torch_models_of_other_names() -> tuple[Any, Any]:
    nn = pytest.importorskip("torch").nn

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.only(self.only(x))

    return Once(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.mark.parametrize("models", [keras_models, torch_models, torch_models_of_other_names])
def test_two_layers_do_not_fill_one_that_is_used_twice(models: Callable[[], tuple[Any, Any]]) -> None:
    model, other = models()
    adapter = adapter_of(model)
    graph, tensors = adapter.graph_of(other), adapter.tensors_of(other)
    assert graph.fingerprint == adapter.graph_of(model).fingerprint
    before = {name: array.copy() for name, array in adapter.tensors_of(model).items()}
    with pytest.raises(TensorMismatchError, match="expected one value"):
        fill(model, tensors, graph, LoadOptions())
    np.testing.assert_equal(dict(adapter.tensors_of(model)), before)
