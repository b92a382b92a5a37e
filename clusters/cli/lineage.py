"""`tensorvine lineage`: where a version comes from, as a tree and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json
from ..lineage.lineage import lineage_of


def lineage(
    model: Annotated[str, typer.Argument(help="NAME or NAME@VERSION.", show_default=False)],
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            "--svg",
            metavar="FILE",
            help="Also draw the lineage to this .svg, .png or .pdf file.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
) -> None:
    """Show the ancestors and descendants of a version, their quality, and which tensors were inherited.

    For each ancestor, the command lists the layers of the version that contain tensors written by the ancestor. For
    each descendant, the command shows how many of the descendant's tensors were written by the version.

    Retired ancestors are included. Their quality is shown if it is still stored in memory or on disk. --picture
    requires the extra `viz`.
    """
    from ..lineage.picture import check_picture, draw_lineage
    from ..lineage.tree import lineage_tree

    if picture is not None:
        check_picture(picture)
    with connected(name, address, scheduler) as repository:
        found = lineage_of(repository, model)
    if as_json:
        print_json(found.as_dict())
    else:
        console().print(lineage_tree(found))
    if picture is not None:
        draw_lineage(found, picture)
        console(stderr=True).print(f"picture: {picture}", soft_wrap=True)
