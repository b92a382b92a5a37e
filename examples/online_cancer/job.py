"""The job itself: `model.fit` with a callback that publishes, and consumers that classify meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from classifier import BATCH, Samples, build, load_samples
from online.answering import Answering, bearable
from online.picture import draw_runs
from online.place import Place
from online.recorded import Run
from online.report import Report
from online.watching import Watch
from tensorvine.actors import CheckpointCallback, Consumer, Repository
from tensorvine.planner import PlanRequest

SEED = 7
WARMUP = 2
"""Epochs before the first version."""
ASKED = 20
"""Samples of one question."""
EACH = 2
"""Iterations from one question to the next, all consumers together."""
START_S, END_S = 120.0, 300.0
"""How long to wait for the first version, and for the last answer once it is due."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to do."""

    epochs: int
    rate: float
    """Of stochastic gradient descent."""
    period_s: float
    """From one training iteration to the next, at least."""
    consumers: int


QUICK = Size(epochs=12, rate=0.01, period_s=0.01, consumers=1)
FULL = Size(epochs=120, rate=0.002, period_s=0.01, consumers=2)


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Run the whole job and draw its picture into the directory `out`."""
    size = QUICK if quick else FULL
    train, test = load_samples(SEED)
    epoch = -(-len(train.features) // BATCH)
    report = Report()
    report.title(place.title)
    with place.ray(), place.open() as repo:
        job = Job(repo, place.prefix, size, train, test, report)
        runs = [job.follow("planned", PlanRequest("optimal", warmup=WARMUP * epoch))]
        epochs = PlanRequest("epoch", warmup=WARMUP * epoch, epoch=epoch)
        runs.append(job.follow("epoch", epochs, runs[0].period_s / EACH))
    report.table(f"NT3 classifies {ASKED} samples an answer, and learns meanwhile", runs)
    report.picture(draw_runs(runs, (), out / "runs.png"))


class Job:
    """Trainings under one schedule or another, and those who answer meanwhile."""

    def __init__(
        self, repo: Repository, prefix: str, size: Size, train: Samples, test: Samples, report: Report
    ) -> None:
        self._repo = repo
        self._prefix = prefix
        """Of the names of models."""
        self._size = size
        self._train = train
        self._epoch = -(-len(train.features) // BATCH)
        self._questions = Asked(test)
        self._report = report

    def follow(self, schedule: str, request: PlanRequest, period_s: float | None = None) -> Run:
        """Train with `model.fit`, publish and answer.

        Args:
            schedule: how it is called.
            request: what it is.
            period_s: from one iteration to the next; None: as fast as all can follow.
        """
        self._report.title(f"{schedule.capitalize()} updates")
        name, size, train = f"{self._prefix}nt3-{schedule}", self._size, self._train
        model = self._model()
        publish = CheckpointCallback(self._repo, name, request)
        with ExitStack() as opened:
            opened.enter_context(publish.publisher)  # `fit` closes it only where nothing interrupts it
            consumers = self._consumers(name, opened)
            line = opened.enter_context(self._report.line(size.epochs * self._epoch))
            watch = opened.enter_context(Watch(publish.report, line))

            def begin() -> Answering:
                for consumer in consumers:
                    consumer.wait_for(1, START_S)
                    consumer.infer(self._questions.batch(0))  # a framework compiles at its first answer
                each_s = period_s or bearable(publish.report().costs, size.period_s)
                count = (size.epochs - WARMUP) * self._epoch // EACH
                watch.answering = Answering(consumers, self._questions, count, EACH * each_s, time.time())
                return opened.enter_context(watch.answering)

            pace = Pace(begin)
            begun = time.perf_counter()
            model.fit(
                train.features,
                train.classes,
                batch_size=BATCH,
                epochs=size.epochs,
                callbacks=[publish, pace],
                verbose=0,
            )
            training_s = time.perf_counter() - begun - pace.waited_s
            answers = pace.answering.wait(END_S)
            taken = tuple(consumer.status() for consumer in consumers)
        return Run(
            schedule,
            request.warmup,
            pace.answering.opened_at,
            pace.answering.period_s,
            training_s,
            publish.report(),
            taken,
            answers,
            tuple(watch.sightings),
        )

    def _consumers(self, name: str, opened: ExitStack) -> list[Consumer]:
        """Start the consumers, all at once: most of the time goes into importing TensorFlow."""
        count = self._size.consumers
        with ThreadPoolExecutor(count) as pool:
            starting = [pool.submit(Consumer.start, self._repo, name, build) for _ in range(count)]
        return [opened.enter_context(consumer.result()) for consumer in starting]

    def _model(self) -> keras.Model:
        """Make the same model each time, and let the same batches follow."""
        keras.utils.set_random_seed(SEED)
        model = build()
        model.compile(keras.optimizers.SGD(self._size.rate), "categorical_crossentropy")
        return model


class Pace(keras.callbacks.Callback):
    """Lets the questions begin when the warm-up is over, and from then on holds the training to their pace.

    Iterations of milliseconds take now more and now less on cores that are shared with consumers; at a fixed pace each
    question meets the training at the same iteration, whatever the schedule. What one trains for oneself needs no pace.

    Args:
        begin: waits until the consumers are ready, and begins to ask them.
    """

    answering: Answering
    """Who asks; there once `fit` is over."""

    def __init__(self, begin: Callable[[], Answering]) -> None:
        super().__init__()
        self._begin = begin
        self._iterations: int | None = None
        self.waited_s = 0.0
        """For how long the training was held up here."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Begin at the end of the warm-up."""
        if epoch + 1 == WARMUP:
            begun = time.perf_counter()
            self.answering, self._iterations = self._begin(), 0
            self.waited_s += time.perf_counter() - begun

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Wait until the iteration is due to end."""
        if self._iterations is not None:
            self._iterations += 1
            due = self.answering.opened_at + self._iterations * self.answering.period_s / EACH
            wait_s = max(due - time.time(), 0.0)
            time.sleep(wait_s)
            self.waited_s += wait_s


class Asked:
    """The questions: samples that the training does not see, the same ones for each schedule."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def batch(self, number: int) -> np.ndarray:
        """Return the features that question `number` is about."""
        return self._samples.features[self._chosen(number)]

    def loss(self, number: int, outputs: np.ndarray) -> float:
        """Return the loss that the training minimises too: the mean categorical cross-entropy."""
        right = (outputs * self._samples.classes[self._chosen(number)]).sum(axis=1)
        return float(-np.log(np.maximum(right, 1e-7)).mean())

    def _chosen(self, number: int) -> np.ndarray:
        return np.random.default_rng([SEED, number]).choice(len(self._samples.features), ASKED, replace=False)
