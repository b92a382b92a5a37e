"""The picture of some runs: training loss and fits, how far consumers are behind, what their answers lost.

Rules
- One colour per schedule, the same in all panels (Okabe and Ito's, which colour-blind people tell apart).
- A pale band across a panel: the data changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from tensorvine.actors import Fitted
from tensorvine.planner.curves.forms import FORMS

from .recorded import SMOOTH, Run, smooth

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
INK, GREY, PALE, MARK, PAPER = "#1d1d1d", "#6e6e6e", "#c4c4c4", "#efe6c8", "#ffffff"
PLACES = 4
"""Patterns whose reconstructions are shown."""
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


@dataclass(frozen=True, slots=True)
class Reconstructions:
    """Some patterns, and what they show: in truth, and as two versions reconstructed it."""

    patterns: NDArray[np.float32]
    """(N, side, side)."""
    images: dict[str, Sequence[NDArray[np.float32]]]
    """What of the object, as "amplitude" -> truth, by the first version, by the last version: each (N, side, side)."""


def draw_runs(runs: Sequence[Run], changes: Sequence[int], path: Path, images: Reconstructions | None = None) -> Path:
    """Draw runs and write a PNG.

    Args:
        runs: under different schedules, with the same data; the loss and its fits are those of the first one.
        changes: iterations at which the data changed.
        path: the file; its directory is made.
        images: for the fourth panel, which otherwise adds the losses of the answers up.

    Returns:
        The path of the file.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 9.2), facecolor=PAPER, layout="constrained")
        parts = figure.subfigures(2, 2, wspace=0.03, hspace=0.04).flat
        for part, draw in zip(parts, (_draw_losses, _draw_lag, _draw_answers), strict=False):
            draw(part.subplots(), runs, changes)
        if images:
            _draw_images(parts[3], images)
        else:
            _draw_totals(parts[3].subplots(), runs, changes)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    return path


# ---- panels -------------------------------------------------------------------------------------------------


def _draw_losses(axes: Axes, runs: Sequence[Run], changes: Sequence[int]) -> None:
    run = runs[0]
    iterations, losses = run.losses
    low, high = np.quantile(losses, [0.002, 0.998])
    height = high - low
    axes.plot(iterations, losses, color=PALE, linewidth=0.9, label="each iteration")
    axes.plot(*smooth(iterations, losses), color=GREY, linewidth=1.8, label=f"mean of {SMOOTH}")
    for number, (since, until, fit) in enumerate(_fits(run)):
        along = np.arange(since, until + 1)
        label = None if number else "planner's fit then"
        axes.plot(along, _fitted(fit, along), color=INK, linewidth=1.5, linestyle=(0, (4, 2)), label=label)
    for row, (colour, each) in enumerate(zip(COLOURS, runs, strict=False)):
        at = [update.iteration for update in each.report.updates]
        rug = np.full(len(at), low - (0.1 + 0.09 * row) * height)
        label = f"{len(at)} {each.schedule} updates"
        axes.plot(at, rug, "|", color=colour, markersize=9, markeredgewidth=1.1, label=label)
    axes.set_ylim(low - (0.14 + 0.09 * len(runs)) * height, high + 0.1 * height)
    axes.set(title=f"Training loss, {run.schedule} updates", xlabel="iteration", ylabel="loss")
    axes.axvline(run.warmup, color=GREY, linewidth=1, linestyle=":", label="warm-up ends")
    _mark(axes, changes)
    _legend(axes)


def _draw_lag(axes: Axes, runs: Sequence[Run], changes: Sequence[int]) -> None:
    for colour, run in zip(COLOURS, runs, strict=False):
        seconds, behind = run.lag()
        axes.plot(seconds, behind, color=colour, linewidth=1.3, label=f"{run.schedule}: {behind.mean():.1f} on average")
    axes.set(title="Version lag at the consumers", ylabel="iterations behind the training")
    axes.set_ylim(bottom=0)
    _time_axis(axes, runs[0], changes)


