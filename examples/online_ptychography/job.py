"""The job: one training and two consumers, with one schedule of updates after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from learner import Study, build, shutter, train
from scans import Images, Instrument
from shared.place import Place
from shared.show import COLOURS, GREY, PALE, Report, drawing, legend_below, milliseconds, smooth
from tensorvine.actors import Consumer, ConsumerStatus, Producer, PublishReport, Repository
from tensorvine.planner import PlanRequest

SEED, CONSUMERS, BATCH, RATE = 7, 2, 16, 2e-3
SLACK = 1.6
"""Least period of the instrument, in durations of an iteration: the consumers need the cores, too."""
PATIENCE_S = 300.0
SHOWN = 3
"""Reconstructed patterns in the picture."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training with its consumers."""

    schedule: str
    period_s: float
    """From one batch of patterns to the next."""
    training_s: float
    """Of training and publishing, without waiting for patterns."""
    report: PublishReport
    consumers: Sequence[ConsumerStatus]
    versions: Sequence[int]
    """The version that answered, for each batch."""
    losses: Sequence[float]
    """Of the answers."""
    images: tuple[Any, Any]
    """Patterns of the last scan as reconstructed by the first version, and by the last one."""

    @property
    def latency_s(self) -> float:
        """Median time from the end of a stall until the version answers."""
        commits = {update.ref: update.commit_s for update in self.report.updates}
        taken = [one for status in self.consumers for one in status.deliveries if one.ref in commits]
        return median(commits[one.ref] + one.fetch_s + one.swap_s for one in taken)

    def lag(self, warmup: int) -> list[int]:
        """Return how many measured batches the version of each answer had not learned from."""
        made = {update.ref.version: update.iteration for update in self.report.updates}
        return [warmup + number - made[version] for number, version in enumerate(self.versions)]


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Run the job, and draw the picture into the folder `out`."""
    width, scans, each, period_s = (8, 4, 2, 0.04) if quick else (16, 15, 3, 0.1)
    study = Study(place.repository, Instrument(SEED, each), width, BATCH, RATE, scans)
    known = {"warmup": study.scan, "stop": study.scan * scans}
    report = Report(place.prefix)
    report.title(place.title)
    with place.ray(), place.open() as repo:
        follow = partial(Job(repo, place.prefix, study, report).follow)
        planned = follow("planned", PlanRequest("optimal", **known), period_s)
        runs = [
            planned,
            follow("epoch", PlanRequest("epoch", epoch=study.scan, **known), planned.period_s, adapt=False),
        ]
    compare(report, runs, study)
    report.picture(draw(runs, study, out / "runs.png"))


class Job:
    """A training and its consumers."""

    def __init__(self, repo: Repository, prefix: str, study: Study, report: Report) -> None:
        self._repo, self._prefix, self._study, self._report = repo, prefix, study, report

    def follow(self, schedule: str, request: PlanRequest, period_s: float, *, adapt: bool = True) -> Run:
        """Train, publish and answer until the last pattern is reconstructed.

        `adapt`: whether to extend the period of the instrument if the training is too slow for it.
        """
        study, name = self._study, f"{self._prefix}ptychonn-{schedule}"
        self._report.title(f"{schedule.capitalize()} updates")
        count = study.scan * (study.scans - 1)
        with ExitStack() as opened, ThreadPoolExecutor(1 + CONSUMERS) as pool:
            starting = [pool.submit(Consumer.start, self._repo, name, partial(build, study)) for _ in range(CONSUMERS)]
            producer = Producer.start(self._repo, name, partial(train, study=study), schedule=request)
            opened.enter_context(producer)
            consumers = [opened.enter_context(consumer.result()) for consumer in starting]
            for consumer in consumers:
                consumer.wait_for(1, PATIENCE_S)
            first = consumers[0].infer(shown(study)[0]).outputs
            if adapt:
                period_s = max(period_s, SLACK * iteration_of(producer))
            opens_at = time.time() + 0.2
            self._repo.save(shutter(name), {"opened_at": np.array(opens_at), "period_s": np.array(period_s)})
            self._report.say(f"{study.batch} patterns every {milliseconds(period_s)}")
            answers: dict[int, tuple[int, float]] = {}
            asked = [
                pool.submit(ask, consumer, study, range(place, count, CONSUMERS), opens_at, period_s, answers)
                for place, consumer in enumerate(consumers)
            ]
            with self._report.progress(count) as show:
                while not all(one.done() for one in asked):
                    show(len(answers), f"{len(producer.report().updates)} updates")
                    time.sleep(0.25)
                show(len(answers), f"{len(producer.report().updates)} updates")
            for one in asked:
                one.result()
            training_s, published = producer.result(PATIENCE_S), producer.report()
            consumers[0].wait_for(published.updates[-1].ref.version)
            last = consumers[0].infer(shown(study)[0]).outputs
            statuses = [consumer.status() for consumer in consumers]
        versions, losses = zip(*(answers[number] for number in range(count)), strict=True)
        return Run(schedule, period_s, training_s, published, statuses, versions, losses, (first, last))


def iteration_of(producer: Producer) -> float:
    """Return the duration of an iteration of the warm-up, in seconds. It is measured when the first update is."""
    deadline = time.monotonic() + PATIENCE_S
    while (costs := producer.report().costs) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected measured costs of updates within {PATIENCE_S:.0f} s")
        time.sleep(0.05)
    return costs.iteration_s


def ask(
    consumer: Consumer,
    study: Study,
    numbers: Sequence[int],
    opens_at: float,
    period_s: float,
    answers: dict[int, tuple[int, float]],
) -> None:
    """Have a consumer reconstruct batches when they are measured, and note the version and the loss of each answer."""
    for number in numbers:
        patterns, truth = study.measured(study.scan + 1 + number)
        time.sleep(max(opens_at + (number + 1) * period_s - time.time(), 0.0))
        answer = consumer.infer(patterns)
        loss = np.abs(answer.outputs - truth).mean(axis=(0, 2, 3)).sum()
        answers[number] = answer.ref.version, float(loss)


def shown(study: Study) -> tuple[Images, Images]:
    """Return the patterns of the picture, from the last scan, and the truth."""
    return study.measured(study.scan * (study.scans - 1) + 1)


def compare(report: Report, runs: Sequence[Run], study: Study) -> None:
    """Print what both schedules cost and gave."""
    rows = [
        (
            run.schedule,
            len(run.report.updates),
            milliseconds(sum(update.stall_s for update in run.report.updates)),
            milliseconds(median(update.stall_s for update in run.report.updates)),
            milliseconds(run.latency_s),
            f"{mean(run.lag(study.scan)):.1f}",
            f"{sum(run.losses):.2f}",
            f"{run.training_s:.1f} s",
        )
        for run in runs
    ]
    columns = ("schedule", "updates", "stall in all", "per update", "latency", "lag", "loss of answers", "training")
    report.table(f"{len(runs[0].losses)} answers with each schedule, to the same questions", columns, rows, best=0)
    planned, epoch = (sum(run.losses) for run in runs)
    report.say(f"With planned updates the answers lose in all {1 - planned / epoch:.1%} less than with epoch updates.")
    report.say("Lag: mean number of measured batches that the version of an answer had not learned from.")


def draw(runs: Sequence[Run], study: Study, path: Path) -> Path:
    """Draw losses, lag, loss of the answers and reconstructions, and write a PNG file."""
    with drawing(path, 12, 9) as figure:
        parts = figure.subfigures(2, 2).flat
        training, lag, answers = (parts[place].subplots() for place in range(3))
        iterations, losses = zip(*runs[0].report.losses, strict=True)
        training.plot(iterations, losses, color=PALE, linewidth=0.9)
        training.plot(*smooth(iterations, losses), color=GREY, label="loss, moving average")
        for row, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
            at = [update.iteration for update in run.report.updates]
            label = f"{len(at)} {run.schedule} updates"
            training.plot(at, [-0.05 - 0.07 * row] * len(at), "|", color=colour, markersize=9, label=label)
            lag.plot(
                run.lag(study.scan), color=colour, label=f"{run.schedule}: {mean(run.lag(study.scan)):.1f} on average"
            )
            label = f"{run.schedule}: {sum(run.losses):.1f} in all"
            answers.plot(*smooth(range(len(run.losses)), run.losses), color=colour, label=label)
        training.set(title="Loss of the training with planned updates", xlabel="iteration")
        lag.set(title="Version lag of the consumers", xlabel="answer", ylabel="batches")
        answers.set(title="Loss of the answers, moving average", xlabel="answer")
        for axes in (training, lag, answers):
            legend_below(axes)
        _draw_images(parts[3].subplots(SHOWN, 7), runs[0], study)
    return path


def _draw_images(grid: np.ndarray[Any, np.dtype[Any]], run: Run, study: Study) -> None:
    """Draw patterns with much to see: the truth, and the reconstructions by the first and the last version."""
    patterns, truth = shown(study)
    chosen = np.argsort(truth.std(axis=(2, 3)).prod(axis=1))[::-1][:SHOWN]
    for row, place in zip(grid, chosen, strict=True):
        views = [patterns[place, 0]] + [stack[place, part] for part in (0, 1) for stack in (truth, *run.images)]
        for axes, image in zip(row, views, strict=True):
            axes.imshow(image, cmap="gray", interpolation="nearest")
            axes.set_axis_off()
    names = [f"{part}\n{view}" for part in ("amplitude", "phase") for view in ("truth", "first", "last")]
    for axes, name in zip(grid[0], ("pattern", *names), strict=True):
        axes.set_title(name, fontsize=9, weight="normal", loc="center")
