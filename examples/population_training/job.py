"""The job: a population whose checkpoints are versions, then one whose checkpoints are files, and what they cost."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from matplotlib.axes import Axes
from member import SEED, Files, Problem, Versions, load_problem, member
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from shared.place import Place
from shared.show import COLOURS, INK, Report, drawing, legend_below, milliseconds
from shared.starting import quiet_tune
from tensorvine.actors.search.tune import Retirement
from tensorvine.clusters import draw_lineage, lineage_of

RATES = (1e-4, 1e-3, 0.3, 1.0)
"""Learning rates of the members at the beginning. None of them is good."""
FACTORS = (0.5, 2.0)
"""A learning rate that is copied is multiplied by one of these."""
SLOTS = 2
"""Members that train at the same time on an own Ray: more processes would spend more time on imports."""
QUANTILE = 0.25
"""The worst quarter of the members is replaced by copies of the best quarter."""


@dataclass(frozen=True, slots=True)
class Population:
    """What became of a population."""

    name: str
    results: Sequence[Mapping[str, Any]]
    """What the members reported, in order."""

    @property
    def exploits(self) -> list[Mapping[str, Any]]:
        """The first results after a member was replaced by a copy of another."""
        return [one for one in self.results if one["source"] not in ("", one["member"])]

    @property
    def best(self) -> Mapping[str, Any]:
        """The last result of the member that is best at its end."""
        last = {one["member"]: one for one in self.results}
        return max(last.values(), key=lambda one: one["accuracy"])


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Train both populations, and draw pictures into the folder `out`."""
    quiet_tune()
    problem = load_problem(*((256, 150, 900) if quick else (1024, 100, 2000)))
    report = Report(place.prefix)
    report.title(place.title)
    with place.ray(cpus=SLOTS), place.open({"shards": 1}) as repo:
        report.title(f"{len(RATES)} members, {problem.steps} steps each, {problem.interval} an interval: versions")
        versions = train(problem, "versions", Versions(repo.name, place.prefix), [Retirement(repo.name)])
        say_exploits(report, versions)
        out.mkdir(parents=True, exist_ok=True)
        lineage = draw_lineage(lineage_of(repo, versions.best["ref"]), out / "lineage.svg")
        report.say(f"The best member descends from {len(repo.lineage(versions.best['ref'])) - 1} versions: {lineage}")
        report.title("The same with checkpoints in files")
        files = train(problem, "files", Files())
        say_exploits(report, files)
    compare(report, (versions, files))
    report.picture(draw((versions, files), out / "populations.png"))


def train(
    problem: Problem, name: str, checkpoints: Versions | Files, callbacks: Sequence[tune.Callback] = ()
) -> Population:
    """Train a population with Ray Tune.

    Args:
        problem: What the members train.
        name: Of the population.
        checkpoints: Keeps their state.
        callbacks: Of Tune.
    """
    random.seed(SEED)  # Tune draws from it
    rng, results = random.Random(SEED), Results()  # noqa: S311  for learning rates
    scheduler = PopulationBasedTraining(
        time_attr="steps",
        metric="accuracy",
        mode="max",
        perturbation_interval=problem.interval,
        quantile_fraction=QUANTILE,
        custom_explore_fn=lambda config: {"rate": config["rate"] * rng.choice(FACTORS)},
    )
    here = f"node:{ray.util.get_node_ip_address()}"  # where the files are
    with tempfile.TemporaryDirectory() as folder:
        found = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(member, problem=problem, checkpoints=checkpoints), {"cpu": 1, here: 1e-3}
            ),
            param_space={"rate": tune.grid_search(list(RATES))},
            tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
            run_config=tune.RunConfig(name=name, storage_path=folder, callbacks=[results, *callbacks], verbose=0),
        ).fit()
    if found.errors:
        raise found.errors[0]
    return Population(name, results.all)


class Results(tune.Callback):
    """Collects what the members report."""

    def __init__(self) -> None:
        self.all: list[Mapping[str, Any]] = []

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Mapping[str, Any], **info: object
    ) -> None:
        """Keep a result."""
        self.all.append(dict(result))


def say_exploits(report: Report, population: Population) -> None:
    """Print which member was replaced by a copy of which other."""
    for one in population.exploits:
        report.say(f"{one['member']} becomes a copy of {one['source']} and trains with rate {one['rate']:g}")
    best = population.best
    report.say(f"The best is {best['member']}: {best['accuracy']:.1%} right on 600 images that are not trained on.")


def compare(report: Report, populations: Sequence[Population]) -> None:
    """Print what the checkpoints of both populations cost."""

    def median_of(results: Sequence[Mapping[str, Any]], metric: str) -> str:
        return milliseconds(median(one[metric] for one in results)) if results else "-"

    measures = {
        "exploits": lambda one: len(one.exploits),
        "saving a state, median": lambda one: median_of(one.results, "saved_s"),
        "start and loading of a copy, median": lambda one: median_of(one.exploits, "loaded_s"),
        "accuracy of the best member": lambda one: f"{one.best['accuracy']:.1%}",
        "seconds": lambda one: f"{one.results[-1]['ended'] - one.results[0]['ended']:.1f}",
    }
    rows = [(name, *map(measure, populations)) for name, measure in measures.items()]
    report.table("Versions and files", ("", *(one.name for one in populations)), rows)


def draw(populations: Sequence[Population], path: Path) -> Path:
    """Draw the learning rates of the first population, and the accuracy of both, and write a PNG file."""
    with drawing(path) as figure:
        rates, best = figure.subplots(1, 2)
        _draw_rates(rates, populations[0])
        for colour, population in zip((INK, COLOURS[1]), populations, strict=True):
            done = sorted(population.results, key=lambda one: one["ended"])
            seconds = [one["ended"] - done[0]["ended"] for one in done]
            accuracy = np.maximum.accumulate([one["accuracy"] for one in done])
            best.step(seconds, accuracy, where="post", color=colour, label=population.name)
        best.set(title="Best accuracy so far", xlabel="seconds since the first report", ylabel="share of 600 images")
        legend_below(best)
    return path


def _draw_rates(axes: Axes, population: Population) -> None:
    """Draw the learning rate of each member over its steps, with a dot for each copy."""
    for number, colour in zip(range(len(RATES)), COLOURS, strict=False):
        own = [one for one in population.results if one["member"] == f"member-{number}"]
        steps, rates = [one["steps"] for one in own], [one["rate"] * 1.06 ** (number - 1.5) for one in own]
        axes.plot(steps, rates, color=colour, linewidth=2, drawstyle="steps-pre", label=f"member {number}")
    copies = population.exploits
    axes.plot([one["steps"] for one in copies], [one["rate"] for one in copies], "o", color=INK, label="copied")
    axes.set_yscale("log")
    axes.set(title="Learning rates of the members, with versions", xlabel="steps", ylabel="learning rate")
    legend_below(axes, 3)
