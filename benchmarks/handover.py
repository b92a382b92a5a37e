"""A producer that trains once per order, a consumer that answers at a fixed rate, and who adds the answers up.

Rules
- Producer and consumer are the library's, in processes of their own, one thread each. Versions go from one to the other
  as users' do; orders and reports are small models of the same repository.
- Every training starts from the state at the end of the warm-up and takes the same steps. The version of that state
  answers when it begins.
- An inference is about all samples held out, always the same: answers differ by their versions alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorvine.planner import Schedule

from .learners import Learner, Net, learner
from .session import NAME

if TYPE_CHECKING:
    from tensorvine.actors import Consumer, Publisher, Repository

TIMEOUT_S = 120.0
CALIBRATIONS = 8
"""Versions published during the warm-up."""

Values = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """One network, and for how long it is trained and asked."""

    net: Net
    epoch: int
    """Iterations."""
    warmup: int
    """Epochs before the plan."""
    epochs: int
    """Epochs after it."""
    inference_s: float
    """From one inference to the next."""
    paper: Mapping[str, str]
    """Viper's figure 10 and table 1: method -> cumulative inference loss and checkpoints."""

    @property
    def start(self) -> int:
        """Last iteration of the warm-up."""
        return self.warmup * self.epoch

    @property
    def stop(self) -> int:
        """Last iteration."""
        return self.start + self.epochs * self.epoch


@dataclass(frozen=True)
class Answer:
    """One inference."""

    at: float
    """When it was asked for, in seconds since the epoch."""
    version: int
    loss: float


@dataclass
class Runs:
    """What became of one schedule, run by run."""

    losses: list[float] = field(default_factory=list)
    """Cumulative inference loss."""
    seconds: list[float] = field(default_factory=list)
    """Of the training."""
    stalled: list[float] = field(default_factory=list)
    """Seconds of that in which it waited for publishing."""
    served: list[int] = field(default_factory=list)
    """Versions that answered at least once."""

    def mean(self) -> float:
        """Return the mean loss."""
        return float(np.mean(self.losses))


# ---- the driver's side ----------------------------------------------------------------------------------


class Trainer:
    """A producer, its consumer, and one who asks; driven by messages, which are small models of the repository."""

    def __init__(self, repo: Repository, consumer: Consumer, case: Case) -> None:
        self.consumer = consumer
        self._repo = repo
        self._case = case
        self._answers: list[Answer] = []
        self._answered = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="benchmark-ask")
        self._heard = 0

    def warm_up(self) -> Values:
        """Wait for the end of the warm-up; gives losses and times."""
        self.consumer.wait_for(1, TIMEOUT_S)
        self._thread.start()
        return self._hear()

    def go(self, plan: Schedule, inferences: int, into: Runs) -> None:
        """Train once with a schedule, and add up the losses of so many inferences."""
        _tell(self._repo, _orders(self._case), iterations=np.array(plan.iterations, dtype=np.int64))
        first = int(self._hear()["version"])
        self._wait(lambda answer: answer.version == first, f"an answer of version {first}")
        _tell(self._repo, _orders(self._case), go=np.array(1))
        found = self._hear()
        began, every = float(found["began"]), self._case.inference_s
        end = began + every * inferences
        self._wait(lambda answer: answer.at >= end, f"an answer after {inferences} inferences")
        taken = answers_of(self._answers, began, every, inferences)
        into.losses.append(sum(answer.loss for answer in taken))
        into.seconds.append(float(found["took_s"]))
        into.stalled.append(float(found["stalls_s"].sum()))
        into.served.append(len({answer.version for answer in taken} - {first}))

    def truth(self) -> dict[int, float]:
        """Return the held-out loss at some iterations, from a training that nobody watches."""
        _tell(self._repo, _orders(self._case), end=np.array(1))
        found = self._hear()
        return dict(zip(found["iterations"].tolist(), found["losses"].tolist(), strict=True))

    def close(self) -> None:
        """Stop asking."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S)

    def _hear(self) -> Values:
        self._heard, found = _hear(self._repo, _news(self._case), self._heard)
        return found

    def _wait(self, reached: Callable[[Answer], bool], what: str) -> None:
        """Wait until the newest answer is as wanted."""
        with self._answered:
            if not self._answered.wait_for(lambda: bool(self._answers) and reached(self._answers[-1]), TIMEOUT_S):
                found = self._answers[-1:]
                raise TimeoutError(f"benchmark schedule: expected {what} within {TIMEOUT_S:g} s; found {found}")

    def _ask(self) -> None:
        """Ask at a fixed rate; what is due while an answer is under way is left out."""
        every, due = self._case.inference_s, time.time()
        while not self._closing.wait(max(due - time.time(), 0.0)):
            at = time.time()
            answer = self.consumer.infer(None)
            with self._answered:
                self._answers.append(Answer(at, answer.ref.version, float(answer.outputs)))
                self._answered.notify_all()
            due += every * (1 + max(time.time() - due, 0.0) // every)


def answers_of(answers: Sequence[Answer], began: float, every: float, count: int) -> list[Answer]:
    """Return the answer to each of `count` inferences at a fixed rate: the last that was asked for until it was due.

    Args:
        answers: in order of time.
        began: when the first inference is due, in seconds since the epoch.
        every: seconds from one to the next.
        count: of inferences.

    >>> asked = [Answer(0.0, 1, 9.0), Answer(1.0, 1, 9.0), Answer(3.1, 2, 5.0)]
    >>> [answer.version for answer in answers_of(asked, began=1.5, every=1.0, count=3)]
    [1, 1, 2]
    """
    due = began + every * np.arange(count)
    places = np.searchsorted([answer.at for answer in answers], due, side="right") - 1
    return [answers[place] for place in places]


@contextmanager
def running(repo: Repository, case: Case) -> Iterator[Trainer]:
    """Start all that a case needs; end it."""
    from tensorvine.actors import Consumer, Producer

    with (
        Consumer.start(repo, case.net, partial(Judge, case.net)) as consumer,
        Producer.start(repo, case.net, partial(_train, case=case), schedule=case.stop + 1) as producer,
    ):
        trainer = Trainer(repo, consumer, case)
        try:
            yield trainer
            producer.result(TIMEOUT_S)
        finally:
            trainer.close()


def _orders(case: Case) -> str:
    return f"orders/{case.net}"


def _news(case: Case) -> str:
    return f"news/{case.net}"


def _tell(repo: Repository, name: str, **values: Any) -> None:
    repo.save(name, {key: np.asarray(value) for key, value in values.items()})


def _hear(repo: Repository, name: str, after: int) -> tuple[int, Values]:
    """Wait for the next message of a name; gives its number and its values."""
    ref = repo.wait_newer(name, after, TIMEOUT_S)
    if ref is None:
        raise TimeoutError(f"benchmark schedule: expected a message {name!r} within {TIMEOUT_S:g} s; found none")
    return ref.version, repo.load(ref)


# ---- the actors' side -----------------------------------------------------------------------------------


class Judge:
    """A model whose answer is its loss on the samples held out."""

    def __init__(self, net: Net) -> None:
        import torch

        torch.set_num_threads(1)
        self._learner = learner(net)

    def assign(self, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Take a version."""
        import torch

        self._learner.model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in tensors.items()})

    def __call__(self, batch: Any) -> float:
        """Answer."""
        del batch  # always the same samples, so that answers differ by their versions alone
        return self._learner.held_out_loss()


