"""Asking consumers all the time, at a fixed rate, and judging their answers.

Rules
- One thread per consumer: a slow one holds up no other. Who is late asks at once, so that all questions are asked.
- The rate is fixed, and lower than what consumers can: on few cores, answers that come as fast as they can would
  take the time of the training, and it would be the schedule with fewer answers that looks good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from tensorvine.actors import Consumer
from tensorvine.planner import UpdateCosts

from .recorded import Answer

JOIN_S = 5.0
SLACK, SLOWEST = 1.6, 2.0
"""Of what an iteration took in the warm-up; and of the period that was planned for."""


class Questions(Protocol):
    """What consumers are asked. Both methods are called from several threads."""

    def batch(self, number: int) -> np.ndarray:
        """Return the inputs of question `number`, from 0."""
        ...

    def loss(self, number: int, outputs: Any) -> float:
        """Compare an answer with the truth."""
        ...


class Answering:
    """Asks consumers in turn, from when the `with` block begins.

    Args:
        consumers: who is asked.
        questions: what.
        count: how many questions, in all.
        period_s: seconds from one question to the next, all consumers together.
        opened_at: when the first one is due, in seconds since the epoch.
    """

    def __init__(
        self, consumers: Sequence[Consumer], questions: Questions, count: int, period_s: float, opened_at: float
    ) -> None:
        self.count = count
        self._questions = questions
        self.period_s = period_s
        self.opened_at = opened_at
        self._step = len(consumers)
        self._answers: list[list[Answer]] = [[] for _ in consumers]
        self._errors: list[Exception] = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(consumer, first), name=f"ask-{first}", daemon=True)
            for first, consumer in enumerate(consumers)
        ]

    def wait(self, timeout: float) -> tuple[Answer, ...]:
        """Wait for the last answer and give all, in the order of the questions.

        Raises:
            TimeoutError: there are answers missing after `timeout` seconds.
            TensorVineError: what a consumer raised.
        """
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if self._errors:
            raise self._errors[0]
        answers = self.so_far()
        if len(answers) < self.count:
            raise TimeoutError(f"expected {self.count} answers within {timeout} s; found {len(answers)}")
        return answers

    def so_far(self) -> tuple[Answer, ...]:
        """Return the answers that are there, in the order of the questions."""
        return tuple(sorted((answer for own in self._answers for answer in list(own)), key=lambda found: found.number))

    def versions(self) -> list[int | None]:
        """Return which version answered last, for each consumer."""
        return [own[-1].version if own else None for own in self._answers]

    def __enter__(self) -> Answering:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _ask(self, consumer: Consumer, first: int) -> None:
        try:
            for number in range(first, self.count, self._step):
                batch = self._questions.batch(number)
                due = self.opened_at + number * self.period_s
                if self._stopping.wait(max(due - time.time(), 0.0)):
                    return
                answer = consumer.infer(batch)
                at = time.time()
                loss = self._questions.loss(number, answer.outputs)
                self._answers[first].append(Answer(number, at, answer.ref.version, loss))
        except Exception as exc:  # noqa: BLE001  raised again by `wait`, in the main thread
            self._errors.append(exc)


def bearable(costs: UpdateCosts | None, period_s: float) -> float:
    """Return a time for an iteration that leaves the cores time for the answers too.

    Args:
        costs: what was measured in the warm-up; None: nothing was.
        period_s: the least time; the most is twice as much.

    >>> bearable(UpdateCosts(0.1, 0.001, 0.01, 0.01), period_s=0.1), bearable(None, period_s=0.1)
    (0.16000000000000003, 0.1)
    """
    taken_s = costs.iteration_s if costs is not None else 0.0
    return min(max(period_s, SLACK * taken_s), SLOWEST * period_s)
