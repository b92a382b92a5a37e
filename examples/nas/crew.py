"""The crew: so many workers, wherever there is room for them; one that dies is replaced.

Rules
- Everything here is an event: a worker that is ready, an outcome, a worker that died. Nobody waits for one worker.
- A worker that waits for room (an autoscaler may be making some) holds no candidate.
- A worker that cannot even start is not tried for ever: its reason is raised. An error of its own is one soon; one that
  dies without a word may have been put on a node that is gone, which a cluster takes its time to notice.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Self

from tensorvine.actors.engine.engine import Engine, Lifetime
from tensorvine.actors.rpc.calls import Request, answers, remote
from tensorvine.actors.rpc.channel import Channel
from tensorvine.store.errors import OperationTimeoutError, ShardUnavailableError

from .store import Access
from .trainer import Trainer
from .worker import Outcome, Task, Worker

STARTS = 5
"""How often in a row a worker may fail at its start with an error of its own."""
NOTICE_S = 60.0
"""For how long workers may die before they are ready."""
CANDIDATE_S = 24 * 3600.0
"""How long a worker may take to start, or to evaluate a candidate."""
PAUSE_S = 0.5
"""How much longer to wait each time before another one is started, up to `STARTS` times."""


class WorkerCalls:
    """Calls of a worker."""

    @remote("ctl")
    def ready(self) -> int:
        """Answer as soon as candidates may come, with the process id."""
        ...

    @remote("data")
    def evaluate(self, task: Task) -> Outcome:
        """Evaluate a candidate; the group's event loop runs nothing else meanwhile."""
        ...


class WorkerActor:
    """A worker as an actor: it evaluates one candidate after another; for the arguments see `Worker`."""

    def __init__(self, trainer: Trainer, access: Access) -> None:
        self._worker = Worker(trainer, access)

    @answers(WorkerCalls.ready)
    async def ready(self) -> int:
        """Answer as declared."""
        return self._worker.ready()

    @answers(WorkerCalls.evaluate)
    async def evaluate(self, task: Task) -> Outcome:
        """Answer as declared."""
        return self._worker.evaluate(task)


@dataclass(slots=True, eq=False)
class Hand:
    """One worker, as the crew sees it."""

    name: str
    channel: Channel
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
        engine: what runs them.
        trainer, access: the arguments of each `Worker`.
        size: how many.
        cpus: CPU slots of each; 0: they share what there is.
        spread: over the nodes, as evenly as can be; False: as the engine likes it: Ray fills one node after the other.
    """

    def __init__(
        self, engine: Engine, trainer: Trainer, access: Access, size: int, cpus: float = 0.0, *, spread: bool = False
    ) -> None:
        if size < 1:
            raise ValueError(f"Crew: size: expected a positive number; found {size}")
        _travel()
        self._engine, self._size = engine, size
        self._arguments = {"trainer": trainer, "access": access}
        self._lifetime = Lifetime(outlives=False, restarts=False, cpus=cpus, spread=spread)
        token = secrets.token_hex(4)
        self._names = (f"nas-crew-{token}/worker-{number}" for number in count())
        self._waits = ThreadPoolExecutor(size, thread_name_prefix="nas-crew")
        self._hands: dict[Future[Any], Hand] = {}
        """Future answer -> the worker that it comes from."""
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
        self._ask(hand, WorkerCalls.evaluate(task))

    def next(self, timeout: float) -> Outcome | Lost | None:
        """Wait for an event; None: a worker became ready, or one died that had no candidate.

        Raises:
            OperationTimeoutError: nothing happened within `timeout` seconds.
            RuntimeError: workers die before they are ready, again and again.
        """
        self._fill()
        done, _ = wait(self._hands, timeout, FIRST_COMPLETED)
        answer = next(iter(done), None)
        if answer is None:
            raise OperationTimeoutError(
                f"search: expected an event of {self._size} workers within {timeout:g} s; found none; "
                f"{self.ready} of them are ready"
            )
        hand = self._hands.pop(answer)
        task, hand.task = hand.task, None
        try:
            found = answer.result()
        except Exception as exc:
            if task is None or isinstance(exc, ShardUnavailableError):
                return self._died(task, exc)
            raise
        self._idle.append(hand)
        self._stillborn.clear()
        return None if task is None else found

    def close(self) -> None:
        """End all workers."""
        for hand in (*self._idle, *self._hands.values()):
            self._engine.kill(hand.name)
        self._idle, self._hands = [], {}
        self._waits.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self) -> None:
        for _ in range(self._size - len(self._idle) - len(self._hands)):
            name = next(self._names)
            actor = self._engine.spawn(WorkerActor, name, self._arguments, lifetime=self._lifetime)
            self._ask(Hand(name, Channel(self._engine, name, actor=actor)), WorkerCalls.ready())

    def _ask(self, hand: Hand, request: Request[Any]) -> None:
        self._hands[self._waits.submit(hand.channel.call, request, CANDIDATE_S)] = hand

    def _died(self, task: Task | None, error: Exception) -> Lost | None:
        self.deaths += 1
        reason = str(error.__cause__ or error).strip()
        if task is not None:
            return Lost(task, reason.splitlines()[-1])
        self._stillborn.append(time.monotonic())
        times, since = len(self._stillborn), self._stillborn[-1] - self._stillborn[0]
        if since > NOTICE_S or (_is_its_own(error) and times >= STARTS):
            raise RuntimeError(
                f"search: expected workers that start; {times} in a row died before: {reason}"
            ) from error
        self._pause.wait(PAUSE_S * min(times, STARTS))
        return None


def _is_its_own(error: Exception) -> bool:
    """Tell whether a worker failed at its start by an error of its own: Ray calls that a death, but says so of it."""
    return not isinstance(error, ShardUnavailableError) or getattr(error.__cause__, "actor_init_failed", False)


def _travel() -> None:
    """Have this package sent along with workers, which need not find it: its modules import one another at the top
    only.
    """
    for pickler in ("cloudpickle", "ray.cloudpickle"):  # Dask's and Ray's
        if pickler in sys.modules:
            sys.modules[pickler].register_pickle_by_value(sys.modules[__package__])
