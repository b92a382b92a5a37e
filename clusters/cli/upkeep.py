"""`tensorvine scale` and `flush`: more or fewer shards, and all on disk."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ...store.sizes import size
from .. import words
from ..client import Address, AsJson, Name, Scheduler, connected, console, print_json
from .options import Timeout, count_from

SCALE_S = 120.0
FLUSH_S = 600.0


def scale(
    shards: Annotated[
        str,
        typer.Argument(
            metavar="N",
            help="Number of shards, or per-node: one on each node, also on nodes that join later.",
            show_default=False,
        ),
    ],
    timeout: Timeout = SCALE_S,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Change the number of shards while reads and writes continue. No data is lost.

    The change consists of steps: each step adds one or more shards or drains one shard. At the timeout, the current
    step is undone if it is still starting shards or copying tensors. Otherwise, it is completed in the background.
    """
    count = count_from(shards)
    with connected(name, address, scheduler) as repository:
        report = repository.scale(count, timeout)
        known = repository.name
    if as_json:
        print_json({"repository": known, **asdict(report)})
        return
    out = console()
    out.print(f"Repository {known} has {words.count(report.shards_after, 'shard')}; before: {report.shards_before}")
    out.print(f"  tensors moved: {size(report.tensor_bytes_moved)}; took {report.seconds:.2f} s")


def flush(
    timeout: Timeout = FLUSH_S,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Wait until all versions committed so far are written to the repository's path."""
    with connected(name, address, scheduler) as repository:
        repository.flush(timeout)
        known = repository.name
    if as_json:
        print_json({"repository": known, "on_disk": True})
    else:
        console().print(f"Repository {known}: all of it is on disk")
