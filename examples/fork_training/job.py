"""The job itself: train, fork, let all directions go on, and compare them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from directions import DIRECTIONS, ORIGINAL, Direction, Outcome
from network import accuracy, build, load_samples
from online.place import Place
from picture import draw_directions
from progress import Progress
from report import Report
from tensorvine.actors import Repository, Trainers, fork_many, start_trainers

SAVED_AT = 20
"""The original saves a version after so many steps: the parent of what its clones save."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much to do."""

    directions: Sequence[Direction]
    forked_at: int
    """The step."""
    steps: int
    """In all."""


QUICK = Size(DIRECTIONS[:2], forked_at=80, steps=230)
FULL = Size(DIRECTIONS, forked_at=150, steps=1200)


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Run the whole job and draw its picture into the directory `out`."""
    size = QUICK if quick else FULL
    report = Report()
    report.title(place.title)
    with place.ray(), place.open() as repo, ExitStack() as opened:
        Job(repo, place.prefix, size, report, opened).run(out)


class Job:
    """One training and its directions.

    Args:
        repo: where they are saved.
        prefix: of the names of models.
        size: how much to do.
        report: prints.
        opened: closes what is started.
    """

    def __init__(self, repo: Repository, prefix: str, size: Size, report: Report, opened: ExitStack) -> None:
        self._repo, self._prefix, self._size, self._report, self._opened = repo, prefix, size, report, opened
        self._train, self._test = load_samples()
        self._progress = Progress()

    def run(self, out: Path) -> None:
        """Train, fork, compare and draw."""
        size, report, progress = self._size, self._report, self._opened.enter_context(self._progress)
        original = self._start()
        report.title(f"Training on with {ORIGINAL.ranks} ranks, to step {size.steps}")
        begun = time.perf_counter()
        progress.watch(ORIGINAL.name, original)
        original.train_async(size.steps - SAVED_AT)

        count = sum(direction.ranks for direction in size.directions)
        report.title(f"Forking at step {size.forked_at} into {len(size.directions)} directions of {count} ranks in all")
        groups = self._fork(original)
        forked = time.perf_counter()
        report.fork(groups[0].report, forked - begun, original.describe()[0].steps_done)
        outcomes = self._outcomes([original, *groups], [begun, *[forked] * len(groups)])
        report.directions(outcomes, size.forked_at, self._prefix)
        report.same(*outcomes[:2])
        report.picture(draw_directions(outcomes, size.forked_at, progress, out / "directions.png"))

    def _start(self) -> Trainers:
        """Start the original and have it save the version that the directions descend from."""
        self._report.title(f"Starting the original, {ORIGINAL.ranks} ranks")
        trainers = start_trainers(
            partial(build, self._train, self._test),
            ORIGINAL.ranks,
            name=ORIGINAL.name,
            repository=self._repo,
            timeout=TIMEOUT_S,
        )
        self._opened.enter_context(trainers)
        trainers.train(SAVED_AT)
        self._report.say(f"{trainers.save(self._prefix + ORIGINAL.name).ref} is saved at step {SAVED_AT}.")
        return trainers

    def _fork(self, original: Trainers) -> list[Trainers]:
        """Fork the original, which trains; the clones train on at once."""
        directions = self._size.directions
        groups = fork_many(
            original,
            [direction.ranks for direction in directions],
            at_step=self._size.forked_at,
            options=[direction.options for direction in directions],
            names=[direction.name for direction in directions],
            steps=self._size.steps - self._size.forked_at,
            timeout=TIMEOUT_S,
        )
        for direction, group in zip(directions, groups, strict=True):
            self._opened.enter_context(group)
            self._progress.watch(direction.name, group)
        return groups

    def _outcomes(self, groups: Sequence[Trainers], begun: Sequence[float]) -> list[Outcome]:
        """Wait until all have come to their end, and save them."""
        with ThreadPoolExecutor(len(groups)) as pool:
            try:
                return list(pool.map(self._outcome, (ORIGINAL, *self._size.directions), groups, begun))
            except BaseException:
                for group in groups:
                    group.kill()  # so that the threads' calls end, and they with them
                raise

    def _outcome(self, direction: Direction, group: Trainers, begun: float) -> Outcome:
        losses = group.results(TIMEOUT_S)
        seconds = time.perf_counter() - begun
        info = self._repo.info(group.save(self._prefix + direction.name).ref)
        tensors = self._repo.load(info.ref)
        right = accuracy(tensors, self._test)
        return Outcome(direction, losses, self._size.steps, seconds, info.ref, info.parent, tensors, right)
