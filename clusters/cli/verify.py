"""`tensorvine verify`: is everything what was written?"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import words
from ..client import Address, Name, connected, console


def verify(
    model: Annotated[
        str | None, typer.Argument(help="NAME or NAME@VERSION. Without it: all versions.", show_default=False)
    ] = None,
    name: Name = None,
    address: Address = None,
) -> None:
    """Check checksums, in memory and on disk, owners, and what could not be read; exit code 1 if something is wrong."""
    from rich.progress import track

    out = console()
    with connected(name, address) as repository:
        refs = repository.models() if model is None else [repository.info(model).ref]
        progress = track(refs, "checking", console=console(stderr=True), transient=True)
        problems = [f"{f.ref or f.file}: {f.reason}" for f in repository.unreadable()] if model is None else []
        problems += [str(problem) for ref in progress for problem in repository.verify(ref)]
    for problem in problems:
        out.print(problem, style="red", soft_wrap=True, markup=False)
    out.print(f"{words.count(len(refs), 'version')} checked, {words.count(len(problems), 'problem')}")
    if problems:
        raise typer.Exit(1)
