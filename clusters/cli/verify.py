"""`tensorvine verify`: is everything what was written?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...store.errors import ModelNotFoundError
from .. import words
from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json

if TYPE_CHECKING:
    from ...actors.client.repository import Repository
    from ...actors.client.verifier import Problem
    from ...store.refs import ModelRef


def verify(
    model: Annotated[
        str | None, typer.Argument(help="NAME or NAME@VERSION. Without it: all versions.", show_default=False)
    ] = None,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Check stored versions for damage, in memory and on disk, and list files that cannot be read.

    The command checks the manifest of each version, and the checksum and owner of each tensor. The owner must be the
    version itself or an ancestor of the version. The exit code is 1 if a problem is found.
    """
    from ...actors.client.progress import each

    out = console()
    with connected(name, address, scheduler) as repository:
        refs = repository.models() if model is None else [repository.info(model).ref]
        progress = each(refs, f"verify of {repository.name}", "versions", len(refs))
        unread = repository.unreadable() if model is None else []
        wrong = [problem for ref in progress for problem in _problems(repository, ref, asked=model is not None)]
    problems = [*unread, *wrong]
    if as_json:
        files = [{"ref": str(f.ref) if f.ref else None, "file": f.file, "text": f.reason} for f in unread]
        texts = [{"ref": str(p.ref) if p.ref else None, "file": None, "text": p.text} for p in wrong]
        print_json({"versions": len(refs), "problems": [*files, *texts]})
    else:
        for line in (*(f"{f.ref or f.file}: {f.reason}" for f in unread), *map(str, wrong)):
            out.print(line, style="red", soft_wrap=True)
        out.print(f"{words.count(len(refs), 'version')} checked, {words.count(len(problems), 'problem')}")
    if problems:
        raise typer.Exit(1)


def _problems(repository: Repository, ref: ModelRef, asked: bool) -> list[Problem]:
    """Verify a version; one of all that there were, and retired since, has no problems."""
    try:
        return repository.verify(ref)
    except ModelNotFoundError:
        if asked:
            raise
        return []
