"""A training in plain NumPy for tests of forks: small, exact, and it tells all that is asked of it.

Its state: large and small tensors, momenta, a local statistic, a random generator. A step depends on all of them, on
the step's number, the rank and the options, so that two trainings go on alike only if all of it came over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from tensorvine.actors.training.training import Hooks, RankContext, TensorSpec

SHAPES = {"large": (700, 300), "odd": (100_003,), "kernel": (31, 7), "bias": (5,), "scalar": (), "empty": (0, 4)}


@cache
def _weights(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, np.ndarray]:
    """Draw weights once: each training begins with a copy."""
    rng = np.random.default_rng(7)
    return {name: np.array(rng.normal(size=shape)) for name, shape in shapes}


class PlainTraining:
    """One rank.

    Args:
        context: options: "rate", and "shapes" to have others than `SHAPES`.
        turn: called with ("begin" | tensor's name | "end") in the thread that trains, before it goes on.
    """

    def __init__(self, context: RankContext, turn: Callable[[str], None] = lambda place: None) -> None:
        self.context, self.turn = context, turn
        self.options = {"rate": 0.1, **context.options}
        shapes = self.options.pop("shapes", SHAPES)
        self.weights = {name: array.copy() for name, array in _weights(tuple(shapes.items())).items()}
        self.momenta = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self.statistic = np.full(3, float(context.rank))
        self.random = np.random.default_rng(100 + context.rank)
        self._done = 0
        self._hooks: Hooks | None = None
        self._wait: Callable[[str], None] | None = None
        self.seen: list[str] = []
        """Tensors that the gate was asked for."""
        self.filled_names: list[str] = []
        self.lock = threading.Lock()

    @property
    def steps_done(self) -> int:
        return self._done

    def hook(self, hooks: Hooks | None) -> None:
        self._hooks = hooks

    def configure(self, options: Mapping[str, Any]) -> None:
        unknown = options.keys() - self.options.keys()
        if unknown:
            raise ValueError(f"options: expected {sorted(self.options)}; found {sorted(unknown)}")
        self.options.update(options)

    def specs(self) -> Sequence[TensorSpec]:
        names = [part for name in reversed(self.weights) for part in (f"{name}/momentum", name)]
        found = [(name, self.tensor(name), False) for name in names] + [("statistic", self.statistic, True)]
        return [TensorSpec(name, array.dtype.name, array.shape, array.nbytes, local) for name, array, local in found]

    def forward_order(self) -> Sequence[str]:
        return list(self.weights)

    def tensor(self, name: str) -> np.ndarray:
        if name == "statistic":
            return self.statistic
        weight, _, momentum = name.partition("/")
        return self.momenta[weight] if momentum else self.weights[weight]

    def facts(self) -> Mapping[str, Any]:
        return {"done": self._done, "random": self.random.bit_generator.state}

    def memory(self, name: str) -> np.ndarray:
        return self.tensor(name)

    def filled(self, name: str) -> None:
        with self.lock:
            self.filled_names.append(name)

    def restore(self, facts: Mapping[str, Any]) -> None:
        self._done = facts["done"]
        self.random.bit_generator.state = facts["random"]

    def gate(self, wait: Callable[[str], None] | None) -> None:
        self._wait = wait

    def step(self) -> float:
        step, hooks = self._done + 1, self._hooks
        self.turn("begin")
        telling = hooks is not None and hooks.step_begins(step)
        loss = float(step)
        for name in self.weights:
            for part in (name, f"{name}/momentum") if self._wait else ():
                self.seen.append(part)
                self._wait(part)
            loss += float(np.sum(np.abs(self.weights[name]))) + float(np.sum(self.momenta[name]))
        if self._wait:
            self._wait("statistic")
        if hooks is not None:
            hooks.before_update()
        self.statistic += self.random.normal(size=3)
        for place, name in enumerate(reversed(self.weights)):
            gradient = self.weights[name] * step + place
            gradient -= np.rint(gradient)
            self.momenta[name] *= 0.9
            self.momenta[name] += gradient
            self.weights[name] -= self.options["rate"] * self.momenta[name]
            if telling and hooks is not None:
                hooks.updated(f"{name}/momentum", self.momenta[name])
                hooks.updated(name, self.weights[name])
            self.turn(name)
        self._done = step
        if hooks is not None:
            hooks.step_ended(step)
        self.turn("end")
        return loss + float(np.sum(self.statistic))

    def close(self) -> None:
        self.hook(None)
