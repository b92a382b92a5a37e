"""What is printed: what the fork cost, and a table of the directions."""

from __future__ import annotations

from collections.abc import Sequence

from directions import Outcome
from online.report import Report as Lines
from online.report import milliseconds
from rich import box
from rich.table import Table
from tensorvine.actors import ForkReport

COLUMNS = ("ranks", "loss at\nthe fork", "loss at\nthe end", "accuracy", "steps", "seconds")


class Report(Lines):
    """Prints to the terminal, or to wherever the output goes."""

    def fork(self, fork: ForkReport, seconds: float, step: int) -> None:
        """Print what a fork cost.

        Args:
            fork: its report.
            seconds: from the order until all clones were whole.
            step: how far the original was then.
        """
        self.say(f"held       {milliseconds(fork.held_s)}: for so long the original stood still, at most")
        self.say(
            f"standby    {milliseconds(fork.standby_s)}: from when clones and state were there until all were whole"
        )
        starting = max(fork.readiness_s - fork.standby_s, 0.0)
        self.say(
            f"readiness  {fork.readiness_s:.2f} s from the end of step {fork.step} until all were whole; "
            f"for {starting:.2f} s of it their processes were starting"
        )
        state = f"{fork.nbytes / 1e6:.1f} MB of state were there {seconds:.1f} s after the fork was ordered"
        self.say(f"{state}; the original was at step {step} by then.")

    def directions(self, outcomes: Sequence[Outcome], forked_at: int, prefix: str) -> None:
        """Print what became of each training, without the prefix of the names of models."""
        style = {"title_justify": "left", "title_style": "bold", "header_style": "dim", "box": box.SIMPLE_HEAD}
        table = Table(title="\nWhat became of the directions", padding=(0, 1, 0, 0), **style)
        table.add_column("direction", no_wrap=True)
        for column in COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("saved as", no_wrap=True)
        table.add_column("child of", no_wrap=True)
        before = outcomes[0].loss(forked_at)
        for outcome in outcomes:
            table.add_row(
                outcome.direction.text,
                str(outcome.direction.ranks),
                f"{before:.4f}",
                f"{outcome.losses[0][-1]:.4f}",
                f"{outcome.accuracy:.1%}",
                str(len(outcome.losses[0])),
                f"{outcome.seconds:.1f}",
                str(outcome.ref).removeprefix(prefix),
                str(outcome.parent).removeprefix(prefix),
            )
        self._console.print(table)
        self.say("Loss: mean cross-entropy on 360 images that are never trained on nor perturbed.")

    def same(self, original: Outcome, control: Outcome) -> None:
        """Print whether the direction that changes nothing goes as the original does."""
        steps, tensors = len(control.losses[0]), len(control.tensors)
        verdict = "are the same, bit for bit" if control.same(original) else "are NOT the same"
        self.say(f"Original and {control.direction.name}: {steps} losses of each rank and {tensors} tensors {verdict}.")
