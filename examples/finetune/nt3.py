"""The data and the networks: CANDLE's NT3, which tells tumours from normal tissue by 60,483 gene expressions.

Rules
- Most samples come first, some later; both are judged by the same test samples. They are one array, once in memory.
- `FULL` is NT3 as CANDLE and the papers have it: 154,922,918 parameters, 620 MB, of which the first dense layer has
  99.9%. `SMALL` has the same layers for the same samples, at a size that two cores train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
from nas.data import NT3_CLASSES, NT3_FEATURES, load
from subject import Subject, Task

BATCH = 20
LATER = 0.2
"""Share of the training samples that come later."""
DROPOUT = 0.1
TRUNK = ("conv1", "conv2", "features")
"""The layers with weights below the head."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a network is."""

    filters: int
    """Of both convolutions."""
    units: int
    """Of the first dense layer."""


FULL, SMALL = Size(128, 200), Size(8, 40)
LAST_UNITS = 20
"""Of the second dense layer, which is part of the head."""


def nt3(size: Size, folder: Path | None, samples: int) -> Subject:
    """Return the subject.

    Args:
        size: of the networks.
        folder: with CANDLE's files; None: data of their shape are generated.
        samples: how many to generate.

    Raises:
        ValueError: a file is none of CANDLE's.
        OSError: a file cannot be read.
    """
    data = load("nt3", samples=samples, folder=str(folder or ""))
    features, labels = data.train[0][..., None], data.train[1]
    early = round((1 - LATER) * len(labels))
    test = (data.test[0][..., None], data.test[1])
    first = Task(f"first {early} samples", (features[:early], labels[:early]), test)
    later = Task(f"{len(labels) - early} later samples", (features[early:], labels[early:]), test)

    def build(extra: Sequence[int] = (), dropout: float = 0.0) -> keras.Model:
        return network(size, extra, dropout)

    return Subject(first, later, lambda: build((LAST_UNITS,), DROPOUT), build, TRUNK, BATCH, judged=BATCH)


def network(size: Size, extra: Sequence[int], dropout: float) -> keras.Model:
    """Build a network; with `FULL`, one more layer of `LAST_UNITS` and `DROPOUT` it is NT3."""
    layers = keras.layers
    head = [layers.Dense(width, activation="relu", name=f"extra{i}") for i, width in enumerate(extra, 1)]
    if dropout:
        head.append(layers.Dropout(dropout, name="dropout"))
    return keras.Sequential(
        [
            keras.Input((NT3_FEATURES, 1), name="expressions"),
            layers.Conv1D(size.filters, 20, activation="relu", name="conv1"),
            layers.MaxPooling1D(1, name="pool1"),
            layers.Conv1D(size.filters, 10, activation="relu", name="conv2"),
            layers.MaxPooling1D(10, name="pool2"),
            layers.Flatten(name="flatten"),
            layers.Dense(size.units, activation="relu", name="features"),
            layers.Dropout(DROPOUT, name="dropout1"),
            *head,
            layers.Dense(NT3_CLASSES, activation="softmax", name="head"),
        ]
    )
