"""The crew: so many workers, wherever there is room for them; one that dies is replaced.

Rules
- Everything here is an event: a worker that is ready, an outcome, a worker that died. Nobody waits for one worker.
- A worker that waits for room (an autoscaler may be making some) holds no candidate.
- A worker that cannot even start is not tried for ever: its reason is raised. An error of its own is one soon; one that
  dies without a word may have been put on a node that is gone, which a cluster takes its time to notice.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
import ray.exceptions
from tensorvine.store.errors import OperationTimeoutError

from .worker import Outcome, Task, Worker

STARTS = 5
"""How often in a row a worker may fail at its start with an error of its own."""
NOTICE_S = 60.0
"""For how long workers may die before they are ready."""
PAUSE_S = 0.5
"""How much longer to wait each time before another one is started, up to `STARTS` times."""


@dataclass(slots=True, eq=False)
class Hand:
    """One worker, as the crew sees it."""

    actor: Any
    task: Task | None = None
    """What it evaluates; None before it is ready."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker died, and its candidate with it."""

    task: Task
    reason: str


class Crew:
    """Workers. A context manager: it ends them.

    Args:
        make: gives the arguments of `Worker`.
        size: how many.
        cpus: CPU slots of each; 0: they share what there is.
        spread: over the nodes, as evenly as can be; False: as Ray likes it, which fills one node after the other.
    """

    def __init__(
        self, make: Callable[[], tuple[Any, ...]], size: int, cpus: float = 0.0, *, spread: bool = False
    ) -> None:
        if size < 1:
            raise ValueError(f"Crew: size: expected a positive number; found {size}")
        # Workers need not find this package: it travels with them. So its modules import one another at the top only.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__package__])
        self._class = ray.remote(Worker).options(
            num_cpus=cpus, max_restarts=0, scheduling_strategy="SPREAD" if spread else "DEFAULT"
        )
        self._make, self._size = make, size
        self._hands: dict[Any, Hand] = {}
        """What is awaited -> who owes it."""
        self._idle: list[Hand] = []
        self._stillborn: list[float] = []
        """When workers died that were never ready, since one was."""
        self._pause = threading.Event()
        self.deaths = 0
        """How many workers died."""

    @property
    def idle(self) -> int:
        """How many are ready and have nothing to do."""
        return len(self._idle)

    @property
    def ready(self) -> int:
        """How many are at work or could be."""
        return len(self._idle) + sum(hand.task is not None for hand in self._hands.values())

    def give(self, task: Task) -> None:
        """Give a candidate to an idle worker."""
        hand = self._idle.pop()
        hand.task = task
        self._hands[hand.actor.evaluate.remote(task)] = hand

    def next(self, timeout: float) -> Outcome | Lost | None:
        """Wait for an event; None: a worker became ready, or one died that had no candidate.

        Raises:
            OperationTimeoutError: nothing happened within `timeout` seconds.
            RuntimeError: workers die before they are ready, again and again.
        """
        self._fill()
        done, _ = ray.wait(list(self._hands), num_returns=1, timeout=timeout)
        if not done:
            raise OperationTimeoutError(
                f"search: expected an event of {self._size} workers within {timeout:g} s; found none; "
                f"{self.ready} of them are ready"
            )
        hand = self._hands.pop(done[0])
        task, hand.task = hand.task, None
        try:
            answer = ray.get(done[0], timeout=timeout)
        except ray.exceptions.RayActorError as exc:
            return self._died(task, exc)
        self._idle.append(hand)
        self._stillborn.clear()
        return None if task is None else answer

    def close(self) -> None:
        """End all workers."""
        for hand in (*self._idle, *self._hands.values()):
            ray.kill(hand.actor)
        self._idle, self._hands = [], {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self) -> None:
        for _ in range(self._size - len(self._idle) - len(self._hands)):
            actor = self._class.remote(*self._make())
            self._hands[actor.ready.remote()] = Hand(actor)

    def _died(self, task: Task | None, error: ray.exceptions.RayActorError) -> Lost | None:
        self.deaths += 1
        reason = str(error).strip().splitlines()[-1]
        if task is not None:
            return Lost(task, reason)
        self._stillborn.append(time.monotonic())
        times, since = len(self._stillborn), self._stillborn[-1] - self._stillborn[0]
        if since > NOTICE_S or (error.actor_init_failed and times >= STARTS):
            raise RuntimeError(f"search: expected workers that start; {times} in a row died before: {error}") from error
        self._pause.wait(PAUSE_S * min(times, STARTS))
        return None
