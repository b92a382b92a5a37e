"""Pictures and tables of the examples, on the terminal and as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDTH_OF_A_FILE = 120
"""Columns of output that is not a terminal. Without it, tables are cut to 80."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which colour-blind people can tell apart."""
INK, GREY, PALE, PAPER = "#1d1d1d", "#6e6e6e", "#c4c4c4", "#ffffff"
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
Floats = NDArray[np.float64]


class Report:
    """Prints steps, progress and tables.

    Args:
        prefix: Prefix of the run's model names, which is not printed.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        console = Console(highlight=False)
        self._console = console if console.is_terminal else Console(width=WIDTH_OF_A_FILE, highlight=False)

    def title(self, text: str) -> None:
        """Print the title of a step."""
        self._console.print(f"\n[bold]{text}[/bold]")

    def say(self, text: str) -> None:
        """Print a line of a step."""
        self._console.print(f"  {text}")

    def short(self, ref: object) -> str:
        """Return a version's name without the prefix of the run. None gives an empty text."""
        return "" if ref is None else str(ref).removeprefix(self._prefix)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        left: int = 1,
        best: int | None = None,
    ) -> None:
        """Print a table.

        Args:
            title: Its title.
            columns: Headings.
            rows: The cells of each row.
            left: Number of columns that are aligned to the left; the others are aligned to the right.
            best: Number of the row that is printed in green.
        """
        table = Table(
            title=f"\n{title}",
            title_justify="left",
            title_style="bold",
            header_style="dim",
            box=box.SIMPLE_HEAD,
            padding=(0, 2, 0, 0),
        )
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number < left else "right", overflow="fold")
        for number, row in enumerate(rows):
            table.add_row(*map(str, row), style="bold green" if number == best else None)
        self._console.print(table)

    @contextmanager
    def progress(self, total: int, text: str = "starting") -> Iterator[Callable[[int, str], None]]:
        """Return a context manager that shows a bar, and yields a function that sets the steps done and the text."""
        columns = (TextColumn(" "), BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as bar:
            task = bar.add_task("", total=total, text=text)
            yield lambda done, text: bar.update(task, completed=done, text=text)

    def picture(self, path: Path) -> None:
        """Print the path of a picture."""
        self._console.print(f"\nPicture: {path}", soft_wrap=True)


@contextmanager
def drawing(path: Path, width: float = 12.0, height: float = 5.6) -> Iterator[Figure]:
    """Return a context manager that yields a figure and writes it as a PNG file at the end.

    Args:
        path: The file. Its folder is created.
        width, height: In inches.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})


def legend_below(axes: Axes, columns: int = 2) -> None:
    """Put the legend below a panel, where it covers no data."""
    axes.legend(loc="upper left", bbox_to_anchor=(-0.05, -0.13), ncols=columns, handlelength=1.6, columnspacing=1.4)


def smooth(x: ArrayLike, y: ArrayLike, width: int = 15) -> tuple[Floats, Floats]:
    """Return the moving average of a line over `width` points, or over all points if there are fewer.

    >>> [line.tolist() for line in smooth(range(17), range(0, 34, 2))]
    [[7.0, 8.0, 9.0], [14.0, 16.0, 18.0]]
    """
    width = max(1, min(width, np.size(y)))
    each = np.full(width, 1 / width)
    return np.convolve(x, each, "valid").round(9), np.convolve(y, each, "valid").round(9)


def milliseconds(seconds: float) -> str:
    """Format a short time.

    >>> milliseconds(0.00123), milliseconds(0.0456), milliseconds(1.5)
    ('1.2 ms', '46 ms', '1500 ms')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def size(count: float) -> str:
    """Format a number of bytes.

    >>> size(2_345_678), size(5_140), size(0)
    ('2.35 MB', '5.1 kB', '0')
    """
    if not count:
        return "0"
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"
