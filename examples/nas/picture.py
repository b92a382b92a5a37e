"""The picture: accuracy over time for each search, the space it takes, and what its workers did when.

Rules
- One colour per mode in all panels (Okabe and Ito's, which colour-blind people tell apart).
- A bar of a timeline is one candidate, from its start to its end; alternating shades tell neighbours apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..online.picture import COLOURS, INK, PAPER, STYLE
from .plan import Mode
from .report import NAMES
from .results import Results

COLOUR = {Mode.NONE: COLOURS[0], Mode.HDF5: COLOURS[1], Mode.REPOSITORY: COLOURS[2]}
SMOOTH = 25
"""Candidates whose qualities are averaged, or a quarter of all where there are few."""
LEAST = 0.05
"""Quantile of the qualities below which nothing is shown."""
SECONDS = "seconds since the search began"


def draw_searches(searches: Sequence[Results], path: Path) -> Path:
    """Draw searches and write a PNG.

    Args:
        searches: of the same plan in different modes.
        path: the file; its directory is made.

    Returns:
        The path of the file.
    """
    with mpl.rc_context(STYLE):
        rows = len(searches)
        figure = Figure(figsize=(12, 5.2 + 1.5 * rows), facecolor=PAPER, layout="constrained")
        grid = figure.add_gridspec(1 + rows, 2, height_ratios=(3.4, *(1 for _ in searches)))
        end = 1.02 * max(run.seconds for run in searches)
        _draw_quality(figure.add_subplot(grid[0, 0]), searches, end)
        _draw_space(figure.add_subplot(grid[0, 1]), searches, end)
        for row, run in enumerate(searches, 1):
            _draw_tasks(figure.add_subplot(grid[row, :]), run, end, last=row == rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    return path


def _draw_quality(axes: Axes, searches: Sequence[Results], end: float) -> None:
    seen: list[float] = []
    for run in searches:
        colour, name = COLOUR[run.plan.mode], NAMES[run.plan.mode]
        done = [(one.at, one.outcome.quality) for one in run.told if one.outcome.quality is not None]
        if not done:
            continue
        at, quality = np.array(done).T
        seen += quality.tolist()
        axes.plot(at, quality, ".", color=colour, markersize=2.5, alpha=0.3)
        wide = max(1, min(SMOOTH, len(quality) // 4))
        each = np.full(wide, 1 / wide)
        means = np.convolve(at, each, "valid"), np.convolve(quality, each, "valid")
        axes.plot(*means, color=colour, linewidth=1.0, linestyle=(0, (3, 2)))
        rises, best = run.climb()
        axes.step([*rises, run.seconds], [*best, best[-1]], where="post", color=colour, linewidth=2, label=name)
    if seen:
        low, high = np.quantile(seen, LEAST), max(seen)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.08 * (high - low))
    axes.set(title="Quality: best so far, mean (dashed), each (dots)", xlabel=SECONDS, ylabel="quality")
    axes.set_xlim(0, end)
    axes.legend(loc="lower right")


def _draw_space(axes: Axes, searches: Sequence[Results], end: float) -> None:
    for run in searches:
        if not run.bytes_written:
            continue
        colour, name = COLOUR[run.plan.mode], NAMES[run.plan.mode]
        at = [one.at for one in run.told]
        stored = np.array([one.space_bytes for one in run.told]) / 1e6
        written = np.cumsum([one.outcome.bytes_written for one in run.told]) / 1e6
        axes.plot(at, written, color=colour, linewidth=1.2, linestyle=(0, (3, 2)), label=f"{name}, nothing retired")
        axes.plot(at, stored, color=colour, linewidth=2, label=name)
    axes.set(title="Space", xlabel=SECONDS, ylabel="MB stored")
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left")


def _draw_tasks(axes: Axes, run: Results, end: float, *, last: bool) -> None:
    """Draw who evaluated what when: a row per worker."""
    workers = list(dict.fromkeys(one.outcome.worker for one in run.told if one.outcome.worker))
    for row, worker in enumerate(workers):
        own = [one for one in run.told if one.outcome.worker == worker]
        lengths = [one.outcome.ended - one.outcome.began for one in own]
        bars = [(one.at - length, length) for one, length in zip(own, lengths, strict=True)]
        shades = [(COLOUR[run.plan.mode], 0.55 + 0.4 * (number % 2)) for number in range(len(own))]
        axes.broken_barh(bars, (row - 0.42, 0.84), facecolors=shades, linewidth=0)
        failed = [one.at for one in own if one.outcome.quality is None]
        axes.plot(failed, [row] * len(failed), "x", color=INK, markersize=5)
    axes.set_title(f"What each worker did, {NAMES[run.plan.mode]}: {run.seconds:.0f} s in all")
    axes.set_yticks(range(len(workers)), [f"worker {row + 1}" for row in range(len(workers))])
    axes.set_xlim(0, end)
    if last:
        axes.set_xlabel(SECONDS)
    else:
        axes.tick_params(labelbottom=False)