def _draw_answers(axes: Axes, runs: Sequence[Run], changes: Sequence[int]) -> None:
    for colour, run in zip(COLOURS, runs, strict=False):
        seconds, losses = run.heard()
        axes.plot(seconds, losses, color=colour, linewidth=0.6, alpha=0.35)
        label = f"{run.schedule}: {losses.sum():.1f} in all"
        axes.plot(*smooth(seconds, losses), color=colour, linewidth=1.8, label=label)
    axes.set(title=f"Loss of the answers, and mean of {SMOOTH}", ylabel="loss against the truth")
    _time_axis(axes, runs[0], changes)


def _draw_totals(axes: Axes, runs: Sequence[Run], changes: Sequence[int]) -> None:
    for colour, run in zip(COLOURS, runs, strict=False):
        seconds, losses = run.heard()
        axes.plot(seconds, losses.cumsum(), color=colour, linewidth=1.8, label=run.schedule)
    axes.set(title="Cumulative inference loss", ylabel="sum of the answers' losses")
    axes.set_ylim(bottom=0)
    _time_axis(axes, runs[0], changes)


def _draw_images(part: SubFigure, shown: Reconstructions) -> None:
    views = ("truth", "first version", "last version")
    grid = part.subplots(PLACES, 1 + len(views) * len(shown.images))
    part.suptitle("Reconstructions in the last scan", x=0.02, ha="left", fontsize=11.5, weight="bold")
    for row, place in zip(grid, _telling(shown), strict=True):
        _draw_image(row[0], shown.patterns[place], 0.0, shown.patterns.max())
        for number, stacks in enumerate(shown.images.values()):
            low, high = np.quantile(stacks[0], [0.01, 0.99])
            for axes, stack in zip(row[1 + len(views) * number :], stacks, strict=False):
                _draw_image(axes, stack[place], low, high)
    grid[0, 0].set_title("pattern", fontsize=9, weight="normal", loc="center")
    for number, kind in enumerate(shown.images):
        for axes, view in zip(grid[0, 1 + len(views) * number :], views, strict=False):
            axes.set_title(f"{kind}\n{view}", fontsize=9, weight="normal", loc="center")


def _draw_image(axes: Axes, image: NDArray[np.float32], low: float, high: float) -> None:
    axes.imshow(image, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
    axes.set_axis_off()


# ---- parts of panels ----------------------------------------------------------------------------------------


def _time_axis(axes: Axes, run: Run, changes: Sequence[int]) -> None:
    """Finish a panel over the time of the answers."""
    _mark(axes, [(change - 1 - run.warmup) * run.period_s for change in changes])
    axes.set_xlabel("seconds since the first question")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    _legend(axes)


def _mark(axes: Axes, places: Sequence[float]) -> None:
    """Draw where the data changed."""
    for number, place in enumerate(places):
        label = None if number else "data change"
        axes.axvline(place, color=MARK, linewidth=5, zorder=0, label=label)


def _legend(axes: Axes) -> None:
    """Put the legend below the panel, where no data are."""
    axes.legend(loc="upper left", bbox_to_anchor=(-0.08, -0.14), ncols=3, handlelength=1.4, columnspacing=1.2)


def _fits(run: Run) -> list[tuple[int, int, Fitted]]:
    """Return the fits that the planner had: from which iteration on, up to which, and the curve."""
    found: list[tuple[int, Fitted]] = []
    for sighting in run.sightings:
        if sighting.curve is not None and (not found or found[-1][1] != sighting.curve):
            found.append((sighting.iteration, sighting.curve))
    ends = [*(since for since, _ in found), run.report.losses[-1][0]][1:]
    return [(since, until, fit) for (since, fit), until in zip(found, ends, strict=True)]


def _fitted(fit: Fitted, iterations: NDArray[np.int64]) -> NDArray[np.float64]:
    form = FORMS[fit.form]
    return np.broadcast_to(
        np.maximum(
            form.function(np.maximum(iterations - fit.origin, form.first).astype(float), *fit.params.values()), 0
        ),
        iterations.shape,
    )


def _telling(shown: Reconstructions) -> list[int]:
    """Choose patterns with much to see: some of those whose truth varies most."""
    varied = np.prod([truth.std(axis=(1, 2)) for truth, *_ in shown.images.values()], axis=0)
    return sorted(np.argsort(varied)[::-1][: 2 * PLACES : 2].tolist())
