"""What the job prints: progress while it trains, and tables of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.tree import Tree
from tensorvine.actors import PrefixMatch
from tensorvine.store import ModelInfo, ModelRef

WIDTH_OF_A_FILE = 120
"""Columns when the output is no terminal; tables would be cut to 80."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version that the job saved, and what it was like then."""

    info: ModelInfo
    predictions: np.ndarray
    """What the model predicted for the test samples when it was saved."""
    file_bytes: int
    """Size of its `.weights.h5` file."""

    @property
    def ref(self) -> ModelRef:
        """Its name and version."""
        return self.info.ref

    @property
    def accuracy(self) -> float:
        """On the test samples of its own task."""
        return self.info.quality or 0.0

    @property
    def bytes_inherited(self) -> int:
        """Bytes that it shares with its ancestors."""
        return self.info.bytes_total - self.info.bytes_owned


@dataclass(frozen=True, slots=True)
class Retired:
    """A version that went."""

    info: ModelInfo
    freed: int
    """Bytes that no other version needed."""


def size(count: int) -> str:
    """Write a number of bytes for people.

    >>> size(2_345_678), size(5_140), size(0)
    ('2.35 MB', '5.1 kB', '0')
    """
    if not count:
        return "0"
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


class Report:
    """Prints to the terminal, or to wherever the output goes.

    Args:
        prefix: of the job's models; it is not printed.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        console = Console(highlight=False)
        self._console = console if console.is_terminal else Console(width=WIDTH_OF_A_FILE, highlight=False)

    def title(self, text: str) -> None:
        """Begin a step."""
        self._console.print(f"\n[bold]{text}[/bold]")

    @contextmanager
    def progress(self, name: str, epochs: int) -> Iterator[Callable[[], None]]:
        """Show a bar of epochs; yields what to call after each."""
        columns = (TextColumn(f"  {name:16}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as bar:
            task = bar.add_task(name, total=epochs)
            yield lambda: bar.advance(task)

    def found(self, candidate: str, match: PrefixMatch) -> None:
        """Say what a prefix query found."""
        self._console.print(
            f"  longest_prefix({candidate}) = {self._short(match.ref)} (quality {match.quality:.3f}): "
            f"{len(match.layers)} layers with {len(match.tensors)} tensors match"
        )

    def accuracies(self, versions: Sequence[Version]) -> None:
        """Print what each version learned, and how well."""
        table = self._table("Accuracy", "version", "parent", "task", "learned", right=("accuracy",))
        best = max((v for v in versions if v.info.parent), key=lambda version: version.accuracy)
        for version in versions:
            info = version.info
            style = "bold green" if version is best else None
            row = (
                self._short(info.ref),
                self._short(info.parent or ""),
                info.metadata["task"],
                info.metadata["learned"],
            )
            table.add_row(*row, f"{version.accuracy:.1%}", style=style)
        self._console.print(table)
        scratch = next(version for version in versions if version.ref.name == f"{self._prefix}scratch")
        self._console.print(
            f"  With transfer {best.accuracy:.1%} ({self._short(best.ref)}); from scratch, on the same samples for as "
            f"many epochs, {scratch.accuracy:.1%}."
        )

    def bytes_stored(self, versions: Sequence[Version], stored: int) -> None:
        """Print bytes beside those of one file per version."""
        files = sum(version.file_bytes for version in versions)
        table = self._table(f"Bytes of {len(versions)} versions", "", right=("bytes",))
        table.add_row("one .weights.h5 file each", size(files))
        table.add_row("tensors, counted once per version", size(sum(v.info.bytes_total for v in versions)))
        table.add_row("stored in the repository", size(stored), style="bold green")
        self._console.print(table)
        self._console.print(f"  The repository holds {stored / files:.0%} of what the files hold.")

    def owners(
        self, versions: Sequence[Version], contributions: Mapping[ModelRef, Mapping[ModelRef, Sequence[str]]]
    ) -> None:
        """Print which version wrote the tensors of each version."""
        table = self._table("Who owns what", "version", "its tensors were written by", right=("owned", "inherited"))
        for version in versions:
            wrote = contributions[version.ref]
            known = [other.ref for other in versions if other.ref in wrote]
            others = [ref for ref in wrote if ref not in known]  # such as those of another run
            text = ", ".join(f"{self._short(ref)} ({len(wrote[ref])})" for ref in (*known, *others))
            table.add_row(self._short(version.ref), text, size(version.info.bytes_owned), size(version.bytes_inherited))
        self._console.print(table)

    def lineage(self, versions: Sequence[Version], live: Sequence[ModelRef]) -> None:
        """Print the lineage as a tree."""
        trees: dict[ModelRef, Tree] = {}
        roots: list[Tree] = []
        """Of what has no parent, or one that another run saved."""
        for version in versions:
            fate = "" if version.ref in live else "  [dim](retired)[/dim]"
            owned = f"[green]owns {size(version.info.bytes_owned)}[/green]"
            text = f"{self._short(version.ref)}  {version.accuracy:.1%}  {owned}{fate}"
            parent = version.info.parent
            if parent in trees:
                trees[version.ref] = trees[parent].add(text)
            else:
                roots.append(Tree(text if parent is None else f"{text}  from {parent}"))
                trees[version.ref] = roots[-1]
        self.title("Lineage")
        for root in roots:
            self._console.print(root)

    def answers(self, answers: Mapping[str, ModelRef | Sequence[ModelRef] | None]) -> None:
        """Print questions and what the repository answered."""
        table = self._table("Queries", "question", "answer")
        for question, answer in answers.items():
            refs = ", ".join(map(self._short, answer)) if isinstance(answer, Sequence) else self._short(answer)
            table.add_row(question, refs)
        self._console.print(table)

    def retired(
        self,
        retired: Sequence[Retired],
        heir: ModelRef,
        lineage: Sequence[ModelRef],
        contributions: Mapping[ModelRef, Sequence[str]],
    ) -> None:
        """Print what went, what that freed, and that an heir of the last one is whole."""
        table = self._table("Retired", "version", right=("accuracy", "owned", "freed", "kept for descendants"))
        for one in retired:
            owned = one.info.bytes_owned
            row = (
                self._short(one.info.ref),
                f"{one.info.quality:.1%}",
                size(owned),
                size(one.freed),
                size(owned - one.freed),
            )
            table.add_row(*row)
        self._console.print(table)
        gone, name = retired[-1].info.ref, self._short(heir)
        self._console.print(
            f"  {self._short(gone)} is retired; {name} still has {len(contributions.get(gone, ()))} tensors of it."
        )
        if gone in lineage:  # all may descend from what another run saved
            self._console.print(f"  The lineage of {name} still names it: {', '.join(map(self._short, lineage))}.")

    def verified(self, versions: Sequence[Version]) -> None:
        """Say that all versions predict what they did when they were saved."""
        self._console.print(
            f"\n[green]Loaded again: all {len(versions)} versions that are left predict the same, bit for bit.[/green]"
        )

    def picture(self, path: Path) -> None:
        """Name the picture; the last line."""
        self._console.print(f"\nPicture of the lineage: {path}", soft_wrap=True)

    def _short(self, ref: object) -> str:
        return str(ref).removeprefix(self._prefix)

    def _table(self, title: str, *left: str, right: Sequence[str] = ()) -> Table:
        self._console.print()
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            header_style="dim",
            box=box.SIMPLE_HEAD,
            padding=(0, 2, 0, 0),
        )
        for column in left:
            table.add_column(column, overflow="fold")
        for column in right:
            table.add_column(column, justify="right", no_wrap=True)
        return table
