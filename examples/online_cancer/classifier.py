"""The data and the network: scikit-learn's breast cancer measurements, and CANDLE's NT3 at a size for CPUs.

Rules
- Nothing is downloaded.
- NT3 reads 60,483 gene expressions of a tumour. There are 30 measurements here, of cell nuclei; each of 600 features
  is a mixture of a few of them, as genes that are expressed together are.
- TensorFlow is imported within the functions: by whoever calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import keras

FEATURES = 600
MIXED = 3
"""Measurements that one feature is a mixture of."""
NOISE = 0.5
"""Standard deviation of what is added to a feature, in units of a measurement's."""
BATCH = 10
TEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples and their classes."""

    features: NDArray[np.float32]
    """(N, 600, 1), each feature scaled by its largest absolute value."""
    classes: NDArray[np.float32]
    """(N, 2): malignant, benign; one is 1."""


def load_samples(seed: int) -> tuple[Samples, Samples]:
    """Return samples for the training and for questions."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler, maxabs_scale

    measurements, labels = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(seed)
    mixture = np.zeros((measurements.shape[1], FEATURES))
    for feature in range(FEATURES):
        mixture[rng.choice(len(mixture), MIXED, replace=False), feature] = rng.normal(size=MIXED)
    mixed = StandardScaler().fit_transform(measurements) @ mixture
    features = maxabs_scale(mixed + rng.normal(scale=NOISE, size=mixed.shape))[..., None].astype(np.float32)
    classes = np.eye(2, dtype=np.float32)[labels]
    parts = train_test_split(features, classes, test_size=TEST_SHARE, stratify=labels, random_state=seed)
    return Samples(parts[0], parts[2]), Samples(parts[1], parts[3])


def build() -> keras.Model:
    """Build the network for a process that shares few cores with others: TensorFlow computes with one thread.

    It is called in the consumers' processes too, which import it by its name, from beside the script that was started:
    see the rules of `learner.py` in online_ptychography.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return nt3()


def nt3() -> keras.Model:
    """Build NT3 with 600 features, 16 filters and dense layers of 64 and 20: 62,686 parameters."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((FEATURES, 1), name="features"),
            layers.Conv1D(16, 20, activation="relu", name="conv1"),
            layers.MaxPooling1D(1, name="pool1"),
            layers.Conv1D(16, 10, activation="relu", name="conv2"),
            layers.MaxPooling1D(10, name="pool2"),
            layers.Flatten(name="flatten"),
            layers.Dense(64, activation="relu", name="dense1"),
            layers.Dropout(0.1, name="dropout1"),
            layers.Dense(20, activation="relu", name="dense2"),
            layers.Dropout(0.1, name="dropout2"),
            layers.Dense(2, activation="softmax", name="classes"),
        ],
        name="nt3",
    )
