"""The command line: `tensorvine up | status | ls | show | lineage | verify | down`.

Rules
- An error of the one tree is one line on standard error and exit code 1; wrong usage is exit code 2.
- What TensorVine warns of is one line on standard error, too. What Ray remarks on while it connects is not told.
- Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import typer

from ...store.errors import TensorVineError
from .life import down, up
from .lineage import lineage
from .look import ls, show, status
from .verify import verify

_OURS = __name__.partition(".")[0]
_HELP = "Start, look into and stop a model repository on a Ray cluster."


def application() -> typer.Typer:
    """Make the command-line application."""
    app = typer.Typer(
        name="tensorvine", help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
    for command in (up, status, ls, show, lineage, verify, down):
        app.command()(command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
        arguments: the words after `tensorvine`; None: those of this process.
    """
    told, silent, ours = logging.StreamHandler(), logging.NullHandler(), logging.getLogger(_OURS)
    told.setLevel(logging.WARNING)
    told.setFormatter(logging.Formatter("tensorvine: %(message)s"))
    ours.addHandler(told)
    logging.getLogger().addHandler(silent)  # without any, Python prints what others warn of
    try:
        application()(list(arguments) if arguments is not None else None)
    except TensorVineError as exc:
        typer.echo(f"tensorvine: {' '.join(str(exc).split())}", err=True)
        sys.exit(1)
    finally:
        ours.removeHandler(told)
        logging.getLogger().removeHandler(silent)
