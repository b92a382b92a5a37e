"""Completion of commands and options in shells: `tensorvine --show-completion [SHELL]`, `--install-completion [SHELL]`.

Rules
- typer has both options, for the shell that it finds itself in. Here a shell can be named, too.
- No error of usage repeats a URL: a misplaced one may hold a password.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Generator, Iterable
from typing import Any

import typer
from typer.core import TyperGroup

from ...store.errors import OptionError, StorageError

UsageError: Any = typer.BadParameter.__base__  # of the click that this typer uses
POWERSHELLS = ("powershell", "pwsh")
SHELLS = ("bash", "zsh", "fish", *POWERSHELLS)
URL = "(a URL)"
"""What messages say in the place of one."""
_URL = re.compile(r"[^\s'\"()]*://[^\s'\"()]*")
_ARGUMENTS = f"{__name__}.arguments"
_SHOW, _INSTALL = "--show-completion", "--install-completion"


class Commands(TyperGroup):
    """The commands, and before them the two options with the name of a shell."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take a shell's name, which typer's options do not take."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        with _without_urls(ctx.meta[_ARGUMENTS]):
            if len(args) == 2 and args[0] in (_SHOW, _INSTALL):
                if args[1] not in SHELLS:
                    raise typer.BadParameter(f"expected one of {', '.join(SHELLS)}; found {args[1]!r:.100}", ctx)
                _complete(args[0], args[1], ctx.find_root().info_name)
                raise typer.Exit
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error of usage repeats no URL, which may hold a password."""
        with _without_urls(ctx.meta[_ARGUMENTS]):
            return super().invoke(ctx)


@contextlib.contextmanager
def _without_urls(arguments: Iterable[str]) -> Generator[None]:
    try:
        yield
    except UsageError as exc:
        exc.message = without_urls(exc.message, arguments)
        raise


def without_urls(message: str, arguments: Iterable[str]) -> str:
    """Return a message without the URLs of arguments, whole or in part.

    >>> without_urls("No such command 'redis://:a secret@host'.", ["redis://:a secret@host"])
    "No such command '(a URL)'."
    >>> without_urls("expected redis://host; found 'redis://:secret'", ["redis://:secret@host"])
    "expected redis://host; found '(a URL)'"
    """
    urls = [argument for argument in arguments if "://" in argument]
    for argument in sorted(urls, key=len, reverse=True):
        for text in (argument, argument.partition("=")[2]):
            if "://" in text:
                message = message.replace(text, URL).replace(repr(text)[1:-1], URL)
    for found in _URL.findall(message):
        if any(found in argument for argument in urls):
            message = message.replace(found, URL)
    return message


def _complete(option: str, shell: str, program: str) -> None:
    from typer.completion import (
        get_completion_script,  # pyright: ignore[reportPrivateImportUsage]  # each typer since 0.15 has both here
        install,  # pyright: ignore[reportPrivateImportUsage]
    )

    if option == _SHOW:
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        typer.echo(get_completion_script(prog_name=program, complete_var=variable, shell=shell))
        return
    if shell in POWERSHELLS:  # typer would have it run scripts of anybody
        raise OptionError(
            f"{_INSTALL} {shell}: expected another shell; add the output of {_SHOW} {shell} to $PROFILE yourself"
        )
    try:
        _, path = install(shell=shell, prog_name=program)
    except (OSError, subprocess.SubprocessError) as exc:
        raise StorageError(f"{_INSTALL} {shell}: cannot write the completion script: {exc}") from exc
    typer.echo(f"completion of {program} is installed for new {shell} shells: {path}")
