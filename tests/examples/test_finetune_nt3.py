"""Fine-tuning of NT3: its own network, and data of its shape in two parts. What the job does with them is general."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nt3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as the example's script finds it."""
    for folder in ("examples", "examples/finetune"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("nt3")


def test_the_root_is_the_papers_network(nt3: Any) -> None:
    with keras.StatelessScope():  # no weights of 620 MB
        model = nt3.network(nt3.FULL, (nt3.LAST_UNITS,), nt3.DROPOUT)
    assert model.count_params() == 154_922_918
    assert [type(layer).__name__ for layer in model.layers] == (
        ["Conv1D", "MaxPooling1D"] * 2 + ["Flatten"] + ["Dense", "Dropout"] * 2 + ["Dense"]
    )


def test_a_head_learns_from_later_samples_and_the_trunk_stays(nt3: Any) -> None:
    subject = nt3.nt3(nt3.Size(2, 4), None, 50)
    (early, _), (later, labels) = subject.first.train, subject.later.train
    assert (early.shape, later.shape) == ((32, 60_483, 1), (8, 60_483, 1))
    assert early.base is later.base  # one array
    assert subject.first.test[0] is subject.later.test[0]
    keras.utils.set_random_seed(0)
    model = subject.network((16,), 0.25)
    before = {layer.name: layer.get_weights() for layer in model.layers}
    for layer in model.layers:
        layer.trainable = layer.name not in subject.trunk
    subject.train(model, subject.later, 1e-2, 1, lambda: None, lambda: None)
    changed = {
        layer.name for layer in model.layers if not all(map(np.array_equal, layer.get_weights(), before[layer.name]))
    }
    assert "head" in changed <= {"extra1", "head"}
    assert subject.predict(model, subject.later).shape == (10, 2)
    assert set(labels) <= {0, 1}
