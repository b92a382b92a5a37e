"""Predicted and measured cumulative inference loss of five schedules for NT3, TC1 and PtychoNN (Viper).

Rules
- A producer trains in its process and publishes; a consumer in another answers at a fixed rate with its version. The
  losses of these versions on samples that were held out are added up. One thread each. Orders and reports are small
  models of the same repository.
- Plans use what is known at the end of the warm-up: the curve fitted to its losses, and the costs measured on its last
  part, in which versions are published now and then and answered with.
- Every schedule starts from the state at the end of the warm-up and takes the same steps. Schedules take turns.
- `foreseen` is the predictor's result if it knew the held-out losses: its distance to `predicted` is the curve's fault,
  and that of `measured` to it is the fault of the times.
- The paper's figures are of larger networks and more inferences: their ratios compare, not their sizes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from tensorvine.planner import (
    Schedule,
    UpdateCosts,
    closed_form_schedule,
    cumulative_inference_loss,
    epoch_schedule,
    fit_loss_curve,
    fixed_schedule,
    greedy_schedule,
    greedy_threshold,
    optimal_schedule,
)
from tensorvine.planner.curves.forms import FORMS

from .core.clusters import NAME, repository
from .core.measure import in_turn, progress, sample
from .core.report import Goal, Report
from .core.trainings import Learner, Net, learner

METHODS = ("epoch", "fixed", "greedy", "closed form", "exact")
NOTHING, LIMITED, MOST_STALLED = "no update", "exact, 2%", 0.02
"""A training that publishes nothing; the best schedule whose stalls take at most 2% of the training."""
SLACK = 1.1
"""Inferences go on for this multiple of the time that the training takes alone."""
CALIBRATIONS, TIMEOUT_S = 8, 120.0
"""Versions published during the warm-up."""


@dataclass(frozen=True)
class Case:
    """One network, and for how long it is trained and asked."""

    net: Net
    epoch: int
    """Iterations."""
    warmup: int
    epochs: int
    """Before and after the plan."""
    inference_s: float
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

    def inferences(self, costs: UpdateCosts) -> int:
        """Return the number of inferences."""
        return int(SLACK * (self.stop - self.start) * costs.iteration_s / costs.inference_s)


CASES = (
    Case("nt3", 56, 4, 17, 0.02, {"epoch": "3.8 k, 7", "fixed": "3.6 k, 49", "greedy": "3.0 k, 40"}),
    Case("tc1", 216, 2, 7, 0.02, {"epoch": "32.8 k, 16", "fixed": "30.6 k, 128", "greedy": "30.4 k, 63"}),
    Case("ptychonn", 40, 1, 3, 0.05, {"epoch": "66.2 k, 13", "fixed": "52.9 k, 16", "greedy": "45.1 k, 6"}),
)


@dataclass
class _Runs:
    """Figures of one schedule, run by run: losses, seconds of the training, and seconds of that for publishing."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)

    def mean(self) -> float:
        return float(np.mean(self.losses))


def run(report: Report) -> None:
    """Measure three trainings; with less effort NT3, for a shorter time."""
    nt3 = CASES[0]
    cases = report.pick(quick=(replace(nt3, warmup=2, epochs=1),), normal=CASES)
    rounds = report.pick(quick=1, normal=3)
    with repository() as repo:
        for case in cases:
            progress(f"{case.net}: warm-up")
            with _running(repo, case) as trainer:
                warmup = trainer.warm_up()
                costs = _costs(warmup, trainer.consumer, case)
                plans = _plans(case, warmup["losses"].tolist(), costs)
                runs = {name: _Runs() for name in plans}
                for turn in range(rounds):
                    for name in in_turn(list(plans), turn):
                        progress(f"{case.net}: {name}, {len(plans[name].iterations)} updates, round {turn + 1}")
                        trainer.go(plans[name], case.inferences(costs), runs[name])
                truth = trainer.truth()
            _add(report, case, costs, plans, runs, truth)


