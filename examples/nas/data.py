"""The data: what ships with scikit-learn, and generators at the true shapes of ATTN and NT3. Nothing is downloaded.

Rules
- NT3 is large (339 MB): it is made, read and scaled in place, so that a process never holds it twice.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TEST_SHARE = 0.2
ATTN_FEATURES = 6212
ATTN_POSITIVE = 0.0361
ATTN_INFORMATIVE = 64
"""Features of the generated data that tell the classes apart."""
NT3_FEATURES, NT3_CLASSES = 60_483, 2
NT3_FILES = {"nt_train2.csv": 1_120, "nt_test2.csv": 280}
"""CANDLE's files -> samples of each."""
NT3_INFORMATIVE, NT3_SHIFT = 3_000, 1.0
"""Features of the generated data that tell the classes apart, and by how many deviations."""
NAMES = ("digits", "digits-shifted", "breast_cancer", "wine", "attn", "nt3")


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


def features_of(name: str) -> int:
    """Return how many features a sample of a data set has."""
    known = {"attn": ATTN_FEATURES, "nt3": NT3_FEATURES}
    return known[name] if name in known else load(name).features


def load(name: str, seed: int = 0, samples: int = 4000, folder: str = "") -> Data:
    """Make a data set.

    Args:
        name: one of `NAMES`. `digits-shifted` has each training image nine times, moved by up to a pixel each way.
        seed: of the split, and of what is generated.
        samples: how many to generate, for `attn`, and for `nt3`, which has at most CANDLE's 1,400.
        folder: with CANDLE's `NT3_FILES`, for `nt3` alone; empty: the data are generated.

    Raises:
        ValueError: there is no such data set, or a file is none of CANDLE's.
        OSError: a file cannot be read.
    """
    if folder and name != "nt3":
        raise ValueError(f"data: expected nt3 with a folder of CANDLE's files; found {name!r}")
    if name == "nt3":
        return _nt3(samples, seed, folder)
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


def _nt3(samples: int, seed: int, folder: str) -> Data:
    """Make NT3's data, or read CANDLE's; each feature is divided by its greatest magnitude in the training set."""
    if folder:
        train, test = (read_candle(Path(folder, name)) for name in NT3_FILES)
    else:
        count = min(samples, sum(NT3_FILES.values()))
        tests = max(NT3_CLASSES, round(TEST_SHARE * count))
        rng = np.random.default_rng(seed)
        shift = np.zeros(NT3_FEATURES, np.float32)
        chosen = rng.choice(NT3_FEATURES, NT3_INFORMATIVE, replace=False)
        shift[chosen] = NT3_SHIFT * rng.choice([-1, 1], NT3_INFORMATIVE)
        train, test = (_profiles(rng, number, shift) for number in (count - tests, tests))
    scale = np.maximum(train[0].max(axis=0), -train[0].min(axis=0))
    scale[scale == 0] = 1
    for features, _ in (train, test):
        features /= scale
    return Data("nt3", NT3_CLASSES, train, test)


def _profiles(
    rng: np.random.Generator, count: int, shift: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw profiles of two classes, of which one is shifted; as many of each, in any order."""
    labels = rng.permutation(np.arange(count) % NT3_CLASSES)
    features = rng.standard_normal((count, NT3_FEATURES), dtype=np.float32)
    for row in np.flatnonzero(labels):
        features[row] += shift
    return features, labels


def read_candle(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read one of CANDLE's NT3 files: a sample a line, its class and its features, with commas or blanks between them.

    Raises:
        ValueError: a line is none of these; names it.
        OSError: the file cannot be read.
    """
    with path.open() as file:
        count = sum(bool(line.strip()) for line in file)
    features, labels = np.empty((count, NT3_FEATURES), np.float32), np.empty(count, np.int64)
    row = 0
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            values = _numbers(line)
            if len(values) != 1 + NT3_FEATURES or values[0] not in range(NT3_CLASSES):
                what = f"{len(values)} numbers, {values[0]:g} first" if len(values) else "no number"
                raise ValueError(
                    f"{path}, line {number}: expected a class (0 or 1) and {NT3_FEATURES} features; found {what}"
                )
            labels[row], features[row] = values[0], values[1:]
            row += 1
    if set(labels.tolist()) != set(range(NT3_CLASSES)):
        raise ValueError(f"{path}: expected samples of both classes; found {count} samples")
    return features, labels


def _numbers(line: str) -> NDArray[np.float64]:
    """Return the numbers that a line begins with."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # what NumPy says of anything else that follows them
        try:
            return np.fromstring(line.replace(",", " "), sep=" ")
        except (DeprecationWarning, ValueError):
            return np.empty(0)


def _shifted(images: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    side = round(images.shape[1] ** 0.5)
    framed = np.pad(images.reshape(-1, side, side), ((0, 0), (1, 1), (1, 1)))
    moved = [framed[:, y : y + side, x : x + side].reshape(images.shape) for y in range(3) for x in range(3)]
    return np.concatenate(moved), np.tile(labels, len(moved))
