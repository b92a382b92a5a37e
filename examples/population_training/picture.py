"""The picture: learning rates of both populations over time, and how good their best members are.

Rules
- One colour per member in the upper panels, one per population in the lower ones.
- An arrow in an upper panel: the member that it points to became a copy of that from which it comes. Where the line is
  missing, nobody trained in that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from online.picture import COLOURS, INK, PAPER, STYLE
from recorded import PopulationRun

RUNS = (INK, COLOURS[1])
BESIDE = 1.09
"""Factor between members that have the same learning rate: their lines are drawn beside one another."""
LEAST = 0.85
"""Accuracy that is shown; what was below at the beginning is not."""
SECONDS = "seconds since the first member began"


def draw_populations(runs: Sequence[PopulationRun], path: Path) -> Path:
    """Draw two populations and write a PNG.

    Args:
        runs: with the same members at the beginning.
        path: the file; its directory is made.

    Returns:
        The path of the file.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 8.4), facecolor=PAPER, layout="constrained")
        rates, best = figure.subplots(2, 2, sharey="row", height_ratios=(1.2, 1))
        end = 1.02 * max(run.seconds for run in runs)
        for axes, run in zip(rates, runs, strict=True):
            _draw_rates(axes, run, end)
        rates[0].set_ylabel("learning rate")
        _draw_best(best[0], runs, end)
        _draw_steps(best[1], runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    return path


def _draw_rates(axes: Axes, run: PopulationRun, end: float) -> None:
    for member, colour in enumerate(COLOURS[: len(run.rates)]):
        for number, (seconds, rate) in enumerate(run.stretches(member)):
            label = None if number else f"member {member}: {run.last(member).accuracy:.1%} at its end"
            place = _place(rate, member)
            axes.plot(seconds, [place, place], color=colour, linewidth=2.2, label=label, solid_capstyle="butt")
    for exploit in run.exploits:
        at = exploit.at + exploit.away_s
        arrow = {"arrowstyle": "-|>", "color": COLOURS[exploit.member], "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        start, tip = _place(exploit.source, exploit.winner), _place(exploit.rate, exploit.member)
        axes.annotate("", (at, tip), (at, start), arrowprops=arrow)
    axes.set_yscale("log")
    axes.set(title=f"{run.name}, exploits: {len(run.exploits)}", xlabel=SECONDS)
    axes.set_xlim(0, end)
    _legend(axes)


def _place(rate: float, member: int) -> float:
    return rate * BESIDE ** (member - 1.5)


def _draw_best(axes: Axes, runs: Sequence[PopulationRun], end: float) -> None:
    for colour, run in zip(RUNS, runs, strict=True):
        seconds, best = run.best()
        axes.step([*seconds, run.seconds], [*best, best[-1]], where="post", color=colour, linewidth=1.8, label=run.name)
    axes.set(title="Best accuracy so far, over time", xlabel=SECONDS, ylabel="share of 600 images")
    axes.set_xlim(0, end)
    _legend(axes)


def _draw_steps(axes: Axes, runs: Sequence[PopulationRun]) -> None:
    for colour, run in zip(RUNS, runs, strict=True):
        steps = np.cumsum([interval.steps for interval in run.intervals])
        axes.step(steps, run.best()[1], where="post", color=colour, linewidth=1.8, label=run.name)
    axes.set(title="The same, over the work done", xlabel="steps trained by all members together")
    axes.set_xlim(left=0)
    axes.set_ylim(LEAST, 1)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Put the legend below the panel, where no data are."""
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.14), ncols=2, handlelength=1.6, columnspacing=1.6)
