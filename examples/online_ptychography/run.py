"""Reconstruct diffraction patterns with a network that learns while they come in.

What it shows
1. An instrument scans an object with light, and exchanges it for another one now and then (simulated, of real
   images). PtychoNN turns each diffraction pattern into the object's amplitude and phase.
2. A producer warms up on the first scan, then learns from every batch of patterns as it comes. Two consumers
   reconstruct each batch as soon as it is measured, before the producer learns from it, with the newest version they
   have. Versions travel while the training and the answers go on.
3. The same is done twice, with the same data at the same times: first the planner decides when to publish, from the
   losses and from what an update costs; then there is one update after each scan, the usual epoch.
4. A table of updates, stalls, latency and the cumulative inference loss of both schedules; a picture of the loss and
   its fits, of how far the consumers are behind, and of reconstructions.

How to run it, after `pip install --group examples '.[ray,redis,tensorflow,torch,viz]'`
    python examples/online_ptychography/run.py --quick         PtychoNN of width 8, under a minute
    python examples/online_ptychography/run.py --out DIR       width 16 and more scans, minutes, the picture in DIR

Questions come at a fixed rate, because all of it runs on the same few cores: see `online.answering`.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))  # for examples/shared, in the driver only

from shared.place import Address, Named, Place
from shared.starting import interruptible


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a smaller network and fewer scans")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where the picture goes")] = Path(
        "out/online_ptychography"
    ),
    address: Address = None,
    repository: Named = None,
) -> None:
    """Reconstruct diffraction patterns with a network that learns while they come in."""
    with interruptible():
        from job import run

        run(quick=quick, out=out, place=Place("online_ptychography", address, repository))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