def _costs(warmup: Mapping[str, Any], consumer: Any, case: Case) -> UpdateCosts:
    """Take the medians of the warm-up."""
    taken = [each.fetch_s + each.swap_s for each in consumer.status().deliveries]
    iteration_s, stall_s, commit_s = (float(median(warmup[key])) for key in ("iterations_s", "stalls_s", "commits_s"))
    return UpdateCosts(iteration_s, stall_s, commit_s + median(taken), case.inference_s)


def _plans(case: Case, losses: list[float], costs: UpdateCosts) -> dict[str, Schedule]:
    curve = fit_loss_curve(losses, tuple(FORMS), start=1)
    window = (curve, costs, case.start, case.stop, case.inferences(costs))
    allowed_s = MOST_STALLED * (case.stop - case.start) * costs.iteration_s
    return {
        NOTHING: Schedule((), None, cumulative_inference_loss((), curve, costs, case.start, window[-1])),
        "epoch": epoch_schedule(*window, epoch=case.epoch),
        "fixed": fixed_schedule(*window),
        "greedy": greedy_schedule(*window, greedy_threshold(losses)),
        "closed form": closed_form_schedule(*window),
        "exact": optimal_schedule(*window),
        LIMITED: optimal_schedule(*window, most=int(allowed_s / costs.stall_s)),
    }


def _add(
    report: Report,
    case: Case,
    costs: UpdateCosts,
    plans: Mapping[str, Schedule],
    runs: Mapping[str, _Runs],
    truth: tuple[Any, Any],
) -> None:
    inferences, alone_s = case.inferences(costs), median(runs[NOTHING].seconds)
    for name, plan in plans.items():
        found, updates = runs[name], len(plan.iterations)
        foreseen = cumulative_inference_loss(
            plan.iterations, lambda iteration: np.interp(iteration, *truth), costs, case.start, inferences
        )
        stalled = median(found.stalled) / alone_s
        goals = _goals(plans, runs) if name == "exact" else []
        if name == LIMITED:
            goals = [Goal("share of the training's time spent on publishing", stalled, at_most=MOST_STALLED)]
        text = f"{case.net}, {name}: {updates} updates, loss {found.mean():.4g} "
        report.add(
            f"{text}(predicted {plan.predicted_loss:.4g}, foreseen {foreseen:.4g})",
            sample(found.seconds),
            peer=(f"Viper: {case.paper[name]} checkpoints", None) if name in case.paper else None,
            floor=(NOTHING, alone_s),
            goals=goals,
            headline=name == "exact" and case.net == CASES[0].net,
            method=name,
            updates=updates,
            predicted_loss=plan.predicted_loss,
            foreseen_loss=foreseen,
            **{"measured_losses": found.losses, "inferences": inferences, "stalled_share": stalled, **asdict(costs)},
        )


def _goals(plans: Mapping[str, Schedule], runs: Mapping[str, _Runs]) -> list[Goal]:
    others = [name for name in METHODS if name != "exact"]
    predicted = plans["exact"].predicted_loss / min(plans[name].predicted_loss for name in others)
    goals = [Goal("times the least predicted loss of the others", predicted, at_most=1 + 1e-9)]
    if len(runs["exact"].losses) > 1:  # one run does not show the noise
        best = min(others, key=lambda name: runs[name].mean())
        noise = max((max(runs[name].losses) - min(runs[name].losses)) / runs[name].mean() for name in METHODS)
        what = f"times the least measured loss of the others ({best}), runs of one schedule differ by up to {noise:.1%}"
        goals.append(Goal(what, runs["exact"].mean() / runs[best].mean(), at_most=1 + noise))
    return goals


# ---- the driver's side ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One inference: when it was asked for, in seconds since the epoch, the version and its loss."""

    at: float
    version: int
    loss: float


