"""The job itself: both populations, one after the other."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from online.place import Place
from picture import draw_populations
from population import Population
from problem import load_problem
from report import Report
from tuned import train

RATES = (1e-4, 1e-3, 0.3, 1.0)
"""Of the members at the beginning: none is good."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to do."""

    width: int
    interval: int
    steps: int


QUICK = Size(width=256, interval=400, steps=2000)
FULL = Size(width=1024, interval=100, steps=2000)


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Train both populations, and draw the picture into the directory `out`."""
    size = QUICK if quick else FULL
    report = Report()
    problem = load_problem(size.width, size.interval)
    report.title(place.title)
    with place.ray(cpus=len(RATES)), ExitStack() as opened:
        repo = opened.enter_context(place.open()) if place.named is not None else None
        report.title(f"Forks in memory: {len(RATES)} members, {size.steps} steps each, {size.interval} an interval")
        with Population(problem, RATES, size.steps, repo) as population:
            forks = population.run()
            if repo is not None:
                report.say(f"The best member is saved: {population.save(f'{place.prefix}best').ref}")
        report.exploits(forks)
        report.title("Ray Tune, with checkpoints in files")
        files = train(problem, RATES, size.steps)
        report.exploits(files)
    report.compare((forks, files))
    report.picture(draw_populations((forks, files), out / "populations.png"))
