"""What the online examples print: a line per run that changes while it runs, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from .recorded import Answer, Run

WIDTH_OF_A_FILE = 120
"""Columns when the output is no terminal; tables would be cut to 80."""
RECENT = 25
"""Answers whose mean loss is shown."""


class Line:
    """The line of one run."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def show(
        self,
        iteration: int,
        loss: float,
        newest: int | None,
        versions: Sequence[int | None],
        answers: Sequence[Answer],
    ) -> None:
        """Show how far the training is, and which versions answer.

        Args:
            iteration: the last one.
            loss: of it.
            newest: version; None before the first.
            versions: that answered last, one per consumer.
            answers: all so far.
        """
        text = f"loss {loss:.3f}"
        if newest is not None:
            text += f"  published @{newest}"
        if answers:
            behind = ", ".join(f"@{v} (-{max((newest or v) - v, 0)})" if v else "none yet" for v in versions)
            recent = [answer.loss for answer in answers[-RECENT:]]
            text += f"  answering {behind}  their loss {sum(recent) / len(recent):.3f}"
        self._bar.update(self._task, completed=iteration, text=text)


class Report:
    """Prints to the terminal, or to wherever the output goes."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._console = console if console.is_terminal else Console(width=WIDTH_OF_A_FILE, highlight=False)

    def title(self, text: str) -> None:
        """Begin a step."""
        self._console.print(f"\n[bold]{text}[/bold]")

    def say(self, text: str) -> None:
        """Print a line of a step."""
        self._console.print(f"  {text}")

    @contextmanager
    def line(self, iterations: int) -> Iterator[Line]:
        """Show a line of a run that has so many iterations."""
        columns = (TextColumn(" "), BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*columns, console=self._console) as bar:
            yield Line(bar, bar.add_task("", total=iterations, text="starting"))

    def table(self, title: str, runs: Sequence[Run]) -> None:
        """Print what each schedule cost and gave, and how they compare."""
        self._console.print()
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            header_style="dim",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("schedule")
        for column in (
            "updates",
            "stall\nin all",
            "stall per\nupdate",
            "latency\n(median)",
            "mean lag\n(iterations)",
            "loss of answers\npredicted",
            "loss of answers\nmeasured",
            "training",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        best = min(runs, key=lambda run: run.measured_loss)
        for run in runs:
            table.add_row(*_row(run), style="bold green" if run is best else None)
        self._console.print(table)
        self._compare(best, max(runs, key=lambda run: run.measured_loss))

    def picture(self, path: Path) -> None:
        """Name the picture; the last line."""
        self._console.print(f"\nPicture of the runs: {path}", soft_wrap=True)

    def _compare(self, best: Run, worst: Run) -> None:
        less = 1 - best.measured_loss / worst.measured_loss
        stalled = sum(best.stalls_s) / best.training_s
        self.say(f"{len(best.answers)} answers each, to the same questions at the same times.")
        self.say(
            f"With {best.schedule} updates their loss is in all {less:.1%} less than with {worst.schedule} updates."
        )
        self.say(f"For {stalled:.1%} of its time the training was held up by {best.schedule} updates.")
        self.say("Lag: how far the version that answers is behind the training. Predicted: from the training's losses.")


def _row(run: Run) -> tuple[str, ...]:
    return (
        run.schedule,
        str(len(run.report.updates)),
        milliseconds(sum(run.stalls_s)),
        milliseconds(median(run.stalls_s)),
        milliseconds(run.latency_s),
        f"{run.lag()[1].mean():.1f}",
        f"{run.predicted_loss:.2f}",
        f"{run.measured_loss:.2f}",
        f"{run.training_s:.2f} s",
    )


def milliseconds(seconds: float) -> str:
    """Write a short time for people.

    >>> milliseconds(0.00123), milliseconds(0.0456), milliseconds(1.5)
    ('1.2 ms', '46 ms', '1500 ms')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