class _Trainer:
    """A producer, its consumer, and a thread that asks; driven by messages, small models of the repository."""

    def __init__(self, repo: Any, consumer: Any, case: Case) -> None:
        self.consumer, self._repo, self._case = consumer, repo, case
        self._answers: list[Answer] = []
        self._answered, self._closing = threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="benchmark-ask")
        self._heard = 0

    def warm_up(self) -> dict[str, Any]:
        """Wait for the end of the warm-up; return losses and times."""
        self.consumer.wait_for(1, TIMEOUT_S)
        self._thread.start()
        return self._hear()

    def go(self, plan: Schedule, inferences: int, into: _Runs) -> None:
        """Train once with a schedule, and add up the losses of the inferences."""
        orders, every = f"orders/{self._case.net}", self._case.inference_s
        _tell(self._repo, orders, iterations=np.array(plan.iterations, dtype=np.int64))
        first = int(self._hear()["version"])
        self._wait(lambda answer: answer.version == first, f"an answer of version {first}")
        _tell(self._repo, orders, go=1)
        found = self._hear()
        began = float(found["began"])
        self._wait(lambda answer: answer.at >= began + every * inferences, f"an answer after {inferences} inferences")
        into.losses.append(sum(each.loss for each in answers_of(self._answers, began, every, inferences)))
        into.seconds.append(float(found["took_s"]))
        into.stalled.append(float(found["stalls_s"].sum()))

    def truth(self) -> tuple[Any, Any]:
        """Return iterations and their held-out losses, from a training that publishes nothing."""
        _tell(self._repo, f"orders/{self._case.net}", end=1)
        found = self._hear()
        return found["iterations"], found["losses"]

    def close(self) -> None:
        """Stop asking."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S)

    def _hear(self) -> dict[str, Any]:
        self._heard, found = _hear(self._repo, f"news/{self._case.net}", self._heard)
        return found

    def _wait(self, reached: Callable[[Answer], bool], what: str) -> None:
        with self._answered:
            if not self._answered.wait_for(lambda: bool(self._answers) and reached(self._answers[-1]), TIMEOUT_S):
                found = self._answers[-1:]
                raise TimeoutError(f"benchmark schedule: expected {what} within {TIMEOUT_S:g} s; found {found}")

    def _ask(self) -> None:
        """Ask at a fixed rate; an inference that is due while another one runs is left out."""
        every, due = self._case.inference_s, time.time()
        while not self._closing.wait(max(due - time.time(), 0.0)):
            at = time.time()
            answer = self.consumer.infer(None)
            with self._answered:
                self._answers.append(Answer(at, answer.ref.version, float(answer.outputs)))
                self._answered.notify_all()
            due += every * (1 + max(time.time() - due, 0.0) // every)


def answers_of(answers: Sequence[Answer], began: float, every: float, count: int) -> list[Answer]:
    """Return the answer to each of `count` inferences at a fixed rate: the last one asked for until it was due.

    >>> asked = [Answer(0.0, 1, 9.0), Answer(1.0, 1, 9.0), Answer(3.1, 2, 5.0)]
    >>> [answer.version for answer in answers_of(asked, began=1.5, every=1.0, count=3)]
    [1, 1, 2]
    """
    due = began + every * np.arange(count)
    places = np.searchsorted([answer.at for answer in answers], due, side="right") - 1
    return [answers[place] for place in places]


@contextmanager
def _running(repo: Any, case: Case) -> Iterator[_Trainer]:
    """Start a consumer and a producer; end them."""
    from tensorvine.actors import Consumer, Producer

    with (
        Consumer.start(repo, case.net, partial(Judge, case.net)) as consumer,
        Producer.start(repo, case.net, partial(_train, case=case), schedule=case.stop + 1) as producer,
    ):
        trainer = _Trainer(repo, consumer, case)
        try:
            yield trainer
            producer.result(TIMEOUT_S)
        finally:
            trainer.close()


def _tell(repo: Any, name: str, **values: Any) -> None:
    repo.save(name, {key: np.asarray(value) for key, value in values.items()})


def _hear(repo: Any, name: str, after: int) -> tuple[int, dict[str, Any]]:
    """Wait for the next message of a name; return its number and its values."""
    ref = repo.wait_newer(name, after, TIMEOUT_S)
    if ref is None:
        raise TimeoutError(f"benchmark schedule: expected a message {name!r} within {TIMEOUT_S:g} s; found none")
    return ref.version, repo.load(ref)


# ---- the actors' side -------------------------------------------------------------------------------------


class Judge:
    """A model whose answer is its loss on the samples held out: answers differ by their versions alone."""

    def __init__(self, net: Net) -> None:
        import torch

        torch.set_num_threads(1)
        self._learner = learner(net)

    def assign(self, tensors: Mapping[str, Any]) -> None:
        """Take a version."""
        import torch

        self._learner.model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in tensors.items()})

    def __call__(self, batch: Any) -> float:
        """Answer."""
        del batch
        return self._learner.held_out_loss()


def _train(publisher: Any, case: Case) -> None:
    """Warm up, train once for each order, and at last once more for the held-out losses."""
    import torch
    from tensorvine.actors import Repository

    torch.set_num_threads(1)
    run, orders, news = learner(case.net), f"orders/{case.net}", f"news/{case.net}"
    with Repository.connect(NAME) as repo:
        _tell(repo, news, **_warm_up(publisher, run, case))
        state, heard = run.state(), 0
        while True:
            heard, order = _hear(repo, orders, heard)
            run.restore(state)
            if "end" in order:
                break
            _tell(repo, news, version=publisher.publish(run.model).committed(TIMEOUT_S).ref.version)
            heard, _ = _hear(repo, orders, heard)
            _tell(repo, news, **_timed(publisher, run, case, order["iterations"].tolist()))
        every = max(1, (case.stop - case.start) // 200)
        losses = {case.start: run.held_out_loss()}
        for iteration in range(case.start + 1, case.stop + 1):
            run.step(iteration)
            if (iteration - case.start) % every == 0:
                losses[iteration] = run.held_out_loss()
        _tell(repo, news, iterations=list(losses), losses=list(losses.values()))


def _warm_up(publisher: Any, run: Learner, case: Case) -> dict[str, Any]:
    """Train up to the plan; publish now and then in the last half, to measure the costs."""
    losses: list[float] = []
    due = set(np.linspace(case.start // 2, case.start - 1, CALIBRATIONS, dtype=int).tolist())
    publishing: list[float] = []
    publisher.publish(run.model).committed(TIMEOUT_S)
    ends = [time.perf_counter()]
    for iteration in range(1, case.start + 1):
        losses.append(run.step(iteration))
        ends.append(time.perf_counter())
        if iteration in due:
            publisher.publish(run.model, losses[-1])
            publishing.append(time.perf_counter() - ends[-1])
            ends[-1] = time.perf_counter()
    publisher.finish()
    return {
        "losses": losses,
        "iterations_s": [end - begin for begin, end in pairwise(ends)][case.start // 4 :],
        "stalls_s": publishing,
        "commits_s": [update.commit_s for update in publisher.report().updates[1:]],
    }


def _timed(publisher: Any, run: Learner, case: Case, iterations: Sequence[int]) -> dict[str, Any]:
    """Train from the end of the warm-up on, and publish by a schedule."""
    due, stalls = frozenset(iterations), [0.0]
    began, begin = time.time(), time.perf_counter()
    for iteration in range(case.start + 1, case.stop + 1):
        loss = run.step(iteration)
        if iteration in due:
            stop = time.perf_counter()
            publisher.publish(run.model, loss)
            stalls.append(time.perf_counter() - stop)
    took = time.perf_counter() - begin
    publisher.finish()
    return {"began": began, "took_s": took, "stalls_s": stalls}
