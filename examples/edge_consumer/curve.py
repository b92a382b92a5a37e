"""The model: a curve as a sum of cosines with trained weights. It needs NumPy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

NAME = "wave"
COSINES = 1 << 12
POINTS = 256


def truth(x: np.ndarray) -> np.ndarray:
    """Return the true curve."""
    return np.sin(3 * x) + 0.5 * np.cos(7 * x)


class Wave:
    """The model of a consumer."""

    def assign(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Use the tensors of a version."""
        self._tensors = dict(tensors)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the curve at `x`, of shape (n,)."""
        return cosines(x, self._tensors) @ self._tensors["weights"]


class Training:
    """Trains the weights by gradient descent. Frequencies and phases do not change."""

    def __init__(self, seed: int = 7) -> None:
        random = np.random.default_rng(seed)
        self.tensors = {
            "frequencies": random.normal(0, 4, COSINES).astype(np.float32),
            "phases": random.uniform(0, 2 * np.pi, COSINES).astype(np.float32),
            "weights": np.zeros(COSINES, np.float32),
        }
        x = np.linspace(-2, 2, POINTS, dtype=np.float32)
        self._inputs, self._outputs = cosines(x, self.tensors), truth(x)

    def learn(self, steps: int) -> float:
        """Train some steps, and return the root of the mean squared error."""
        for _ in range(steps):
            left = self._inputs @ self.tensors["weights"] - self._outputs
            self.tensors["weights"] -= self._inputs.T @ left / POINTS
        return float(np.sqrt(np.mean(left**2)))


def cosines(x: np.ndarray, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return all cosines at `x`: shape (n, COSINES)."""
    return np.cos(np.outer(x, tensors["frequencies"]) + tensors["phases"]) * np.float32(np.sqrt(2 / COSINES))