def _train(publisher: Publisher, case: Case) -> None:
    """Warm up, train once for each order, and at last once more to know the losses held out."""
    import torch
    from tensorvine.actors import Repository

    torch.set_num_threads(1)
    run = learner(case.net)
    repo = Repository.connect(NAME)
    try:
        _tell(repo, _news(case), **_warm_up(publisher, run, case))
        state, heard = run.state(), 0
        while True:
            heard, order = _hear(repo, _orders(case), heard)
            run.restore(state)
            if "end" in order:
                break
            pending = publisher.publish(run.model)
            _tell(repo, _news(case), version=pending.committed(TIMEOUT_S).ref.version)
            heard, _ = _hear(repo, _orders(case), heard)
            _tell(repo, _news(case), **_timed(publisher, run, case, order["iterations"].tolist()))
        _tell(repo, _news(case), **_true_losses(run, case))
    finally:
        repo.close()


def _warm_up(publisher: Publisher, run: Learner, case: Case) -> dict[str, Any]:
    """Train up to the plan; publish now and then in the last half, to know what that costs."""
    losses: list[float] = []
    ends = [time.perf_counter()]
    due = set(np.linspace(case.start // 2, case.start - 1, CALIBRATIONS, dtype=int).tolist())
    publishing: list[float] = []
    publisher.publish(run.model).committed(TIMEOUT_S)
    for iteration in range(1, case.start + 1):
        losses.append(run.step(iteration))
        ends.append(time.perf_counter())
        if iteration in due:
            publisher.publish(run.model, losses[-1])
            publishing.append(time.perf_counter() - ends[-1])
            ends[-1] = time.perf_counter()
    publisher.finish()
    updates = publisher.report().updates[1:]
    times = [end - begin for begin, end in pairwise(ends)]
    return {
        "losses": losses,
        "iterations_s": times[case.start // 4 :],
        "stalls_s": publishing,
        "commits_s": [update.commit_s for update in updates],
    }


def _timed(publisher: Publisher, run: Learner, case: Case, iterations: Sequence[int]) -> dict[str, Any]:
    """Train from the end of the warm-up on, and publish by a schedule."""
    due = frozenset(iterations)
    stalls: list[float] = []
    began, begin = time.time(), time.perf_counter()
    for iteration in range(case.start + 1, case.stop + 1):
        loss = run.step(iteration)
        if iteration in due:
            stop = time.perf_counter()
            publisher.publish(run.model, loss)
            stalls.append(time.perf_counter() - stop)
    took = time.perf_counter() - begin
    publisher.finish()
    return {"began": began, "took_s": took, "stalls_s": stalls or [0.0]}


def _true_losses(run: Learner, case: Case) -> dict[str, Any]:
    """Return the held-out loss of every version that any schedule could publish, or of every few."""
    every = max(1, (case.stop - case.start) // 200)
    iterations, losses = [case.start], [run.held_out_loss()]
    for iteration in range(case.start + 1, case.stop + 1):
        run.step(iteration)
        if (iteration - case.start) % every == 0:
            iterations.append(iteration)
            losses.append(run.held_out_loss())
    return {"iterations": np.array(iterations), "losses": np.array(losses)}
