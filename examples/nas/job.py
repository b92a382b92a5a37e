"""One search in a cluster, and the comparison of searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from deephyper.evaluator.callback import Callback
from tensorvine.actors import Repository
from tensorvine.clusters import draw_lineage, lineage_of

from ..shared.place import Place
from ..shared.show import COLOURS, Report, drawing, legend_below, milliseconds, smooth
from .search import (
    Evaluation,
    Line,
    Plan,
    Results,
    RunFunction,
    evolution_of,
    read,
    retirement_of,
    with_deephyper,
    with_tune,
)

TARGETS = (0.9, 0.95, 0.97, 0.98)
"""Qualities whose times are compared."""


@dataclass(frozen=True)
class Job:
    """A search. The cluster runs already."""

    plan: Plan
    place: Place
    out: Path
    """Folder of its results."""
    candidates: int
    workers: int
    transfer: bool = True
    """Whether candidates inherit, through the repository."""
    memory: bool = False
    """The repository writes no files, so that the search cannot be resumed."""
    report: Report = field(default_factory=Report)

    def run(self, runner: str = "deephyper") -> list[Line]:
        """Search, and return what became of each candidate."""
        self.report.title(f"Search {'with' if self.transfer else 'without'} transfer, {self.workers} workers at once")
        name = self.place.prefix.removesuffix("/") or self.plan.name
        plan, lines = read(self.out / "results.jsonl", replace(self.plan, name=name))
        left = self.candidates - len(lines)
        with ExitStack() as opened:
            run, callbacks, store = self.parts(opened, plan, lines)
            show = opened.enter_context(self.report.progress(self.candidates))

            def watch(done: Sequence[Line]) -> None:
                best = max((line["quality"] or 0.0 for line in done), default=0.0)
                show(len(done), f"best {best:.1%}  {done[-1]['space_bytes'] / 1e6:.1f} MB stored")

            callbacks.append(Results(self.out / "results.jsonl", lines, store, watch))
            evolution = evolution_of(plan, lines, self.out)
            if left > 0 and runner == "tune":
                with_tune(evolution, run, callbacks, left, self.workers, self.out)
            elif left > 0:
                with_deephyper(evolution, run, callbacks, left, self.workers)
            self.finish(store, lines)
        return lines

    def parts(self, opened: ExitStack, plan: Plan, lines: Sequence[Line]) -> tuple[RunFunction, list[Callback], Any]:
        """Return the run function, callbacks, and the repository, if there is one, which `opened` closes."""
        evaluation, prefix = self.evaluation(plan, len(lines)), f"{plan.name}/{len(lines):06d}-"
        if not self.transfer:
            return evaluation.run(None, prefix), [], None
        path = None if self.memory or self.place.address else self.out / "repository"
        repo = opened.enter_context(self.place.open({"shards": 1, "path": path}))
        return evaluation.run(repo.name, prefix), [retirement_of(repo, plan, lines, prefix)], repo

    def evaluation(self, plan: Plan, first: int) -> Evaluation:
        """Return what builds and trains the candidates from number `first` on."""
        return Evaluation(plan, first)

    def finish(self, repo: Repository | None, lines: Sequence[Line]) -> None:
        """Draw the lineage of the best candidate of the population."""
        live = set() if repo is None else {str(ref) for ref in repo.models()}
        best = max((line for line in lines if line["ref"] in live), key=lambda line: line["quality"], default=None)
        if repo and best:
            qualities = repo.qualities(repo.lineage(best["ref"])).values()
            lineage = ", ".join(f"{quality:.1%}" for quality in qualities)
            self.report.say(f"Best live candidate {best['ref']}; quality of it and its ancestors: {lineage}")
            self.report.say(f"Drawn in {draw_lineage(lineage_of(repo, best['ref']), self.out / 'lineage.svg')}")


def _reached(lines: Sequence[Line], target: float) -> str:
    return next((f"{line['at']:.1f} s" for line in lines if line["quality"] >= target), "never")


def compare(searches: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Print what the searches cost and gave, and draw their qualities and the stored bytes as a PNG file."""
    report = Report()
    done = {mode: [line for line in lines if line["quality"] is not None] for mode, lines in searches.items()}
    done = {mode: lines for mode, lines in done.items() if lines}
    rows = {
        "candidates": lambda mode: len(searches[mode]),
        "failed": lambda mode: len(searches[mode]) - len(done[mode]),
        "end to end": lambda mode: f"{searches[mode][-1]['at']:.1f} s",
        "best quality": lambda mode: f"{max(line['quality'] for line in done[mode]):.2%}",
        "mean quality": lambda mode: f"{mean(line['quality'] for line in done[mode]):.2%}",
        **{f"time to {target:.0%}": lambda mode, target=target: _reached(done[mode], target) for target in TARGETS},
        "in the repository, per candidate": lambda mode: milliseconds(
            mean(line["repository_s"] for line in done[mode])
        ),
        "stored at most": lambda mode: f"{max(line['space_bytes'] for line in searches[mode]) / 1e6:.1f} MB",
        "written": lambda mode: f"{sum(line['bytes_written'] for line in done[mode]) / 1e6:.1f} MB",
    }
    report.table("The searches", ("", *done), [(name, *map(cell, done)) for name, cell in rows.items()])
    with drawing(path) as figure:
        quality, space = figure.subplots(1, 2)
        for colour, (mode, lines) in zip(COLOURS, done.items(), strict=False):
            at, qualities = [line["at"] for line in lines], [line["quality"] for line in lines]
            quality.plot(at, qualities, ".", color=colour, markersize=3, alpha=0.3)
            quality.plot(*smooth(at, qualities, 25), color=colour, linewidth=1, linestyle="--")
            best = [max(qualities[: number + 1]) for number in range(len(qualities))]
            quality.step(at, best, where="post", color=colour, linewidth=2, label=mode)
            if any(line["space_bytes"] for line in lines):
                space.plot(at, [line["space_bytes"] / 1e6 for line in lines], color=colour, label=mode)
        quality.set(
            title="Quality: best so far, mean (dashed)", xlabel="seconds", ylabel="mean accuracy of the classes"
        )
        space.set(title="Space", xlabel="seconds", ylabel="MB stored")
        legend_below(quality)
        legend_below(space)
    report.picture(path)
