"""Completion of commands and options in shells: `tensorvine --show-completion [SHELL]`, `--install-completion [SHELL]`.

Rules
- typer has both options, for the shell that it finds itself in. Here a shell can be named, too.
"""

from __future__ import annotations

import subprocess
from typing import Any

import typer
from typer.core import TyperGroup

from ...store.errors import OptionError, StorageError

POWERSHELLS = ("powershell", "pwsh")
SHELLS = ("bash", "zsh", "fish", *POWERSHELLS)
_SHOW, _INSTALL = "--show-completion", "--install-completion"


class Commands(TyperGroup):
    """The commands, and before them the two options with the name of a shell."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take a shell's name, which typer's options do not take."""
        if len(args) == 2 and args[0] in (_SHOW, _INSTALL):
            if args[1] not in SHELLS:
                raise typer.BadParameter(f"expected one of {', '.join(SHELLS)}; found {args[1]!r:.100}", ctx)
            _complete(args[0], args[1], ctx.find_root().info_name)
            raise typer.Exit
        return super().parse_args(ctx, args)


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
        raise OptionError(f"{_INSTALL} {shell}: expected another shell; add what {_SHOW} {shell} prints to $PROFILE")
    try:
        _, path = install(shell=shell, prog_name=program)
    except (OSError, subprocess.SubprocessError) as exc:
        raise StorageError(f"{_INSTALL} {shell}: expected to write the script; {exc}") from exc
    typer.echo(f"{shell} completes {program} from its next start on: {path}")
