"""The job: train with DDP, fork, let all directions train on, and compare them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from shared.place import Place
from shared.show import COLOURS, GREY, INK, Report, drawing, legend_below, milliseconds
from tensorvine.actors import Repository, Trainers, find_trainers, fork_many
from tensorvine.store import ModelInfo
from training import accuracy, build, ddp_rank, load_samples

RANKS, FORKED_AT = 2, 150
"""Ranks of the original, and the step after which it is forked."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Direction:
    """A way to train on after the fork."""

    name: str
    text: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What is changed."""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a direction."""

    direction: Direction
    losses: Sequence[Sequence[float]]
    """Losses on the test images after each step since the fork, by rank."""
    info: ModelInfo
    """Of the saved version."""
    accuracy: float


DIRECTIONS = (
    Direction("control", "nothing changed", ranks=RANKS),
    Direction("rate-up", "learning rate x 4", {"learning_rate": 4e-3}),
    Direction("labels", "30% of the labels wrong", {"wrong_labels": 0.3}),
    Direction("without-8", "no image of an 8", {"without": 8}),
    Direction("rate-down", "learning rate / 10", {"learning_rate": 1e-4}),
    Direction("pixels", "noise on the pixels", {"pixel_noise": 0.5}),
)


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Run the job, and draw the losses into the folder `out`."""
    directions, steps = (DIRECTIONS[:2], 150) if quick else (DIRECTIONS, 1000)
    report = Report(place.prefix)
    report.title(place.title)
    with place.ray(), place.open() as repo, tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        Job(repo, place, directions, steps, report, Path(folder), opened).run(out)


class Job:
    """One training and its directions, which train `steps` steps after the fork. The ranks meet in `folder`."""

    def __init__(
        self,
        repo: Repository,
        place: Place,
        directions: Sequence[Direction],
        steps: int,
        report: Report,
        folder: Path,
        opened: ExitStack,
    ) -> None:
        self._repo, self._prefix, self._run = repo, place.prefix, f"digits-{place.run}"
        self._directions, self._steps = directions, steps
        self._report, self._folder, self._opened = report, folder, opened
        self._samples = load_samples()

    def run(self, out: Path) -> None:
        """Train, fork, compare and draw."""
        report = self._report
        report.title(f"Training with DDP on {RANKS} ranks")
        ranks = self._start()
        groups = self._fork()
        original = ray.get(ranks, timeout=TIMEOUT_S)
        outcomes = self._outcomes(groups)
        self._compare(outcomes, original)
        report.picture(draw(outcomes, original[0], out / "directions.png"))

    def _start(self) -> list[ray.ObjectRef]:
        """Start the ranks as Ray tasks on this node."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        rank_task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=here)(ddp_rank)
        last, samples = FORKED_AT + self._steps, self._samples
        ranks = [rank_task.remote(self._run, rank, RANKS, str(self._folder), last, *samples) for rank in range(RANKS)]
        self._opened.callback(_cancel, ranks)
        return ranks

    def _fork(self) -> list[Trainers]:
        """Fork the ranks, which train on. The clones train at once."""
        ranks, began = find_trainers(self._run, timeout=TIMEOUT_S), time.perf_counter()
        Path(self._folder, "go").touch()
        count = sum(direction.ranks for direction in self._directions)
        self._report.title(f"Forking into {len(self._directions)} directions with {count} ranks in all")
        groups = fork_many(
            ranks,
            [direction.ranks for direction in self._directions],
            at_step=FORKED_AT,
            build=partial(build, *self._samples),
            options=[direction.options for direction in self._directions],
            names=[f"{self._run}-{direction.name}" for direction in self._directions],
            repository=self._repo,
            steps=self._steps,
            timeout=TIMEOUT_S,
        )
        for group in groups:
            self._opened.enter_context(group)
        fork, seconds = groups[0].report, time.perf_counter() - began
        say = self._report.say
        say(
            f"{fork.nbytes / 1e6:.1f} MB of state after step {fork.step}, from memory to memory; the original continued"
        )
        say(f"held       {milliseconds(fork.held_s)}: longest time for which the fork blocked a rank of the original")
        say(f"standby    {milliseconds(fork.standby_s)}: until all clones had the whole state, after they had started")
        say(f"readiness  {seconds:.2f} s in all, most of it for the start of the clones' processes")
        return groups

    def _outcomes(self, groups: Sequence[Trainers]) -> list[Outcome]:
        """Wait for all directions, and save them."""
        with ThreadPoolExecutor(len(groups)) as pool:
            try:
                return list(pool.map(self._outcome, self._directions, groups))
            except BaseException:
                for group in groups:
                    group.kill()  # so that the calls of the other threads end
                raise

    def _outcome(self, direction: Direction, group: Trainers) -> Outcome:
        losses = group.results(TIMEOUT_S)
        info = self._repo.info(group.save(self._prefix + direction.name).ref)
        return Outcome(direction, losses, info, accuracy(self._repo.load(info.ref), self._samples[1]))

    def _compare(self, outcomes: Sequence[Outcome], original: Sequence[Sequence[float]]) -> None:
        rows = [
            (
                outcome.direction.text,
                self._report.short(outcome.info.ref),
                outcome.direction.ranks,
                f"{original[0][FORKED_AT - 1]:.4f}",
                f"{outcome.losses[0][-1]:.4f}",
                f"{outcome.accuracy:.1%}",
                outcome.info.metadata["fork"]["step"],
            )
            for outcome in outcomes
        ]
        columns = ("direction", "saved as", "ranks", "loss at the fork", "at the end", "accuracy", "forked after step")
        self._report.table("Directions", columns, rows, left=2)
        self._report.say("Loss: mean cross-entropy on 360 images that are never trained on nor perturbed.")
        control = outcomes[0].losses
        same = all(mine == own[FORKED_AT:] for mine, own in zip(control, original, strict=True))
        verdict = "are the same, bit for bit" if same else "are NOT the same"
        self._report.say(f"Original and control: {len(control[0])} losses of each rank {verdict}.")


def draw(outcomes: Sequence[Outcome], original: Sequence[float], path: Path) -> Path:
    """Draw the losses, which part at the fork, and write a PNG file."""
    with drawing(path, 11, 6) as figure:
        axes = figure.subplots()
        axes.plot(np.arange(1, len(original) + 1), original, color=INK, linewidth=3, label="original, with DDP")
        steps = np.arange(FORKED_AT, FORKED_AT + len(outcomes[0].losses[0]) + 1)
        for outcome, colour in zip(outcomes, ("#F0E442", *COLOURS), strict=False):
            style = (0, (2.5, 2.5)) if outcome is outcomes[0] else "-"
            losses = [original[FORKED_AT - 1], *outcome.losses[0]]
            label = f"{outcome.direction.text}: {outcome.accuracy:.1%} right"
            axes.plot(steps, losses, color=colour, linewidth=1.6, linestyle=style, label=label)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.axvline(FORKED_AT, color=GREY, linewidth=1, linestyle=":", label=f"fork after step {FORKED_AT}")
        axes.set(title="Loss on test images: the directions part at the fork", xlabel="step", ylabel="cross-entropy")
        legend_below(axes, 3)
    return path


def _cancel(ranks: Sequence[ray.ObjectRef]) -> None:
    for rank in ranks:
        ray.cancel(rank, force=True)
