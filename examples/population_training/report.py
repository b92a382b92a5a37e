"""What is printed: each exploit, and a table of both populations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from online.report import Report as Lines
from online.report import milliseconds
from recorded import PopulationRun
from rich import box
from rich.table import Table


class Report(Lines):
    """Prints to the terminal, or to wherever the output goes."""

    def exploits(self, run: PopulationRun) -> None:
        """Print who was replaced by whom."""
        for exploit in run.exploits:
            self.say(
                f"{exploit.at:5.1f} s: {exploit.member} becomes a copy of {exploit.winner} at step {exploit.step}, "
                f"with learning rate {exploit.rate:g}, after {exploit.away_s:.2f} s "
                f"({milliseconds(exploit.moved_s)} for its state)"
            )
        self.say(f"{run.seconds:.1f} s in all; the best member is right about {run.accuracy:.1%}.")

    def compare(self, runs: Sequence[PopulationRun]) -> None:
        """Print what the exploits of populations cost, and what they came to."""
        style = {"title_justify": "left", "title_style": "bold", "header_style": "dim", "box": box.SIMPLE_HEAD}
        table = Table(title="\nWhat the exploits cost", padding=(0, 2, 0, 0), **style)
        table.add_column("")
        for run in runs:
            table.add_column(run.name, justify="right", no_wrap=True)
        for name, measure in MEASURES.items():
            table.add_row(name, *map(measure, runs))
        self._console.print(table)
        self.say("A fork starts a process for the copy: most of the time to its first step. The winner trains on.")
        self.say("Tune's copies take over a process that is there; it also pauses members that go on as they are.")
        self.say("Accuracy is that on 600 images which are not trained on, and by which the members are chosen.")


def _median(seconds: Iterable[float]) -> str:
    found = list(seconds)
    return milliseconds(median(found)) if found else "none"


MEASURES: Mapping[str, Callable[[PopulationRun], str]] = {
    "exploits": lambda run: str(len(run.exploits)),
    "moving the state, median": lambda run: _median(exploit.moved_s for exploit in run.exploits),
    "from a member's last step to its copy's first, median": lambda run: _median(
        exploit.away_s for exploit in run.exploits
    ),
    "the same, in all": lambda run: f"{sum(exploit.away_s for exploit in run.exploits):.1f} s",
    "times that a member stood still for its state to be taken": lambda run: str(len(run.held_s)),
    "for how long, median": lambda run: _median(run.held_s),
    "other members' pauses, in all": lambda run: f"{sum(pause.away_s for pause in run.pauses):.1f} s",
    "processes that trained": lambda run: str(run.processes),
    "steps trained by all members": lambda run: str(sum(interval.steps for interval in run.intervals)),
    "seconds from the first step to the last": lambda run: f"{run.seconds:.1f}",
    "accuracy of the best member at its end": lambda run: f"{run.accuracy:.1%}",
}
"""What is compared, and how it is written."""
