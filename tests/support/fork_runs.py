"""One fork in this process, for tests: its ranks and clones are `PlainTraining`s in threads, over real groups."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.actors.training.fork.fork_hooks import ForkHooks
from tensorvine.actors.training.fork.order import ForkOrder
from tensorvine.actors.training.fork.receiver import ForkReceiver
from tensorvine.actors.training.training import RankContext
from tensorvine.store.errors import ForkError

from tests.support.plain_training import SHAPES, PlainTraining

AT = 3
"""The step that is forked."""
TIMEOUT_S = 60.0


def training(rank: int = 0, size: int = 1, **options: Any) -> PlainTraining:
    return PlainTraining(RankContext("run", rank, size, None, options))


def expected(rank: int, steps: int) -> tuple[dict[str, bytes], list[float]]:
    """What a training that nobody forks has after `AT` steps, and the losses of the steps after that."""
    state, losses = undisturbed(rank, 5 if steps <= 5 else 20)
    return state, losses[:steps]


@cache
def undisturbed(rank: int, steps: int) -> tuple[dict[str, bytes], list[float]]:
    """Train such a training, once for all tests."""
    plain = training(rank)
    for _ in range(AT):
        plain.step()
    state = {spec.name: plain.tensor(spec.name).tobytes() for spec in plain.specs()}
    return state, [plain.step() for _ in range(steps)]


class Run:
    """Ranks and clones of one fork."""

    def __init__(self, sources: int, clones: int, backend: str = "shared", timeout: float = TIMEOUT_S) -> None:
        self.connect = partial(connect, rendezvous=LocalRendezvous())
        self.trainings = [training(rank, sources) for rank in range(sources)]
        self.ports = [ForkHooks(t, "run", rank, sources, self.connect) for rank, t in enumerate(self.trainings)]
        for own, fork_hooks in zip(self.trainings, self.ports, strict=True):
            own.hook(fork_hooks)
        self.order = self.ordered(clones, backend, timeout)
        self.intakes: list[ForkReceiver] = []
        self.clones: list[PlainTraining] = []

    def ordered(self, clones: int, backend: str = "shared", timeout: float = TIMEOUT_S) -> ForkOrder:
        first = self.trainings[0]
        specs, forward = tuple(first.specs()), tuple(first.forward_order())
        return ForkOrder(
            id=uuid.uuid4().hex[:8],
            run="run",
            sources=len(self.trainings),
            groups=(clones,),
            specs=specs,
            forward=forward,
            transport=backend,
            timeout=timeout,
        )

    def adopt(self, only: Sequence[int] | None = None) -> None:
        for clone in range(self.order.clones) if only is None else only:
            self.clones.append(training(clone, self.order.clones, shapes=SHAPES))
            for name in SHAPES:
                self.clones[-1].weights[name][...] = np.nan
            self.intakes.append(ForkReceiver(self.order, clone, self.clones[-1], self.connect))

    def train(self, steps: int) -> list[list[float]]:
        return [[own.step() for _ in range(steps)] for own in self.trainings]

    def arm(self, step: int = AT) -> None:
        for fork_hooks in self.ports:
            fork_hooks.arm(self.order, step)
        for fork_hooks in self.ports:
            if fork_hooks.agree(self.order.id):
                fork_hooks.capture()

    def ended(self) -> list[str | None]:
        """Wait for the end of the fork at the ranks, and give their errors."""
        states = [fork_hooks.state(self.order.id, TIMEOUT_S) for fork_hooks in self.ports]
        assert all(state.ended for state in states)
        return [state.error for state in states]

    def close(self) -> None:
        for fork_hooks in self.ports:
            fork_hooks.close()
        for receiver in self.intakes:
            receiver.fail(ForkError("the test has ended"))


Make = Callable[..., Run]
