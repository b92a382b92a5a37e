"""The command line: `tensorvine up | status | top | ls | show | lineage | diff | wait | export | import | ... | down`.

Rules
- An error of the one tree is one line on standard error and exit code 1; wrong usage is exit code 2.
- What TensorVine warns of is one line on standard error, too. What Ray and Dask remark on while they connect is not
  told.
- Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from ...store.errors import TensorVineError, shown
from ..client import say_error
from .cluster_files import cluster_files
from .completion import Commands, without_urls
from .diff import diff
from .files import export, import_
from .life import down, up
from .lineage import lineage
from .look import ls, repos, show, status
from .metrics import metrics
from .models import retire, wait
from .sizes import ray_sizes
from .top import top
from .upkeep import flush, scale
from .verify import verify
from .web import web

_OURS = __name__.partition(".")[0]
_HELP = "Start, inspect, change and stop a model repository on a Ray or Dask cluster."
_COMMANDS = (
    *(up, repos, status, top, ls, show, lineage, diff, verify, export, import_, wait, retire, scale, flush, down),
    metrics,
    web,
    cluster_files,
    ray_sizes,
)


class _OneLine(logging.Formatter):
    """Writes a message in one line, however many an error of Ray has in it, and escapes what does not print."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(" ".join(super().format(record).split()))


def application() -> typer.Typer:
    """Make the command-line application."""
    app = typer.Typer(name="tensorvine", cls=Commands, help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for command in _COMMANDS:
        app.command(command.__name__.rstrip("_").replace("_", "-"))(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("tensorvine"))
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
        arguments: the words after `tensorvine`; None: those of this process.
    """
    told, silent, ours = logging.StreamHandler(), logging.NullHandler(), logging.getLogger(_OURS)
    told.setLevel(logging.WARNING)
    told.setFormatter(_OneLine("tensorvine: %(message)s"))
    ours.addHandler(told)
    logging.getLogger().addHandler(silent)  # without any, Python prints what others warn of
    words = list(arguments) if arguments is not None else sys.argv[1:]
    try:
        application()(words)
    except TensorVineError as exc:
        say_error(
            without_urls(str(exc), (word for word in words if "@" in word or "?" in word))
        )  # others are no secret
        sys.exit(1)
    finally:
        ours.removeHandler(told)
        logging.getLogger().removeHandler(silent)
