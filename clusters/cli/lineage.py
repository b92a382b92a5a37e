"""`tensorvine lineage`: where a version comes from, as a tree and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json
from ..lineage.lineage import lineage_of


def lineage(
    model: Annotated[str, typer.Argument(help="NAME or NAME@VERSION.", show_default=False)],
    svg: Annotated[
        Path | None, typer.Option(help="Also draw it, into this file.", dir_okay=False, show_default=False)
    ] = None,
    as_json: AsJson = False,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
) -> None:
    """Show who a version derives from, who wrote which of its layers, the quality along the way, and its descendants.

    Retired ancestors are named; their quality went with them. --svg needs the extra `pictures`.
    """
    from ..lineage.picture import check_picture, draw_lineage
    from ..lineage.tree import lineage_tree

    if svg is not None:
        check_picture(svg)
    with connected(name, address, scheduler) as repository:
        found = lineage_of(repository, model)
    if as_json:
        print_json(found.as_dict())
    else:
        console().print(lineage_tree(found))
    if svg is not None:
        draw_lineage(found, svg)
        console(stderr=True).print(f"picture: {svg}", soft_wrap=True)
