"""The job itself: one training and two consumers, under one schedule of updates after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from learner import Study, build, shutter, train
from online.answering import Answering, bearable
from online.picture import Reconstructions, draw_runs
from online.place import Place
from online.recorded import Run
from online.report import Report, milliseconds
from online.watching import Watch
from scans import Instrument, Measured
from tensorvine.actors import Consumer, Producer, Repository
from tensorvine.planner import PlanRequest

SEED = 7
CONSUMERS = 2
BATCH, RATE = 16, 2e-3
START_S, END_S = 120.0, 300.0
"""How long to wait for the first version; and for the last answer and the end of the training once they are due."""
SHOWN = 16
"""Patterns of the last scan that are reconstructed by the first and by the last version."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to do."""

    width: int
    """Of PtychoNN."""
    scans: int
    """After the first one, of the warm-up."""
    scans_per_sample: int
    period_s: float
    """From one batch of patterns to the next, at least."""

    def study(self, repository: str) -> Study:
        """Say what the training is that publishes in this repository."""
        instrument = Instrument(SEED, self.scans_per_sample)
        scan = instrument.scan // BATCH
        return Study(repository, instrument, self.width, BATCH, RATE, scan, scan * (1 + self.scans))


QUICK = Size(width=8, scans=3, scans_per_sample=2, period_s=0.04)
FULL = Size(width=16, scans=14, scans_per_sample=3, period_s=0.1)


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Run the whole job and draw its picture into the directory `out`."""
    size = QUICK if quick else FULL
    study = size.study(place.repository)
    known = {"warmup": study.warmup, "stop": study.iterations}
    report = Report()
    report.title(place.title)
    with place.ray(), place.open() as repo:
        planned = Job(repo, place.prefix, study, "planned", PlanRequest("optimal", **known), report)
        runs = [planned.follow(size.period_s)]
        epochs = Job(repo, place.prefix, study, "epoch", PlanRequest("epoch", epoch=study.scan, **known), report)
        runs.append(epochs.follow(runs[0].period_s, adapt=False))
    report.table(f"PtychoNN reconstructs {study.batch} patterns an answer, and learns meanwhile", runs)
    report.picture(draw_runs(runs, study.exchanges(), out / "runs.png", planned.images))


class Job:
    """One training under one schedule, and those who answer meanwhile."""

    images: Reconstructions
    """Of the first and of the last version; there after `follow`."""

    def __init__(
        self, repo: Repository, prefix: str, study: Study, schedule: str, request: PlanRequest, report: Report
    ) -> None:
        self._repo = repo
        self._study = study
        self._schedule = schedule
        self._request = request
        self._report = report
        self._name = f"{prefix}ptychonn-{schedule}"
        """A name of its own for each run: what the planner learned of one is not told to the other."""

    def follow(self, period_s: float, *, adapt: bool = True) -> Run:
        """Train, publish and answer until the last pattern is reconstructed.

        Args:
            period_s: from one batch of patterns to the next.
            adapt: make that longer where the training is too slow for it.
        """
        study = self._study
        self._report.title(f"{self._schedule.capitalize()} updates")
        with ExitStack() as opened:
            producer, consumers = self._start(opened)
            line = opened.enter_context(self._report.line(study.iterations))
            with Watch(producer.report, line) as watch:
                for consumer in consumers:
                    consumer.wait_for(1, START_S)
                first = self._reconstruct(consumers)
                period_s = bearable(producer.report().costs, period_s) if adapt else period_s
                opened_at = self._open_shutter(period_s) + period_s
                count = study.iterations - study.warmup
                with Answering(consumers, Arriving(study), count, period_s, opened_at) as watch.answering:
                    answers = watch.answering.wait(count * period_s + END_S)
                training_s = producer.result(END_S)
            published = producer.report()
            consumers[0].wait_for(published.updates[-1].ref.version)
            self.images = _images(self._shown(), first, self._reconstruct(consumers[:1]))
            taken = tuple(consumer.status() for consumer in consumers)
        return Run(
            self._schedule,
            study.warmup,
            opened_at,
            period_s,
            training_s,
            published,
            taken,
            answers,
            tuple(watch.sightings),
        )

    def _start(self, opened: ExitStack) -> tuple[Producer, list[Consumer]]:
        """Start the actors, all at once: most of the time goes into importing TensorFlow."""
        name, repo, study = self._name, self._repo, self._study
        with ThreadPoolExecutor(1 + CONSUMERS) as pool:
            training = pool.submit(Producer.start, repo, name, partial(train, study=study), schedule=self._request)
            answering = [pool.submit(Consumer.start, repo, name, partial(build, study)) for _ in range(CONSUMERS)]
        return (
            opened.enter_context(training.result()),
            [opened.enter_context(consumer.result()) for consumer in answering],
        )

    def _open_shutter(self, period_s: float) -> float:
        """Let the instrument begin; says when it does."""
        opens_at = time.time() + 0.2
        self._repo.save(shutter(self._name), {"opened_at": np.array(opens_at), "period_s": np.array(period_s)})
        self._report.say(f"{self._study.batch} patterns every {milliseconds(period_s)}")
        return opens_at

    def _shown(self) -> Measured:
        study = self._study
        return study.instrument.measure((study.iterations - study.scan) * study.batch, SHOWN)

    def _reconstruct(self, consumers: Sequence[Consumer]) -> Sequence[np.ndarray]:
        """Let each consumer answer about the patterns that are shown; give the answer of the first one."""
        answers = [consumer.infer(self._shown().patterns) for consumer in consumers]
        return answers[0].outputs


class Arriving:
    """The questions: batches of patterns in the order of the scan, each before the training learns from it."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._truth: dict[int, Measured] = {}

    def batch(self, number: int) -> np.ndarray:
        """Return the patterns of batch `number` after the warm-up."""
        measured = self._truth[number] = self._study.measured(self._study.warmup + 1 + number)
        return measured.patterns

    def loss(self, number: int, outputs: Any) -> float:
        """Return the loss that the training minimises too: both images' mean absolute errors."""
        truth, (amplitudes, phases) = self._truth.pop(number), outputs
        return float(np.abs(amplitudes - truth.amplitudes).mean() + np.abs(phases - truth.phases).mean())


def _images(truth: Measured, first: Sequence[np.ndarray], last: Sequence[np.ndarray]) -> Reconstructions:
    (amplitudes, phases) = zip((truth.amplitudes, truth.phases), first, last, strict=True)
    return Reconstructions(
        truth.patterns[..., 0],
        {"amplitude": [image[..., 0] for image in amplitudes], "phase": [image[..., 0] for image in phases]},
    )
