"""`tensorvine diff`: what differs between two versions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .. import words
from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json, table
from .options import Timeout

if TYPE_CHECKING:
    from ...actors.client.diff import Diff

DIFF_S = 600.0
BARS = " ▁▂▃▄▅▆▇█"
"""From an empty bin to the fullest one."""


def diff(
    a: Annotated[str, typer.Argument(help="NAME or NAME@VERSION.", show_default=False)],
    b: Annotated[str, typer.Argument(help="NAME or NAME@VERSION.", show_default=False)],
    histogram: Annotated[
        int | None, typer.Option(help="Show a histogram with this number of bins.", min=1, show_default=False)
    ] = None,
    timeout: Timeout = DIFF_S,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Compare the tensors of two versions, A and B.

    For each tensor that differs, the command shows the percentage of elements that differ, and the L2 norm of the
    difference, B minus A. The shards compare the tensors, and send only these numbers.
    """
    with connected(name, address, scheduler) as repository:
        found = repository.diff(a, b, histogram=histogram, timeout=timeout)
    if as_json:
        changed = {tensor: asdict(each) for tensor, each in found.changed.items()}
        kept = {"equal": found.equal, "changed": changed, "new": found.new, "gone": found.gone}
        print_json({"a": str(found.a), "b": str(found.b), **kept})
    else:
        _print(found, histogram is not None)


def _print(found: Diff, bars: bool) -> None:
    out, counts = console(), f"{len(found.equal):,} equal, {len(found.changed):,} changed"
    counts += f", {len(found.new):,} new, {len(found.gone):,} gone"
    out.print(f"{found.a} and {found.b}: {counts}", soft_wrap=True)
    if not (found.changed or found.new or found.gone):
        return
    rows = table("tensors that differ", "tensor", *(("histogram",) if bars else ()), right=("elements", "norm"))
    for tensor, each in found.changed.items():
        shown = (_bars(each.counts),) if bars else ()
        rows.add_row(tensor, *shown, f"{each.share:.2%}", words.quality(each.norm))
    for tensor in found.new:
        rows.add_row(tensor, *(("",) if bars else ()), "new", "-")
    for tensor in found.gone:
        rows.add_row(tensor, *(("",) if bars else ()), "gone", "-")
    out.print(rows)


def _bars(counts: tuple[int, ...]) -> str:
    """Draw a histogram in one line.

    >>> _bars((0, 1, 8, 4))
    ' ▁█▄'
    """
    most = max(counts, default=0) or 1
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)
