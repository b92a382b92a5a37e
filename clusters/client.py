"""How a command reaches a repository, and where it prints.

Rules
- A command connects, asks, and disconnects; what it finds running goes on running.
- Its cluster is the Ray of --address or the Dask of --scheduler. Without either it is what a variable names:
  RAY_ADDRESS a Ray, DASK_SCHEDULER_ADDRESS a Dask; where both do, one has to say. Where none does, it is the Ray that
  was started on this machine. So what somebody named goes before what is found.
- Of Ray and Dask, that one is imported whose cluster it is.
- Results go to standard output, all else to standard error. What Ray and Dask remark on is left out.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..store.errors import EngineUnavailableError, OptionError, RepositoryNotFoundError, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..actors.client.repository import Repository
    from ..actors.engine.engine import Engine

Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        "-n",
        help="Name of the repository. Without it: 'default', unless it belongs to another user.",
        show_default=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of a Ray cluster. Without --address and --scheduler: RAY_ADDRESS or DASK_SCHEDULER_ADDRESS, "
        "otherwise the Ray that was started on this machine.",
        show_default=False,
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="HOST:PORT of a Dask scheduler, instead of --address.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

WIDTH = 160
"""Characters in a line where there is no terminal."""


class EngineName(StrEnum):
    """What runs a repository."""

    RAY = "ray"
    DASK = "dask"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster is."""

    engine: EngineName
    address: str | None
    """None: a Ray, and none runs."""

    def __str__(self) -> str:
        return f"{self.engine.capitalize()} at {self.address}"


@contextmanager
def connected(name: str | None, address: str | None, scheduler: str | None) -> Generator[Repository]:
    """Connect to a repository for one command.

    Raises:
        RepositoryNotFoundError: no cluster runs there, or no repository of that name on it.
        ForeignRepositoryError: no name is given, and the repository is another user's.
        EngineUnavailableError: the cluster's package is not installed.
        typer.BadParameter: the address is none, or it is not clear which cluster is meant.
    """
    from ..actors.client.repository import Repository

    with joined(running_at(address, scheduler)) as engine, Repository.connect(name, engine=engine) as repository:
        yield repository


def running_at(address: str | None, scheduler: str | None) -> Place:
    """Return the cluster that a command is to look at.

    Raises:
        RepositoryNotFoundError: none is named, and no Ray was started on this machine.
        EngineUnavailableError, typer.BadParameter: as of `place_of`.
    """
    place = place_of(address, scheduler)
    if place.address is None:
        raise RepositoryNotFoundError(
            "expected a Ray cluster, from RAY_ADDRESS or started on this machine; found none: pass --address, or "
            "--scheduler for Dask, or start a Ray with `tensorvine up`"
        )
    return place


def place_of(address: str | None, scheduler: str | None, engine: EngineName | None = None) -> Place:
    """Return the cluster that is meant, by the module's rules.

    Args:
        address: of a Ray.
        scheduler: address of a Dask.
        engine: what is to run the repository; None: what the others say.

    Raises:
        EngineUnavailableError: Ray is not installed, and no Dask is named.
        typer.BadParameter: what is given does not go together, or names no Dask where one is wanted.
    """
    if address is not None and (scheduler is not None or engine is EngineName.DASK):
        raise typer.BadParameter(
            "an address of Ray; expected it without --scheduler and --engine dask", param_hint="--address"
        )
    if scheduler is not None and engine is EngineName.RAY:
        raise typer.BadParameter("an address of Dask; expected it without --engine ray", param_hint="--scheduler")
    dask = os.environ.get("DASK_SCHEDULER_ADDRESS") or None
    ray = os.environ.get("RAY_ADDRESS") not in (None, "", "auto", "local")
    if engine is None and address is scheduler is None and dask is not None and ray:
        raise typer.BadParameter(
            "expected --address or --scheduler, because both RAY_ADDRESS and DASK_SCHEDULER_ADDRESS are set"
        )
    if scheduler is not None or engine is EngineName.DASK or (engine is address is None and dask is not None):
        return Place(EngineName.DASK, _scheduler(scheduler or dask))
    return Place(EngineName.RAY, address or _running_ray())


@contextmanager
def joined(place: Place) -> Generator[Engine]:
    """Join a cluster that runs, and leave it in the end.

    Raises:
        RepositoryNotFoundError: none runs there, or it refuses this process.
        EngineUnavailableError: its package is not installed.
        typer.BadParameter: the address is none.
    """
    from ..actors.engine import choice

    dask = place.engine is EngineName.DASK
    logger = logging.getLogger("distributed" if dask else "ray")
    try:
        door = choice.door(place.engine)  # both set their loggers when they are imported
        logger.setLevel(logging.ERROR)
        engine = door.joined(place.address)
    except (OptionError, ValueError) as exc:
        raise typer.BadParameter(str(exc), param_hint="--scheduler" if dask else "--address") from exc
    try:
        yield engine
    finally:
        engine.leave()


def _scheduler(address: str | None) -> str:
    if address is None:
        raise typer.BadParameter(
            "expected --scheduler HOST:PORT or DASK_SCHEDULER_ADDRESS with dask; to start a cluster, run `dask "
            "scheduler` and `dask worker HOST:PORT`",
            param_hint="--engine",
        )
    if ":" not in address:
        raise typer.BadParameter(f"expected HOST:PORT; found {address!r:.100}", param_hint="--scheduler")
    from ..actors.engine import choice

    choice.door(EngineName.DASK)  # says so where it is not installed
    from ..actors.engine.dask import clients

    return clients.in_full(address)


def _running_ray() -> str | None:
    from ..actors.engine import choice

    try:
        choice.door(EngineName.RAY)
    except EngineUnavailableError as exc:
        raise EngineUnavailableError(f"{exc}, or pass a Dask with --scheduler or DASK_SCHEDULER_ADDRESS") from exc
    from ..actors.engine.ray import embedded

    return embedded.running()


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


def say_error(error: object) -> None:
    """Say an error in one line on standard error."""
    typer.echo(f"tensorvine: {shown(' '.join(str(error).split()))}", err=True)


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
