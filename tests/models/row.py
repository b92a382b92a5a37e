"""What was found of one architecture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    tensors: int
    """Of its state."""
    state_mib: float
    """Of all tensors of the state, each name counted."""
    stored_mib: float
    """Of what a save wrote, without the optimizer's state."""
    graph: str
    """Layers of the graph; "chain" where it could not be traced."""
    state: bool
    """Weights and buffers came back, bit for bit."""
    optimizer: bool
    """Its state did."""
    answers: bool
    """What it answers to one batch is the same, bit for bit."""
    alone: bool | None
    """The first and the third, when it is built again from the repository alone; None: it says that it cannot be."""
    control: bool
    """The same three, by the framework's own format."""

    @property
    def whole(self) -> bool:
        """Whether all came back."""
        return self.state and self.optimizer and self.answers and self.alone is not False


@dataclass(frozen=True, slots=True)
class Failed:
    """An architecture that could not be saved or loaded."""

    name: str
    error: str


HEAD = "| architecture | tensors | MiB | layers | result |\n|---|---|---|---|---|"


def names_in(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


def line(row: Row | Failed) -> str:
    """Write a line of the table."""
    if isinstance(row, Failed):
        return f"| {row.name} | | | | **{row.error}** |"
    state, stored = f"{row.state_mib:.2f}", f"{row.stored_mib:.2f}"
    compared = {
        "state": row.state,
        "optimizer": row.optimizer,
        "answers": row.answers,
        "rebuilt": row.alone is not False,
    }
    differ = ", ".join(name for name, same in compared.items() if not same)
    result = f"**differ: {differ}**" if differ else "into=" if row.alone is None else "rebuilt"
    size = state if state == stored else f"{state} ({stored})"
    return f"| {row.name} | {row.tensors} | {size} | {row.graph} | {result} |"
