"""How a command reaches a repository, and where it prints.

Rules
- A command connects, asks, and disconnects; what it finds running goes on running.
- Results go to standard output, all else to standard error. What Ray remarks on is left out.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..store.errors import RepositoryNotFoundError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..actors.client.repository import Repository

Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        "-n",
        help="The repository's name. Without it: default, unless that is another user's.",
        show_default=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of the Ray cluster. Without it: RAY_ADDRESS, else the Ray that was started on this machine.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

WIDTH = 160
"""Characters in a line where there is no terminal."""


@contextmanager
def connected(name: str | None, address: str | None) -> Generator[Repository]:
    """Connect to a repository for one command.

    Raises:
        RepositoryNotFoundError: no Ray runs there, or no repository of that name on it.
        ForeignRepositoryError: no name is given, and the repository is another user's.
        typer.BadParameter: the address is none.
    """
    from ..actors.client.repository import Repository
    from ..actors.engine.ray import embedded

    if address is None and embedded.running() is None:
        raise RepositoryNotFoundError(
            "expected a Ray that RAY_ADDRESS names or that was started on this machine; found none: give --address, "
            "or start one with `tensorvine up`"
        )
    attach(address)
    repository = Repository.connect(name)
    try:
        yield repository
    finally:
        repository.close()
        repository.engine.leave()


def attach(address: str | None) -> None:
    """Attach to a Ray; an address that is none is wrong usage."""
    from ..actors.engine.ray import embedded

    logging.getLogger("ray").setLevel(logging.ERROR)  # Ray set it when it was imported
    try:
        embedded.attach(address)
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--address") from exc


def console(stderr: bool = False) -> Console:
    """Return where to print: as wide as the terminal, or wide enough for a table where there is none.

    Brackets in names are printed as they are: nothing in a text is taken for markup.
    """
    from rich.console import Console

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else WIDTH
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def print_json(value: object) -> None:
    """Print a value as JSON, and nothing else; a number that JSON does not have is null."""
    typer.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast("list[object]", value)]
    return value


def say_error(error: Exception) -> None:
    """Say an error in one line on standard error."""
    typer.echo(f"tensorvine: {' '.join(str(error).split())}", err=True)


def table(title: str, *left: str, right: tuple[str, ...] = ()) -> Table:
    """Make a table: columns of words, then columns of numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=box.SIMPLE_HEAD)
    for column in left:
        made.add_column(column, overflow="fold")
    for column in right:
        made.add_column(column, justify="right", no_wrap=True)
    return made
