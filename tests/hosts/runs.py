"""A training over two hosts, and forks of it: clones go on bit for bit.

The training goes on while it is forked, and is stopped afterwards.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
from tensorvine.actors.training.forks import fork
from tensorvine.actors.training.numpy import NumpyTraining, StepContext
from tensorvine.actors.training.start import Trainers, start_trainers
from tensorvine.actors.training.training import RankContext

STEPS = 10**9
"""That the training begins before it is forked: more than it comes to."""
STEP_S = 0.05
"""That a step takes at least, so that the machine is left to what is tested."""
ON = 5
"""Steps that both then go on."""


def build(context: RankContext) -> NumpyTraining:
    """Make a rank: its weights depend on all that went before, and on what both ranks drew."""
    random = np.random.default_rng(context.rank)
    state = {"w": np.ones((300, 200)), "b": np.zeros(3)}

    def step(now: StepContext) -> float:
        time.sleep(STEP_S)
        loss = float(np.mean(now["w"] ** 2) + now["b"].sum())
        now.reduce("w", np.cos(now["w"] * now.step + now.rank))
        now.reduce("b", now.random.normal(size=3))
        now.update("w", now["w"] - 0.01 * now.mean("w"))
        now.update("b", now["b"] - 0.01 * now.mean("b"))
        return loss

    return NumpyTraining(context, state, step, parameters=["w", "b"], random=random)


class Run:
    """A training with a rank on each of some nodes.

    Args:
        name: of the run.
        nodes: ids of the nodes.
    """

    def __init__(self, name: str, nodes: list[str]) -> None:
        self.name = name
        self._trainers: Trainers = start_trainers(build, len(nodes), name=name, nodes=nodes)
        self._losses: list[list[float]] = [[] for _ in nodes]

    def forked(self, clones: str, timeout: float) -> int:
        """Fork it, and let it train meanwhile; give the step that the clones began after.

        Raises:
            ValueError: clones did not go on as the training did.
        """
        self._trainers.train_async(STEPS)
        with ExitStack() as ending:
            try:
                made = fork(self._trainers, at_step=None, name=clones, timeout=timeout)
                ending.callback(made.kill)
            finally:
                self._trainers.stop(timeout)
                self._note(self._trainers.results(timeout))
            after = made.report.step
            if max(made.report.standby_s, made.report.readiness_s) > timeout:
                raise ValueError(f"expected the fork to be over within {timeout} s; found {made.report}")
            if after >= len(self._losses[0]):
                raise ValueError(f"expected the training to go on after step {after}; it ended there")
            self._note(self._trainers.train(ON, timeout))
            found = made.train(ON, timeout)
            expected = [losses[after : after + ON] for losses in self._losses]
            if found != expected:
                raise ValueError(f"clones after step {after}: expected losses {expected}; found {found}")
            return after

    def close(self) -> None:
        """End it."""
        self._trainers.kill()

    def _note(self, losses: list[list[float]]) -> None:
        for known, more in zip(self._losses, losses, strict=True):
            known += more
