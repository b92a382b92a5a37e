"""The data: what ships with scikit-learn, and a generator at the true shape of ATTN. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TEST_SHARE = 0.2
ATTN_FEATURES = 6212
ATTN_POSITIVE = 0.0361
ATTN_INFORMATIVE = 64
"""Features of the generated data that tell the classes apart."""
NAMES = ("digits", "digits-shifted", "breast_cancer", "wine", "attn")


@dataclass(frozen=True, slots=True)
class Data:
    """Samples to train on and to judge by."""

    name: str
    classes: int
    train: tuple[NDArray[np.float32], NDArray[np.int64]]
    """Features (N, F), and classes (N,)."""
    test: tuple[NDArray[np.float32], NDArray[np.int64]]

    @property
    def features(self) -> int:
        """Of one sample."""
        return self.train[0].shape[1]

    def quality(self, predicted: NDArray[np.int64]) -> float:
        """Return the mean over the classes of the share of test samples that are right.

        For classes of equal size it is the accuracy; where 3.6% are positive, plain accuracy says nothing.
        """
        truth = self.test[1]
        return float(np.mean([np.mean(predicted[truth == label] == label) for label in range(self.classes)]))


def load(name: str, seed: int = 0, samples: int = 4000) -> Data:
    """Make a data set.

    Args:
        name: one of `NAMES`. `digits-shifted` has each training image nine times, moved by up to a pixel each way.
        seed: of the split, and of what is generated.
        samples: how many to generate, for `attn` alone.

    Raises:
        ValueError: there is no such data set.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    if name == "attn":
        features, labels = _generated(samples, seed)
    elif name in NAMES:
        features, labels = getattr(datasets, f"load_{name.removesuffix('-shifted')}")(return_X_y=True)
    else:
        raise ValueError(f"data: expected one of {', '.join(NAMES)}; found {name!r}")
    train_x, test_x, train_y, test_y = train_test_split(
        features, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed
    )
    if name == "digits-shifted":
        train_x, train_y = _shifted(train_x, train_y)
    mean, deviation = train_x.mean(axis=0), train_x.std(axis=0)
    scale = np.where(deviation > 0, deviation, 1)
    train, test = (((part - mean) / scale).astype(np.float32) for part in (train_x, test_x))
    classes = int(labels.max()) + 1
    return Data(name, classes, (train, train_y.astype(np.int64)), (test, test_y.astype(np.int64)))


def _generated(samples: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw profiles at ATTN's shape: what is positive follows from a few features, not linearly."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((samples, ATTN_FEATURES), dtype=np.float32)
    informative = features[:, :ATTN_INFORMATIVE]
    score = informative @ rng.standard_normal(ATTN_INFORMATIVE).astype(np.float32)
    score += 2 * np.abs(informative @ rng.standard_normal(ATTN_INFORMATIVE).astype(np.float32))
    order = np.argsort(score)
    labels = np.zeros(samples, np.int64)
    labels[order[-max(2, round(ATTN_POSITIVE * samples)) :]] = 1
    return features, labels


def _shifted(images: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    side = round(images.shape[1] ** 0.5)
    framed = np.pad(images.reshape(-1, side, side), ((0, 0), (1, 1), (1, 1)))
    moved = [framed[:, y : y + side, x : x + side].reshape(images.shape) for y in range(3) for x in range(3)]
    return np.concatenate(moved), np.tile(labels, len(moved))
