"""What is printed: a line per search while it runs, and tables of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .journal import Told
from .plan import Mode, Plan
from .results import Results

WIDTH_OF_A_FILE = 120
"""Columns when the output is no terminal; tables would be cut to 80."""
STYLE = {"title_justify": "left", "title_style": "bold", "header_style": "dim", "box": box.SIMPLE_HEAD}
NAMES = {
    Mode.NONE: "no transfer",
    Mode.HDF5: "HDF5 files + Redis",
    Mode.REPOSITORY: "repository",
}
BEST = 5
TARGETS = 4
"""How many qualities are aimed at."""
STEPS = (0.005, 0.01, 0.02, 0.05)
"""How far they may be apart."""


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
    def search(self, plan: Plan) -> Iterator[Callable[[Told, int], None]]:
        """Show a line of a search; it is told of each candidate, and how many workers are ready."""
        columns = (
            TextColumn(" "),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        state = {"best": 0.0, "failed": 0, "stored": 0.0, "busy": 1e-9}
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task("", total=plan.candidates, text="workers are starting")

            def told(one: Told, workers: int) -> None:
                outcome = one.outcome
                state["best"] = max(state["best"], outcome.quality or 0.0)
                state["failed"] += outcome.quality is None
                state["stored"] += outcome.stored_s
                state["busy"] += outcome.ended - outcome.began
                text = f"best {state['best']:.1%}  {workers} workers  {one.space_bytes / 1e6:.1f} MB stored"
                text += f"  {state['stored'] / state['busy']:.1%} of the time for it"
                if state["failed"]:
                    text += f"  {state['failed']} failed"
                bar.update(task, advance=1, text=text)

            yield told

    def best(self, results: Results) -> None:
        """Print the best candidates, and the quality along their lineage."""
        mode = NAMES[results.plan.mode]
        table = Table(title=f"\nThe best candidates, {mode}", padding=(0, 1, 0, 0), **STYLE)
        for column in ("candidate", "quality", "found\nafter", "tensors\ninherited"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("lineage: quality of each ancestor, from the root on")
        for told in results.best(BEST):
            outcome = told.outcome
            chain = [f"{one.outcome.number} {one.outcome.quality:.1%}" for one in reversed(results.lineage(told))]
            shown = chain if len(chain) <= 6 else [*chain[:2], f"({len(chain) - 5} more)", *chain[-3:]]
            table.add_row(
                str(outcome.number),
                f"{outcome.quality:.1%}",
                f"{told.at:.0f} s",
                f"{outcome.taken} of {outcome.tensors}",
                " > ".join(shown),
            )
        self._console.print(table)

    def compare(self, searches: Sequence[Results]) -> None:
        """Print what the searches cost and gave, beside one another."""
        table = Table(title="\nThe searches", padding=(0, 2, 0, 0), **STYLE)
        table.add_column("")
        for results in searches:
            table.add_column(NAMES[results.plan.mode], justify="right", no_wrap=True)
        for name, text in _rows(searches):
            table.add_row(name, *(text(results) for results in searches))
        self._console.print(table)

    def picture(self, path: Path) -> None:
        """Name the picture; the last line."""
        self._console.print(f"\nPicture of the searches: {path}", soft_wrap=True)


def _rows(searches: Sequence[Results]) -> Iterator[tuple[str, Callable[[Results], str]]]:
    yield "candidates (of these, failed)", lambda run: f"{len(run.told)} ({run.failed})"
    yield "end to end", lambda run: f"{run.seconds:.1f} s"
    yield "best quality", lambda run: f"{max(run.climb()[1], default=0.0):.2%}"
    yield "mean quality of the second half", lambda run: f"{_mean(run):.2%}"
    for target in targets(searches):
        yield f"time to {target:.1%}", lambda run, target=target: _after(run.time_to(target))
    yield "tensors inherited, second half", lambda run: f"{run.frozen:.0%}"
    yield "share of time for storing", lambda run: f"{run.share:.2%}" if run.bytes_written else "-"
    yield "stored at most", lambda run: _megabytes(run.bytes_most)
    yield "stored if nothing were retired", lambda run: _megabytes(run.bytes_written)


def targets(searches: Sequence[Results]) -> list[float]:
    """Choose qualities to aim at: round ones, up to the best that any search reached.

    >>> targets([])
    []
    """
    tops = [quality for run in searches for quality in run.climb()[1]]
    if not tops:
        return []
    span = max(tops) - min(tops)
    step = next((step for step in STEPS if step * TARGETS >= span / 2), STEPS[-1])
    top = int(max(tops) / step + 1e-9)
    return [round((top - back) * step, 4) for back in reversed(range(TARGETS))]


def _mean(run: Results) -> float:
    qualities = [one.outcome.quality for one in run.later if one.outcome.quality is not None]
    return sum(qualities) / len(qualities) if qualities else 0.0


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count else "-"
