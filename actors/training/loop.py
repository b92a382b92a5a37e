"""The thread that a training runs in: steps, and between them what others ask of it.

Rules
- All that touches a training is called in this one thread: steps, and jobs at the boundaries between them. So a job
  sees the state as a step left it, and no step begins before the job has ended.
- While nothing is asked, a boundary costs a step one lock that nobody holds.
- A job for a boundary to come is carried out there, or as soon as no train is under way. One that comes too late for
  its boundary is refused.
- A train that was announced counts as under way until it came: what waits for a boundary to come waits for its steps.
- A job that fails is its caller's matter, and so is a step that fails: the thread goes on. A StopIteration comes out
  as a RuntimeError, since whoever awaits it could not tell it from an answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...store.errors import PeerLostError
from .training import Training

LAST_STEPS = 64
"""Steps whose mean time is told."""

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Train:
    steps: int
    losses: list[float] = field(default_factory=list[float])
    ended: Future[list[float]] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    step: int | None
    """The boundary after this step; None: the next."""
    ended: Future[Any] = field(default_factory=Future)


class TrainingLoop:
    """Runs a training.

    Args:
        where: whose it is, for errors.
        failed: called in the thread with the error of a step that failed, before its caller hears of it.
    """

    def __init__(self, where: str, failed: Callable[[BaseException], None]) -> None:
        self.training: Training | None = None
        """Set by a job, once."""
        self.steps_trained = 0
        """Steps that were trained here."""
        self._where = where
        self._failed = failed
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._train: _Train | None = None
        self._announced = self._came = 0
        """Numbers of the last train that was announced, and of the last that began or failed to."""
        self._begun = 0
        """The last step that has begun."""
        self._stopping = False
        self._closed = False
        self._last_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._thread = threading.Thread(target=self._main, name="tensorvine-train", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a train is under way, or was announced and has yet to come."""
        return self._train is not None or (self._announced > self._came and not self._closed)

    @property
    def step_s(self) -> float:
        """Mean seconds of the last steps; 0 before the first."""
        last = list(self._last_s)
        return sum(last) / len(last) if last else 0.0

    def announce(self, train: int) -> None:
        """Tell that a train will come; trains are numbered from 1. One that came already is no change."""
        with self._changed:
            self._announced = max(self._announced, train)

    def came(self, train: int) -> None:
        """Tell that a train that was announced has begun, or will not."""
        with self._changed:
            self._came = max(self._came, train)
            self._changed.notify_all()

    def run(self, steps: int) -> Future[list[float]]:
        """Begin to train; the future gives the losses of these steps.

        Raises:
            ValueError: a train is under way, or there are no steps to train.
            PeerLostError: it was closed.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"{self._where}: train: expected at least 1 step, as an integer; found {steps!r}")
        with self._changed:
            self._check_open("train")
            if self._train is not None:
                done, all_ = len(self._train.losses), self._train.steps
                raise ValueError(
                    f"{self._where}: train: expected no training in progress; {done} of {all_} steps of one are done"
                )
            self._train = train = _Train(steps)
            train.ended.set_running_or_notify_cancel()
            self._changed.notify_all()
        return train.ended

    def at_boundary(self, work: Callable[[], _Result], step: int | None = None) -> Future[_Result]:
        """Have a job carried out between two steps.

        Args:
            work: called in the training's thread. It should be short: it holds the training up.
            step: carry it out after this step; None: at the next boundary. Where no train is under way, at once.

        Raises:
            ValueError: the step after that has begun, or has ended before a train that was announced.
            PeerLostError: it was closed.
        """
        job = _Job(work, step)
        with self._changed:
            self._check_open("a job")
            if step is not None and self.busy:
                begun = self._begun if self._train is not None else self._done()
                if begun > step:
                    raise ValueError(f"{self._where}: expected step {begun} or later, as it has begun; found {step}")
            self._jobs.append(job)
            self._changed.notify_all()
        return job.ended

    def stop(self) -> None:
        """End the train that is under way, if any, at the next boundary; it gives the losses so far."""
        with self._changed:
            self._stopping = self._train is not None

    def close(self, timeout: float) -> bool:
        """End the thread after the step and the jobs that are under way; gives whether it has ended.

        Args:
            timeout: seconds.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise PeerLostError(f"{self._where}: {what}: expected a running rank; it was closed")

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._train is not None or any(self._is_due()))
                due = self._due()
            self._carry_out(due)
            train = self._train
            if train is not None:
                self._steps(train)
            with self._changed:
                if self._closed and not self._jobs:
                    return

    def _steps(self, train: _Train) -> None:
        """Train until all steps are done, one fails, or it is told to stop."""
        error: BaseException | None = None
        try:
            while self._goes_on(train):
                began = time.perf_counter()
                train.losses.append(self._ready().step())
                self._last_s.append(time.perf_counter() - began)
                self.steps_trained += 1
        except BaseException as exc:  # noqa: BLE001  handed to the caller that trains
            error = _raisable(exc)
            self._failed(error)
        with self._changed:
            self._train, self._stopping, self._begun = None, False, 0
        if error is not None:
            train.ended.set_exception(error)
        else:
            train.ended.set_result(train.losses)

    def _goes_on(self, train: _Train) -> bool:
        """Carry out what is due, then begin a step, if one is to begin: what comes for this boundary now is refused."""
        while True:
            with self._changed:
                due = self._due()
                if not due:
                    if len(train.losses) == train.steps or self._stopping or self._closed:
                        return False
                    self._begun = self._ready().steps_done + 1
                    return True
            self._carry_out(due)

    def _ready(self) -> Training:
        if self.training is None:
            raise ValueError(f"{self._where}: expected a training that was built; found none")
        return self.training

    def _due(self) -> list[_Job]:
        """Take the jobs of this boundary. The lock is held."""
        if not self._jobs:
            return []
        due = [job for job, is_due in zip(self._jobs, self._is_due(), strict=True) if is_due]
        self._jobs = [job for job in self._jobs if job not in due]
        return due

    def _is_due(self) -> list[bool]:
        """Tell of each job whether it is due at this boundary. The lock is held."""
        done, idle = self._done(), not self.busy
        return [idle or job.step is None or job.step <= done for job in self._jobs]

    def _done(self) -> int:
        return self.training.steps_done if self.training is not None else 0

    def _carry_out(self, jobs: list[_Job]) -> None:
        for job in jobs:
            if not job.ended.set_running_or_notify_cancel():
                continue
            try:
                result = job.work()
            except BaseException as exc:  # noqa: BLE001  handed to the caller
                job.ended.set_exception(_raisable(exc))
            else:
                job.ended.set_result(result)


def _raisable(error: BaseException) -> BaseException:
    """Return an error that a coroutine can raise (as PEP 479 does)."""
    if not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    raised = RuntimeError(f"a training raised {error!r}: its data may be exhausted")
    raised.__cause__ = error
    return raised
