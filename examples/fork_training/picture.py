"""The picture: losses that part at the fork, and how far all were at what time.

Rules
- One colour per training, the same in both panels; what coincides is drawn one above the other, the upper one dashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from directions import Outcome
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from online.picture import COLOURS, GREY, INK, PAPER, STYLE
from progress import Progress

LINES = (INK, "#F0E442", *COLOURS, "#56B4E9")
"""Original, control, directions: Okabe and Ito's, which colour-blind people tell apart."""
DASHED = (0, (2.5, 2.5))


def draw_directions(outcomes: Sequence[Outcome], forked_at: int, progress: Progress, path: Path) -> Path:
    """Draw trainings and write a PNG.

    Args:
        outcomes: the original, the control, and other directions.
        forked_at: the step of the fork.
        progress: how far they were when.
        path: the file; its directory is made.

    Returns:
        The path of the file.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 5.6), facecolor=PAPER, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
        _draw_losses(left, outcomes, forked_at)
        _draw_progress(right, outcomes, forked_at, progress)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=3, handlelength=2.2, columnspacing=1.6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    return path


def _draw_losses(axes: Axes, outcomes: Sequence[Outcome], forked_at: int) -> None:
    before = outcomes[0].loss(forked_at)
    for place, outcome in enumerate(outcomes):
        steps, losses = outcome.curve()
        if place:
            steps, losses = np.append(forked_at, steps), np.append(before, losses)
        label = f"{outcome.direction.text}: loss {losses[-1]:.3f}, {outcome.accuracy:.1%} right"
        axes.plot(steps, losses, label=label, **_style(place))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(title="Loss on test images: the directions part at the fork", xlabel="step", ylabel="mean cross-entropy")
    axes.margins(x=0.01)
    axes.axvline(forked_at, color=GREY, linewidth=1, linestyle=":")
    place = {"xycoords": ("data", "axes fraction"), "xytext": (5, 0), "va": "bottom"}
    axes.annotate(f"fork at step {forked_at}", (forked_at, 0.02), textcoords="offset points", color=GREY, **place)


def _draw_progress(axes: Axes, outcomes: Sequence[Outcome], forked_at: int, progress: Progress) -> None:
    for place, outcome in enumerate(outcomes):
        seconds, steps = np.array(progress.seen[outcome.direction.name]).T
        before = int((steps < outcome.steps).sum())  # a training that has ended is of no interest
        axes.plot(seconds[: before + 1], steps[: before + 1], **_style(place))
    axes.axhline(forked_at, color=GREY, linewidth=1, linestyle=":")
    place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 4), "ha": "right"}
    axes.annotate(f"step {forked_at}", (1, forked_at), textcoords="offset points", color=GREY, **place)
    axes.set(title="Progress: the original goes on", xlabel="seconds since the original went on", ylabel="steps done")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _style(place: int) -> dict[str, object]:
    """Return the style of a line; the control is dashed above the original."""
    style: dict[str, object] = {"color": LINES[place], "linewidth": 1.4, "zorder": 2}
    if place == 0:
        style |= {"linewidth": 3.2}
    if place == 1:
        style |= {"linewidth": 1.8, "linestyle": DASHED, "zorder": 4}
    return style
